# SPDX-License-Identifier: Apache-2.0
"""WindowPool: blocks for the K/V of layers with a sliding window, and the kept windows that are made of them.

Such a layer sees the last W tokens only, so its blocks come from a pool of their own. A request has those of
its latest tokens; a *kept window* is the list of blocks before a grid point, with which a later request can
go on there. Full blocks are never written again, so requests and kept windows share them:

    request      . . . . [b4] [b5] [b6] [b7] ->        holders: b4 2, b5 2, b6 1, b7 1
    kept window          [b4  b5]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radixkv.cache.states.checkpoint import GRID
from radixkv.cache.states.state_pool import StatePool

#: Guessed tokens of a request in a step, at most: blocks for them stay when the guesses were wrong.
MAX_GUESSES = GRID


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """Sizes of the memory for layers with windows.

    Attributes:
        tokens: positions that such a layer sees, the query's own included; the most of all layers.
        num_blocks: blocks of the pool.
        step_tokens: most tokens of a step.
        block_bytes: of one block, all layers with a window together.
    """

    tokens: int
    num_blocks: int
    step_tokens: int
    block_bytes: int = 0

    def blocks_per_window(self, block_size: int) -> int:
        """Return the most blocks of a kept window, and at least one."""
        return max(1, (self.tokens + block_size - 2) // block_size)

    def window_before(self, position: int, block_size: int) -> range:
        """Return the blocks of a text, by index, with the window before a grid point."""
        return range(max(0, position - self.tokens + 1) // block_size, position // block_size)

    def blocks_per_request(self, block_size: int) -> int:
        """Return the most blocks of a running request, beside those that its share of a step fills.

        The window before the last grid point, the tokens since, guesses, and a partial block at either end;
        one more where a step is planned ahead.
        """
        return (self.tokens + GRID + MAX_GUESSES) // block_size + 3

    def max_requests(self, block_size: int) -> int:
        """Return the most requests that may run, so that a step never lacks a block."""
        rest = self.num_blocks - -(-self.step_tokens // block_size)
        return rest // self.blocks_per_request(block_size)


class WindowPool:
    """Counts the holders of blocks. A kept window is named by a number, its *slot*, as a state is.

    Attributes:
        blocks: counts the holders of each block: requests and kept windows.
    """

    def __init__(self, spec: WindowSpec, block_size: int) -> None:
        self.blocks = StatePool(spec.num_blocks)
        self._per_window = spec.blocks_per_window(block_size)
        self._kept: dict[int, Sequence[int]] = {}
        self._next = 0

    def __repr__(self) -> str:
        return f"WindowPool({self.blocks.num_slots} blocks, {self.blocks.num_free} free)"

    @property
    def num_slots(self) -> int:
        """Whole windows that the blocks are enough for, if they share none."""
        return self.blocks.num_slots // self._per_window

    @property
    def num_free(self) -> int:
        """Whole windows that the free blocks are enough for."""
        return self.blocks.num_free // self._per_window

    def keep(self, blocks: Sequence[int]) -> int:
        """Return the slot of a new kept window, which holds `blocks` until it is dropped. O(blocks)."""
        for block in blocks:
            self.blocks.share(block)
        slot = self._next
        self._next += 1
        self._kept[slot] = blocks
        return slot

    def kept(self, slot: int) -> Sequence[int]:
        """Return the blocks of a kept window. O(1)."""
        return self._kept[slot]

    def drop(self, slot: int) -> None:
        """Drop a kept window, and free its blocks that have no other holder. O(blocks)."""
        for block in self._kept.pop(slot):
            self.blocks.drop(block)

    def holders(self, slot: int) -> int:
        """Return how many hold the least held block of a window; 1: to drop it frees some. O(blocks)."""
        return min((self.blocks.holders(block) for block in self._kept[slot]), default=1)

    def check(self, kept: Iterable[int], held: Iterable[int]) -> None:
        """Assert that the tree has these kept windows, that leases hold these blocks, and the others are
        free."""
        assert sorted(kept) == sorted(self._kept), "kept windows are in no checkpoint"
        self.blocks.check((block for blocks in self._kept.values() for block in blocks), held)


class StateWindowPool(WindowPool):
    """Kept windows with the state after them: one slot names both, and both go with it.

    Attributes:
        states: counts the holders of each state's slot.
    """

    def __init__(self, spec: WindowSpec, block_size: int, num_states: int) -> None:
        super().__init__(spec, block_size)
        self.states = StatePool(num_states)
        self._state_of: dict[int, int] = {}

    @property
    def num_slots(self) -> int:
        return min(super().num_slots, self.states.num_slots)

    def keep_both(self, blocks: Sequence[int], state: int) -> int:
        """Return the slot of a kept window and of a state, one of whose holders it takes over. O(blocks)."""
        slot = self.keep(blocks)
        self._state_of[slot] = state
        return slot

    def state(self, slot: int) -> int:
        """Return the slot of a kept state. O(1)."""
        return self._state_of[slot]

    def drop(self, slot: int) -> None:
        super().drop(slot)
        self.states.drop(self._state_of.pop(slot))

    def state_holders(self, slot: int) -> int:
        """Return how many hold the state; 1: to drop it frees its slot. O(1)."""
        return self.states.holders(self._state_of[slot])
