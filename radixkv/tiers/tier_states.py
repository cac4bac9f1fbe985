# SPDX-License-Identifier: Apache-2.0
"""TierStates: checkpoints, of states or of windows, on their way between the tree and tiers.

    an ended request's text    its checkpoints go to each tier beside the K/V before them
    a prompt                   the deepest state that a tier has, within the K/V at hand or in a tier
    a state arrives            a free slot -> a checkpoint of the tree, after the K/V before it

A prompt gains nothing by K/V without a state: no tier is asked for more K/V than a state sums up. Slots are
copied beside the steps, as they were when the copy began: none is held for a copy, and running requests never
lack one. The window before a grid point is a state in this sense, where windows are freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens, NamespaceName, TokenIds
from radixkv.cache.prefix_cache import Lease, Match, PrefixCache
from radixkv.cache.states.checkpoint import Checkpoint
from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.model.block_copy import BlockCopy
from radixkv.tiers.checkpoint_memory import CheckpointMemory
from radixkv.tiers.measured_tier import MeasuredTier
from radixkv.tiers.tier import Bytes
from radixkv.tiers.transfer_ends import TransferEnds
from radixkv.tiers.transfer_log import TransferLog, result_of

# Bytes of states that are copied out at a time, or one: a GPU has these beside its pools.
_MAX_COPIED_BYTES = 64 * 2**20


class _Wanted(NamedTuple):
    """State to copy out, and the tiers that get it."""

    state: BlockRun
    checkpoint: Checkpoint
    tiers: list[MeasuredTier]


class _Copy(NamedTuple):
    """Copy of a state under way."""

    of: _Wanted
    contents: BlockCopy


class TierStates:
    """Saves and restores states of one cache. Used by the engine's thread only.

    Args:
        tiers: all of them keep states; asked in this order.
        keeper: the cache's checkpoints.
        memory: the checkpoints' contents.
        ends: reports of ended copies.
    """

    def __init__(
        self,
        tiers: Sequence[MeasuredTier],
        cache: PrefixCache,
        keeper: Checkpoints,
        memory: CheckpointMemory,
        ends: TransferEnds,
        log: TransferLog,
    ) -> None:
        self._tiers = tiers
        self._blocks = cache.block_leases
        self._keeper = keeper
        self._memory = memory
        self._ends, self._log = ends, log
        self._waiting: deque[_Wanted] = deque()
        self._copies: dict[int, _Copy] = {}

    def __len__(self) -> int:
        """Number of states to copy or being copied."""
        return len(self._waiting) + len(self._copies)

    # ------------------------------------------------------------------ out

    def save(
        self,
        run: BlockRun,
        token_ids: TokenIds,
        namespace: NamespaceName,
        takers: Sequence[tuple[MeasuredTier, int]],
    ) -> None:
        """Give tiers the checkpoints inside a run of cached blocks that they lack.

        Args:
            takers: tiers, and up to which token each keeps the K/V.
        """
        states = run.states()
        if states is None or not takers:
            return
        kept = self._blocks.checkpoints(token_ids, namespace)
        for index in reversed(range(len(states))):
            checkpoint = kept.get(states.start + (index + 1) * states.block_size)
            if checkpoint is not None:
                state = states.part(index, index + 1)
                self._want(state, checkpoint, [tier for tier, end in takers if state.end <= end])
        self._start()

    def _want(self, state: BlockRun, checkpoint: Checkpoint, tiers: Sequence[MeasuredTier]) -> None:
        wanting = []
        for tier in tiers:
            try:
                tier.touch(state)
                if len(tier.wants(state)):
                    wanting.append(tier)
            except Exception as error:
                self._failed(error, tier)
        coming = (*self._waiting, *(copy.of for copy in self._copies.values()))
        if wanting and all(other.checkpoint is not checkpoint for other in coming):
            self._waiting.append(_Wanted(state, checkpoint, wanting))

    def _start(self) -> None:
        """Begin copies, as many as may be under way; of states that have been evicted there are none."""
        most = max(1, _MAX_COPIED_BYTES // self._memory.num_bytes)
        while self._waiting and len(self._copies) < most:
            wanted = self._waiting.popleft()
            if wanted.checkpoint.node is None:
                continue
            try:
                copy = self._memory.save(wanted.checkpoint.slot)
            except Exception as error:
                self._failed(error)
                continue
            self._copies[self._ends.expect(copy)] = _Copy(wanted, copy)

    def ended(self, number: int) -> None:
        """Give tiers the state whose copy of that number is done, if there is one, and begin the next."""
        copy = self._copies.pop(number, None)
        if copy is None:
            return
        self._start()
        contents, failure = result_of(copy.contents)
        if failure is not None:
            self._failed(failure)
            return
        data = self._memory.record(contents)
        for tier in copy.of.tiers:
            try:
                tier.save(copy.of.state, data)
            except Exception as error:
                self._failed(error, tier)

    def close(self) -> None:
        """Forget the copies under way."""
        self._waiting.clear()
        self._copies.clear()

    def _failed(self, error: BaseException, tier: MeasuredTier | None = None) -> None:
        self._log.counts.failed_saves += 1
        self._log.failed("save", error, tier)

    # ------------------------------------------------------------------ in

    def beyond(self, match: Match, missing: BlockRun) -> list[BlockRun]:
        """Return the states after a prompt's nearest one, of its cached and missing blocks. O(tokens).

        The last token is always computed: no state may sum it up.
        """
        return list(self._beyond(match, missing))

    def _beyond(self, match: Match, missing: BlockRun) -> Iterator[BlockRun]:
        resume, most = match.resume, len(match.data) // TOKEN_BYTES - 1
        for run in (*self._blocks.cached_runs(EncodedTokens(match.data), match.namespace), missing):
            states = run.states()
            if states is None:
                continue
            size = states.block_size
            first = max(0, (resume - states.start) // size)
            stop = min(len(states), (most - states.start) // size)
            if first < stop:
                yield states.part(first, stop)

    def deepest(self, states: Sequence[BlockRun], end: int) -> tuple[MeasuredTier, BlockRun | None] | None:
        """Return the tier with the deepest of some states that sums up at most `end` tokens, and that state.

        With None for the state: no tier has one of the deepest run, and this one does not know yet.
        """
        for run in reversed(states):
            count = min(len(run), (end - run.start) // run.block_size)
            if count <= 0:
                continue
            part = run.part(0, count)
            place = -1
            taken: MeasuredTier | None = None
            undecided: MeasuredTier | None = None
            for tier in self._tiers:
                try:
                    found = tier.last_state(part)
                except Exception as error:
                    self._log.failed("look up", error, tier)
                    continue
                if found is None:
                    undecided = undecided or tier
                elif found > place:
                    place, taken = found, tier
            if taken is not None:
                return taken, part.part(place, place + 1)
            if undecided is not None:
                return undecided, None
        return None

    def restore(self, lease: Lease, state: BlockRun, data: Bytes) -> bool:
        """Make a checkpoint of an arrived state; False: there is no room for it, or its K/V has gone.

        Args:
            lease: on the K/V of its tokens.
        """
        slot = self._memory.restore(state.end, data)
        if slot is None:
            return False
        if not lease.shares or state.end > lease.tree_tokens:
            self._keeper.pool.drop(slot)
            return False
        self._keeper.add(lease.node, state.end, slot)
        return True
