"""Attention of one request's rows over contiguous keys and values, on CPU, returning the log-sum-exp.

`dense_attention` picks torch's flash operator where the logits are plain, and explicit matrix products where
they are not (softcap). Both return the log-sum-exp of each row, so that results over disjoint key
ranges merge exactly (`merge_states`) and attention sinks are one factor at the end (`apply_sinks`).
"""

from __future__ import annotations

import torch

from radixkv_kernels.interface import Scoring

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

#: Logits held at once by the explicit path, in elements (16 MiB of float32).
_MAX_LOGITS = 1 << 22


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key ranges: outputs `[..., D]`, log-sum-exps `[...]`
    float32."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).unsqueeze(-1)
    weight_b = torch.exp(lse_b - lse).unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Add a sink logit per head to the softmax's denominator: `out [Hq, n, D]`, `lse [Hq, n]`, `sinks
    [Hq]`."""
    keep = torch.sigmoid(lse - sinks.to(torch.float32).unsqueeze(-1))
    return (out * keep.unsqueeze(-1)).to(out.dtype)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_position: int,
    key_position: int,
    scoring: Scoring,
) -> torch.Tensor:
    """Causal attention of consecutive rows over consecutive keys.

    Args:
        query: `[Hq, n, D]`; row j is at position `query_position + j`.
        key, value: `[Hkv, m, D]`; key i is at `key_position + i`. Every row sees at least one key, and the
            last key is at most at the last row's position.

    Returns:
        `[Hq, n, D]` in the query's dtype.
    """
    attention = _flash_parts if scoring.softcap is None else _explicit
    out, lse = attention(query, key, value, query_position, key_position, scoring)
    return out if scoring.sinks is None else apply_sinks(out, lse, scoring.sinks)


def _flash_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_position: int,
    key_position: int,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By torch's flash operator: output, log-sum-exp `[Hq, n]` float32."""
    scale, window = scoring.scale, scoring.window
    n, m = query.shape[1], key.shape[1]
    q, k, v = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    if window is not None and query_position + n - 1 - key_position >= window:
        mask = visibility(n, m, query_position, key_position, window)
        bias = torch.zeros(n, m, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        out, lse = _flash(q, k, v, attn_mask=bias, scale=scale)
        return out[0], lse[0]
    before = query_position - key_position
    if n == 1 or before <= 0:
        out, lse = _flash(q, k, v, is_causal=n > 1, scale=scale)
        return out[0], lse[0]
    # Keys before the first row are visible to every row: no mask to build there, and no work in the causal
    # half of the rest.
    out_a, lse_a = _flash(q, k[:, :, :before], v[:, :, :before], scale=scale)
    out_b, lse_b = _flash(q, k[:, :, before:], v[:, :, before:], is_causal=True, scale=scale)
    return merge_states(out_a[0], lse_a[0], out_b[0], lse_b[0])


def visibility(n: int, m: int, query_position: int, key_position: int, window: int | None) -> torch.Tensor:
    """Bool `[n, m]`: which keys each row sees."""
    rows = torch.arange(query_position, query_position + n).unsqueeze(1)
    keys = torch.arange(key_position, key_position + m).unsqueeze(0)
    visible = keys <= rows
    return visible if window is None else visible & (rows - keys < window)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_position: int,
    key_position: int,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrix products in float32 with the score matrix in memory, a tile of rows at a time."""
    scale, softcap = scoring.scale, scoring.softcap
    num_heads, n, _ = query.shape
    num_kv_heads, m, _ = key.shape
    group = num_heads // num_kv_heads
    keys = key.to(torch.float32).transpose(1, 2).unsqueeze(1)
    values = value.to(torch.float32).unsqueeze(1)
    out = torch.empty_like(query)
    lse = torch.empty(num_heads, n, dtype=torch.float32)
    step = max(1, _MAX_LOGITS // (num_heads * m))
    for start in range(0, n, step):
        rows = query[:, start : start + step]
        count = rows.shape[1]
        q = rows.to(torch.float32).reshape(num_kv_heads, group, count, -1)
        logits = (torch.matmul(q, keys) * scale).view(num_heads, count, m)
        if softcap is not None:
            logits = torch.tanh_(logits.div_(softcap)).mul_(softcap)
        mask = visibility(count, m, query_position + start, key_position, scoring.window)
        logits.masked_fill_(~mask, float("-inf"))
        lse[:, start : start + step] = torch.logsumexp(logits, dim=-1)
        weights = torch.softmax(logits, dim=-1).view(num_kv_heads, group, count, m)
        out[:, start : start + step] = torch.matmul(weights, values).view(num_heads, count, -1)
    return out, lse


#: Segment width and rows per product of `canonical_attention`.
SEGMENT = 256
_TILE = 32


def canonical_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_position: int,
    key_position: int,
    scoring: Scoring,
) -> torch.Tensor:
    """As `dense_attention`, with results that do not depend on which rows are computed
    together.

    Every product has one shape (32 rows by 256 keys at absolute positions, padded): matrix libraries choose
    their blocking, and so the order of their sums, by shape. Segments fold in order by log-sum-exp.
    """
    num_heads, n, head_size = query.shape
    num_kv_heads, m, _ = key.shape
    group = num_heads // num_kv_heads
    # Pad keys to whole segments with zeros: what lies outside may be unwritten.
    low = key_position // SEGMENT * SEGMENT
    padding = (0, 0, key_position - low, -(key_position + m) % SEGMENT)
    keys = torch.nn.functional.pad(key.to(torch.float32), padding).transpose(1, 2)
    values = torch.nn.functional.pad(value.to(torch.float32), padding)
    rows = query.to(torch.float32).reshape(num_kv_heads, group * n, head_size) * scoring.scale
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -(group * n) % _TILE))
    total = rows.shape[1]
    position = (torch.arange(n) + query_position).repeat(group)
    position = torch.nn.functional.pad(position, (0, total - group * n), value=query_position)
    sink_logits = _per_row(scoring.sinks, num_kv_heads, group, n, total)
    out = torch.empty(num_kv_heads, total, head_size)
    for start in range(0, total, _TILE):
        tile = slice(start, start + _TILE)
        tile_rows, tile_position = rows[:, tile].contiguous(), position[tile].unsqueeze(1)
        top = torch.full((num_kv_heads, _TILE, 1), float("-inf"))
        sums = torch.zeros(num_kv_heads, _TILE, 1)
        acc = torch.zeros(num_kv_heads, _TILE, head_size)
        for first in range(low, int(tile_position.max()) + 1, SEGMENT):
            columns = torch.arange(first, first + SEGMENT)
            visible = columns <= tile_position
            if scoring.window is not None:
                visible &= tile_position - columns < scoring.window
            place = slice(first - low, first - low + SEGMENT)
            logits = torch.bmm(tile_rows, keys[:, :, place].contiguous())
            if scoring.softcap is not None:
                logits = torch.tanh(logits / scoring.softcap) * scoring.softcap
            logits.masked_fill_(~visible, float("-inf"))
            seg_top = logits.amax(dim=-1, keepdim=True)
            hidden = seg_top == float("-inf")
            weights = torch.exp(logits - seg_top.masked_fill(hidden, 0.0))
            seg_sums = weights.sum(dim=-1, keepdim=True)
            seg_acc = torch.bmm(weights, values[:, place].contiguous())
            new = torch.maximum(top, seg_top)
            safe = new.masked_fill(new == float("-inf"), 0.0)
            keep, add = torch.exp(top - safe), torch.exp(seg_top - safe)
            sums = sums * keep + seg_sums * add
            acc = acc * keep + seg_acc * add
            top = new
        if scoring.sinks is not None:
            new = torch.maximum(top, sink_logits[:, tile])
            keep = torch.exp(top - new)
            acc, sums = acc * keep, sums * keep + torch.exp(sink_logits[:, tile] - new)
        out[:, tile] = acc / sums
    return out[:, : group * n].reshape(num_heads, n, head_size).to(query.dtype)


def _per_row(
    per_head: torch.Tensor | None, num_kv_heads: int, group: int, n: int, total: int
) -> torch.Tensor:
    """A value per query head, laid out as rows `[Hkv, total, 1]` of group x n and padding; zeros for None."""
    rows = torch.zeros(num_kv_heads, total, 1)
    if per_head is not None:
        values = per_head.to(torch.float32).view(num_kv_heads, group, 1).expand(-1, -1, n)
        rows[:, : group * n, 0] = values.reshape(num_kv_heads, group * n)
    return rows
