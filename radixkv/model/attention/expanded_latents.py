# SPDX-License-Identifier: Apache-2.0
"""Latent attention of long chunks, expanded: every head's keys and values are made again from the latents.

Absorbed attention (see `latent_attention`) multiplies 2 latent + rope numbers for each query, key and head;
expanded heads take nope + rope + value. For n queries at the end of a context of c tokens, and F = latent
(nope + value) multiplications to expand a token or to fold a query and its output::

    absorbed    n F + pairs (2 latent + rope)          pairs = n (c - (n - 1) / 2)
    expanded    c F + pairs (nope + rope + value)

At the start of a prompt n is c, and expansion always takes less; behind a long cached prefix it takes
chunks of some hundred queries. The latents are read back from the cache, so that both ways see the same
numbers, 8-bit ones included. The way of a chunk depends on the cutting of its prompt and on the cached part,
and the two ways differ in their last bits: deterministic mode leaves all chunks absorbed. (Decodes must be,
and their K/V is the next prompt's prefix: `docs/kernels.md` has the figures.)

Heads are expanded some at a time, in memory of a fixed size. On a CPU they are attended by the same kernels,
from blocks of their own; on a GPU by torch's attention (`radixkv_kernels.contiguous`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from radixkv.model.attention.latent_attention import Latents
from radixkv.sampling.device_arrays import to_device
from radixkv.scheduling.batch import Batch
from radixkv_kernels import AttentionBackend, AttentionPlan, KVSpec, PagedKV, make_backend
from radixkv_kernels.contiguous import (
    FLASH_DTYPES,
    LARGEST_HEAD,
    MAX_BYTES,
    MIN_ROWS,
    HeadShape,
    causal_attention,
    is_right,
)

#: Fewest queries of an expanded chunk, below which a launch for each chunk costs more than it saves.
MIN_QUERIES = 64
#: Multiplications count this much more where heads are expanded: expanded rows are written and read again.
_EXPANSION_COST = 1.5
#: Elements of expanded keys and values that are kept at once, few enough for a CPU's caches; one head's where
#: that is more.
SCRATCH_ELEMENTS = 2**20
_BLOCK = 64
_MULTIPLE = 8


class StepMemory(Protocol):
    """Memory and backend of a step, as `AttentionStep` has them."""

    backend: AttentionBackend
    kv: Any

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the rows' keys and values to their slots."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries of one request that attend with expanded heads.

    Attributes:
        rows: their rows of the step.
        context: tokens that the last of them sees.
        blocks: int64, the request's blocks, on the device.
    """

    rows: slice
    context: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class LongChunks:
    """A step's rows, divided into expanded chunks and others.

    Attributes:
        others: int64, rows that attend to latents.
        plan: of these alone; None: there are none.
    """

    expansion: Expansion
    chunks: Sequence[Chunk]
    others: Tensor
    plan: AttentionPlan | None

    def attend(
        self,
        step: StepMemory,
        layer: int,
        latents: Latents,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        """Write a layer's latents, then attend: `query` [T, H, nope + rope] -> [T, H, value].

        Args:
            key, value: as `Latents.join` makes them, [T, 1, size].
        """
        step.write(layer, key, value)
        out = query.new_zeros(*query.shape[:2], latents.value)
        if self.plan is not None:
            folded = latents.fold_query(query[self.others])
            attended = step.backend.attend(step.kv, layer, folded, self.plan, scale=scale)
            out[self.others] = latents.fold_output(attended)
        for chunk in self.chunks:
            stored = step.kv.read_keys(layer, chunk.blocks, chunk.context, latents.weight.dtype)
            out[chunk.rows] = self.expansion.attend(latents, query[chunk.rows], stored[:, 0], scale)
        return out


class Expansion:
    """Expanded attention of one model; not thread-safe.

    Args:
        sizes: a latent attention of the model, by whose sizes chunks are chosen.
        name: of the attention backend.
        max_num_tokens: most queries of a step.
        min_queries: fewest queries of a chunk.
        is_contiguous: torch's attention computes it, as on a GPU.
    """

    def __init__(
        self,
        sizes: Latents,
        name: str,
        max_num_tokens: int,
        *,
        min_queries: int = MIN_QUERIES,
        is_contiguous: bool = False,
    ) -> None:
        self._sizes, self._name, self._max_num_tokens = sizes, name, max_num_tokens
        self._min_queries, self._is_contiguous = min_queries, is_contiguous
        self._scratch: dict[tuple[int, int], _Scratch] = {}

    def pays(self, queries: int, context: int) -> bool:
        """Return True if `queries` tokens at the end of a context are attended faster with expanded heads."""
        if queries < self._min_queries:
            return False
        s = self._sizes
        a_token = s.latent * (s.nope + s.value)
        pairs = queries * (context - (queries - 1) / 2)
        absorbed = queries * a_token + pairs * (2 * s.latent + s.rope)
        expanded = context * a_token + pairs * (s.nope + s.rope + s.value)
        return _EXPANSION_COST * expanded < absorbed

    def divide(self, batch: Batch, backend: AttentionBackend) -> LongChunks | None:
        """Choose the chunks of a step; None: there are none."""
        starts, contexts = batch.query_starts, batch.context_lengths
        counts = np.diff(starts)
        candidates = np.flatnonzero(counts >= self._min_queries)
        long = [r for r in candidates if self.pays(counts[r], contexts[r])]
        if not long:
            return None
        device = self._sizes.weight.device
        chunks = [
            Chunk(
                slice(int(starts[r]), int(starts[r + 1])),
                int(contexts[r]),
                to_device(batch.block_tables[r].astype(np.int64), device),
            )
            for r in long
        ]
        others = np.setdiff1d(np.arange(len(counts)), long)
        rows = np.concatenate(
            [np.arange(starts[r], starts[r + 1]) for r in others] or [np.zeros(0, np.int64)]
        )
        plan = None
        if len(rows):
            ends = np.concatenate([[0], np.cumsum(counts[others])]).astype(np.int32)
            plan = backend.plan(ends, contexts[others], [batch.block_tables[r] for r in others])
        return LongChunks(self, chunks, to_device(rows.astype(np.int64), device), plan)

    def attend(self, latents: Latents, query: Tensor, stored: Tensor, scale: float) -> Tensor:
        """Attend the last queries of a context.

        Args:
            query: [n, H, nope + rope].
            stored: [c, K], keys as `Latents.join` makes them.

        Returns:
            [n, H, value].
        """
        if self._is_contiguous:
            return _attend_contiguously(latents, query, stored, scale)
        sizes = (
            -(-(latents.nope + latents.rope) // _MULTIPLE) * _MULTIPLE,
            -(-latents.value // _MULTIPLE) * _MULTIPLE,
        )
        scratch = self._scratch.get(sizes)
        if scratch is None or scratch.tokens < len(stored):
            tokens = max(1024, 1 << (len(stored) - 1).bit_length())
            scratch = self._scratch[sizes] = _Scratch(
                self._name, tokens, query.shape[1], sizes, self._max_num_tokens
            )
        return scratch.attend(latents, query, stored, scale)


class _Scratch:
    """Blocks of expanded keys and values for contexts of up to `tokens`, some heads at a time."""

    def __init__(
        self, name: str, tokens: int, heads: int, sizes: tuple[int, int], max_num_tokens: int
    ) -> None:
        self.tokens = tokens
        self._heads = max(1, min(heads, SCRATCH_ELEMENTS // (tokens * sum(sizes))))
        device = torch.device("cpu")
        spec = KVSpec(
            1, tokens // _BLOCK, _BLOCK, self._heads, sizes[0], torch.float32, device, value_size=sizes[1]
        )
        self._kv = PagedKV(spec)
        self._kv.clear(spec.num_blocks)
        self._backend = make_backend(
            name,
            num_query_heads=self._heads,
            spec=spec,
            compute_dtype=torch.float32,
            share_prefixes=False,
            max_num_tokens=max_num_tokens,
            max_num_seqs=1,
            max_model_len=tokens,
        )
        self._table = np.arange(spec.num_blocks, dtype=np.int32)
        self._keys, self._values = (each[0].flatten(1, 2) for each in (self._kv.key, self._kv.value))

    def attend(self, latents: Latents, query: Tensor, stored: Tensor, scale: float) -> Tensor:
        """See `Expansion.attend`."""
        count, context = len(query), len(stored)
        latent, rotated = (
            stored[:, : latents.latent],
            stored[:, latents.latent : latents.latent + latents.rope],
        )
        plan = self._backend.plan(
            np.array([0, count], np.int32), np.array([context], np.int32), [self._table]
        )
        up_key, up_value = latents.weights()
        width = latents.nope + latents.rope
        self._keys[:, :context, latents.nope : width] = rotated
        parts = []
        for first in range(0, query.shape[1], self._heads):
            # The last pass may go over heads of the one before again.
            first = max(0, min(first, query.shape[1] - self._heads))
            own = slice(first, first + self._heads)
            self._keys[:, :context, : latents.nope] = latent @ up_key[own].transpose(1, 2)
            self._values[:, :context, : latents.value] = latent @ up_value[own].transpose(1, 2)
            asked = nn.functional.pad(query[:, own], (0, self._keys.shape[2] - width))
            parts.append((own, self._backend.attend(self._kv, 0, asked, plan, scale=scale)))
        out = query.new_empty(count, query.shape[1], latents.value)
        for own, part in parts:
            out[:, own] = part[..., : latents.value]
        return out


def _attend_contiguously(latents: Latents, query: Tensor, stored: Tensor, scale: float) -> Tensor:
    """See `Expansion.attend`: some heads at a time, by torch's attention."""
    context, heads = len(stored), query.shape[1]
    latent = stored[:, : latents.latent]
    rotated = stored[:, latents.latent : latents.latent + latents.rope]
    up_key, up_value = latents.weights()
    width = latents.nope + latents.rope
    # Values are padded to the width of keys.
    at_once = max(1, MAX_BYTES // (2 * width * context * stored.dtype.itemsize))
    out = query.new_empty(len(query), heads, latents.value)
    for first in range(0, heads, at_once):
        own = slice(first, first + at_once)
        plain = latent @ up_key[own].transpose(1, 2)
        key = torch.cat([plain, rotated.expand(len(plain), -1, -1)], 2)
        value = latent @ up_value[own].transpose(1, 2)
        out[:, own] = causal_attention(query[:, own], key, value, scale)
    return out


def find_latents(model: nn.Module) -> Latents | None:
    """Return a latent attention of a model; None: it has none."""
    return next((module for module in model.modules() if isinstance(module, Latents)), None)


def make_expansion(model: nn.Module, name: str, max_num_tokens: int) -> Expansion | None:
    """The expanded attention of a model; None: it has no latents, or torch's attention does not take them."""
    sizes = find_latents(model)
    if sizes is None:
        return None
    if sizes.weight.device.type == "cpu":
        return Expansion(sizes, name, max_num_tokens)
    width, weight = sizes.nope + sizes.rope, sizes.weight
    if weight.dtype not in FLASH_DTYPES or width > LARGEST_HEAD or max_num_tokens < MIN_ROWS:
        return None
    heads = len(sizes.weights()[0])
    if not is_right(
        causal_attention, HeadShape(heads, heads, width, sizes.value, weight.dtype, weight.device)
    ):
        return None
    return Expansion(sizes, name, max_num_tokens, min_queries=MIN_ROWS, is_contiguous=True)
