# SPDX-License-Identifier: Apache-2.0
"""HostTier: blocks in the memory of the process, for an engine whose pool is a GPU's."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache.block_run import BlockRun
from radixkv.text.thread_priority import yield_to_steps
from radixkv.tiers.selection import Selection
from radixkv.tiers.tier import OpenTier, TierBlocks, TierState

if TYPE_CHECKING:
    import numpy.typing as npt

#: Allocates memory of a size: uint8 [bytes].
Allocate = Callable[[int], "npt.NDArray[np.uint8]"]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Block with its place in its run."""

    run: BlockRun
    index: int
    data: npt.NDArray[np.uint8]


class HostTier(OpenTier):
    """Tier of the most recently used blocks, by identity and saved tokens.

    A thread copies saved blocks one by one, so that each one's memory is free when it goes; a load
    hands out the memory itself, which lives on while it is read.

    Args:
        max_bytes: of blocks.
        allocate: allocator of memory, such as pinned memory.
        selection: blocks to save; None: see `Selection`.
    """

    name = "host"
    keeps_states = True

    def __init__(
        self, max_bytes: int, allocate: Allocate | None = None, selection: Selection | None = None
    ) -> None:
        self.max_bytes = max_bytes
        self.selection = selection or Selection()
        self._allocate = allocate or (lambda size: np.empty(size, np.uint8))
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        self._coming: set[bytes] = set()  # those that are being copied
        self._lock = threading.Lock()
        self._copier = ThreadPoolExecutor(1, "radixkv-host-tier", initializer=yield_to_steps)

    def __repr__(self) -> str:
        return f"HostTier({len(self._kept)} blocks, {self._num_bytes / 2**20:.0f} MiB)"

    def lookup(self, run: BlockRun) -> tuple[TierState, int]:
        """See `Tier`. O(blocks)."""
        count = 0
        while count < len(run) and run.identities[count] in self._kept:
            count += 1
        return (TierState.HIT, count) if count else (TierState.MISS, 0)

    def last(self, run: BlockRun) -> int:
        """See `Tier`. O(states)."""
        return max([i for i, identity in enumerate(run.identities) if identity in self._kept], default=-1)

    def load(self, run: BlockRun) -> Future[Sequence[TierBlocks]]:
        """See `Tier`; done when it returns. The tail counts as used first."""
        found: list[_Kept] = []
        with self._lock:
            for identity in run.identities:
                kept = self._kept.get(identity)
                if kept is None:
                    break
                found.append(kept)
        self.touch(run.part(0, len(found)))
        pieces: list[TierBlocks] = []
        first = 0
        for end in range(1, len(found) + 1):
            begin = found[first]
            is_next = (
                end < len(found)
                and found[end].run is begin.run
                and found[end].index - begin.index == end - first
            )
            if not is_next:
                part = begin.run.part(begin.index, begin.index + end - first)
                pieces.append(TierBlocks(part, [kept.data for kept in found[first:end]]))
                first = end
        done: Future[Sequence[TierBlocks]] = Future()
        done.set_result(pieces)
        return done

    def wants(self, run: BlockRun) -> range:
        """See `Tier`: the missing blocks."""
        missing = [i for i, identity in enumerate(run.identities) if self._lacks(identity)]
        return range(missing[0], missing[-1] + 1) if missing else range(0)

    def save(self, run: BlockRun, data: npt.NDArray[np.uint8]) -> None:
        """See `Tier`."""
        missing = [i for i, identity in enumerate(run.identities) if self._lacks(identity)]
        self._coming.update(run.identities[i] for i in missing)
        self._copier.submit(self._copy, run, data, missing)

    def touch(self, run: BlockRun) -> None:
        """See `Tier`. O(blocks)."""
        with self._lock:
            for identity in reversed(run.identities):
                if identity in self._kept:
                    self._kept.move_to_end(identity)

    def flush(self, timeout: float) -> None:
        """See `OpenTier`."""
        wait([self._copier.submit(int)], timeout)

    def close(self) -> None:
        """Forget all."""
        self._copier.shutdown(cancel_futures=True)
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    def _lacks(self, identity: bytes) -> bool:
        return identity not in self._kept and identity not in self._coming

    def _copy(self, run: BlockRun, data: npt.NDArray[np.uint8], indices: Sequence[int]) -> None:
        """Copy some blocks of a run, on the tier's thread."""
        for index in reversed(indices):  # the tail is used first, and goes first
            identity = run.identities[index]
            try:
                if data[index].nbytes <= self.max_bytes:
                    memory = self._allocate(data[index].nbytes)
                    memory[:] = data[index]
                    self._keep(identity, _Kept(run, index, memory))
            finally:
                self._coming.discard(identity)

    def _keep(self, identity: bytes, kept: _Kept) -> None:
        with self._lock:
            self._kept[identity] = kept
            self._num_bytes += kept.data.nbytes
            while self._num_bytes > self.max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= oldest.data.nbytes
