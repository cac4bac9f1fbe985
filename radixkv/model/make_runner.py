# SPDX-License-Identifier: Apache-2.0
"""Make the runner of a loaded model: choose the backend, size the K/V memory, set the threads."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.adapters.attachment import adds_by_row
from radixkv.model.adapters.base_modules import BaseModules
from radixkv.model.attention.own_attention import has_linear_biases
from radixkv.model.cuda_graphs import max_padded_rows
from radixkv.model.device_paths import make_thread_control
from radixkv.model.early_checks import check_available
from radixkv.model.loading.loader import LoadedModel
from radixkv.model.memory.kv_memory import ModelShape, free_memory, is_sized_by_gpu, size_kv_cache
from radixkv.model.memory.state_memory import check_states_supported
from radixkv.model.memory.step_memory import measure_encoding_memory, measure_step_memory
from radixkv.model.memory.window_memory import describe_windows
from radixkv.model.parallel.communicator import Communicator
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.model.vision.step_images import ENCODER_CACHE_BYTES
from radixkv_kernels import KVLayout
from radixkv_kernels.states import GRID, StateSpec

logger = logging.getLogger("radixkv")

#: Most elements of a value that the Triton kernels read.
_LARGEST_GPU_VALUE = 512
DEFAULT_BUDGET = {"cpu": 512, "cuda": 8192}


def token_budget(config: EngineConfig, device: torch.device) -> int:
    """Return the most tokens of a step."""
    return config.max_num_batched_tokens or DEFAULT_BUDGET[device.type]


def largest_step(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return the most tokens of a step whose last chunk may have to go on to the end of an image."""
    spare = 0 if loaded.vision is None else max(0, loaded.vision.processor.most_together - 1)
    return token_budget(config, loaded.device) + spare


def make_runner(
    config: EngineConfig, loaded: LoadedModel, communicator: Communicator | None = None
) -> tuple[ModelRunner, int]:
    """Make the runner of a model; return it, and the longest context in tokens.

    Args:
        communicator: connects ranks that have loaded shares of one model; all of them call this at once.

    Raises:
        ConfigError: the KV cache does not fit, or the backend does not run on this device.
    """
    device = loaded.device
    backend = config.attention_backend
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "cpu"
    if backend == "triton" and device.type != "cuda":
        raise ConfigError("attention backend triton needs a GPU; leave attention_backend out on a CPU")
    if backend == "triton":
        _check_sizes(loaded)
    if config.kv_cache_dtype != "auto" and has_linear_biases(loaded.hf_config):
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} would round away the positions that {loaded.name} "
            "keeps in its keys for linear biases (ALiBi); use --kv-cache-dtype auto"
        )
    if config.takes_adapters:
        _check_adapters(config, device, backend)
    # A number of threads that the user chose is kept, and so is the one that fixes deterministic mode's sums.
    # The ranks of a group would take each other for other programs.
    adapts = (
        device.type == "cpu" and config.threads is None and not config.deterministic and communicator is None
    )
    check_states_supported(config, loaded.attention, device)
    spec, max_model_len, states = _size(config, loaded, communicator)
    if config.kv_cache_memory is not None:
        size = spec.num_blocks * spec.bytes_per_block
        check_available("--kv-cache-memory", size, free_memory(device))
    if states is not None:
        logger.info(
            "%.2f GiB for K/V of %d tokens, %.2f GiB for %d states (one for %d tokens, at most), "
            "%.2f GiB for the latest inputs of %d running requests",
            spec.num_blocks * spec.bytes_per_block / 2**30,
            spec.num_blocks * spec.block_size,
            states.num_slots * states.bytes_per_slot / 2**30,
            states.num_slots,
            GRID,
            states.num_rings * states.bytes_per_ring / 2**30,
            states.num_rings,
        )
    runner = ModelRunner(
        loaded,
        spec,
        StepLimits(largest_step(config, loaded), config.max_num_seqs, max_model_len),
        backend=backend,
        deterministic=config.deterministic,
        share_prefixes=config.share_prefix_attention,
        quantization=config.quantization,
        before_step=make_thread_control() if adapts else None,
        is_alone=communicator is None,
        max_lora_rank=config.max_lora_rank if config.takes_adapters else 0,
        states=states,
    )
    if runner.windows is not None:
        logger.info("%s", describe_windows(spec, runner.windows.spec, max_model_len))
    if communicator is not None:
        # Tensors that are added up have one shape; what holds for a multiple holds for a larger one.
        runner.row_multiple = communicator.largest(runner.row_multiple)
    return runner, max_model_len


