"""Transfers: the loads and saves of one engine that are under way.

    load   reserve blocks -> ask the tier -> ...... -> arrived: write -> commit -> release
                             |  private to the lease of the load       | cached, evictable

    save   hold cached blocks -> copy them out -> ...... -> copied: release -> give the data to the tier
                                 |  can't be evicted               | evictable again

A save is given up for who needs its blocks and would wait too long: they are free at once, and what was read
of them is thrown away.

Each has a lease of its own, so that no end of a request, and no preemption, gives its blocks to anybody else.
Only the engine's thread writes blocks, when the data is there: a load that is given up before has written
nothing, and its blocks are free at once; what arrives later is dropped. What was matched of the prompt stays
protected meanwhile, and what was loaded is matched by whoever waits for it as any other cached prefix is.

An object of this class belongs to one cache. When that is rebuilt, or the engine ends, it is closed and
forgotten: what arrives afterwards reaches nobody, and what was being copied out is not believed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import EncodedTokens, NamespaceName, TokenIds
from radixkv.cache.prefix_cache import Lease, Match, PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.tiers.load import TierLoad, rows_of
from radixkv.tiers.measured_tier import DAMAGED, TOO_SLOW, EngineSpeeds, Found, MeasuredTier
from radixkv.tiers.patience import Patience
from radixkv.tiers.tier import BlocksBeforeDamage, Bytes, TierState

if TYPE_CHECKING:
    import numpy.typing as npt

logger = logging.getLogger("radixkv")

# Blocks that are written in one step: requests that run wait for them.
MAX_WRITTEN_BLOCKS = 64
# Blocks that are copied out at a time: so many are not evictable, and so much memory is taken.
MAX_COPIED_BLOCKS = 64
# Ended requests whose blocks wait to be looked at; of more, the oldest are not saved.
MAX_OFFERS = 256
# Seconds between two warnings about a tier that fails.
WARNING_PAUSE_S = 60.0


class BlockMemory(Protocol):
    """Where blocks are copied from and to; see `radixkv.engine.runner.Runner`."""

    def save(self, blocks: Sequence[int]) -> Future[npt.NDArray[np.uint8]]: ...

    def load(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None: ...


@dataclass(slots=True)
class TransferCounts:
    """What came of loads and saves, since the start.

    Attributes:
        loads: started; `loaded_blocks` of them were committed.
        failed_loads: those that gave fewer blocks than asked for, or none.
        late_loads: of these, those given up at the deadline.
        saved_blocks: given to the tier.
        failed_saves: copies, or calls of the tier, that failed.
        dropped_saves: copies that were given up for requests that needed their blocks.
    """

    loads: int = 0
    loaded_blocks: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    saved_blocks: int = 0
    failed_saves: int = 0
    dropped_saves: int = 0


class _Piece(NamedTuple):
    """Blocks that are to be copied out, of the text that they are in.

    Attributes:
        takers: tiers that want some of them, and which, by their place in `run`.
    """

    run: BlockRun
    token_ids: TokenIds
    namespace: NamespaceName
    takers: list[tuple[MeasuredTier, range]]


class _Save(NamedTuple):
    """Blocks that are being copied out."""

    piece: _Piece
    lease: Lease
    future: Future[Any]
    started: float


class _Arrivals:
    """Numbers of transfers whose futures are done; any thread may add one.

    It outlives the engine for as long as a future is not done: it holds nothing of it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._numbers: deque[tuple[int, float]] = deque()
        self._some = threading.Event()

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def expect(self, number: int, future: Future[Any], on_arrival: Callable[[], None]) -> None:
        """Add the number, and call `on_arrival`, when the future is done."""

        def arrived(_: Future[Any]) -> None:
            self._numbers.append((number, self._clock()))
            self._some.set()
            on_arrival()

        future.add_done_callback(arrived)

    def take(self) -> list[tuple[int, float]]:
        """Each with the clock's reading when it was done."""
        self._some.clear()
        return [self._numbers.popleft() for _ in range(len(self._numbers))]

    def wait(self, timeout: float | None) -> None:
        """Until there is something to take."""
        if not self._numbers:
            self._some.wait(timeout)


