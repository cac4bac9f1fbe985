# SPDX-License-Identifier: Apache-2.0
"""StepTables: a step's operations on states as the kernels read them, uploaded once for all layers.

A program walks the rows of one request from its base to its end, so that of the plan's operations there
remain, for each request, where it begins and after how many of its rows a state is kept::

    requests  int32 [R, 8]  first row, rows, ring, tokens in the ring, base slot, folds [begin, end),
                            first of its rows that the ring keeps
    folds     int32 [F, 4]  rows of its request before it, slot, request, rows before the fold before it; a
                            request's last one is its end and has slot -1
    kept      int32 [M, 4]  row, ring, place: rows that rings hold after the step
    owners    int32 [T]     request of each row
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from radixkv_kernels.state_interface import FOLD, ROWS, StatePlan
from radixkv_kernels.states import GRID


class StepTables:
    """Tables of a plan in the memory of a device; see the module.

    Attributes:
        plan: the plan of the tables.
        num_requests, num_folds, num_kept: lengths of the tables.
    """

    def __init__(self, plan: StatePlan, device: torch.device) -> None:
        self.plan = plan
        parts = _tables(plan)
        requests, folds, kept, _ = parts
        self.num_requests, self.num_folds, self.num_kept = len(requests), len(folds), len(kept)
        host = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
        if device.type == "cuda":  # a copy from other memory would wait for what runs there
            host = host.pin_memory()
        words = host.to(device, non_blocking=True)
        self.requests, self.folds, self.kept, self.owners = words.split([part.size for part in parts])


def _tables(plan: StatePlan) -> tuple[np.ndarray, ...]:
    requests: list[tuple[int, ...]] = []
    folds: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    operations, starts = plan.operations.tolist(), plan.request_starts.tolist()
    for begin, end in itertools.pairwise(starts):
        own = operations[begin:end]
        if not own:
            continue
        code, ring, base = own[0][:3]
        at = GRID
        if code == ROWS:
            ring, at, base = own[0][3:]
        request, first_fold, rows, before = len(requests), len(folds), 0, 0
        for operation in own:
            if operation[0] == ROWS:
                piece, rows = operation, rows + operation[2]
                continue
            slot = operation[3 if operation[0] == FOLD else 2]
            if slot < plan.spec.num_slots:  # the state itself passes on in registers
                folds.append((rows, slot, request, before))
                before = rows
        folds.append((rows, -1, request, before))
        first = piece[1] + piece[2] - rows
        pieces.append(tuple(piece[1:5]))
        requests.append((first, rows, ring, at, base, first_fold, len(folds), piece[1] - first))
    table = np.array(requests, np.int32).reshape(-1, 8)
    row, count, ring_of, place = np.array(pieces, np.int32).reshape(-1, 4).T
    within = np.arange(count.sum(), dtype=np.int32) - np.repeat(np.cumsum(count) - count, count)
    kept = np.zeros((len(within), 4), np.int32)
    for column, values in enumerate((row, ring_of, place)):
        kept[:, column] = np.repeat(values, count)
    kept[:, 0] += within
    kept[:, 2] += within
    owners = np.repeat(np.arange(len(table), dtype=np.int32), table[:, 1])
    return table, np.array(folds, np.int32).reshape(-1, 4), kept, owners
