# SPDX-License-Identifier: Apache-2.0
"""Copies to tiers that end late, in any order, or fail: scripted ones, and real ones that are held up."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from paged_language_model import PagedHashModel
from stateful_hash_model import StatefulHashModel
from windowed_hash_model import WindowedHashModel

from radixkv.model.block_copy import BlockCopy
from radixkv.model.host_copies import HostCopies


class LateCopies:
    """Copies with the contents of when they were asked for, as a GPU makes them, ended by `act`.

    Args:
        random: which end, and which fail.
    """

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._pending: list[BlockCopy] = []
        self.is_late = True

    def of(self, copy: BlockCopy) -> BlockCopy:
        """A copy with the contents of one that is over."""
        contents, fails = copy.result(), self._random.random() < 0.05

        def end(row: int) -> None:
            if fails:
                raise OSError("the device is gone")

        late = BlockCopy(contents, end, reads_pool=False)
        self._pending.append(late)
        if not self.is_late:
            self.end_all()
        return late

    def act(self) -> None:
        """End some of them."""
        while self._pending and self._random.random() < 0.4:
            self._pending.pop(self._random.randrange(len(self._pending))).run()

    def end_all(self) -> None:
        """End all of them, and later ones at once."""
        self.is_late = False
        while self._pending:
            self._pending.pop().run()


class _LateMemory:
    """Slots, or blocks of windows, that are copied late."""

    def __init__(self, memory: Any, copies: LateCopies) -> None:
        self._memory, self._copies = memory, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def save(self, places: Sequence[int]) -> BlockCopy:
        return self._copies.of(self._memory.save(places))


class _CopiedLate(PagedHashModel):
    copies: LateCopies | None = None

    def copy_late(self, copies: LateCopies) -> None:
        """Let all copies from now on be these."""
        self.copies = copies
        if self.states is not None:
            self.states = _LateMemory(self.states, copies)
        if self.windows is not None:
            self.windows = _LateMemory(self.windows, copies)

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        copy = super().save(blocks)
        return copy if self.copies is None else self.copies.of(copy)


class LateStatefulModel(_CopiedLate, StatefulHashModel):
    """A `StatefulHashModel` with late copies."""


class LateWindowedModel(_CopiedLate, WindowedHashModel):
    """A `WindowedHashModel` with late copies."""


class LateStateWindowedModel(_CopiedLate, StatefulHashModel, WindowedHashModel):
    """A model with states that frees its windows, too, with late copies."""


class HeldMemory(HostCopies):
    """Copies whose thread is held up until somebody is to write to their places, or `let_go`; some fail.

    Args:
        random: which are held up, and which fail.

    Attributes:
        num_overtaken: copies that were under way when a step or a load was to write to their places.
    """

    def __init__(self, random: random.Random) -> None:
        super().__init__()
        self._random = random
        self._held: list[tuple[frozenset[int], BlockCopy, threading.Event]] = []
        self._holds = True
        self.num_overtaken = 0

    def save(
        self, places: Sequence[int], size: int, read: Callable[[int, np.ndarray[Any, Any]], None]
    ) -> BlockCopy:
        go, fails = threading.Event(), self._random.random() < 0.03
        if not self._holds or self._random.random() < 0.2:
            go.set()

        def held(place: int, row: np.ndarray[Any, Any]) -> None:
            if threading.current_thread() is not threading.main_thread():
                go.wait()
            if fails:
                raise OSError("the memory is gone")
            read(place, row)

        copy = super().save(places, size, held)
        self._held.append((frozenset(places), copy, go))
        return copy

    def before_writing(self, places: Iterable[int]) -> None:
        places = list(places)
        self._held = [each for each in self._held if not each[1].done()]
        for copied, _, go in self._held:
            if not copied.isdisjoint(places):
                self.num_overtaken += 1
                go.set()
        super().before_writing(places)

    def finish(self) -> None:
        self.let_go()
        super().finish()

    def let_go(self, *, for_good: bool = False) -> None:
        """Let copies under way go on; with `for_good`, all later ones, too."""
        self._holds = not for_good
        for _, _, go in self._held:
            go.set()
