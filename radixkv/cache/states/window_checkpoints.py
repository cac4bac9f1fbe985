# SPDX-License-Identifier: Apache-2.0
"""WindowCheckpoints: the points of the tree at which requests can go on, of a model that frees its windows.

The K/V of layers that see everything is in the tree's blocks, as for other models. The K/V of layers with a
window is a state of sorts: of use only where it was kept, at a grid point. Places, worth, and the order of
eviction are those of states.
"""

from __future__ import annotations

from radixkv.cache.states.checkpoint import Checkpoint
from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.cache.states.window_pool import WindowPool, WindowSpec
from radixkv.errors import ConfigError


class WindowCheckpoints(Checkpoints):
    """The kept windows of one tree; arguments as for `Checkpoints`.

    Attributes:
        spec: sizes of the pool.
        block_size: tokens per block.

    Raises:
        ConfigError: a grid point does not end a whole block, or there are too few blocks for one request.
    """

    pool: WindowPool  # type: ignore[assignment]
    frees_windows = True

    def __init__(self, spec: WindowSpec, block_size: int, num_blocks: int) -> None:
        pool = WindowPool(spec, block_size)
        super().__init__(max(2, pool.num_slots), block_size, num_blocks)
        self.spec, self.pool, self.block_size = spec, pool, block_size
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
        blocks = self.pool.blocks
        count = len(self.spec.window_before(end, self.block_size))
        if not self._make_room(count, spare_some=True):
            return None
        taken = [block for _ in range(count) if (block := blocks.take()) is not None]
        slot = self.pool.keep(taken)
        for block in taken:
            blocks.drop(block)
        return slot

    def _make_room(self, num_blocks: int, *, spare_some: bool) -> bool:
        while self.pool.blocks.num_free < num_blocks:
            victim = self._victim(spare_some=spare_some)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _victim(self, *, spare_some: bool) -> Checkpoint | None:
        victim = super()._victim(spare_some=spare_some)
        if victim is None and not spare_some:  # each of the others' blocks is in two windows
            victim = min(self._all, key=lambda one: one.priority, default=None)
        return victim


def make_checkpoints(
    num_slots: int, windows: WindowSpec | None, block_size: int, num_blocks: int
) -> Checkpoints:
    """Make the collection of checkpoints of a model that frees its windows, or of one with states."""
    if windows is not None:
        return WindowCheckpoints(windows, block_size, num_blocks)
    return Checkpoints(num_slots, block_size, num_blocks)
