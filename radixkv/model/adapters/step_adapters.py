# SPDX-License-Identifier: Apache-2.0
"""Adapters of a step's rows, and an order of the step's entries that keeps the rows of each together.

    rows     | no adapter | adapter a ......... | adapter b |
    segments              | start        end    | ...

The scheduler's order of entries is kept where it is of that kind already. Else the runner computes the step
with its entries moved; the logits keep their order, so that nothing above the runner sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from radixkv.model.adapters.packed_adapter import PackedAdapter
from radixkv.sampling.device_arrays import to_device
from radixkv.scheduling.batch import Batch, BatchStates, BatchWindows, Entry
from radixkv.scheduling.length_classes import plain_positions


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows [start, end) of a step, which one adapter changes; None: no adapter does."""

    start: int
    end: int
    adapter: PackedAdapter | None


class StepAdapters:
    """Segments of a step, in ascending order and without gaps.

    Attributes:
        first, end: the rows of all segments.
        ranks: largest rank of a segment for each product; 0: no adapter changes it.
    """

    def __init__(self, segments: Sequence[AdapterRows]) -> None:
        self.segments = segments
        self.first, self.end = segments[0].start, segments[-1].end
        adapters = [segment.adapter for segment in segments if segment.adapter is not None]
        self.ranks: list[int] = np.maximum.reduce([adapter.ranks for adapter in adapters]).tolist()
        self._table: npt.NDArray[np.int64] | None = None
        self._address = self._stride = 0

    def address(self, product: int) -> int:
        """Address of the segments of a product, for `radixkv_kernels.cpu.linear.low_rank`."""
        if self._table is None:
            own = [None if segment.adapter is None else segment.adapter.table for segment in self.segments]
            nothing = np.zeros_like(next(table for table in own if table is not None))
            tables = [nothing if table is None else table for table in own]
            table = self._table = np.stack(tables, axis=1)
            table[:, :, 0] = [segment.start for segment in self.segments]
            table[:, :, 1] = [segment.end for segment in self.segments]
            self._address, self._stride = table.ctypes.data, table.strides[0]
        return self._address + product * self._stride


def adapter_of(entry: Entry, end: int) -> PackedAdapter | None:
    """The adapter that changes rows of an entry, which computes tokens up to `end`; None: none does."""
    request = entry.request.request
    adapter: PackedAdapter | None = request.adapter
    return adapter if request.adapter_from < end else None


def arrange(batch: Batch) -> tuple[Batch, StepAdapters | None]:
    """Bring the rows of each adapter together.

    O(entries) where no entry has an adapter, else O(tokens).

    Returns:
        The batch to compute, with its logits in the order of the given one, and the adapters of its rows
        (None: no row has one).
    """
    if not any(entry.request.request.adapter for entry in batch.entries):
        return batch, None
    ends = plain_positions(batch)[batch.query_starts[1:] - 1].tolist()
    adapters = [adapter_of(entry, last + 1) for entry, last in zip(batch.entries, ends, strict=True)]
    if not any(adapters):
        return batch, None
    names = ["" if adapter is None else adapter.identity for adapter in adapters]
    order = sorted(range(len(names)), key=names.__getitem__)  # stable; no adapter comes first
    if order != list(range(len(order))):
        batch = _moved(batch, order)
        adapters = [adapters[r] for r in order]
    return batch, StepAdapters(_segments(adapters, batch))


def _segments(adapters: Sequence[PackedAdapter | None], batch: Batch) -> list[AdapterRows]:
    """Segments of rows with one adapter; equal weights are one object.

    Of an activated adapter the tokens before its invocation are rows of the base.
    """
    segments: list[AdapterRows] = []
    positions = plain_positions(batch)
    for r, adapter in enumerate(adapters):
        if adapter is None:
            continue
        start, end = int(batch.query_starts[r]), int(batch.query_starts[r + 1])
        begin = start + max(0, batch.entries[r].request.request.adapter_from - int(positions[start]))
        last = segments[-1] if segments else None
        if last is not None and last.end < begin:
            segments.append(AdapterRows(last.end, begin, None))
        elif last is not None and last.adapter is adapter:
            begin = segments.pop().start
        segments.append(AdapterRows(begin, end, adapter))
    return segments


def _moved(batch: Batch, order: Sequence[int]) -> Batch:
    """Return the batch with its entries in another order, and its logits in the same as before."""
    starts = batch.query_starts
    counts = np.diff(starts)[order]
    query_starts = np.zeros_like(starts)
    np.cumsum(counts, out=query_starts[1:])
    rows = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in order])
    place = np.empty_like(rows)
    place[rows] = np.arange(len(rows))
    write_slots, write_rows = batch.write_slots, batch.write_rows
    if write_rows is None:
        write_slots = write_slots[rows]
    else:
        write_rows = place[write_rows]
    fed = batch.fed_tokens
    return replace(
        batch,
        entries=[batch.entries[r] for r in order],
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        query_starts=query_starts,
        context_lengths=batch.context_lengths[order],
        block_tables=[batch.block_tables[r] for r in order],
        write_slots=write_slots,
        write_rows=write_rows,
        logit_rows=place[batch.logit_rows],
        fed_tokens=None if fed is None else fed[to_device(rows, fed.device)],
        num_rows=0,
        states=None if batch.states is None else _moved_states(batch.states, order),
        windows=None if batch.windows is None else _moved_windows(batch.windows, order, rows),
    )


def _moved_windows(windows: BatchWindows, order: Sequence[int], rows: npt.NDArray[np.int64]) -> BatchWindows:
    return BatchWindows([windows.block_tables[r] for r in order], windows.write_slots[rows])


def _moved_states(states: BatchStates, order: Sequence[int]) -> BatchStates:
    place = np.argsort(order)
    return BatchStates(
        base_slots=states.base_slots[order],
        base_positions=states.base_positions[order],
        ring_rows=states.ring_rows[order],
        target_slots=states.target_slots[order],
        target_positions=states.target_positions[order],
        saves=[save._replace(row=int(place[save.row])) for save in states.saves],
    )
