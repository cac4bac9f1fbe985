# SPDX-License-Identifier: Apache-2.0
"""StepTables: a step's operations on states as the kernels read them, uploaded once for all layers.

Convolutions and scans walk the rows of one request from its base to its end, so that of the plan's operations
there remain, for each request, where it begins and after how many of its rows a state is kept::

    walks     int32 [W, 8]  first row, rows, ring, tokens in the ring, base slot, folds [begin, end),
                            first of its rows that the ring keeps
    folds     int32 [F, 4]  rows of its request before it, slot, request, rows before the fold before it; a
                            request's last one is its end and has slot -1
    owners    int32 [T]     request of each row
    kept      int32 [M, 4]  row, ring, place: rows that rings hold after the step

Heads are computed in chunks of the grid, or, a few rows of a request outside deterministic mode, over its
ring::

    requests  int32 [R, 8]  chunks [begin, end), base slot, ring, copies [begin, end)
    chunks    int32 [C, 8]  first row, its place in the chunk, end of the chunk's rows, ring, slot for the
                            state after it or -1; places before the first row are the ring's
    copies    int32 [S, 2]  slot, slot that its state goes to, too
    shorts    int32 [D, 8]  first row, rows, ring, tokens in the ring, base slot
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from radixkv_kernels.state_interface import FOLD, ROWS, StatePlan
from radixkv_kernels.states import GRID

#: Most rows of a request that are computed over its ring.
MAX_SHORT_ROWS = 8


class StepTables:
    """Tables of a plan in the memory of a device; see the module.

    Args:
        deterministic: all rows of heads come in chunks.

    Attributes:
        plan: the plan of the tables.
        num_walks, num_folds, num_kept, num_requests, num_chunks, num_shorts: lengths of the tables.
    """

    def __init__(self, plan: StatePlan, device: torch.device, *, deterministic: bool) -> None:
        self.plan, self.deterministic = plan, deterministic
        parts = (*_walks(plan), *_chunks(plan, deterministic))
        lengths = [len(part) for part in parts]
        self.num_walks, self.num_folds, _, self.num_kept = lengths[:4]
        self.num_requests, self.num_chunks, _, self.num_shorts = lengths[4:]
        host = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
        if device.type == "cuda":  # a copy from other memory would wait for what runs there
            host = host.pin_memory()
        words = host.to(device, non_blocking=True)
        tables = words.split([part.size for part in parts])
        self.walks, self.folds, self.owners, self.kept = tables[:4]
        self.requests, self.chunks, self.copies, self.shorts = tables[4:]


def _walks(plan: StatePlan) -> tuple[np.ndarray, ...]:
    requests: list[tuple[int, ...]] = []
    folds: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    for own in _by_request(plan):
        code, ring, base = own[0][:3]
        at = GRID
        if code == ROWS:
            ring, at, base = own[0][3:]
        request, first_fold, rows, before = len(requests), len(folds), 0, 0
        for operation in own:
            if operation[0] == ROWS:
                piece, rows = operation, rows + operation[2]
                continue
            slot = _target(operation)
            if slot < plan.spec.num_slots:  # the state itself passes on in registers
                folds.append((rows, slot, request, before))
                before = rows
        folds.append((rows, -1, request, before))
        first = piece[1] + piece[2] - rows
        pieces.append(tuple(piece[1:5]))
        requests.append((first, rows, ring, at, base, first_fold, len(folds), piece[1] - first))
    table = _table(requests, 8)
    row, count, ring_of, place = _table(pieces, 4).T
    within = np.arange(count.sum(), dtype=np.int32) - np.repeat(np.cumsum(count) - count, count)
    kept = np.zeros((len(within), 4), np.int32)
    for column, values in enumerate((row, ring_of, place)):
        kept[:, column] = np.repeat(values, count)
    kept[:, 0] += within
    kept[:, 2] += within
    owners = np.repeat(np.arange(len(table), dtype=np.int32), table[:, 1])
    return table, _table(folds, 4), owners, kept


def _chunks(plan: StatePlan, deterministic: bool) -> tuple[np.ndarray, ...]:
    requests: list[tuple[int, ...]] = []
    chunks: list[list[int]] = []
    copies: list[tuple[int, ...]] = []
    shorts: list[tuple[int, ...]] = []
    num_slots = plan.spec.num_slots
    for own in _by_request(plan):
        if not deterministic and _is_short(own, num_slots):
            _, first, count, ring, place, base = own.pop()
            shorts.append((first, count, ring, place, base, 0, 0, 0))
            if not own:
                continue
        first_chunk, first_copy = len(chunks), len(copies)
        ring, base = (own[0][3], own[0][5]) if own[0][0] == ROWS else own[0][1:3]
        if own[0][0] != ROWS:  # a full ring is a chunk without rows
            chunks.append([0, GRID, GRID, ring, -1, 0, 0, 0])
        for operation in own:
            if operation[0] == ROWS:
                _, first, count, _, place, _ = operation
                chunks.append([first, place, place + count, ring, -1, 0, 0, 0])
            elif _target(operation) < num_slots:  # others pass on in registers
                if chunks[-1][4] < 0:
                    chunks[-1][4] = _target(operation)
                else:
                    copies.append((chunks[-1][4], _target(operation)))
        requests.append((first_chunk, len(chunks), base, ring, first_copy, len(copies), 0, 0))
    return _table(requests, 8), _table(chunks, 8), _table(copies, 2), _table(shorts, 8)


def _is_short(own: list[list[int]], num_slots: int) -> bool:
    """Return True if a request has a few rows in one ring, after at most one fold, into a slot."""
    rows = [operation for operation in own if operation[0] == ROWS]
    return (
        len(rows) == 1
        and own[-1] is rows[0]
        and rows[0][2] <= MAX_SHORT_ROWS
        and (len(own) == 1 or rows[0][5] < num_slots)
    )


def _by_request(plan: StatePlan) -> list[list[list[int]]]:
    operations = plan.operations.tolist()
    pairs = itertools.pairwise(plan.request_starts.tolist())
    return [operations[begin:end] for begin, end in pairs if begin < end]


def _target(operation: list[int]) -> int:
    """The slot that a fold or a copy writes."""
    return operation[3 if operation[0] == FOLD else 2]


def _table(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, width)
