# SPDX-License-Identifier: Apache-2.0
"""Draws on a CPU: one token for each row, by temperature, top_k, top_p, min_p and a number in [0, 1).

    scaled = (logits - their maximum) / temperature
    rows with neither top_k nor top_p:   all of the vocabulary, in its order
    rows with top_k:                     its k likeliest tokens     \\  candidates, likeliest first
    rows with top_p alone:               enough of the likeliest    /
    -> what top_p and min_p leave of them -> inverse transform sampling

All rows of a kind are drawn by the same few operations; a threshold finds the tokens that top_p may keep.
Equal logits are in the order of their ids. A row's token depends on nothing but the row and its request. On a
GPU one kernel draws the same tokens (`radixkv_kernels.triton.sample`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from radixkv.sampling.sampling_params import SamplingParams

#: Rows with more candidates than this are apart from those with few.
_MANY = 1024
#: Neighbouring tokens whose weights are added up before one of them is looked for: about the root of V.
_CHUNK = 256
#: Sums of fewer numbers than a vector holds would be made in another order.
_MIN_WIDTH = 16
#: Logits worked on at a time: what stays in a CPU's cache.
_LOGITS = 2**20

_NUMBER, _TOP_P, _TEMPERATURE, _MIN_P, _LOG_MIN_P, _TOP_K = range(6)


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> torch.Tensor:
    """Draw one token for each row of float32 logits [R, V]. A row that is no number gets any token.

    Args:
        params: of each row. numbers: of each row, in [0, 1).

    Returns:
        Tokens int64 [R].
    """
    vocabulary = logits.shape[1]
    groups = _groups(params)
    order = [row for group in groups for row in group.rows]
    table = np.array(
        [
            (
                numbers[row],
                params[row].top_p if params[row].top_p < 1.0 else math.inf,
                params[row].temperature,
                params[row].min_p,
                math.log(params[row].min_p) if params[row].min_p > 0.0 else -math.inf,
                params[row].top_k,
            )
            for row in order
        ]
    )
    in_order = len(groups) == 1 and order == list(range(len(order)))
    settings = torch.from_numpy(table).T[:, :, None]
    drawn: list[torch.Tensor] = []
    end = 0
    for group in groups:
        for size in group.block_sizes(vocabulary):
            start, end = end, end + size
            own = logits[start:end] if in_order else logits[order[start:end]]
            part = settings[:, start:end]
            # Subtract the maximum first: dividing by a tiny temperature must not overflow.
            scaled = (own - own.amax(dim=1, keepdim=True)).div_(part[_TEMPERATURE].float())
            if group.has_top_k or group.has_top_p:
                drawn.append(_draw_filtered(scaled, table[start:end], part, group))
            else:
                drawn.append(_draw_plain(scaled, part, group))
    tokens = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
    return tokens if in_order else tokens[np.argsort(order)]


@dataclass(slots=True)
class _Group:
    """Rows of one kind: those without top_k and top_p are drawn from all of the vocabulary, in its order."""

    rows: list[int]
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool

    def block_sizes(self, vocabulary: int) -> Iterator[int]:
        """Number of rows to work on at a time."""
        size = max(1, _LOGITS // vocabulary)
        for start in range(0, len(self.rows), size):
            yield min(size, len(self.rows) - start)


def _groups(params: Sequence[SamplingParams]) -> list[_Group]:
    """Group the rows by how they are drawn; those with top_k are in the order of their k."""
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for row, p in enumerate(params):
        kinds.setdefault((p.top_k > 0, p.top_k > 0 or p.top_p < 1.0), []).append(row)
    groups = []
    for (has_top_k, _), rows in sorted(kinds.items()):
        if has_top_k:
            rows.sort(key=lambda row: params[row].top_k)
        has_top_p = any(params[row].top_p < 1.0 for row in rows)
        groups.append(_Group(rows, has_top_k, has_top_p, any(params[row].min_p > 0.0 for row in rows)))
    return groups


def _draw_plain(scaled: torch.Tensor, settings: torch.Tensor, group: _Group) -> torch.Tensor:
    if group.has_min_p:
        scaled.masked_fill_(scaled < settings[_MIN_P].float().log(), -torch.inf)
    return _invert(scaled, settings[_NUMBER])[:, 0]


def _draw_candidates(
    values: torch.Tensor,
    ids: torch.Tensor,
    reached: torch.Tensor | None,
    settings: torch.Tensor,
    group: _Group,
) -> torch.Tensor:
    """Draw one of the candidates [R, N] of each row, likeliest first; `values` are overwritten.

    Args:
        reached: float64 running sums of their shares; None: no row has top_p.
    """
    if reached is not None:
        # Keep each token before which less than top_p had been reached; always the first.
        values[:, 1:].masked_fill_(reached[:, :-1] >= settings[_TOP_P], -torch.inf)
    if group.has_min_p:
        values.masked_fill_(values < settings[_LOG_MIN_P].float(), -torch.inf)
    return ids.gather(1, _invert(values, settings[_NUMBER]))[:, 0]


def _draw_filtered(
    scaled: torch.Tensor, table: np.ndarray, settings: torch.Tensor, group: _Group
) -> torch.Tensor:
    """Return candidates in groups of rows that need about the same number."""
    tokens: torch.Tensor | None = None
    for rows, found in (_largest if group.has_top_k else _likely)(scaled, table):
        values, ids, shares = found
        if shares is None and group.has_top_p:
            shares = torch.softmax(values, 1)
        reached = shares.double().cumsum(1) if group.has_top_p and shares is not None else None
        if len(values) == len(scaled):
            return _draw_candidates(values, ids, reached, settings, group)
        if tokens is None:
            tokens = torch.empty(len(scaled), dtype=torch.int64)
        tokens[rows] = _draw_candidates(values, ids, reached, settings[:, rows], group)
    assert tokens is not None
    return tokens


#: Rows of a block; values, ids and, of rows without top_k, shares of their candidates.
_Candidates = tuple[slice | torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def _size_class(count: int) -> int:
    """Return the class of rows with `count` candidates; rows of one class are padded to their widest.

    Padding adds zeros to a row's sums. Rows of at most `_CHUNK` candidates are a class, since their sums have
    one level, others two; the third class keeps many candidates away from rows with few.
    """
    return (count > _CHUNK) + (count > _MANY)


def _padded(values: torch.Tensor, ids: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    missing = width - values.shape[1]
    return (pad(values, (0, missing), value=-torch.inf), pad(ids, (0, missing))) if missing else (values, ids)


def _top_in_order(scaled: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and ids of the `count` largest of each row [R, V], equal ones by their ids."""
    # One more tells whether the last one is equal to others, of which `topk` returns any.
    values, ids = torch.topk(scaled, min(count + 1, scaled.shape[1]))
    is_equal = (values[:, 1:] == values[:, :-1]) & values[:, 1:].isfinite()
    values, ids = values[:, :count], ids[:, :count]
    if is_equal.any():
        for row in is_equal[:, count - 1 :].flatten().nonzero().flatten().tolist():
            places = (scaled[row] == values[row, -1]).nonzero().flatten()
            is_last = values[row] == values[row, -1]
            ids[row, is_last] = places[: int(is_last.sum())]
        ids = ids.sort(dim=1).values
        values, order = scaled.gather(1, ids).sort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order)
    return values, ids


