# SPDX-License-Identifier: Apache-2.0
"""Memory of the KV cache: a share of free memory, or a given size; every refusal gives the numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.attention.attention_shape import AttentionShape
from radixkv.model.early_checks import (
    available_cpu_memory,
    check_context,
    check_holds_a_chat,
    check_num_blocks,
)
from radixkv.model.memory.state_memory import size_states
from radixkv.model.memory.window_memory import shape_with_windows, size_windows
from radixkv_kernels import KVLayout
from radixkv_kernels.states import StateSpec

# Share of the available RAM that the KV cache takes on a CPU without --kv-cache-memory. Pages of it that no
# request has used yet cost nothing: the operating system hands them out at the first write.
CPU_MEMORY_SHARE = 0.25

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Parameters that the size of a block depends on."""

    attention: AttentionShape
    dtype: torch.dtype
    device: torch.device
    max_model_len: int


def is_sized_by_gpu(config: EngineConfig, device: torch.device) -> bool:
    """Return True if K/V get the rest of a GPU's memory, so that the size of a step must be known."""
    return device.type == "cuda" and config.kv_cache_memory is None and config.num_blocks is None


def _memory_for_kv(config: EngineConfig, device: torch.device, step_memory: int) -> tuple[int, str]:
    """Bytes for K/V, and a phrase that says where the number comes from."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory, "--kv-cache-memory"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Weights are already in `total - free`.
        usable = int(total * config.gpu_memory_utilization) - (total - free) - step_memory
        share = (
            f"{config.gpu_memory_utilization:.0%} of {total / _GIB:.1f} GiB GPU memory less what is in use "
            f"and {step_memory / _GIB:.2f} GiB for a step"
        )
        return max(0, usable), share
    available = available_cpu_memory()
    return int(available * CPU_MEMORY_SHARE), f"{CPU_MEMORY_SHARE:.0%} of {available / _GIB:.1f} GiB free RAM"


def size_kv_cache(
    config: EngineConfig, shape: ModelShape, step_memory: int = 0, step_tokens: int = 0
) -> tuple[KVLayout, int, StateSpec | None]:
    """Decide the number of KV blocks and of states, and the longest request.

    Args:
        step_memory: bytes that the largest step takes besides weights and K/V, where `is_sized_by_gpu`.
        step_tokens: most tokens of a step.

    Returns:
        The layout of the paged storage, `max_model_len` in tokens, and the size of the states' memory.

    Raises:
        ConfigError: it does not fit; the message gives the numbers and the flags to change.
    """

    quantization = None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    attention = shape_with_windows(config, shape.attention, shape.max_model_len)
    try:
        layout = attention.layout(1, config.block_size, shape.dtype, shape.device, quantization)
    except ValueError as error:
        raise ConfigError(f"{error}; change --block-size") from error
    memory, source = _memory_for_kv(config, shape.device, step_memory)
    num_windows = 0
    if layout.window is not None:
        num_windows = size_windows(config, layout, memory, step_tokens)
        if not num_windows:
            layout = replace(layout, groups=shape.attention.groups)
        elif config.window_memory is None:
            memory -= num_windows * layout.bytes_per_window_block
            source += " less windows"
    block_bytes = layout.bytes_per_block
    states = size_states(config, shape.attention, memory, block_bytes, shape.device)
    if states is not None and config.state_memory is None:
        memory -= states.num_bytes
        source += " less states"
    num_blocks = config.num_blocks if config.num_blocks is not None else memory // block_bytes
    tokens = num_blocks * config.block_size
    wanted = config.max_model_len
    if wanted is not None:
        check_context(wanted, shape.max_model_len)
    needed = -(-(wanted or 1) // config.block_size)
    if num_blocks < max(needed, 1):
        have = (
            f"--num-blocks {num_blocks}"
            if config.num_blocks is not None
            else f"{memory / _GIB:.2f} GiB ({source}) hold {num_blocks} blocks"
        )
        what = f"--max-model-len {wanted} needs {needed} blocks" if wanted else "one block is needed"
        raise ConfigError(
            f"the KV cache does not fit: {what} of {config.block_size} tokens "
            f"({block_bytes / 1024:.0f} KiB each, {needed * block_bytes / _GIB:.2f} GiB), but {have}; "
            "lower --max-model-len, or raise --kv-cache-memory, --num-blocks or --gpu-memory-utilization"
        )
    if config.num_blocks is not None:
        check_num_blocks(num_blocks, block_bytes, free_memory(shape.device))
    elif config.kv_cache_memory is not None:
        check_holds_a_chat(config, memory, block_bytes // config.block_size, shape.max_model_len)
    return (
        layout.with_blocks(num_blocks, max(1, num_windows)),
        min(wanted or shape.max_model_len, tokens),
        states,
    )


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_cpu_memory()
