# SPDX-License-Identifier: Apache-2.0
"""Simulate how much KV memory four allocation schemes waste, and how many sequences they hold at once.

The machine: a fixed number of token slots and a queue that is never empty. Sequences enter in order while
they fit (prompt first), each running one gets a token per step, and leaves with its last one. A paged pool
that runs full preempts the sequence that came last and queues it again with the tokens it has. Where the
memory goes is averaged over the steps for which somebody waits, in the terms of the PagedAttention paper
(Kwon et al., SOSP 2023): slots that hold tokens, slots reserved for tokens to come, slots never to be used
within a sequence's own slots (internal fragmentation), and slots lost between (external).

    waste = 1 - slots with tokens / (all slots - free slots)

Nothing is stepped token by token: between two events (an end, a preemption) sums over the steps have closed
forms.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from radixkv.cli.replay.allocators import (
    Allocator,
    BuddyAllocator,
    PagedAllocator,
    ReplayedSequence,
    SlabAllocator,
)
from radixkv.cli.replay.trace import Int64Array
from radixkv.cli.replay.workload import Workload
from radixkv.errors import ConfigError

SCHEMES = ("slab", "buddy", "paged", "paged+sharing")


@dataclass(frozen=True, slots=True)
class SchemeResult:
    """Use of the memory under one scheme. Shares are of all slots, averaged over time; they sum to 1.

    Attributes:
        workload: the workload's name.
        scheme: one of `SCHEMES`.
        block_size: slots per page of the paged schemes.
        total_slots: token slots in the memory.
        waste: share of the slots not free that hold no token.
        used_share: slots that hold tokens.
        reserved_share: slots reserved for tokens that will come.
        internal_share: slots held by a sequence that it will never use.
        external_share: free slots that no waiting sequence can use because of where they lie.
        free_share: the rest.
        mean_sequences: sequences at once, averaged over time.
        peak_sequences: most sequences at once.
        pages_saved: pages that sharing saved, averaged over time.
        shared_share: those as a share of the pages there would have been without sharing.
        steps: steps until all sequences had ended.
        completed: sequences that ended.
        preempted: how often a sequence had to go and come again.
        refused: sequences that do not fit at all.
    """

    workload: str
    scheme: str
    block_size: int
    total_slots: int
    waste: float
    used_share: float
    reserved_share: float
    internal_share: float
    external_share: float
    free_share: float
    mean_sequences: float
    peak_sequences: int
    pages_saved: float
    shared_share: float
    steps: int
    completed: int
    preempted: int
    refused: int


def make_allocator(
    scheme: str, workload: Workload, total_slots: int, block_size: int, max_length: int
) -> Allocator:
    """The allocator of a scheme.

    Raises:
        ConfigError: unknown scheme, or memory for less than one block.
    """
    if block_size < 1 or total_slots < block_size:
        raise ConfigError(f"{total_slots} slots hold no block of {block_size} tokens; give more memory")
    if scheme == "slab":
        return SlabAllocator(total_slots, max_length)
    if scheme == "buddy":
        return BuddyAllocator(total_slots)
    if scheme == "paged":
        return PagedAllocator(total_slots, block_size)
    if scheme == "paged+sharing":
        paths, pages = workload.pages_by_prefix(block_size)
        return PagedAllocator(total_slots, block_size, paths, pages)
    raise ConfigError(f"unknown scheme {scheme!r}; there are {', '.join(SCHEMES)}")


def simulate(
    workload: Workload, scheme: str, total_slots: int, block_size: int = 16, max_length: int | None = None
) -> SchemeResult:
    """Serve a workload under one scheme. O((sequences + preemptions) x sequences at once).

    Args:
        workload: the sequences.
        scheme: one of `SCHEMES`.
        total_slots: token slots in the memory.
        block_size: slots per page.
        max_length: slots of a slab; None: the workload's longest sequence.

    Raises:
        ConfigError: unknown scheme, or memory for less than one block.
    """
    longest = int(workload.final_lengths.max(initial=1)) if max_length is None else max_length
    allocator = make_allocator(scheme, workload, total_slots, block_size, longest)
    return _Simulation(workload, scheme, allocator, total_slots, block_size).run()


def _pages_until(tokens: Int64Array, size: int) -> Int64Array:
    """sum of ceil(i / size) for i = 1..tokens, for each."""
    full, rest = tokens // size, tokens % size
    return size * full * (full + 1) // 2 + rest * (full + 1)


class _Averages:
    """Sums over steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.sums = np.zeros(7)

    def add(self, steps: int, sums: np.ndarray) -> None:
        self.steps += steps
        self.sums += sums

    def means(self) -> list[float]:
        return (self.sums / max(self.steps, 1)).tolist()


