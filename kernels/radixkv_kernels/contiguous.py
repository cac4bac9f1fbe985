# SPDX-License-Identifier: Apache-2.0
"""Long chunks of prompts by torch's own attention, over keys and values laid out one after the other.

A paged cache is read block by block, which keeps a kernel from copying tiles by descriptors while it
multiplies. For a long chunk that costs more than a copy of the context, made once a layer: 8,192 tokens of 8
heads of 128 are 33 MB. Flash attention's causal mask begins at the first key, so a chunk behind a prefix
attends twice:

    queries of the chunk  x  prefix            no mask         -> a, log-sum-exp A
    queries of the chunk  x  keys of the chunk  causal         -> b, log-sum-exp B
    output = b + sigmoid(A - B) (a - b)

In plain mode only: the sums are in another order than those of the kernel for shorter chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from radixkv_kernels.interface import AttentionPlan, BackendConfig, Scoring
from radixkv_kernels.kv_cache import PagedKV

#: Fewest rows of a chunk that is attended so.
MIN_ROWS = 1024
#: Most bytes of a layer's keys and values that are laid out: 131,072 tokens of 8 heads of 128 in 16 bits.
MAX_BYTES = 1 << 29
#: Widest heads, and types, of flash attention on a GPU.
LARGEST_HEAD = 256
FLASH_DTYPES = (torch.bfloat16, torch.float16)


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


def takes_long_chunks(config: BackendConfig) -> bool:
    """Return True if a backend's layers can be attended so: 16 bits, as they are computed, in plain mode."""
    spec = config.spec
    has_types = config.compute_dtype in FLASH_DTYPES or spec.device.type == "cpu"
    is_plain = not config.deterministic and spec.quantization is None and not spec.value_in_key
    return is_plain and has_types and max(spec.head_size, spec.value_size) <= LARGEST_HEAD


def scratch_bytes(config: BackendConfig) -> int:
    """Most bytes that a layer's long chunk takes besides its output; 0: there are none."""
    if not takes_long_chunks(config) or config.max_num_tokens < MIN_ROWS:
        return 0
    spec = config.spec
    laid_out = min(MAX_BYTES, config.max_model_len * bytes_per_token(config))
    # Two results and their join in float32.
    rows = 3 * 4 * config.max_num_tokens * config.num_query_heads * spec.value_size
    return laid_out + rows


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
    kv: PagedKV, layer: int, query: torch.Tensor, chunk: ContiguousChunk, scale: float
) -> torch.Tensor:
    """Attend a chunk: `query` [n, Hq, D] -> [n, Hq, V]. Its keys and values are in the cache."""
    key, value = (
        data[layer].index_select(1, chunk.blocks).flatten(1, 2)[:, : chunk.context]
        for data in (kv.key, kv.value)
    )
    return causal_attention(query, key, value, scale)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend the last n tokens of a context of c.

    Args:
        query: [n, Hq, D].
        key, value: [Hkv, c, D] and [Hkv, c, V]; Hkv divides Hq.

    Returns:
        [n, Hq, V].
    """
    rows, size = query.shape[1], value.shape[2]
    own = key.shape[1] - len(query)
    asked = query.transpose(0, 1)[None]
    if size < key.shape[2]:  # heads of one size are wanted
        value = pad(value, (0, key.shape[2] - size))
    out, sums = _flash(asked, key[None, :, own:], value[None, :, own:], scale, is_causal=True)
    if own:
        before, sums_before = _flash(asked, key[None, :, :own], value[None, :, :own], scale, is_causal=False)
        share = torch.sigmoid(sums_before[..., : len(query)] - sums[..., : len(query)])
        out = torch.lerp(out.float(), before.float(), share[..., None]).to(query.dtype)
    assert out.shape[1] == rows
    return out[0].transpose(0, 1)[..., :size]


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention and its float32 log-sum-exp [1, Hq, n], which torch's public function keeps."""
    operators: Any = torch.ops.aten
    if query.device.type == "cpu":
        out, sums = operators._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
    else:
        out, sums, *_ = operators._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )
    return out, sums
