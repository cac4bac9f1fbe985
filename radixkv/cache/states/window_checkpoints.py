# SPDX-License-Identifier: Apache-2.0
"""WindowCheckpoints: the points of the tree at which requests can go on, of a model that frees its windows.

The K/V of layers that see everything is in the tree's blocks, as for other models. The K/V of layers with a
window is a state of sorts: of use only where it was kept, at a grid point. Places, worth, and the order of
eviction are those of states. Where a model has states, too, a checkpoint is a state and a window: they come
together, and the want of either takes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from radixkv.cache.states.checkpoint import Checkpoint
from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.cache.states.window_pool import StateWindowPool, WindowPool, WindowSpec
from radixkv.errors import ConfigError


class WindowCheckpoints(Checkpoints):
    """The kept windows of one tree; arguments as for `Checkpoints`.

    Attributes:
        spec: sizes of the pool.
        block_size: tokens per block.
        num_evicted_for_windows: of the evicted ones, those that made room for blocks of windows.

    Raises:
        ConfigError: a grid point does not end a whole block, or there are too few blocks for one request.
    """

    pool: WindowPool  # type: ignore[assignment]

    def __init__(
        self, spec: WindowSpec, block_size: int, num_blocks: int, *, pool: WindowPool | None = None
    ) -> None:
        pool = pool or WindowPool(spec, block_size)
        super().__init__(max(2, pool.num_slots), block_size, num_blocks)
        self.spec, self.pool, self.block_size = spec, pool, block_size
        self.num_evicted_for_windows = 0
        if self.max_requests < 1:
            raise ConfigError(
                f"a running request needs up to {spec.blocks_per_request(block_size)} blocks for windows of "
                f"{spec.tokens} tokens, besides {-(-spec.step_tokens // block_size)} for a step, and there "
                f"is memory for {spec.num_blocks}; raise --window-memory, or keep windows whole with "
                "--window-memory 0"
            )

    @property
    def max_requests(self) -> int:
        return self.spec.max_requests(self._block_size)

    def _memory(self) -> dict[str, int]:
        blocks = self.pool.blocks
        return {"window_blocks": blocks.num_slots, "free_window_blocks": blocks.num_free}

    def take_block(self) -> int | None:
        """Return a block to write to, evicting checkpoints of least worth; None: requests hold all."""
        return self.pool.blocks.take() if self._make_room(1, spare_some=False) else None

    def take_window(self, end: int) -> int | None:
        """Return the slot of a new kept window before a grid point, to be filled; None: there is no room.

        Checkpoints worth less than others make room; pinned ones stay, and blocks that requests share.
        """
        count = len(self.spec.window_before(end, self.block_size))
        if not self._make_room(count, spare_some=True):
            return None
        blocks = self.pool.blocks
        taken = [block for _ in range(count) if (block := blocks.take()) is not None]
        slot = self._kept(taken)
        for block in taken:
            blocks.drop(block)
        return slot

    def _kept(self, blocks: Sequence[int]) -> int:
        return self.pool.keep(blocks)

    def _make_room(self, num_blocks: int, *, spare_some: bool) -> bool:
        while self.pool.blocks.num_free < num_blocks:
            victim = self._victim(spare_some=spare_some)
            if victim is None and not spare_some:  # each of the others' blocks is in two windows
                victim = min(self._all, key=lambda one: one.priority, default=None)
            if victim is None:
                return False
            self._evict(victim)
            self.num_evicted_for_windows += 1
        return True


class StateWindowCheckpoints(WindowCheckpoints):
    """Checkpoints of a model that has states and frees its windows; arguments as for both."""

    pool: StateWindowPool

    def __init__(self, num_slots: int, spec: WindowSpec, block_size: int, num_blocks: int) -> None:
        if num_slots < 2:
            raise ConfigError(f"a running request needs two states, and there is memory for {num_slots}")
        super().__init__(spec, block_size, num_blocks, pool=StateWindowPool(spec, block_size, num_slots))
        self.slots = self.pool.states

    @property
    def max_requests(self) -> int:
        return min(super().max_requests, self.slots.num_slots // 2)

    def _memory(self) -> dict[str, int]:
        slots = self.slots
        return {
            **super()._memory(),
            "state_slots": slots.num_slots,
            "free_state_slots": slots.num_free,
            "evicted_for_windows": self.num_evicted_for_windows,
        }

    def contents(self, state: int, window: Sequence[int]) -> int:
        return self.pool.keep_both(window, state)

    def state_slot(self, checkpoint: Checkpoint) -> int:
        return self.pool.state(checkpoint.slot)

    def take_slot(self) -> int | None:
        """Return a slot to write a state into, see `Checkpoints.take_slot`."""
        return self.slots.take() if self._free_states(1, spare_some=False) else None

    def take_window(self, end: int) -> int | None:
        """Return the slot of a new kept window and its state, see `WindowCheckpoints.take_window`."""
        if not self._free_states(1, spare_some=True):
            return None
        return super().take_window(end)

    def _kept(self, blocks: Sequence[int]) -> int:
        state = self.slots.take()
        assert state is not None
        return self.pool.keep_both(blocks, state)

    def free_slots(self) -> None:
        self._free_states(self._spare, spare_some=True)
        before = self.num_evicted
        super().free_slots()
        self.num_evicted_for_windows += self.num_evicted - before

    def _free_states(self, count: int, *, spare_some: bool) -> bool:
        while self.slots.num_free < count:
            victim = self._victim(spare_some=spare_some, holders=self.pool.state_holders)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def check(self, leases: Iterable[Any]) -> None:
        leases, kept = list(leases), [checkpoint.slot for checkpoint in self]
        self.pool.check(kept, [block for lease in leases for block in lease.windows.held()])
        self.slots.check(
            map(self.pool.state, kept), [slot for lease in leases for slot in lease.held_slots()]
        )


def make_checkpoints(
    num_slots: int, windows: WindowSpec | None, block_size: int, num_blocks: int
) -> Checkpoints:
    """Make the collection of checkpoints of a model with states (slots for them), freed windows, or both."""
    if windows is not None and num_slots:
        return StateWindowCheckpoints(num_slots, windows, block_size, num_blocks)
    if windows is not None:
        return WindowCheckpoints(windows, block_size, num_blocks)
    return Checkpoints(num_slots, block_size, num_blocks)