def _largest(scaled: torch.Tensor, table: np.ndarray) -> Iterator[_Candidates]:
    """Return the k largest logits of rows that are in the order of their k; equal ones by their ids."""
    counts = np.minimum(table[:, _TOP_K], scaled.shape[1]).astype(np.int64).tolist()
    start = 0
    for _, members in itertools.groupby(counts, _size_class):
        first, parts = start, []
        sizes = Counter(members)
        # The sums of very few numbers would be made in another order.
        width = max(*sizes, _MIN_WIDTH)
        for count, number in sizes.items():
            parts.append(_padded(*_top_in_order(scaled[start : start + number], count), width))
            start += number
        values, ids = parts[0] if len(parts) == 1 else (torch.cat(c) for c in zip(*parts, strict=True))
        yield slice(first, start), (values, ids, None)


def _likely(scaled: torch.Tensor, table: np.ndarray) -> Iterator[_Candidates]:
    """Return all tokens that top_p may keep; equal ones in the order of their ids."""
    vocabulary = scaled.shape[1]
    shares = torch.softmax(scaled, 1)
    # Tokens rarer than this make up less than 1 - top_p together: they sort after all kept tokens.
    rare = (0.5 * (1.0 - table[:, _TOP_P]) / vocabulary).astype(np.float32)
    row, token = np.divmod(np.flatnonzero(shares.numpy() > rare[:, None]), vocabulary)
    counts = np.bincount(row, minlength=len(scaled))
    starts = counts.cumsum() - counts
    classes = np.array([_size_class(count) for count in counts.tolist()])
    for one in sorted(set(classes.tolist())):
        chosen = (classes == one).nonzero()[0]
        sizes = counts[chosen][:, None]
        place = np.arange(max(int(sizes.max()), _MIN_WIDTH))
        ids = (
            torch.from_numpy(token.take(starts[chosen][:, None] + place, mode="clip"))
            if len(token)
            else (torch.zeros(len(chosen), len(place), dtype=torch.int64))
        )
        is_padding = torch.from_numpy(place >= sizes)
        rows = torch.from_numpy(chosen)
        all_rows = len(chosen) == len(scaled)
        own = (shares if all_rows else shares[rows]).gather(1, ids).masked_fill_(is_padding, -1.0)
        own, order = own.sort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order)
        values = (scaled if all_rows else scaled[rows]).gather(1, ids).masked_fill_(is_padding, -torch.inf)
        yield rows, (values, ids, own.clamp_(min=0.0))


def _invert(scaled: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw by inverse transform over the last axis of logits [R, N], long rows in two levels: int64 [R, 1].

    Sums are in float64, so that no tail is lost: first of chunks of the row, then within the one chunk that
    is hit. A row's sums depend on nothing but the row: neither on the others nor on the number of threads.
    """
    # With infinities, its exponentials are faster than `exp`'s.
    weights = torch.softmax(scaled, dim=1)
    if weights.shape[1] <= _CHUNK:
        sums = weights.double().cumsum(dim=1)
        return _first_above(sums, numbers * sums[:, -1:])
    missing = -weights.shape[1] % _CHUNK
    if missing:
        weights = pad(weights, (0, missing))
    chunks = weights.view(len(weights), -1, _CHUNK)
    ends = chunks.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    target = numbers * ends[:, -1:]
    chunk = _first_above(ends, target)
    within = chunks.gather(1, chunk[:, :, None].expand(-1, 1, _CHUNK))[:, 0].double().cumsum(dim=1)
    start = torch.where(chunk > 0, ends.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    return (chunk * _CHUNK + _first_above(within, target - start)).clamp_(max=scaled.shape[1] - 1)


def _first_above(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first place of each row of sums [R, N] that is above its target [R, 1]: int64 [R, 1].

    A weight of 0 is never hit: where rounding has pushed the target to the very end, the place is that of
    the last other one. Sums that are no numbers give a place that exists.
    """
    return torch.minimum(
        torch.searchsorted(sums, target, right=True), torch.searchsorted(sums, sums[:, -1:].contiguous())
    ).clamp_(max=sums.shape[1] - 1)
