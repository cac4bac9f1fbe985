# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: which states stay in the tree, and which one is evicted for a new one.

A checkpoint is worth the tokens that would have to be computed again without it: from the nearest one above
that is not superseded. Eviction is GreedyDual over that worth: a touched checkpoint gets the clock plus its
worth, and the clock is set to the priority of whatever was evicted last.

A hit that goes on below leaves a deeper checkpoint behind, so it *supersedes* the one it found: worth a
quarter. A later hit that goes on with other tokens shows that prompts part there: a junction, of full worth.

    system prompt ── o ─┬─ turn 1 ── (o) ── turn 2 ── o       o: a checkpoint, (o): superseded
                        └─ turn 1' ── o

`base` leaves superseded ones out: else a superseded parent would make its child look cheap, and both go.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from radixkv.cache.accounts import BlockAccount
from radixkv.cache.keys import TOKEN_BYTES
from radixkv.cache.node import Node
from radixkv.cache.reporting.events import ChangeLog
from radixkv.cache.states.checkpoint import GRID, Checkpoint
from radixkv.cache.states.state_pool import StatePool
from radixkv.errors import ConfigError

SUPERSEDED_WORTH = 0.25
MAX_SPARE = 2  # slots that are kept free where there are many: what a prompt's step takes
_HEIR_TOKENS = 8 * GRID  # of a hit's continuation, to see whether the next one goes the same way


