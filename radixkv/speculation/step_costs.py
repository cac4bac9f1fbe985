# SPDX-License-Identifier: Apache-2.0
"""StepCosts: the cost of one more row in a step, and the value of a token there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

#: Duration of a step by its rows, as a multiple of a step of one row. `cpu` was measured (SmolLM2-135M,
#: float32, 2 cores; docs/speculation.md); its kernels take eight rows at a time, so that the ninth and the
#: seventeenth cost more than others. `triton` is an estimate from a GPU's roofline.
MEASURED: Mapping[str, Mapping[int, float]] = {
    "cpu": {1: 1.0, 4: 1.07, 8: 1.25, 9: 1.34, 16: 1.87, 17: 2.15, 24: 2.6, 32: 3.1, 64: 5.1, 128: 9.2},
    "triton": {1: 1.0, 16: 1.03, 64: 1.12, 128: 1.3, 256: 1.8, 512: 3.2},
}


class StepCosts:
    """Duration of a step by its rows, linear between measurements and after the last one.

    Args:
        durations: rows of a step -> its duration in any unit; at least two.
    """

    def __init__(self, durations: Mapping[int, float]) -> None:
        assert len(durations) >= 2
        self._rows = sorted(durations)
        self._costs = [durations[rows] for rows in self._rows]

    @classmethod
    def of_backend(cls, backend: str) -> StepCosts:
        """Return the costs of an attention backend; of an unknown one, a CPU's."""
        return cls(MEASURED.get(backend, MEASURED["cpu"]))

    def duration(self, rows: int) -> float:
        """Return the time of a step of `rows` rows. O(log entries)."""
        i = self._segment(rows)
        return self._costs[i] + (rows - self._rows[i]) * self._slope(i)

    def one_more(self, rows: int) -> float:
        """Return the cost of one more row in a step of `rows`."""
        return self._slope(self._segment(rows))

    def break_even(self, rows: int, num_samples: int) -> float:
        """Return the least probability of a guess that pays for one more row, with `num_samples` samples.

        A right guess saves its request one step, so it is worth that request's share of a step's duration.
        """
        return self.one_more(rows) * num_samples / self.duration(num_samples)

    def _segment(self, rows: int) -> int:
        return min(max(0, bisect_right(self._rows, rows) - 1), len(self._rows) - 2)

    def _slope(self, i: int) -> float:
        return (self._costs[i + 1] - self._costs[i]) / (self._rows[i + 1] - self._rows[i])
