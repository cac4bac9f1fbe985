# SPDX-License-Identifier: Apache-2.0
"""Loads: the fetches of blocks from tiers for an engine.

    reserve blocks -> ask the tier -> ...... -> arrived: write -> commit -> release
                      |  private to the lease of the load       | cached, evictable

A load has a lease of its own, so that no end of a request, and no preemption, gives its blocks to anybody
else. Only the engine's thread writes blocks, when the data is there: a load that is given up before has
written nothing, and its blocks are free at once; late data is dropped. The matched part of the
prompt stays protected meanwhile, and loaded blocks are matched by every waiting request as any other prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import EncodedTokens, NamespaceName
from radixkv.cache.prefix_cache import Lease, Match, PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.model.block_copy import BlockMemory
from radixkv.tiers.measured_tier import DAMAGED, TOO_SLOW, EngineSpeeds, Found, MeasuredTier
from radixkv.tiers.saves import Saves
from radixkv.tiers.tier import BlocksBeforeDamage, Bytes, TierBlocks, TierState
from radixkv.tiers.tier_states import TierStates
from radixkv.tiers.transfer_ends import TransferEnds
from radixkv.tiers.transfer_log import TransferLog, result_of

# Blocks that are written in one step: requests that run wait for them.
MAX_WRITTEN_BLOCKS = 64


@dataclass(slots=True, eq=False, repr=False)
class TierLoad:
    """Load of blocks. A waiting request treats it like a request that computes the tokens.

    Attributes:
        run: the blocks.
        lease: lease on the text up to their end; None: the load has ended.
        tier: the tier that they come from.
        num_computed: tokens before the blocks; they are cached.
        started: a reading of the engine's clock.
        bytes_ahead: bytes queued in the tier before it, at the time of the call.
        deadline: time at which it is given up, if nothing has arrived; a reading of the engine's clock.
        rows: arrived data, verified to be of the same tokens; None: nothing yet.
        has_failed: it has ended, and some of the blocks are missing.
        refused: the reason why they are missing; None: it is not known.
    """

    number: int
    run: BlockRun
    lease: Lease | None
    tier: MeasuredTier
    future: Future[Sequence[TierBlocks]]
    started: float
    deadline: float
    bytes_ahead: int = 0
    rows: list[Bytes] | None = None
    num_written: int = 0
    has_failed: bool = False
    refused: str | None = None
    num_computed: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_computed = self.run.start

    def __repr__(self) -> str:
        state = "ended" if self.lease is None else "under way" if self.rows is None else "arrived"
        return f"TierLoad({self.run!r}, {state})"


class Loads:
    """Loads of an engine: started, ended and counted by the engine's thread alone.

    Args:
        tiers: asked in this order.
        memory: the blocks' contents.
        saves: copies that give their blocks up for loads.
        clock: seconds.
        states: makes checkpoints of loaded states; None: the model has none.
    """

    def __init__(
        self,
        tiers: Sequence[MeasuredTier],
        cache: PrefixCache,
        memory: BlockMemory,
        saves: Saves,
        speeds: EngineSpeeds,
        clock: Callable[[], float],
        ends: TransferEnds,
        log: TransferLog,
        states: TierStates | None = None,
    ) -> None:
        self._states = states
        self._tiers = tiers
        self._blocks = cache.block_leases
        self._memory = memory
        self._saves = saves
        self._speeds = speeds
        self._clock = clock
        self._ends = ends
        self._log = log
        self._loads: dict[int, TierLoad] = {}  # under way, by number, the oldest first
        self._by_identity: dict[bytes, TierLoad] = {}  # of each of their blocks
        self._to_write: deque[TierLoad] = deque()  # those that have arrived

    def __len__(self) -> int:
        """Number of loads under way."""
        return len(self._loads)

    def as_tokens(self) -> list[int]:
        """Return, for each load under way, the tokens computed in the same time. O(loads)."""
        return [
            int((load.run.end - load.run.start) * load.tier.time_share(load.run.block_size))
            for load in self._loads.values()
        ]

    @property
    def is_due(self) -> bool:
        """True if a load has arrived and is to be written. O(1)."""
        return bool(self._to_write)

    @property
    def next_deadline(self) -> float | None:
        """Time of the next deadline, by the clock; None: there is none. O(loads)."""
        deadlines = [load.deadline for load in self._loads.values() if load.rows is None]
        return min(deadlines, default=None)

    # ------------------------------------------------------------------ asking

    def lookup(self, run: BlockRun, wait_s: float, *, counts: bool = True) -> Found:
        """Ask the tiers in order for blocks of a run that load sooner than they are computed.

        RETRY where one does not know yet; else, with MISS, why blocks that are there are not loaded.

        Args:
            wait_s: how long the requests may wait.
            counts: False for a mere question: no request needs them.
        """
        answer = Found(TierState.MISS)
        for tier in self._tiers:
            try:
                found = tier.lookup(run, wait_s) if counts else tier.peek(run, wait_s)
            except Exception as error:
                self._log.failed("look up", error, tier)
                continue
            if found.num_blocks:
                return found
            if answer.state is not TierState.RETRY and (found.state is TierState.RETRY or found.refused):
                answer = found
        return answer

    def load_of(self, run: BlockRun) -> tuple[TierLoad, int] | None:
        """Return the load of a run's first block, and the end of its tokens in the run. O(tokens)."""
        load = self._by_identity.get(run.identities[0]) if self._by_identity else None
        if load is None:
            return None
        end = load.run.shared_end(run)
        return (load, end) if end > max(run.start, load.run.start) else None

    def state_load_of(self, states: Sequence[BlockRun]) -> tuple[TierLoad, int] | None:
        """Return the load of the deepest of some states, and the tokens that it sums up. O(states)."""
        if not self._by_identity:
            return None
        for run in reversed(states):
            for index in reversed(range(len(run))):
                load = self._by_identity.get(run.identities[index])
                if load is not None and load.run.is_same_text(run, load.run.end):
                    return load, load.run.end
        return None

    def start(self, tier: MeasuredTier, run: BlockRun, match: Match, deadline: float) -> TierLoad | None:
        """Start to load the blocks after a match, or a state within it.

        None: there is no room, or the tier failed.
        """
        try:
            lease = self._reserve(run, match)
        except OutOfBlocks:
            tier.refuse("no_room")
            return None
        self._log.counts.loads += 1
        started, bytes_ahead = self._clock(), tier.coming_bytes
        try:
            future = tier.load(run)
            number = self._ends.expect(future)
        except Exception as error:
            lease.release()
            self._log.counts.failed_loads += 1
            self._log.failed("load", error, tier)
            return None
        load = TierLoad(number, run, lease, tier, future, started, deadline, bytes_ahead)
        self._loads[number] = load
        self._by_identity.update(dict.fromkeys(run.identities, load))
        return load

    def _reserve(self, run: BlockRun, match: Match) -> Lease:
        """Return the lease of a load, on the K/V before it where it is a state. Saves make room for it."""
        if run.is_state:
            lease = self._blocks.hold(run, EncodedTokens(match.data), match.namespace)
            if lease is None or lease.num_tokens < run.end:
                if lease is not None:
                    lease.release(used=False)
                raise OutOfBlocks("the K/V of a state has gone")
            return lease
        try:
            return self._blocks.reserve(run, match)
        except OutOfBlocks:
            if not self._saves.holds_blocks:
                raise
        self._saves.stop_copy()
        return self._blocks.reserve(run, match)

    # ------------------------------------------------------------------ giving up

    def give_up_latest(self, is_rival: Callable[[NamespaceName], bool]) -> bool:
        """Abandon the latest load without data, to free its blocks; False: there is none.

        Args:
            is_rival: tells if blocks of a namespace would help.
        """
        for load in reversed(self._loads.values()):
            if load.rows is None and load.lease is not None and is_rival(load.lease.namespace):
                self._give_up(load, was_late=False)
                return True
        return False

    def give_up_late(self) -> None:
        """Abandon the loads past their deadline."""
        now = self._clock()
        for load in list(self._loads.values()):
            if load.rows is None and load.deadline <= now:
                self._log.counts.late_loads += 1
                self._give_up(load, was_late=True)

    def _give_up(self, load: TierLoad, *, was_late: bool) -> None:
        load.future.cancel()
        load.tier.gave_up(load.run, self._clock() - load.started if was_late else None)
        if was_late:
            load.refused = TOO_SLOW
        self._end(load)

    # ------------------------------------------------------------------ arriving

    def ended(self, number: int, when: float) -> None:
        """Note that the tier has finished the load of that number, if it is under way."""
        load = self._loads.get(number)
        if load is None:
            return
        pieces, error = result_of(load.future)
        load.rows = []
        if error is None:
            try:
                load.rows = rows_of(load.run, pieces)
                if any(isinstance(piece, BlocksBeforeDamage) for piece in pieces):
                    load.refused = DAMAGED
            except Exception as malformed:
                error = malformed
        if error is not None:
            self._log.failed("load", error, load.tier)
        seconds = max(0.0, when - load.started)
        load.tier.arrived(load.run, len(load.rows), load.bytes_ahead, seconds)
        if load.refused is not None:
            load.tier.refuse(load.refused)
        self._to_write.append(load)

    def write(self) -> None:
        """Write arrived data into its blocks, spread over steps."""
        room = MAX_WRITTEN_BLOCKS
        while self._to_write and room:
            load = self._to_write[0]
            rows, lease = load.rows, load.lease
            assert rows is not None
            assert lease is not None
            some = rows[load.num_written : load.num_written + room]
            if some and lease.shares:  # else a reset came between
                first = load.run.start // load.run.block_size + load.num_written
                started = self._clock()
                try:
                    if load.run.is_state:
                        assert self._states is not None
                        if not self._states.restore(lease, load.run, some[0]):
                            rows.clear()
                            continue
                    else:
                        self._memory.load(lease.block_table[first : first + len(some)].tolist(), some)
                except Exception as error:
                    self._log.failed("load", error, load.tier)
                    rows.clear()
                else:
                    self._speeds.write.measured(sum(map(len, some)), self._clock() - started)
                    load.num_written += len(some)
                    room -= len(some)
                    if load.num_written < len(rows):
                        continue
            self._to_write.popleft()
            self._end(load)

    def _end(self, load: TierLoad) -> None:
        """Commit the written blocks, and release the rest."""
        lease, run = load.lease, load.run
        assert lease is not None
        load.lease = load.rows = None
        del self._loads[load.number]
        for identity in run.identities:
            if self._by_identity.get(identity) is load:
                del self._by_identity[identity]
        if lease.shares and load.num_written and not run.is_state:
            lease.commit(run.start + load.num_written * run.block_size)
            self._log.counts.loaded_blocks += load.num_written
        lease.release()
        load.has_failed = load.num_written < len(run)
        self._log.counts.failed_loads += load.has_failed

    def close(self) -> None:
        """Abandon all loads without changing the cache, which is no longer used."""
        for load in self._loads.values():
            if load.rows is None:
                load.future.cancel()
                load.tier.gave_up(load.run, None)
            load.lease = None
            load.has_failed = True
        self._loads, self._by_identity = {}, {}
        self._to_write.clear()


def rows_of(run: BlockRun, pieces: Sequence[TierBlocks]) -> list[Bytes]:
    """Return the data of a run's leading blocks, as far as they verify as the same text, without a gap.

    O(tokens) for each piece.
    """
    rows: list[Bytes] = []
    position, size = run.start, run.block_size
    for kept, data in pieces:
        is_next = kept.start == position and kept.end == position + len(data) * size
        if not is_next or not run.is_same_text(kept, kept.end):
            break
        rows.extend(data)
        position = kept.end
    return rows
