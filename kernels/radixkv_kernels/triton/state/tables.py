# SPDX-License-Identifier: Apache-2.0
"""StepTables: a step's operations on states as the kernels read them, uploaded once for all layers.

All lie in one int32 array behind a header with their lengths, `COUNTS`. Grids may be larger than these:
programs past a table's end return at once. So launches that were recorded serve other steps whose tables fit,
if these lie at the same addresses (`TableBuffer`).

Convolutions walk the rows of one request from its base to its end, so that of the plan's operations there
remain, for each request, where it begins and after how many of its rows a state is kept::

    walks     int32 [W, 8]  first row, rows, ring, tokens in the ring, base slot
    saves     int32 [S, 4]  rows of its request before a state that is kept, slot, request
    owners    int32 [T]     request of each row
    kept      int32 [M, 4]  row, ring, place: rows that rings hold after the step

Heads and scans are computed in chunks of the grid, or, a few rows of a request outside deterministic mode,
over its ring::

    requests  int32 [R, 8]  chunks [begin, end), base slot, ring, copies [begin, end)
    chunks    int32 [C, 8]  first row, its place in the chunk, end of the chunk's rows, ring, slot for the
                            state after it or -1; places before the first row are the ring's
    copies    int32 [S, 2]  slot, slot that its state goes to, too
    shorts    int32 [D, 8]  first row, rows, ring, tokens in the ring, base slot, tokens after the step
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
#: Decodes in recorded steps of deterministic mode, where each has a chunk, and memory for it.
MAX_CHUNKED_DECODES = 128
#: Columns of each table, in their order.
_WIDTHS = {
    "walks": 8,
    "saves": 4,
    "owners": 1,
    "kept": 4,
    "requests": 8,
    "chunks": 8,
    "copies": 2,
    "shorts": 8,
}
#: Places of the tables' lengths in the header; the kernels spell them as literals.
COUNTS = {name: place for place, name in enumerate(_WIDTHS)}
HEADER = 16


def capacities(rows: int, *, large: bool, deterministic: bool) -> dict[str, int]:
    """Longest tables of recorded steps of this many rows.

    Args:
        large: with chunks of prompts.
        deterministic: all steps have chunks, of decodes, too; there is one kind of them.
    """
    chunks = rows // GRID + rows // 8 + 8 if large or deterministic else rows // 16 + 2
    if deterministic:
        chunks += min(rows, MAX_CHUNKED_DECODES)
    each = dict.fromkeys(_WIDTHS, rows)
    each |= dict.fromkeys(("requests", "chunks"), chunks)
    each |= dict.fromkeys(("saves", "copies"), 2 * chunks)
    return each


class StepTables:
    """Tables of a plan; see the module.

    Args:
        deterministic: all rows of heads come in chunks.

    Attributes:
        plan: the plan of the tables.
        parts: the tables on the host, by name.
        grids: programs of each table's launches.
    """

    def __init__(self, plan: StatePlan, *, deterministic: bool) -> None:
        self.plan, self.deterministic = plan, deterministic
        names = tuple(_WIDTHS)
        self.parts = dict(zip(names, (*_walks(plan), *_chunks(plan, deterministic)), strict=True))
        self.grids = {name: len(part) for name, part in self.parts.items()}

    def __getattr__(self, name: str) -> torch.Tensor:
        """A table on the device, or `header`."""
        tables: dict[str, torch.Tensor] = self.__dict__["_tables"]
        return tables[name]

    def upload(self, device: torch.device) -> None:
        """Bring the tables to new memory of a device."""
        header = np.zeros(HEADER, np.int32)
        for name, place in COUNTS.items():
            header[place] = len(self.parts[name])
        words = np.concatenate([header, *(part.reshape(-1) for part in self.parts.values())])
        host = torch.from_numpy(words)
        if device.type == "cuda":  # a copy from other memory would wait for what runs there
            host = host.pin_memory()
        sizes = [HEADER, *(part.size for part in self.parts.values())]
        views = host.to(device, non_blocking=True).split(sizes)
        self._tables = dict(zip(("header", *self.parts), views, strict=True))

    def fits(self, rows: int, *, large: bool) -> bool:
        """Return True if recorded launches of so many rows have programs for all of it."""
        most = capacities(rows, large=large, deterministic=self.deterministic)
        return all(len(part) <= most[name] for name, part in self.parts.items())


class TableBuffer:
    """Memory for the tables of steps of at most `rows` rows, at addresses that recorded launches may hold."""

    def __init__(self, rows: int, device: torch.device, *, deterministic: bool) -> None:
        self.rows = rows
        most = capacities(rows, large=True, deterministic=deterministic)
        self._places, at = {"header": (0, HEADER)}, HEADER
        for name, width in _WIDTHS.items():
            self._places[name] = at, most[name] * width
            at += most[name] * width
        pinned = device.type == "cuda"
        self._words = torch.zeros(at, dtype=torch.int32, device=device)
        self._staging = torch.zeros(at, dtype=torch.int32, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None
        self._views = {name: self._words[a : a + size] for name, (a, size) in self._places.items()}

    def load(self, tables: StepTables, rows: int, *, large: bool) -> None:
        """Copy tables that fit, and let them be launched as any others of this many rows."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still be reading
        host = self._staging.numpy()
        for name, part in tables.parts.items():
            host[COUNTS[name]] = len(part)
            at = self._places[name][0]
            host[at : at + part.size] = part.reshape(-1)
        self._words.copy_(self._staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        tables._tables = self._views
        tables.grids = capacities(rows, large=large, deterministic=tables.deterministic)


def _walks(plan: StatePlan) -> tuple[np.ndarray, ...]:
    requests: list[tuple[int, ...]] = []
    saves: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    for own in _by_request(plan):
        code, ring, base = own[0][:3]
        at = GRID
        if code == ROWS:
            ring, at, base = own[0][3:]
        rows = 0
        for operation in own:
            if operation[0] == ROWS:
                piece, rows = operation, rows + operation[2]
            elif _target(operation) < plan.spec.num_slots:  # others pass on in registers
                saves.append((rows, _target(operation), len(requests), 0))
        first = piece[1] + piece[2] - rows
        pieces.append(tuple(piece[1:5]))
        requests.append((first, rows, ring, at, base, 0, 0, 0))
    table = _table(requests, 8)
    row, count, ring_of, place = _table(pieces, 4).T
    within = np.arange(count.sum(), dtype=np.int32) - np.repeat(np.cumsum(count) - count, count)
    kept = np.zeros((len(within), 4), np.int32)
    for column, values in enumerate((row, ring_of, place)):
        kept[:, column] = np.repeat(values, count)
    kept[:, 0] += within
    kept[:, 2] += within
    owners = np.repeat(np.arange(len(table), dtype=np.int32), table[:, 1])
    return table, _table(saves, 4), owners, kept


def _chunks(plan: StatePlan, deterministic: bool) -> tuple[np.ndarray, ...]:
    requests: list[tuple[int, ...]] = []
    chunks: list[list[int]] = []
    copies: list[tuple[int, ...]] = []
    shorts: list[tuple[int, ...]] = []
    num_slots = plan.spec.num_slots
    for own in _by_request(plan):
        if not deterministic and _is_short(own, num_slots):
            _, first, count, ring, place, base = own.pop()
            shorts.append((first, count, ring, place, base, place + count, 0, 0))
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
