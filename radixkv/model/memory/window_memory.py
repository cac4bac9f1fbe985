# SPDX-License-Identifier: Apache-2.0
"""Memory of layers with a sliding window: whether their past K/V is freed, and how many blocks they get."""

from __future__ import annotations

import logging

from radixkv.cache.states.checkpoint import GRID
from radixkv.cache.states.window_pool import WindowSpec
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.attention.attention_shape import AttentionShape
from radixkv_kernels import KVLayout

logger = logging.getLogger("radixkv")

#: A context of fewer windows, or of fewer tokens, has little to free.
_MIN_WINDOWS, _MIN_TOKENS = 8, 8192
#: Largest share of windows in the memory for K/V, without --window-memory.
_LARGEST_SHARE = 1 / 3
#: Windows' worth of tokens for each kept window, beside the windows of running requests.
_TOKENS_PER_KEPT = 16
#: Windows are kept whole rather than let fewer requests run at once.
_MIN_REQUESTS = 4


def shape_with_windows(config: EngineConfig, attention: AttentionShape, max_model_len: int) -> AttentionShape:
    """Return the groups of a model's layers: those with a window apart, where their past K/V is freed.

    Raises:
        ConfigError: --window-memory asks for it where it can't be.
    """
    asked = config.window_memory
    if not attention.windows or asked == 0:
        if asked:
            raise ConfigError("--window-memory is for models with layers that have a sliding window")
        return attention
    window = max(attention.windows.values())
    reason = _hindrance(config, attention)
    if reason is not None:
        if asked:
            raise ConfigError(f"--window-memory: K/V of layers with a window can't be freed: {reason}")
        logger.info("K/V of layers with a window is kept whole: %s", reason)
        return attention
    if not asked:
        longest = config.max_model_len or max_model_len
        if config.num_blocks is not None:
            longest = min(longest, config.num_blocks * config.block_size)
        if longest < max(_MIN_WINDOWS * window, _MIN_TOKENS):
            return attention
    return attention.freeing_windows()


def _hindrance(config: EngineConfig, attention: AttentionShape) -> str | None:
    if all(layer in attention.windows for group in attention.groups for layer in group.layers):
        return "every layer of this model has one"
    if GRID % config.block_size:
        return f"it needs a --block-size that divides {GRID}, not {config.block_size}"
    return None


def size_windows(config: EngineConfig, layout: KVLayout, memory: int, step_tokens: int) -> int:
    """Return the number of blocks for windows; 0: memory is so small that windows are better kept whole.

    Running requests come first, then kept windows: one for sixteen windows' worth of tokens in the cache.
    They get a third of the memory at most, and no more blocks than other layers have.

    Args:
        layout: with groups that have a window.
        memory: bytes for all K/V.
        step_tokens: most tokens of a step.

    Raises:
        ConfigError: --window-memory does not hold the window of one request.
    """
    assert layout.window is not None
    size, each, other = config.block_size, layout.bytes_per_window_block, layout.bytes_per_block
    one = WindowSpec(layout.window, 0, step_tokens)
    per_request, per_step = one.blocks_per_request(size), -(-step_tokens // size)
    if config.window_memory is not None:
        count = config.window_memory // each
        if count < per_request + per_step:
            raise ConfigError(
                f"--window-memory {config.window_memory} holds {count} blocks for windows of {layout.window} "
                f"tokens; one request needs {per_request} and a step {per_step}, of {each / 1024:.0f} KiB "
                "each; give it more, or leave the flag out"
            )
        return count
    running = config.max_num_seqs * per_request + per_step
    if config.num_blocks is not None:
        count = min(running + config.num_blocks // _TOKENS_PER_KEPT, config.num_blocks)
    else:
        count = int(min(running + memory // other / _TOKENS_PER_KEPT, memory * _LARGEST_SHARE // each))
        count = min(count, memory // (each + other))
    if (count - per_step) // per_request < min(_MIN_REQUESTS, config.max_num_seqs):
        return 0
    return count


def bytes_of_request(layout: KVLayout, spec: WindowSpec, num_tokens: int) -> tuple[int, int]:
    """Return the most bytes of K/V that a running request takes, and those with whole windows."""
    size, blocks = layout.block_size, -(-num_tokens // layout.block_size)
    windows = min(blocks, spec.blocks_per_request(size) + -(-spec.step_tokens // size))
    whole = blocks * (layout.bytes_per_block + spec.block_bytes)
    return blocks * layout.bytes_per_block + windows * spec.block_bytes, whole


def describe_windows(layout: KVLayout, spec: WindowSpec, max_model_len: int) -> str:
    """Return the figures of the memory for windows, for the log of the start."""
    size = layout.block_size
    longest, whole = bytes_of_request(layout, spec, max_model_len)
    most = longest - -(-max_model_len // size) * layout.bytes_per_block
    gib, kib = 2**30, 1024 * size
    return (
        f"{layout.num_blocks * layout.bytes_per_block / gib:.2f} GiB for K/V of {layout.num_blocks * size} "
        f"tokens ({layout.bytes_per_block / kib:.1f} KiB each), "
        f"{spec.num_blocks * spec.block_bytes / gib:.2f} GiB for windows ({spec.block_bytes / kib:.1f} KiB a "
        f"token) of up to {spec.max_requests(size)} running requests, {most / 2**20:.1f} MiB each at most; "
        f"a request of {max_model_len} tokens takes {longest / 2**20:.0f} MiB, "
        f"{longest / whole:.2f} of what it would with whole windows"
    )
