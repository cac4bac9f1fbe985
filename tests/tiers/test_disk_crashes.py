# SPDX-License-Identifier: Apache-2.0
"""A writer that ends at any system call: nothing acknowledged is lost, nothing wrong is ever given.

RADIXKV_CRASH_SEEDS: how many histories are tried, each ended at every one of its calls.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from crashing_system import CrashingSystem, Killed

from radixkv.tiers.disk.segments import SegmentStore
from radixkv.tiers.record import BlockName

SEEDS = range(int(os.environ.get("RADIXKV_CRASH_SEEDS", "1")))


def name_of(number: int) -> BlockName:
    return BlockName(number.to_bytes(16, "little"), number.to_bytes(32, "big"))


def contents_of(number: int) -> tuple[bytes, bytes]:
    """Tokens and block."""
    source = random.Random(number)
    return source.randbytes(16), source.randbytes(40 + number % 60)


class History:
    """A writer's life, the same for a seed however often it is told, up to its end.

    Attributes:
        tried: records that were begun.
        acknowledged: those that a sync has come after.
        store: the last one that was opened.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        setup = random.Random(seed)
        self.max_bytes = setup.choice([1 << 20, 4000, 2500])
        self.segment_bytes = setup.choice([300, 600])
        self.tried: set[int] = set()
        self.acknowledged: set[int] = set()
        self.store: SegmentStore | None = None

    def live(self, system: CrashingSystem) -> None:
        """Append, read, sync, and restart now and then."""
        steps = random.Random(self.seed + 10**6)
        store = self._open(system)
        for _ in range(steps.randrange(30, 60)):
            chance = steps.random()
            number = steps.randrange(60)
            if chance < 0.5:
                if name_of(number).key not in store:
                    self.tried.add(number)
                    self.acknowledged.discard(number)
                    store.append(name_of(number), *contents_of(number))
            elif chance < 0.6:
                store.use([name_of(n).key for n in range(number, number + 9)])
            elif chance < 0.85:
                there = sorted(n for n in self.tried if name_of(n).key in store)
                if there:
                    number = there[number % len(there)]
                    assert store.read(name_of(number), contents_of(number)[0]) == contents_of(number)[1]
            elif chance < 0.95:
                store.sync()
                self.acknowledged = {n for n in self.tried if name_of(n).key in store}
            else:
                store.close()
                self.acknowledged = {n for n in self.tried if name_of(n).key in store}
                store = self._open(system)
        store.close()
        self.acknowledged = {n for n in self.tried if name_of(n).key in store}

    def _open(self, system: CrashingSystem) -> SegmentStore:
        store = SegmentStore(self.folder, self.max_bytes, self.segment_bytes, system=system)
        self.store = store
        return store

    def verify(self) -> None:
        """What a new process finds."""
        kept = {n for n in self.acknowledged if self.store is not None and name_of(n).key in self.store}
        system = CrashingSystem(self.folder, random.Random(0))  # which syncs nothing
        store = SegmentStore(self.folder, 1 << 20, self.segment_bytes, system=system)
        for number in self.tried:
            tokens, block = contents_of(number)
            found = store.read(name_of(number), tokens)
            assert found is None or found == block, f"{number} is wrong"
            assert found is not None or number not in kept, f"{number} was acknowledged, and is lost"
        for number in (100, 101):  # and it goes on
            store.append(name_of(number), *contents_of(number))
        store.close()
        store = SegmentStore(self.folder, self.max_bytes, self.segment_bytes, system=system)
        assert store.read(name_of(101), contents_of(101)[0]) == contents_of(101)[1]
        size = sum(path.stat().st_size for path in self.folder.glob("*.*"))
        assert size <= store.num_bytes <= self.max_bytes
        store.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_end_at_every_call(seed, tmp_path):
    call, is_over = 0, False
    while not is_over:
        call += 1
        for power_lost in (False, True):
            folder = tmp_path / "kv"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            history = History(seed, folder)
            system = CrashingSystem(folder, random.Random(seed * 1000 + call), killed_at=call)
            try:
                history.live(system)
            except Killed:
                pass
            else:
                is_over = True
            system.bury(power_lost=power_lost)
            history.verify()
    assert call > 20
