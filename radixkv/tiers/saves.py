# SPDX-License-Identifier: Apache-2.0
"""Saves: the copies of blocks out of the pool for an engine's tiers.

    hold cached blocks -> copy them out -> ...... -> copied: release -> give the data to the tiers
                         |  can't be evicted               | evictable again

A copy has a lease of its own: its blocks stay, whatever becomes of requests. A shortage of blocks
stops it: the engine's thread helps copying for as long as requests may wait, then the blocks are free. What
was copied is saved, and the rest is copied later, if it is still cached then. A GPU's blocks are gathered in
the order of the steps, so that they are free at once: no request ever waits for such a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import EncodedTokens, NamespaceName, TokenIds
from radixkv.cache.prefix_cache import Lease, PrefixCache
from radixkv.model.block_copy import BlockCopy, BlockMemory
from radixkv.tiers.measured_tier import MeasuredTier
from radixkv.tiers.tier_states import TierStates
from radixkv.tiers.transfer_ends import TransferEnds
from radixkv.tiers.transfer_log import TransferLog, result_of

# Blocks that are copied out at a time: this many are not evictable, and take that much memory.
MAX_COPIED_BLOCKS = 64
# Ended requests whose blocks wait to be looked at; of more, the oldest are not saved.
MAX_OFFERS = 256


class _Piece(NamedTuple):
    """Blocks to copy out, with their text.

    Attributes:
        takers: tiers that want some of them, and which, by their index in `run`.
    """

    run: BlockRun
    token_ids: TokenIds
    namespace: NamespaceName
    takers: list[tuple[MeasuredTier, range]]

    def part(self, first: int, stop: int) -> _Piece:
        """Return its blocks [first, stop), and the tiers that want some of them."""
        takers = [
            (tier, range(max(blocks.start, first) - first, min(blocks.stop, stop) - first))
            for tier, blocks in self.takers
            if blocks.start < stop and blocks.stop > first
        ]
        return _Piece(self.run.part(first, stop), self.token_ids, self.namespace, takers)


class _Save(NamedTuple):
    """Copy of blocks under way; `lease`: on blocks that it still reads."""

    number: int
    piece: _Piece
    lease: Lease | None
    copy: BlockCopy


class Saves:
    """Saves of an engine: started, ended and counted by the engine's thread alone.

    Args:
        memory: the blocks' contents.
        clock: seconds.
        states: saves states beside the K/V; None: the model has none.

    Attributes:
        saves_all: tiers are offered the whole cached part of a text, not the selected blocks alone.
        patience: time that requests may still wait for blocks being copied out.
    """

    def __init__(
        self,
        tiers: Sequence[MeasuredTier],
        cache: PrefixCache,
        memory: BlockMemory,
        clock: Callable[[], float],
        ends: TransferEnds,
        log: TransferLog,
        states: TierStates | None = None,
    ) -> None:
        self._states = states
        self.saves_all = False
        self.patience = Patience()
        self._tiers = tiers
        self._blocks = cache.block_leases
        self._memory = memory
        self._clock = clock
        self._ends = ends
        self._log = log
        self._offers: deque[tuple[TokenIds, NamespaceName]] = deque(maxlen=MAX_OFFERS)
        self._pieces: deque[_Piece] = deque()
        self._save: _Save | None = None  # under way

    def __len__(self) -> int:
        """Number of texts and pieces to save or being copied."""
        num_states = 0 if self._states is None else len(self._states)
        return len(self._offers) + len(self._pieces) + num_states + self.is_copying

    @property
    def is_copying(self) -> bool:
        """True if blocks are being copied out."""
        return self._save is not None

    @property
    def holds_blocks(self) -> bool:
        """True if the copy under way keeps blocks from others."""
        return self._save is not None and self._save.lease is not None

    @property
    def is_due(self) -> bool:
        """True if a copy could begin. O(1)."""
        return bool(self._pieces or (self._offers and not self._states)) and not self.is_copying

    def offer(self, token_ids: TokenIds, namespace: NamespaceName) -> None:
        """Offer the cached part of a text for saving, soon. O(1)."""
        self._offers.append((token_ids, namespace))

    def cached_texts(self, limit: int) -> list[tuple[EncodedTokens, NamespaceName]]:
        """Return cached runs that could be offered, the latest used first."""
        return list(self._blocks.cached_texts(limit))

    def touch(self, token_ids: TokenIds, namespace: NamespaceName) -> None:
        """Count the cached part of a text as used after all earlier uses, in tiers, too."""
        for run in self._blocks.cached_runs(token_ids, namespace):
            for tier in self._tiers:
                try:
                    states = None if self._states is None else run.states()
                    if states is not None:
                        tier.touch(states)
                    tier.touch(run)
                except Exception as error:
                    self._log.failed("save", error, tier)

    # ------------------------------------------------------------------ starting

    def start(self) -> None:
        """Continue with the offers; call it once all committed tokens have been computed.

        Requests waiting for blocks come first: else the next copy would take the blocks just released.
        """
        # One text's states are copied at a time.
        while self._offers and not self._pieces and not self._states:
            token_ids, namespace = self._offers.popleft()
            for run in self._blocks.cached_runs(token_ids, namespace):
                self._pieces.extend(self._wanted(run, token_ids, namespace))
        while self._pieces and not self.is_copying:
            self._start_copy(self._pieces.popleft())

    def _wanted(self, run: BlockRun, token_ids: TokenIds, namespace: NamespaceName) -> Iterator[_Piece]:
        """Return the parts of a run that tiers want, in pieces to copy in order."""
        takers, ends = [], []
        for tier in self._tiers:
            try:
                chosen = run if self.saves_all else tier.selected(run)
                blocks = tier.wants(chosen)
                ends.append((tier, chosen.end))
                if blocks.start < blocks.stop:
                    takers.append((tier, blocks))
            except Exception as error:
                self._log.failed("save", error, tier)
        if self._states is not None:
            self._states.save(run, token_ids, namespace, ends)
        if not takers:
            return
        whole = _Piece(run, token_ids, namespace, takers)
        end = max(blocks.stop for _, blocks in takers)
        for first in range(min(blocks.start for _, blocks in takers), end, MAX_COPIED_BLOCKS):
            piece = whole.part(first, min(first + MAX_COPIED_BLOCKS, end))
            if piece.takers:
                yield piece

    def _start_copy(self, piece: _Piece) -> None:
        """Copy the part of a piece that is still cached."""
        run = piece.run
        lease = self._blocks.hold(run, piece.token_ids, piece.namespace)
        if lease is None:
            _drop(piece)
            return
        first, num_held = run.start // run.block_size, lease.num_tokens // run.block_size
        if num_held - first < len(run):
            _drop(piece.part(num_held - first, len(run)))
            piece = piece.part(0, num_held - first)
        try:
            copy = self._memory.save(lease.block_table[first:num_held].tolist())
        except Exception as error:
            lease.release(used=False)
            self._failed(piece, error)
            return
        number = self._ends.expect(copy)
        if not copy.reads_pool:
            lease.release(used=False)
        self._save = _Save(number, piece, lease if copy.reads_pool else None, copy)

    # ------------------------------------------------------------------ stopping

    def make_room(self, is_rival: Callable[[NamespaceName], bool], *, at_once: bool) -> bool:
        """Stop the copy under way to free its blocks; False: there is none.

        Args:
            is_rival: tells if blocks of a namespace would help.
            at_once: no request waits until all of them have been copied.
        """
        if self._save is None or self._save.lease is None or not is_rival(self._save.lease.namespace):
            return False
        if at_once:
            self.stop_copy()
        else:
            while self._save is not None and self.stop_copy(self.patience.left_s) and self._pieces:
                self._start_copy(self._pieces.popleft())
        return True

    def stop_copy(self, help_s: float = 0.0) -> bool:
        """End the copy under way: its blocks are free, copied ones are saved; return True if all of them are.

        Args:
            help_s: seconds for which this thread copies, too.
        """
        save = self._save
        assert save is not None
        started = self._clock()
        num_stopped = self._log.counts.stopped_saves
        save.copy.stop(help_s)
        self.patience.spend(self._clock() - started)
        self.ended(save.number)
        return num_stopped == self._log.counts.stopped_saves

    # ------------------------------------------------------------------ ending

    def ended(self, number: int) -> None:
        """Note that the copy of that number is done, if it is the one under way."""
        save = self._save
        if save is None or save.number != number:
            return
        self._save = None
        if save.lease is not None:
            save.lease.release(used=False)
        data, error = result_of(save.copy)
        if error is not None:
            self._failed(save.piece, error)
            return
        if len(data) < len(save.piece.run):
            self._log.counts.stopped_saves += 1
            self._pieces.appendleft(save.piece.part(len(data), len(save.piece.run)))
        for tier, blocks in save.piece.part(0, len(data)).takers:
            try:
                tier.save(save.piece.run.part(blocks.start, blocks.stop), data[blocks.start : blocks.stop])
                self._log.counts.saved_blocks += len(blocks)
            except Exception as refused:
                tier.dropped(len(blocks))
                self._log.counts.failed_saves += 1
                self._log.failed("save", refused, tier)

    def _failed(self, piece: _Piece, error: BaseException) -> None:
        _drop(piece)
        self._log.counts.failed_saves += 1
        self._log.failed("save", error)

    def close(self) -> None:
        """Forget the copies under way without changing the cache, which is no longer used.

        Its blocks may have changed hands: copied data is not trusted.
        """
        if self._save is not None:
            if self._save.lease is not None:
                self._save.copy.stop()
            _drop(self._save.piece)
            self._save = None
        for piece in self._pieces:
            _drop(piece)
        self._offers.clear()
        self._pieces.clear()


def _drop(piece: _Piece) -> None:
    """Count wanted blocks that are not saved."""
    for tier, blocks in piece.takers:
        tier.dropped(len(blocks))


# Requests wait for copies for at most this share of the time of steps, and this many seconds at once.
_SHARE = 0.01
_MAX_S = 0.1


class Patience:
    """Budget of copies: a hundredth of the time that steps take, saved up to a tenth of a second.

    Attributes:
        left_s: seconds that requests may wait now.
    """

    def __init__(self) -> None:
        self.left_s = 0.0

    def earn(self, step_s: float) -> None:
        """Add to the budget for a step of this duration."""
        self.left_s = min(self.left_s + _SHARE * step_s, _MAX_S)

    def spend(self, seconds: float) -> None:
        """Take waiting time from the budget."""
        self.left_s = max(0.0, self.left_s - seconds)
