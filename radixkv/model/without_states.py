# SPDX-License-Identifier: Apache-2.0
"""WithoutStates: the states' and windows' part of `radixkv.engine.runner.Runner` for runners without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.cache.states.window_pool import WindowSpec
    from radixkv.model.block_copy import BlockCopy
    from radixkv_kernels import Bytes


class WithoutStates:
    """Mixin of runners without states or freed windows: there is nothing of them to save or load."""

    @property
    def num_state_slots(self) -> int:
        return 0

    @property
    def bytes_per_state(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return 0

    @property
    def windows(self) -> WindowSpec | None:
        return None

    def save_states(self, slots: Sequence[int]) -> BlockCopy:
        """Never called.

        Raises:
            AssertionError: always: there is no slot that could be named.
        """
        raise AssertionError(f"a runner without states and windows has none at {list(slots)}")

    def load_states(self, slots: Sequence[int], data: Sequence[Bytes]) -> None:
        """Never called; see `save_states`."""
        self.save_states(slots)

    def save_windows(self, blocks: Sequence[int]) -> BlockCopy:
        """Never called; see `save_states`."""
        return self.save_states(blocks)

    def load_windows(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """Never called; see `save_states`."""
        self.save_states(blocks)