class _Simulation:
    """A run: the queue, the running sequences in order of admission, the sums."""

    def __init__(
        self, workload: Workload, scheme: str, allocator: Allocator, total: int, block_size: int
    ) -> None:
        self.workload = workload
        self.scheme = scheme
        self.allocator = allocator
        self.total = total
        self.size = block_size
        finals = workload.final_lengths.tolist()
        fits = [allocator.ever_fits(final) for final in finals]
        self.refused = fits.count(False)
        self.queue = deque(
            ReplayedSequence(index, tokens, finals[index])
            for index, tokens in enumerate(workload.input_lengths.tolist())
            if fits[index]
        )
        self.indices: list[int] = []
        self.tokens = np.zeros(0, dtype=np.int64)
        self.finals = np.zeros(0, dtype=np.int64)
        self.taken = 0  # slots of growing sequences after one more step, shared ones counted for each
        self.busy = _Averages()
        self.draining = _Averages()
        self.peak = self.completed = self.preempted = 0

    def run(self) -> SchemeResult:
        while self.queue or self.indices:
            self._admit()
            if not self._advance():
                self._preempt()
        averages = self.busy if self.busy.steps else self.draining
        used, reserved, internal, external, held, sequences, saved = averages.means()
        free = self.total - held - external
        taken = self.total - free
        logical = held / self.size + saved
        return SchemeResult(
            workload=self.workload.name,
            scheme=self.scheme,
            block_size=self.size,
            total_slots=self.total,
            waste=1 - used / taken if taken else 0.0,
            used_share=used / self.total,
            reserved_share=reserved / self.total,
            internal_share=internal / self.total,
            external_share=external / self.total,
            free_share=free / self.total,
            mean_sequences=sequences,
            peak_sequences=self.peak,
            pages_saved=saved,
            shared_share=saved / logical if logical else 0.0,
            steps=self.busy.steps + self.draining.steps,
            completed=self.completed,
            preempted=self.preempted,
            refused=self.refused,
        )

    def _admit(self) -> None:
        """Let in whoever is first in the queue, while it fits."""
        tokens, finals = [], []
        while self.queue and self.allocator.admit(self.queue[0], self.taken):
            sequence = self.queue.popleft()
            self.indices.append(sequence.index)
            tokens.append(sequence.tokens)
            finals.append(sequence.final)
            if self.allocator.grows:
                self.taken += -(-(sequence.tokens + 1) // self.size) * self.size
        if tokens:
            self.tokens = np.concatenate((self.tokens, tokens))
            self.finals = np.concatenate((self.finals, finals))
            self.peak = max(self.peak, len(self.indices))

    def _slots_next(self) -> int:
        """Slots in pages that the running sequences hold after one more token each."""
        return int((-(-(self.tokens + 1) // self.size)).sum()) * self.size

    def _room_for(self, steps: int) -> bool:
        """Return True if there are pages for `steps` more tokens of each sequence."""
        pages = int((-(-(self.tokens + steps) // self.size)).sum())
        return pages * self.size + self.allocator.reserved_slots() <= self.total // self.size * self.size

    def _advance(self) -> bool:
        """Run until the next end, or as far as the memory reaches; False if that is not one step."""
        assert self.indices, "a sequence that fits the empty memory was not admitted to it"
        steps = int((self.finals - self.tokens).min())
        if self.allocator.grows and not self._room_for(steps):
            low, high = 0, steps  # room for `low`, not for `high`
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._room_for(middle) else (low, middle)
            steps = low
            if not steps:
                return False
        self._account(steps)
        self.tokens += steps
        done = self.tokens >= self.finals
        if done.any():
            for position in np.flatnonzero(done).tolist():
                self.allocator.release(self.indices[position])
            self.indices = [
                index for index, over in zip(self.indices, done.tolist(), strict=True) if not over
            ]
            self.tokens = self.tokens[~done]
            self.finals = self.finals[~done]
            self.completed += int(done.sum())
        if self.allocator.grows:
            self.taken = self._slots_next()
        return True

    def _account(self, steps: int) -> None:
        """Add the next `steps` steps to the sums: states after 1, 2, ..., `steps` tokens more."""
        tokens, after = self.tokens, self.tokens + steps
        logical = float((after * (after + 1) // 2 - tokens * (tokens + 1) // 2).sum())
        slots = self.allocator.reserved_slots()
        saved = 0.0
        if self.allocator.grows:
            pages = float((_pages_until(after, self.size) - _pages_until(tokens, self.size)).sum())
            saved = -slots / self.size * steps
            held = (pages - saved) * self.size
            used = logical - saved * self.size
            reserved = 0.0
            internal = held - used
        else:
            held = float(slots * steps)
            used = logical
            reserved = float(self.finals.sum()) * steps - logical
            internal = held - used - reserved
        external = self.allocator.external_slots(self.queue[0] if self.queue else None) * steps
        averages = self.busy if self.queue else self.draining
        averages.add(steps, np.array([used, reserved, internal, external, held, len(tokens) * steps, saved]))

    def _preempt(self) -> None:
        """Send the sequence that came last back to the head of the queue, with the tokens it has."""
        index = self.indices.pop()
        self.allocator.release(index)
        self.queue.appendleft(ReplayedSequence(index, int(self.tokens[-1]), int(self.finals[-1])))
        self.tokens = self.tokens[:-1]
        self.finals = self.finals[:-1]
        self.taken = self._slots_next()
        self.preempted += 1
