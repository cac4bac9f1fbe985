# SPDX-License-Identifier: Apache-2.0
"""WithoutStates: the states' and windows' part of `radixkv.engine.runner.Runner` for runners without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from radixkv.model.without_windows import WithoutWindows

if TYPE_CHECKING:
    from radixkv.model.block_copy import BlockCopy
    from radixkv_kernels import Bytes


class WithoutStates(WithoutWindows):
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

    def save_states(self, slots: Sequence[int]) -> BlockCopy:
        """Never called.

        Raises:
            AssertionError: always: there is no slot that could be named.
        """
        raise AssertionError(f"a runner without states has no slots {list(slots)}")

    def load_states(self, slots: Sequence[int], data: Sequence[Bytes]) -> None:
        """Never called.

        Raises:
            AssertionError: always: there is no slot that could be named.
        """
        raise AssertionError(f"a runner without states has no slots {list(slots)}")