def _check_adapters(config: EngineConfig, device: torch.device, backend: str) -> None:
    """Refuse adapters where they can't be computed as everything else.

    Raises:
        ConfigError: names the option to change.
    """
    if device.type != "cpu" and backend != "triton":
        raise ConfigError(f"adapters (--lora, --lora-dir) on {device} need the attention_backend triton")
    if config.deterministic and device.type == "cpu" and not adds_by_row():
        raise ConfigError(
            "--deterministic with adapters needs numba (the extra `cpu` installs it): without it, an "
            "adapter's sums depend on the batch"
        )


def _size(
    config: EngineConfig, loaded: LoadedModel, communicator: Communicator | None
) -> tuple[KVLayout, int, StateSpec | None]:
    """The K/V memory of this runner, the longest context, and the memory of states."""
    device = loaded.device
    shape = ModelShape(
        attention=loaded.attention,
        dtype=loaded.dtype,
        device=device,
        max_model_len=loaded.max_model_len,
    )
    if communicator is not None and device.type == "cpu":  # the ranks share the machine's memory
        groups = loaded.attention.groups
        total = [(communicator.total(g.num_query_heads), communicator.total(g.num_kv_heads)) for g in groups]
        whole = loaded.attention.with_heads(total)
        # Each of them keeps all states.
        shape = replace(shape, attention=replace(whole, states=whole.states * communicator.size))
    step_memory, budget = 0, largest_step(config, loaded)
    if is_sized_by_gpu(config, device):
        step_memory = measure_step_memory(
            loaded,
            config.quantization,
            max_num_tokens=budget,
            max_num_seqs=config.max_num_seqs,
            max_padded_rows=max_padded_rows(budget, config.max_num_seqs),
            max_model_len=config.max_model_len or loaded.max_model_len,
            deterministic=config.deterministic,
        )
        if loaded.vision is not None and loaded.vision.has_tower:
            longest = config.max_model_len or loaded.max_model_len
            step_memory += ENCODER_CACHE_BYTES + measure_encoding_memory(loaded.vision, longest)
        if config.takes_adapters:
            from radixkv.model.adapters.gpu_adapters import bytes_of_adapters  # needs triton

            base = BaseModules.of_loaded(loaded)
            step_memory += bytes_of_adapters(base, config.max_loras, config.max_lora_rank, loaded.dtype)
        # The step's memory in torch's allocator counts once, as the memory of a step.
        torch.cuda.empty_cache()
    spec, max_model_len, states = size_kv_cache(config, shape, step_memory, budget)
    if communicator is None:
        return spec, max_model_len, states
    frees_windows = [bool(each) for each in communicator.gather(spec.window is not None)]
    if any(frees_windows) and not all(frees_windows):  # for want of memory on some
        spec, max_model_len, states = size_kv_cache(
            replace(config, window_memory=0), shape, step_memory, budget
        )
    num_blocks = communicator.smallest(spec.num_blocks)
    max_model_len = min(max_model_len, num_blocks * spec.block_size)
    attention = loaded.attention if spec.window is None else loaded.attention.freeing_windows()
    own = attention.layout(num_blocks, spec.block_size, spec.dtype, spec.device, spec.quantization)
    own = own.with_blocks(num_blocks, communicator.smallest(spec.num_window_blocks))
    if states is not None:
        num_slots = communicator.smallest(states.num_slots)
        num_rings = communicator.smallest(states.num_rings)
        states = replace(states, shapes=loaded.attention.states, num_slots=num_slots, num_rings=num_rings)
    return own, max_model_len, states


def _check_sizes(loaded: LoadedModel) -> None:
    """Refuse heads that the GPU's kernels do not read.

    Raises:
        ConfigError: names the size.
    """
    for group in loaded.attention.groups:
        if group.value_size > _LARGEST_GPU_VALUE:
            raise ConfigError(
                f"{loaded.name} has values of {group.value_size} elements; the kernels for GPUs read values "
                f"of up to {_LARGEST_GPU_VALUE}: use --device cpu"
            )
