# SPDX-License-Identifier: Apache-2.0
"""Rewriting of models for a device by the folder `cpu_layers` or by `gpu_layers`.

Nothing else imports these, but for the loader of GGUF files whose weights stay blocks. Without
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

    A warning names products that will be slower than in float32.

    Args:
        quantization: None (weights are packed, on a CPU), `int8`, or `fp8`.
        backend: attention backend that the layers call.

    Raises:
        ConfigError: weights of 8 bits are asked for and can't be had.
    """
    if backend == "triton":
        from radixkv.model.gpu_layers.fused_layers import fuse_layers  # needs triton, which is optional
        from radixkv.model.gpu_layers.products import quantize_products
        from radixkv.model.gpu_layers.scaled_products import use_scaled_products

        fuse_layers(model)
        if quantization is not None:
            quantize_products(model, quantization)
        use_scaled_products(model)
        return
    try:  # the folder may be missing
        from radixkv.model.cpu_layers.rewrite import (
            pack_layers,
            quantize_layers,
            slower_than_float32,
            store_layers_as_fp8,
        )
    except ImportError as error:
        if quantization is not None:
            raise ConfigError(
                f"--quantization {quantization} needs radixkv.model.cpu_layers, which is missing"
            ) from error
        return
    if quantization == "fp8":
        store_layers_as_fp8(model)
    elif quantization is not None:
        quantize_layers(model)
    else:
        pack_layers(model)
    reason = slower_than_float32(model, quantization)
    if reason is not None:
        logger.warning("%s", reason)


def check_instruction_set() -> None:
    """Check the environment variable RADIXKV_CPU_ISA, if there are compiled kernels for a CPU.

    Raises:
        ConfigError: it names instructions that do not exist or that this processor lacks, or comes too late.
    """
    try:  # numba is optional
        from radixkv_kernels.cpu.isa import features
    except ImportError:
        return
    try:
        features()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def kernels_compiled_ahead(device: str, dtype: str) -> AbstractContextManager[None]:
    """Return a context in which the CPU's kernels are compiled aside, on the first start on a machine.

    Args:
        device, dtype: of an EngineConfig; nothing is compiled unless they may mean a CPU and float32.
    """
    if device == "cuda" or dtype not in ("auto", "float32") or torch.cuda.is_available():
        return nullcontext()
    try:  # the folder may be missing, and numba is optional
        from radixkv.model.cpu_layers.rewrite import has_vector_kernels
        from radixkv_kernels.cpu.compile_ahead import compiled_ahead
    except ImportError:
        return nullcontext()
    return compiled_ahead() if has_vector_kernels() else nullcontext()


def make_thread_control() -> Callable[[], None] | None:
    """Return a function to call before each step: it reduces threads while other programs need the cores."""
    try:  # the folder may be missing
        from radixkv.model.cpu_layers.thread_control import ThreadControl
    except ImportError:
        return None
    return ThreadControl(torch.get_num_threads()).before_step