class Checkpoints:
    """The checkpoints of one tree. It alone writes `Node.states`.

    Args:
        num_slots: states that fit the memory, including states of running requests.
        block_size: tokens per block.
        num_blocks: of the pool; a quota of some of them is one of as large a share of the slots.

    Attributes:
        pool: the contents of checkpoints.
        slots: the states' slots, which are all that is in `pool` unless windows are freed.
        version: changes with every checkpoint that comes or goes.
        num_evicted: checkpoints that made room for others, since the start.
        changes: receives each that comes or goes; None: nobody has subscribed.

    Raises:
        ConfigError: a grid point does not end a whole block, or there are too few slots for one request.
    """

    def __init__(self, num_slots: int, block_size: int, num_blocks: int) -> None:
        if GRID % block_size:
            raise ConfigError(
                f"a model with checkpoints needs a block_size that divides {GRID}, not {block_size} "
                "(flag --block-size)"
            )
        if num_slots < 2:
            raise ConfigError(f"a running request needs two states, and there is memory for {num_slots}")
        self.pool = self.slots = StatePool(num_slots)
        self.version = 0
        self.num_evicted = 0
        self.changes: ChangeLog | None = None
        self._spare = min(MAX_SPARE, num_slots // 16)
        self._block_size, self._num_blocks = block_size, num_blocks
        self._all: dict[Checkpoint, None] = {}
        self._heap: list[tuple[tuple[float, int], int, Checkpoint]] = []  # lazily: old entries are skipped
        self._clock = 0.0
        self._tick = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._all)

    def __repr__(self) -> str:
        return f"Checkpoints({len(self._all)} in the tree, {self.pool!r})"

    @property
    def max_requests(self) -> int:
        """Most requests that may run: two slots each, so that a step never lacks one."""
        return self.pool.num_slots // 2

    def figures(self) -> dict[str, int]:
        """Return the fields of `CacheStats` about checkpoints. O(checkpoints)."""
        return {
            **self._memory(),
            "checkpoints": len(self._all),
            "superseded_checkpoints": sum(one.is_superseded for one in self._all),
            "evicted_checkpoints": self.num_evicted,
        }

    def _memory(self) -> dict[str, int]:
        return {"state_slots": self.pool.num_slots, "free_state_slots": self.pool.num_free}

    # ------------------------------------------------------------------ lookup

    def deepest(self, node: Node, end: int) -> Checkpoint | None:
        """Return the deepest checkpoint of the path to `node` that sums up at most `end` tokens. O(path)."""
        current: Node | None = node
        while current is not None:
            states = current.states
            if states is not None:
                most = (end - current.start) // self._block_size
                offset = max([offset for offset in states if offset <= most], default=None)
                if offset is not None:
                    return states[offset]
            current = current.parent
        return None

    def hit(self, checkpoint: Checkpoint, data: bytes) -> None:
        """Count a request with the tokens `data` (encoded) that resumes at a checkpoint. O(1)."""
        checkpoint.num_hits += 1
        # The deepest checkpoint that it leaves behind for a request with the same tokens.
        end = (len(data) // TOKEN_BYTES - 1) // GRID * GRID
        if end > checkpoint.end:
            start = checkpoint.end
            heir = bytes(data[start * TOKEN_BYTES : min(end, start + _HEIR_TOKENS) * TOKEN_BYTES])
            if checkpoint.heir is None:
                checkpoint.heir = heir
            if checkpoint.heir == heir and checkpoint.num_hits == 1:
                checkpoint.is_superseded = True
            elif checkpoint.heir != heir:
                checkpoint.is_superseded = False
        self._touch(checkpoint)

    # ------------------------------------------------------------------ keeping

    def contents(self, state: int, window: Sequence[int]) -> int:
        """Return the slot of a new checkpoint's contents, which takes over one holder of the state. O(1)."""
        return state

    def state_slot(self, checkpoint: Checkpoint) -> int:
        """Return the slot of a checkpoint's state. O(1)."""
        return checkpoint.slot

    def add(self, node: Node, end: int, slot: int) -> None:
        """Keep a state after the first `end` tokens of the path to `node`, which has them in whole blocks.

        The tree takes over one holder of the slot. Where it has such a checkpoint already, that one stays.
        O(path + log checkpoints), with a quota O(checkpoints).
        """
        while node.start >= end:
            assert node.parent is not None
            node = node.parent
        offset = (end - node.start) // self._block_size
        states = node.states
        old = None if states is None else states.get(offset)
        if old is not None:
            self.pool.drop(slot)
            self._touch(old)
            return
        above = self.deepest(node, end - GRID)
        base = 0 if above is None else above.base if above.is_superseded else above.end
        if not self._has_share(node.owner.account):
            self.pool.drop(slot)
            return
        checkpoint = Checkpoint(slot, end, node.identity(offset), base, node)
        if node.states is None:
            node.states = {}
        node.states[offset] = checkpoint
        self._all[checkpoint] = None
        self.version += 1
        if self.changes is not None:
            self.changes.resume_point(checkpoint.identity, is_kept=True)
        self._touch(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out of the tree. O(checkpoints of its node)."""
        node = checkpoint.node
        assert node is not None
        assert node.states is not None
        offset = next(offset for offset, other in node.states.items() if other is checkpoint)
        del node.states[offset]
        if not node.states:
            node.states = None
        checkpoint.node = None
        del self._all[checkpoint]
        self.version += 1
        if self.changes is not None:
            self.changes.resume_point(checkpoint.identity, is_kept=False)
        self.pool.drop(checkpoint.slot)

    def split(self, lower: Node, upper: Node, num_blocks: int) -> None:
        """Divide a node's checkpoints: `upper` has got its first `num_blocks` blocks. O(checkpoints)."""
        states = lower.states or {}
        above = {offset: c for offset, c in states.items() if offset <= num_blocks}
        below = {offset - num_blocks: c for offset, c in states.items() if offset > num_blocks}
        for checkpoint in above.values():
            checkpoint.node = upper
        upper.states, lower.states = above or None, below or None

    def cut(self, node: Node, num_blocks: int) -> None:
        """Forget a node's checkpoints after its first `num_blocks` whole blocks. O(checkpoints)."""
        for offset, checkpoint in list((node.states or {}).items()):
            if offset > num_blocks:
                self.forget(checkpoint)

    def forget_all(self) -> None:
        """Take all checkpoints out of the tree; running requests keep their bases. O(checkpoints)."""
        for checkpoint in list(self._all):
            self.forget(checkpoint)
        self._heap.clear()

    # ------------------------------------------------------------------ room

    def take_slot(self) -> int | None:
        """Return a slot to write a state into, evicting the checkpoint that is worth least.

        Those whose slot a request holds would give nothing; pinned ones, and those under a quota's floor, go
        only when nothing else does. None: requests hold all slots. O(log checkpoints), amortised.
        """
        if not self.pool.num_free:
            victim = self._victim(spare_some=False)
            if victim is None:
                return None
            self._evict(victim)
        return self.pool.take()

    def free_slots(self) -> None:
        """Free the slots for the next step while the newest states count, and the states they supersede.

        A request holds the state at which it resumed while its step takes slots: eviction at that time would
        spare just the superseded state, and take a better one. O(log checkpoints), amortised.
        """
        while self.pool.num_free < self._spare:
            victim = self._victim(spare_some=True)
            if victim is None:
                return
            self._evict(victim)

    def _evict(self, victim: Checkpoint) -> None:
        self._clock = max(self._clock, victim.priority[0])
        self.forget(victim)
        self.num_evicted += 1

    def _victim(self, *, spare_some: bool, holders: Callable[[int], int] | None = None) -> Checkpoint | None:
        """Return the checkpoint to evict; None: requests hold all, or those left are to be spared.

        Args:
            holders: of a slot's contents: with more than one, eviction frees nothing; None: the pool's.
        """
        holders = holders or self.pool.holders
        aside: list[tuple[tuple[float, int], int, Checkpoint]] = []
        spared: Checkpoint | None = None
        found: Checkpoint | None = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            checkpoint = entry[2]
            if checkpoint.node is None or checkpoint.priority != entry[0]:
                continue
            if holders(checkpoint.slot) > 1:
                aside.append(entry)
            elif checkpoint.node.pins or self._is_below_floor(checkpoint.node.owner.account):
                aside.append(entry)
                spared = spared or checkpoint
            else:
                found = checkpoint
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found or (None if spare_some else spared)

    def check(self, leases: Iterable[Any]) -> None:
        """Assert that the tree and `leases` (`LeaseStates`, `LeaseWindows`) hold what is counted as held."""
        self.pool.check(
            [checkpoint.slot for checkpoint in self],
            [slot for lease in leases for slot in lease.held_slots()],
        )

    def _slots_of(self, num_blocks: int) -> int:
        return num_blocks * self.pool.num_slots // self._num_blocks

    def _of_account(self, account: BlockAccount) -> list[Checkpoint]:
        return [c for c in self._all if c.node is not None and c.node.owner.account is account]

    def _is_below_floor(self, account: BlockAccount) -> bool:
        """Return True if a floor keeps all checkpoints of an account: as large a share as of blocks."""
        return bool(account.floor) and len(self._of_account(account)) <= self._slots_of(account.floor)

    def _has_share(self, account: BlockAccount) -> bool:
        """Make room for one more checkpoint under an account's ceiling, if it must by one of its own."""
        if account.ceiling is None:
            return True
        most = max(1, self._slots_of(account.ceiling))
        own = self._of_account(account)
        if len(own) < most:
            return True
        unpinned = [
            checkpoint for checkpoint in own if checkpoint.node is not None and not checkpoint.node.pins
        ]
        if not unpinned:
            return False
        self.forget(min(unpinned, key=lambda checkpoint: checkpoint.priority))
        self.num_evicted += 1
        return True

    def _touch(self, checkpoint: Checkpoint) -> None:
        self._tick += 1
        worth = (checkpoint.end - checkpoint.base) * (SUPERSEDED_WORTH if checkpoint.is_superseded else 1.0)
        checkpoint.priority = (self._clock + worth, self._tick)
        heapq.heappush(self._heap, (checkpoint.priority, checkpoint.slot, checkpoint))
        if len(self._heap) > 64 + 4 * len(self._all):
            self._heap = [(c.priority, c.slot, c) for c in self._all]
            heapq.heapify(self._heap)
