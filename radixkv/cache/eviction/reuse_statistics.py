# SPDX-License-Identifier: Apache-2.0
"""ReuseStatistics: how soon blocks of a class are used again, and what keeping one is therefore worth.

Blocks are counted by class and by age (requests since their last use). Two sums are kept per class and bin of
ages:

    hits       blocks that were used again at that age
    exposure   block-requests spent at that age without being used

so that hits / exposure estimates the *hazard*: the chance per request that a block of that class and age is
used now. Blocks that were evicted go on counting for as long as their owner remembers them: what eviction
takes away is a hit, not the knowledge that there would have been one.

The worth of a block of age a is its Gittins index (Gittins, J. R. Stat. Soc. B 41, 1979): the best ratio,
over all times T to keep it, of the expected hits to the expected space-time,

    worth(a) = max over T of P(used within T | age a) / E[min(time to use, T) | age a].

Where the hazard falls with age, that is the hazard now, and the order within a class is least recently used
first. Where it first rises (people need a minute to type their answer), a block that has waited for some time
is worth more than a new one: the order keeps its present blocks, as a thrashing cache must.

Estimating an age-dependent hit density per class follows LHD (Beckmann et al., NSDI 2018).
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

NUM_BINS = 40
_MAX_ROWS = 16_384  # requests distinguished by their time; older ones count as one
_EXACT_AGE = 512  # below this age, exposure is spread over bins exactly
_PRIOR = 100.0  # blocks' worth of exposure at the average hazard that every class starts with
_DECAY = 0.98  # of the sums, per refresh


# Bin i holds ages in [EDGES[i], EDGES[i + 1]): half-octaves from 1 on, 0 alone.
EDGES: FloatArray = np.concatenate(([0.0], 2.0 ** (np.arange(NUM_BINS) / 2)))
_WIDTHS = np.diff(EDGES)
_SMALL_BINS = [0] + [int(2 * math.log2(age) + 1 + 1e-9) for age in range(1, 4096)]


def age_bin(age: int) -> int:
    """Return the bin of an age in requests. O(1)."""
    if age < 4096:
        return _SMALL_BINS[age] if age > 0 else 0
    return min(int(2 * math.log2(age) + 1 + 1e-9), NUM_BINS - 1)


def gittins_index(hazard: FloatArray) -> FloatArray:
    """Return the index at the start of each bin, for hazards that are constant within a bin.

    Args:
        hazard: float64 [classes, bins], per request.

    Returns:
        float64 [classes, bins], hits per block-request.

    O(classes * bins^2), vectorised.
    """
    classes, bins = hazard.shape
    rate = np.maximum(hazard, 1e-12)
    survive = np.exp(-rate * _WIDTHS)
    gain = 1.0 - survive  # chance of a use within the bin, when it is reached
    spend = gain / rate  # expected time in the bin, when it is reached
    reached = np.ones((classes, bins))  # [:, i]: chance to reach bin j from the start of bin i
    hits = np.zeros((classes, bins))
    time = np.zeros((classes, bins))
    best = np.zeros((classes, bins))
    for j in range(bins):
        from_here = slice(0, j + 1)
        hits[:, from_here] += reached[:, from_here] * gain[:, j : j + 1]
        time[:, from_here] += reached[:, from_here] * spend[:, j : j + 1]
        reached[:, from_here] *= survive[:, j : j + 1]
        np.maximum(best[:, from_here], hits[:, from_here] / time[:, from_here], out=best[:, from_here])
    return best


class ReuseStatistics:
    """Counts by class and age, and the worth that follows from them."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes  # classes are numbered from 0
        self.worth: list[list[float]] = [[1.0] * NUM_BINS for _ in range(num_classes)]
        self._hits = np.zeros((num_classes, NUM_BINS))
        self._exposure = np.zeros((num_classes, NUM_BINS))
        self._live = np.zeros((1024, num_classes), dtype=np.int64)  # row: blocks last used by one request
        self._ancient = np.zeros(num_classes, dtype=np.int64)  # the same, for requests before _base
        self._base = 0
        self._refreshed = 0

    @property
    def counted_blocks(self) -> int:
        """Blocks that are counted now, of all classes and ages."""
        return int(self._live.sum() + self._ancient.sum())

    def begin(self, now: int) -> None:
        """Begin a request; `now` is its number, one above the last. O(1) amortised."""
        if now - self._base >= len(self._live):
            if len(self._live) < _MAX_ROWS:
                self._live = np.concatenate((self._live, np.zeros_like(self._live)))
            else:
                half = _MAX_ROWS // 2
                self._ancient += self._live[:half].sum(axis=0)
                self._live[:half] = self._live[half:]
                self._live[half:] = 0
                self._base += half

    def add(self, request: int, block_class: int, count: int) -> None:
        """Count `count` more blocks (or fewer, if negative) of a class as last used by `request`. O(1)."""
        row = request - self._base
        if row >= 0:
            self._live[row, block_class] += count
        else:
            self._ancient[block_class] += count

    def use(self, request: int, block_class: int, age: int, count: int) -> None:
        """Record a use, at `age`, of `count` blocks last used by `request`; stop counting them. O(1)."""
        self.add(request, block_class, -count)
        self._hits[block_class, age_bin(age)] += count

    def refresh(self, now: int) -> None:
        """Bring exposure, hazards and worth up to date. O(rows + bins^2) per class, vectorised."""
        self._expose(now)
        total_exposure = self._exposure.sum(axis=0)
        average = self._hits.sum(axis=0) / (total_exposure + 1.0)
        prior = _PRIOR * _WIDTHS
        hazard = (self._hits + prior * average) / (self._exposure + prior)
        self.worth = gittins_index(hazard).tolist()
        self._hits *= _DECAY
        self._exposure *= _DECAY

    def _expose(self, now: int) -> None:
        """Add the block-requests spent since the last refresh, at the ages they were spent at."""
        since, self._refreshed = self._refreshed, now
        elapsed = now - since
        if elapsed <= 0:
            return
        rows = now - self._base + 1
        split = max(0, rows - _EXACT_AGE)
        if split:
            ages = now - self._base - np.arange(split) - elapsed / 2
            bins = np.searchsorted(EDGES, ages, side="right") - 1
            starts = [*np.flatnonzero(np.diff(bins, prepend=-1)).tolist(), split]
            for first, end in pairwise(starts):  # a slice's sum is much quicker than np.add.reduceat
                column = min(int(bins[first]), NUM_BINS - 1)
                self._exposure[:, column] += self._live[first:end].sum(axis=0) * float(elapsed)
        if self._ancient.any():
            self._exposure[:, age_bin(now - self._base)] += self._ancient * float(elapsed)
        recent = np.arange(split, rows) + self._base
        until = (now - recent).astype(np.float64)[:, None]
        start = np.maximum(since - recent, 0).astype(np.float64)[:, None]
        overlap = np.minimum(until, EDGES[1:]) - np.maximum(start, EDGES[:-1])
        self._exposure += (np.maximum(overlap, 0.0).T @ self._live[split:rows]).T
