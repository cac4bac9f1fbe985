# SPDX-License-Identifier: Apache-2.0
"""The rewriting of models for a device by the folders `cpu_layers` and `gpu_layers`.

Nothing else imports these folders, but for the loader of GGUF files whose weights stay blocks. Without
`cpu_layers`, models run on a CPU as transformers wrote them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from radixkv.errors import ConfigError

logger = logging.getLogger("radixkv")


def rewrite_layers(model: nn.Module, quantization: str | None, backend: str) -> None:
    """Replace layers of a model by faster or narrower ones, where this machine has them; once is enough.

    What will be slower than float32 on this machine is said in a warning.

    Args:
        quantization: None (weights are packed, on a CPU), or `int8`.
        backend: of the attention that the layers call.

    Raises:
        ConfigError: int8 weights are asked for and can't be had.
    """
    if backend == "triton" and quantization is None:
        from radixkv.model.gpu_layers.rewrite import fuse_layers

        fuse_layers(model)
        return
    try:
        from radixkv.model.cpu_layers.rewrite import pack_layers, quantize_layers
        from radixkv.model.cpu_layers.slow_paths import slower_than_float32
    except ImportError as error:
        if quantization is not None:
            raise ConfigError(
                f"--quantization {quantization} needs radixkv.model.cpu_layers, which is missing"
            ) from error
        return
    if quantization is not None:
        quantize_layers(model)
    else:
        pack_layers(model)
    reason = slower_than_float32(model, quantization)
    if reason is not None:
        logger.warning("%s", reason)


def check_instruction_set() -> None:
    """Look at the environment variable RADIXKV_CPU_ISA, where there are kernels that it speaks of.

    Raises:
        ConfigError: it names instructions that do not exist or that this processor lacks, or comes too late.
    """
    try:
        from radixkv_kernels.cpu.isa import features
    except ImportError:
        return
    try:
        features()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def kernels_compiled_ahead(device: str, dtype: str) -> AbstractContextManager[None]:
    """Return a context beside which the CPU's kernels are compiled, on the first start on a machine.

    Args:
        device, dtype: as an EngineConfig has them; where others than a CPU and float32 are meant, nothing is.
    """
    if device == "cuda" or dtype not in ("auto", "float32") or torch.cuda.is_available():
        return nullcontext()
    try:
        from radixkv.model.cpu_layers.rewrite import has_vector_kernels
        from radixkv_kernels.cpu.compile_ahead import compiled_ahead
    except ImportError:
        return nullcontext()
    return compiled_ahead() if has_vector_kernels() else nullcontext()


def make_thread_control() -> Callable[[], None] | None:
    """Return a function to call before each step: it reduces threads while other programs need the cores."""
    try:
        from radixkv.model.cpu_layers.thread_control import ThreadControl
    except ImportError:
        return None
    return ThreadControl(torch.get_num_threads()).before_step
