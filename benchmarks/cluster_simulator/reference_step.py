# SPDX-License-Identifier: Apache-2.0
"""ReferenceStep: a step of an engine's model that is always the same, to tell how fast the machine is.

Other work on a machine, and its clock, make the same step take half as long again a minute later. What is
measured at one time and compared with another is therefore corrected by steps of both times.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from radixkv.engine.engine import Engine
from radixkv.scheduling.batch import Batch

_NUM_TOKENS = 64
_EDGE = 0.1  # share of the times that are left out, the shortest ones and as many of the longest


class Clock(Protocol):
    """A clock, and waiting by it; seconds."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """Real time."""

    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


class ReferenceStep:
    """A prompt's chunk and a decode after it, computed on K/V blocks that are held for nothing else.

    Neither the engine's requests nor what it has cached are touched; to be run between two of its steps.

    Attributes:
        num_blocks: that it holds.
        latest_s: seconds of the latest one.

    Raises:
        OutOfBlocks: there are none to hold.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        vocab_size, size = engine.limits.vocab_size, engine.cache.block_size
        assert vocab_size is not None
        count = min(_NUM_TOKENS, engine.limits.max_model_len // 2, engine.cache.num_blocks * size // 4)
        tokens = np.random.default_rng(0).integers(vocab_size // 2, vocab_size, count + 1, dtype=np.int64)
        # Nothing is committed: these blocks are nobody else's.
        self._lease = engine.cache.acquire(tokens.astype(np.int32))
        table = self._lease.block_table.copy()
        self.num_blocks = len(table)
        self._runner, self._clock = engine.runner, clock
        self._batches = [
            _batch(tokens, table, size, start, end) for start, end in ((0, count), (count, count + 1))
        ]
        self._seconds: list[float] = []
        self.latest_s = 0.0

    def run(self) -> None:
        """Compute it once; its seconds are added to the others."""
        began = self._clock.now()
        for batch in self._batches:
            float(self._runner.execute(batch)[0, 0])  # waits for it
        self.latest_s = self._clock.now() - began
        self._seconds.append(self.latest_s)

    def take(self) -> float:
        """The mean of the seconds since the last call, without the shortest and the longest tenth."""
        seconds, self._seconds = np.sort(self._seconds), []
        edge = int(_EDGE * len(seconds))
        return float(seconds[edge : len(seconds) - edge].mean())

    def close(self) -> None:
        """Give the blocks back."""
        self._lease.release(discard=True)


def _batch(tokens: np.ndarray, table: np.ndarray, block_size: int, start: int, end: int) -> Batch:
    """Tokens [start, end) of a text, for the logits of the last one."""
    positions = np.arange(start, end, dtype=np.int64)
    return Batch(
        entries=[],
        token_ids=tokens[start:end],
        positions=positions,
        query_starts=np.array([0, end - start], dtype=np.int32),
        context_lengths=np.array([end], dtype=np.int32),
        block_tables=[table],
        write_slots=table[positions // block_size].astype(np.int64) * block_size + positions % block_size,
        write_rows=None,
        logit_rows=np.array([end - start - 1], dtype=np.int64),
        copy_groups=[],
    )