class Transfers:
    """Starts, ends and counts them. Used by the engine's thread only.

    Args:
        tiers: asked in this order.
        memory: the blocks' contents.
        clock: seconds.
        on_arrival: called, on any thread, when `collect` has something to do; may be replaced.

    Attributes:
        saves_all: tiers are offered all that is cached of a text, whatever it was used for.
        patience: of requests that need blocks which are being copied out.
    """

    def __init__(
        self,
        tiers: Sequence[MeasuredTier],
        cache: PrefixCache,
        memory: BlockMemory,
        speeds: EngineSpeeds,
        clock: Callable[[], float],
        on_arrival: Callable[[], None],
    ) -> None:
        self.counts = TransferCounts()
        self.saves_all = False
        self.patience = Patience()
        self._tiers = tiers
        self._speeds = speeds
        self._cache = cache
        self._memory = memory
        self._clock = clock
        self._arrivals = _Arrivals(clock)
        self.on_arrival = on_arrival
        self._last_number = 0
        self._loads: dict[int, TierLoad] = {}  # under way, by number, the oldest first
        self._by_identity: dict[bytes, TierLoad] = {}  # of each of their blocks
        self._to_write: deque[TierLoad] = deque()  # those that have arrived
        self._offers: deque[tuple[TokenIds, NamespaceName]] = deque(maxlen=MAX_OFFERS)
        self._to_save: deque[_Piece] = deque()
        self._saves: dict[int, _Save] = {}  # under way: one, or none
        self._num_failures = 0
        self._next_warning = -float("inf")

    def __repr__(self) -> str:
        return f"Transfers({len(self._loads)} loads, {len(self._saves)} saves)"

    # ------------------------------------------------------------------ when there is something to do

    @property
    def hold_blocks(self) -> bool:
        """Whether transfers are under way, at whose end there may be more room. O(1)."""
        return bool(self._loads or self._saves)

    @property
    def is_due(self) -> bool:
        """Whether `collect` has something to do now. O(1), or O(loads)."""
        if self._arrivals or self._to_write or ((self._offers or self._to_save) and not self._saves):
            return True
        deadline = self.next_deadline
        return deadline is not None and deadline <= self._clock()

    @property
    def next_deadline(self) -> float | None:
        """When the next load or save is given up, a reading of the clock; None: not so far. O(loads)."""
        deadlines = [load.deadline for load in self._loads.values() if load.rows is None]
        if self.patience.deadline is not None:
            deadlines.append(self.patience.deadline)
        return min(deadlines, default=None)

    def wait(self, timeout: float | None) -> None:
        """Until something has arrived, or so many seconds have passed."""
        self._arrivals.wait(timeout)

    def collect(self) -> None:
        """Between steps, when all that is committed has been computed: go on with what is under way."""
        for number, when in self._arrivals.take():
            if number in self._loads:
                self._load_arrived(number, when)
            elif number in self._saves:
                self._save_ended(number, when)
        self._write()
        now = self._clock()
        for load in list(self._loads.values()):
            if load.rows is None and load.deadline <= now:
                self.counts.late_loads += 1
                self._give_up(load, was_late=True)
        if (deadline := self.patience.deadline) is not None and deadline <= now:
            self._drop_saves()

    # ------------------------------------------------------------------ loads

    @property
    def num_loads(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def lookup(self, run: BlockRun, wait_s: float, *, counts: bool = True) -> Found:
        """What the first tier has that brings blocks of a run sooner than they are computed.

        RETRY where one does not know yet; else, with MISS, why blocks that are there are not loaded.

        Args:
            wait_s: how long who needs them may wait.
            counts: False: nobody needs them, somebody wants to know.
        """
        answer = Found(TierState.MISS)
        for tier in self._tiers:
            try:
                found = tier.lookup(run, wait_s) if counts else tier.peek(run, wait_s)
            except Exception as error:
                self._note_failure("look up", error, tier)
                continue
            if found.num_blocks:
                return found
            if answer.state is not TierState.RETRY and (found.state is TierState.RETRY or found.refused):
                answer = found
        return answer

    def load_of(self, run: BlockRun) -> tuple[TierLoad, int] | None:
        """The load that brings the first block of a run, and up to which token of it. O(tokens)."""
        load = self._by_identity.get(run.identities[0]) if self._by_identity else None
        if load is None:
            return None
        end = load.run.shared_end(run)
        return (load, end) if end > max(run.start, load.run.start) else None

    def start_load(self, tier: MeasuredTier, run: BlockRun, match: Match, deadline: float) -> TierLoad | None:
        """Have blocks loaded that follow a match; None: there is no room, or the tier failed."""
        try:
            lease = self._reserve(run, match)
        except OutOfBlocks:
            tier.refuse("no_room")
            return None
        self.counts.loads += 1
        number = self._next_number()
        started, bytes_ahead = self._clock(), tier.coming_bytes
        try:
            future = tier.load(run)
            self._arrivals.expect(number, future, self.on_arrival)
        except Exception as error:
            lease.release()
            self.counts.failed_loads += 1
            self._note_failure("load", error, tier)
            return None
        load = self._loads[number] = TierLoad(
            number,
            run,
            lease,
            tier,
            future,
            started=started,
            deadline=deadline,
            bytes_ahead=bytes_ahead,
        )
        self._by_identity.update(dict.fromkeys(run.identities, load))
        return load

    def _reserve(self, run: BlockRun, match: Match) -> Lease:
        """A lease for a load, which saves have to make room for."""
        try:
            return self._cache.block_leases.reserve(run, match)
        except OutOfBlocks:
            if not self._saves:
                raise
        self._drop_saves()
        return self._cache.block_leases.reserve(run, match)

    def give_up_load(self, is_rival: Callable[[NamespaceName], bool]) -> bool:
        """Give up the latest load of which nothing has arrived, for its blocks; False: there is none.

        Args:
            is_rival: whether blocks of a namespace would help.
        """
        for load in reversed(self._loads.values()):
            if load.rows is None and load.lease is not None and is_rival(load.lease.namespace):
                self._give_up(load, was_late=False)
                return True
        return False

    def _give_up(self, load: TierLoad, *, was_late: bool) -> None:
        load.future.cancel()
        load.tier.gave_up(len(load.run), self._clock() - load.started if was_late else None)
        if was_late:
            load.refused = TOO_SLOW
        self._end_load(load)

    def _load_arrived(self, number: int, when: float) -> None:
        load = self._loads[number]
        pieces, error = _result(load.future)
        load.rows = []
        if error is None:
            try:
                load.rows = rows_of(load.run, pieces)
                if any(isinstance(piece, BlocksBeforeDamage) for piece in pieces):
                    load.refused = DAMAGED
            except Exception as malformed:
                error = malformed
        if error is not None:
            self._note_failure("load", error, load.tier)
        seconds = max(0.0, when - load.started)
        load.tier.arrived(len(load.run), len(load.rows), load.bytes_ahead, seconds)
        if load.refused is not None:
            load.tier.refuse(load.refused)
        self._to_write.append(load)

    def _write(self) -> None:
        """Write what has arrived into its blocks: some in this step, more in the next ones."""
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
                    self._memory.load(lease.block_table[first : first + len(some)].tolist(), some)
                except Exception as error:
                    self._note_failure("load", error, load.tier)
                    rows.clear()
                else:
                    self._speeds.write.measured(sum(map(len, some)), self._clock() - started)
                    load.num_written += len(some)
                    room -= len(some)
                    if load.num_written < len(rows):
                        continue
            self._to_write.popleft()
            self._end_load(load)

    def _end_load(self, load: TierLoad) -> None:
        """Commit what was written, and let go of the rest."""
        lease, run = load.lease, load.run
        assert lease is not None
        load.lease = load.rows = None
        del self._loads[load.number]
        for identity in run.identities:
            if self._by_identity.get(identity) is load:
                del self._by_identity[identity]
        if lease.shares and load.num_written:
            lease.commit(run.start + load.num_written * run.block_size)
            self.counts.loaded_blocks += load.num_written
        lease.release()
        load.has_failed = load.num_written < len(run)
        self.counts.failed_loads += load.has_failed

    # ------------------------------------------------------------------ saves

    @property
    def num_saves(self) -> int:
        """Texts and pieces of them that are to be saved, or being copied."""
        return len(self._offers) + len(self._to_save) + len(self._saves)

    def offer(self, token_ids: TokenIds, namespace: NamespaceName) -> None:
        """What is cached of a text may be saved, soon. O(1)."""
        self._offers.append((token_ids, namespace))

    def cached_texts(self, limit: int) -> list[tuple[EncodedTokens, NamespaceName]]:
        """What is cached and could be offered, the latest used first."""
        return list(self._cache.block_leases.cached_texts(limit))

    def start_saves(self) -> None:
        """Go on with what was offered; to be called when all that is committed has been computed.

        Those who wait for blocks come first: else the next copy would take what the last one let go.
        """
        self._look_at_offers()
        self._start_save()

    def _look_at_offers(self) -> None:
        """Ask the tier which blocks of the next text it wants, when nothing else is to be saved."""
        while self._offers and not self._to_save:
            token_ids, namespace = self._offers.popleft()
            for run in self._cache.block_leases.cached_runs(token_ids, namespace):
                self._to_save.extend(self._pieces(run, token_ids, namespace))

    def _pieces(self, run: BlockRun, token_ids: TokenIds, namespace: NamespaceName) -> Iterator[_Piece]:
        """What of a run tiers want, in pieces to be copied one after the other."""
        wanted = []
        for tier in self._tiers:
            try:
                blocks = tier.wants(run, everything=self.saves_all)
                if blocks.start < blocks.stop:
                    wanted.append((tier, blocks))
            except Exception as error:
                self._note_failure("save", error, tier)
        if not wanted:
            return
        end = max(blocks.stop for _, blocks in wanted)
        for first in range(min(blocks.start for _, blocks in wanted), end, MAX_COPIED_BLOCKS):
            stop = min(first + MAX_COPIED_BLOCKS, end)
            takers = [
                (tier, range(max(blocks.start, first) - first, min(blocks.stop, stop) - first))
                for tier, blocks in wanted
                if blocks.start < stop and blocks.stop > first
            ]
            if takers:
                yield _Piece(run.part(first, stop), token_ids, namespace, takers)

    def _start_save(self) -> None:
        """Copy the next blocks out, one piece at a time, if they are still cached."""
        while self._to_save and not self._saves:
            piece = self._to_save.popleft()
            run = piece.run
            lease = self._cache.block_leases.hold(run, piece.token_ids, piece.namespace)
            if lease is None:
                continue
            blocks = lease.block_table[run.start // run.block_size : run.end // run.block_size].tolist()
            try:
                future = self._memory.save(blocks)
            except Exception as error:
                lease.release(used=False)
                self._save_failed(error)
                continue
            self._saves[number := self._next_number()] = _Save(piece, lease, future, self._clock())
            self._arrivals.expect(number, future, self.on_arrival)

    def give_up_save(self, is_rival: Callable[[NamespaceName], bool], *, at_once: bool) -> bool:
        """Somebody needs blocks: give up what is being copied, for its blocks; False: wait, or none is.

        Args:
            is_rival: whether blocks of a namespace would help.
            at_once: nobody waits for the end of the copy, however soon that is.
        """
        save = next((save for save in self._saves.values() if is_rival(save.lease.namespace)), None)
        if save is None:
            return False
        if not at_once and self.patience.lasts(len(save.piece.run), save.started, self._clock()):
            return False
        self._drop_saves()
        return True

    def _drop_saves(self) -> None:
        """Give up what is being copied."""
        for save in self._saves.values():
            save.future.cancel()
            save.lease.release(used=False)
            self.counts.dropped_saves += 1
        self._saves.clear()
        self.patience.end(self._clock())

    def _save_ended(self, number: int, when: float) -> None:
        save = self._saves.pop(number)
        save.lease.release(used=False)
        self.patience.end(when)
        self.patience.copied(len(save.piece.run), when - save.started)
        data, error = _result(save.future)
        if error is not None:
            self._save_failed(error)
            return
        for tier, blocks in save.piece.takers:
            try:
                tier.save(save.piece.run.part(blocks.start, blocks.stop), data[blocks.start : blocks.stop])
                self.counts.saved_blocks += len(blocks)
            except Exception as refused:
                self._save_failed(refused, tier)

    def _save_failed(self, error: BaseException, tier: MeasuredTier | None = None) -> None:
        self.counts.failed_saves += 1
        self._note_failure("save", error, tier)

    # ------------------------------------------------------------------ both

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _note_failure(self, what: str, error: BaseException, tier: MeasuredTier | None = None) -> None:
        """A tier, or the copy (None), has failed: say so, not too often."""
        self._num_failures += 1
        if tier is not None:
            tier.failed(what)
        now = self._clock()
        if now >= self._next_warning:
            self._next_warning = now + WARNING_PAUSE_S
            logger.warning(
                "the K/V tier %s failed to %s (%d failures so far): %s: %s; prompts are computed instead",
                "(copying)" if tier is None else tier.name,
                what,
                self._num_failures,
                type(error).__name__,
                error,
            )

    def close(self) -> None:
        """Give up what is under way, without a word to the cache, which is not used any more."""
        for load in self._loads.values():
            if load.rows is None:
                load.future.cancel()
                load.tier.gave_up(len(load.run), None)
            load.lease = None
            load.has_failed = True
        self._loads, self._by_identity, self._saves = {}, {}, {}
        for queue in (self._to_write, self._offers, self._to_save):
            queue.clear()


def _result(future: Future[Any]) -> tuple[Any, BaseException | None]:
    """What a future that is done gave, or why it gave nothing."""
    if future.cancelled():
        return None, CancelledError("it was cancelled")
    error = future.exception()
    return (None, error) if error is not None else (future.result(), None)
