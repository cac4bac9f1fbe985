# SPDX-License-Identifier: Apache-2.0
"""Long chunks of prompts by torch's own attention, over keys and values laid out one after the other.

A paged cache is read block by block, which keeps a kernel from copying tiles by descriptors while it
multiplies. For a long chunk that costs more than a copy of the context, made once a layer: 8,192 tokens of 8
heads of 128 are 33 MB. The causal mask ends at the last key: a chunk behind a prefix is one call, too.

    queries of the chunk  x  [ keys of the prefix | keys of the chunk, causal ]

Whether torch's function has the heads, the mask and the types on the device at hand is found by a trial
beside float64. In plain mode only: the sums are in another order than those of the kernel for shorter chunks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from radixkv_kernels.interface import AttentionPlan, BackendConfig, Scoring
from radixkv_kernels.kv_cache import PagedKV
from radixkv_kernels.reference import reference_attention

logger = logging.getLogger(__name__)

#: Fewest rows of a chunk that is attended so.
MIN_ROWS = 1024
#: Most bytes of a layer's keys and values that are laid out: 131,072 tokens of 8 heads of 128 in 16 bits.
MAX_BYTES = 1 << 29
#: Widest heads, and types, of flash attention on a GPU.
LARGEST_HEAD = 256
FLASH_DTYPES = (torch.bfloat16, torch.float16)
#: Most that a trial may differ from float64, of the largest output: a wrong mask or head is far off.
_TOLERANCE = 0.02


class CausalAttention(Hashable, Protocol):
    """A function that attends the last n tokens of a context of c."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return [n, Hq, V].

        Args:
            query: [n, Hq, D].
            key, value: [Hkv, c, D] and [Hkv, c, V]; Hkv divides Hq.
            scale: of logits.
        """


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads that are attended so: their numbers and elements, type and device."""

    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class ContiguousChunk:
    """The rows of a long chunk.

    Attributes:
        rows: of the step.
        context: tokens that the last of them sees.
        blocks: int64 [blocks of the context], on the device.
    """

    rows: slice
    context: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class ContiguousChunks:
    """A step's long chunks, and what is left for the kernel.

    Attributes:
        chunks: one or more.
        others: the other requests' rows, a slice or int64 on the device.
        plan: of these; None: there are none.
    """

    chunks: Sequence[ContiguousChunk]
    others: slice | torch.Tensor
    plan: AttentionPlan | None


def takes_long_chunks(config: BackendConfig, min_rows: int, attention: CausalAttention) -> bool:
    """Return True if a backend's layers can be attended so: 16 bits, as they are computed, in plain mode.

    Args:
        min_rows: fewest rows of a chunk that is attended so.
        attention: computes it; tried once.
    """
    spec = config.spec
    has_types = config.compute_dtype in FLASH_DTYPES or spec.device.type == "cpu"
    is_plain = not config.deterministic and spec.quantization is None and not spec.value_in_key
    fits = max(spec.head_size, spec.value_size) <= LARGEST_HEAD and config.max_num_tokens >= min_rows
    if not (is_plain and has_types and fits):
        return False
    sizes = config.num_query_heads, spec.num_kv_heads, spec.head_size, spec.value_size
    return is_right(attention, HeadShape(*sizes, config.compute_dtype, spec.device))


@functools.cache
def is_right(attention: CausalAttention, shape: HeadShape) -> bool:
    """Return True if a trial, a chunk behind a prefix, gives float64's result; the log says once if not."""
    rows, context = 72, 200
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(size, generator=random).to(shape.dtype)
        for size in (
            (rows, shape.query_heads, shape.key_size),
            (shape.kv_heads, context, shape.key_size),
            (shape.kv_heads, context, shape.value_size),
        )
    )
    scale = shape.key_size**-0.5
    expected = reference_attention(
        query, [key.transpose(0, 1)], [value.transpose(0, 1)], np.array([0, rows]), scale=scale
    )
    try:
        query, key, value = (part.to(shape.device) for part in (query, key, value))
        result = attention(query, key, value, scale)
        error = float((result.double().cpu() - expected).abs().max() / expected.abs().max())
        fault = "" if error <= _TOLERANCE else f"its trial is {error:.2g} off"
    except (
        ImportError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as raised:  # old torch, no kernel for the device
        fault = f"{type(raised).__name__}: {raised}".splitlines()[0]
    if fault:
        logger.warning(
            "long chunks of prompts keep the kernel of shorter ones, since torch's attention can't take "
            "%d:%d heads of %d in %s on %s: %s",
            *(shape.query_heads, shape.kv_heads, shape.key_size, shape.dtype, shape.device, fault),
        )
    return not fault


def scratch_bytes(config: BackendConfig) -> int:
    """Most bytes that a layer's long chunk takes besides its output."""
    spec = config.spec
    laid_out = min(MAX_BYTES, config.max_model_len * bytes_per_token(config))
    # A result, as wide as keys, and a float32 log-sum-exp.
    a_head = max(spec.head_size, spec.value_size) * config.compute_dtype.itemsize + 4
    return laid_out + config.max_num_tokens * config.num_query_heads * a_head


def bytes_per_token(config: BackendConfig) -> int:
    """Bytes of a token's keys and values in one layer."""
    spec = config.spec
    return spec.num_kv_heads * (spec.head_size + spec.value_size) * config.compute_dtype.itemsize


def is_plain(scoring: Scoring) -> bool:
    """Return True for layers without window, softcap and sinks."""
    return scoring.window is None and scoring.softcap is None and scoring.sinks is None


def long_requests(
    config: BackendConfig, query_starts: np.ndarray, context_lengths: np.ndarray, min_rows: int
) -> np.ndarray:
    """Return the requests with long chunks, in order. O(requests)."""
    counts = np.diff(query_starts)
    fits = context_lengths.astype(np.int64) * bytes_per_token(config) <= MAX_BYTES
    return np.flatnonzero((counts >= min_rows) & fits)


def attend_chunk(
    attention: CausalAttention,
    kv: PagedKV,
    layer: int,
    query: torch.Tensor,
    chunk: ContiguousChunk,
    scale: float,
) -> torch.Tensor:
    """Attend a chunk: `query` [n, Hq, D] -> [n, Hq, V]. Its keys and values are in the cache."""
    key, value = (
        data[layer].index_select(1, chunk.blocks).flatten(1, 2)[:, : chunk.context]
        for data in (kv.key, kv.value)
    )
    return attention(query, key, value, scale)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `CausalAttention`: flash attention; on a CPU, where torch has none for it, SDPA."""
    rows, context, size = len(query), key.shape[1], value.shape[2]
    if size < key.shape[2]:  # heads of one size are wanted
        value = pad(value, (0, key.shape[2] - size))
    if query.device.type == "cpu":
        out = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key[None],
            value[None],
            # torch's own name for this mask costs each process of an engine a second: it imports a compiler.
            attn_mask=query.new_ones(rows, context, dtype=torch.bool).tril(context - rows),
            scale=scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)[..., :size]
    from torch.nn.attention.varlen import varlen_attn  # newer than the oldest torch that is allowed

    # One sequence, whose bounds are made on the device, without a wait.
    own, all_keys = (
        torch.arange(0, count + 1, count, dtype=torch.int32, device=query.device) for count in (rows, context)
    )
    result = varlen_attn(
        *(query, key.transpose(0, 1), value.transpose(0, 1), own, all_keys, rows, context),
        scale=scale,
        window_size=(-1, 0),  # causal, ending at the last key
        enable_gqa=True,
    )
    assert isinstance(result, torch.Tensor)  # a pair only where more is asked for
    return result[..., :size]
