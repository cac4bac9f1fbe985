# SPDX-License-Identifier: Apache-2.0
"""WithoutWindows: the windows' part of `radixkv.engine.runner.Runner` for runners that keep windows whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.cache.states.window_pool import WindowSpec
    from radixkv.model.block_copy import BlockCopy
    from radixkv_kernels import Bytes


class WithoutWindows:
    """Mixin of runners that free no windows: there are no blocks of them to save or load."""

    @property
    def windows(self) -> WindowSpec | None:
        return None

    def save_windows(self, blocks: Sequence[int]) -> BlockCopy:
        """Never called.

        Raises:
            AssertionError: always: there is no block that could be named.
        """
        raise AssertionError(f"a runner that keeps windows whole has no blocks {list(blocks)} of them")

    def load_windows(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """Never called.

        Raises:
            AssertionError: always: there is no block that could be named.
        """
        raise AssertionError(f"a runner that keeps windows whole has no blocks {list(blocks)} of them")
