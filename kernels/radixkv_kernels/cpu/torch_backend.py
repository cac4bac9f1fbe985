# SPDX-License-Identifier: Apache-2.0
"""Paged attention by torch's operators alone: the CPU backend where numba is not installed.

Attention is an ordered fold over KV segments, as in the compiled kernels. Every product has one shape (32
rows by 256 keys at absolute positions, padded): matrix libraries choose their blocking, and so the order of
their sums, by shape. So a row's bits do not depend on the batch, deterministic mode or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from radixkv_kernels.interface import (
    Ahead,
    AttentionBackend,
    AttentionPlan,
    BackendConfig,
    BlockTables,
    Scoring,
)
from radixkv_kernels.kv_cache import PagedKV, indexable, quantize

SEGMENT = 256
_TILE = 32
_NEG_INF = float("-inf")


class TorchBackend(AttentionBackend):
    """Backend of a CPU without numba; see the module and `AttentionBackend`.

    Raises:
        ValueError: the cache is not on the CPU.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        if config.spec.device.type != "cpu":
            raise ValueError(f"the cpu backend serves CPU caches, not {config.spec.device}")

    def plan(
        self,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        block_tables: BlockTables,
        ahead: Ahead | None = None,
    ) -> AttentionPlan:
        return AttentionPlan(self.config, query_starts, context_lengths, block_tables, ahead)

    def write(
        self,
        kv: PagedKV,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        if slots.numel() == 0:
            return
        if int(slots.min()) < 0:
            valid = (slots >= 0).nonzero().squeeze(1)
            slots = slots.index_select(0, valid)
            rows = valid if rows is None else rows.index_select(0, valid)
        if rows is not None:
            key, value = key.index_select(0, rows), value.index_select(0, rows)
        parts = ((kv.key, kv.key_scale, key), (kv.value, kv.value_scale, value))
        for data, scales, new in parts[:1] if kv.spec.value_in_key else parts:
            stored = new
            if kv.spec.quantization is not None and scales is not None:
                stored, scale = quantize(new, kv.spec.quantization)
                scales[layer].flatten(1).index_copy_(1, slots, scale.transpose(0, 1))
            stored = indexable(stored.to(data.dtype)).transpose(0, 1)
            indexable(data[layer]).flatten(1, 2).index_copy_(1, slots, stored)

    def _attend(
        self,
        kv: PagedKV,
        layer: int,
        query: torch.Tensor,
        plan: AttentionPlan,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        starts, tables = plan.query_starts.tolist(), plan.block_tables
        last_seen = torch.from_numpy(plan.last_seen(scoring.window))
        for r, length in enumerate(plan.context_lengths.tolist()):
            if starts[r] < starts[r + 1]:
                own = slice(starts[r], starts[r + 1])
                key, value = kv.read(layer, tables[r], length, torch.float32)
                if scoring.window is not None:  # blocks before it may be any, and zero times NaN is NaN
                    value[: max(0, length - (starts[r + 1] - starts[r]) - scoring.window + 1)] = 0
                out[own] = _attend_request(query[own], key, value, last_seen[own], scoring)

    def copy_blocks(self, kv: PagedKV, copies: Sequence[tuple[int, int, int]]) -> None:
        read = [
            (t, target, t[:, :, source, :count].clone())
            for source, target, count in copies
            for t in map(indexable, kv.tensors())
        ]
        for t, target, data in read:
            t[:, :, target, : data.shape[2]] = data


def _attend_request(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, last_seen: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """The last n rows of a context of m tokens: query [n, Hq, D], key [m, Hkv, D], value [m, Hkv, V]
    and the last position [n] that each row sees -> [n, Hq, V]."""
    n, num_heads, head_size = query.shape
    m, num_kv_heads, _ = key.shape
    rows_per_head = num_heads // num_kv_heads * n
    padding = (0, 0, 0, -rows_per_head % _TILE)
    rows = query.to(torch.float32).transpose(0, 1).reshape(num_kv_heads, rows_per_head, head_size)
    rows = pad(rows * scoring.scale, padding)
    group = num_heads // num_kv_heads
    position = pad(torch.arange(m - n, m).repeat(group), padding[2:], value=m - n)
    last_seen = pad(last_seen.repeat(group), padding[2:], value=m - n)
    sinks = torch.full((num_heads,), _NEG_INF) if scoring.sinks is None else scoring.sinks.float()
    sinks = pad(sinks.repeat_interleave(n).view(num_kv_heads, rows_per_head, 1), padding)
    # Whole segments: what lies after the context may be unwritten.
    whole = (0, 0, 0, -m % SEGMENT)
    key, value = pad(key.transpose(0, 1), whole), pad(value.transpose(0, 1), whole)
    out = rows.new_empty(*rows.shape[:2], value.shape[-1])
    for start in range(0, rows.shape[1], _TILE):
        tile = slice(start, start + _TILE)
        seen = position[tile], last_seen[tile]
        out[:, tile] = _attend_tile(rows[:, tile], seen, sinks[:, tile], key, value, scoring)
    return out[:, :rows_per_head].reshape(num_heads, n, value.shape[-1]).transpose(0, 1)


def _attend_tile(
    rows: torch.Tensor,
    seen: tuple[torch.Tensor, torch.Tensor],
    sinks: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """[Hkv, 32, D] rows, with their own and the last position they see, [32] each, and their sinks
    [Hkv, 32, 1], folded over the keys -> [Hkv, 32, V]."""
    position, last_seen = seen
    rows, at, until = rows.contiguous(), position.unsqueeze(1), last_seen.unsqueeze(1)
    window = scoring.window if scoring.window is not None else key.shape[1]
    first_seen = max(0, int(position.min()) - window + 1)
    # A sink is a key that has no value.
    top, sums, acc = sinks, (sinks > _NEG_INF).float(), rows.new_zeros(*rows.shape[:2], value.shape[-1])
    for first in range(first_seen // SEGMENT * SEGMENT, int(last_seen.max()) + 1, SEGMENT):
        columns = torch.arange(first, first + SEGMENT)
        logits = torch.bmm(rows, key[:, first : first + SEGMENT].transpose(1, 2).contiguous())
        if scoring.softcap is not None:
            logits = torch.tanh(logits / scoring.softcap) * scoring.softcap
        logits.masked_fill_((columns > until) | (at - columns >= window), _NEG_INF)
        new = torch.maximum(top, logits.amax(dim=-1, keepdim=True))
        safe = new.masked_fill(new == _NEG_INF, 0.0)
        weights, keep = torch.exp(logits - safe), torch.exp(top - safe)
        sums = sums * keep + weights.sum(dim=-1, keepdim=True)
        acc = acc * keep + torch.bmm(weights, value[:, first : first + SEGMENT].contiguous())
        top = new
    return acc / sums
