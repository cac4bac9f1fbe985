# SPDX-License-Identifier: Apache-2.0
"""HitWindows: hit rates of a cache, in the last minutes and since the start."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from radixkv_server.dialect import Json

BUCKET_S = 10
#: Name -> seconds of the windows that hit rates are told for; None: since the start.
WINDOWS: dict[str, int | None] = {"1m": 60, "5m": 300, "1h": 3600, "total": None}
MAX_WINDOW_S = 3600


@dataclass(slots=True)
class HitCounts:
    """Sums over prompts.

    Attributes:
        hit_requests: prompts with at least half of their tokens cached.
    """

    requests: int = 0
    hit_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of_prompt(cls, num_tokens: int, num_cached_tokens: int) -> HitCounts:
        """Return the sums of a single prompt."""
        return cls(1, int(2 * num_cached_tokens >= num_tokens > 0), num_tokens, num_cached_tokens)

    def add(self, other: HitCounts) -> None:
        self.requests += other.requests
        self.hit_requests += other.hit_requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens

    def to_json(self) -> Json:
        """Return the sums with their rates."""
        return {
            "requests": self.requests,
            "hit_requests": self.hit_requests,
            "request_hit_rate": _rate(self.hit_requests, self.requests),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "token_hit_rate": _rate(self.cached_tokens, self.prompt_tokens),
        }


class HitWindows:
    """Sums in buckets of `BUCKET_S` for an hour, and in all. Times are readings of one clock, in seconds."""

    def __init__(self) -> None:
        self.total = HitCounts()
        self._buckets: deque[tuple[int, HitCounts]] = deque(maxlen=MAX_WINDOW_S // BUCKET_S + 1)

    def count(self, counts: HitCounts, now: float) -> None:
        """Count a lookup."""
        bucket = int(now) // BUCKET_S
        if not self._buckets or self._buckets[-1][0] != bucket:
            self._buckets.append((bucket, HitCounts()))
        self._buckets[-1][1].add(counts)
        self.total.add(counts)

    def latest(self, seconds: float, now: float) -> Iterable[tuple[int, HitCounts]]:
        """Return the buckets of the last `seconds`, in steps of `BUCKET_S`, the latest first."""
        first = int(now - seconds) // BUCKET_S
        return itertools.takewhile(lambda bucket: bucket[0] > first, reversed(self._buckets))


def windows_of(parts: Iterable[HitWindows], now: float) -> dict[str, HitCounts]:
    """Return the sums over each of `WINDOWS`, added up over several parts."""
    sums = {name: HitCounts() for name in WINDOWS}
    for part in parts:
        for name, seconds in WINDOWS.items():
            for _, counts in [(0, part.total)] if seconds is None else part.latest(seconds, now):
                sums[name].add(counts)
    return sums


def history_of(parts: Iterable[HitWindows], seconds: float, now: float) -> list[tuple[float, HitCounts]]:
    """Return age in seconds and sums of each bucket with a prompt, oldest first; over all parts."""
    sums: dict[int, HitCounts] = {}
    for part in parts:
        for bucket, counts in part.latest(seconds, now):
            sums.setdefault(bucket, HitCounts()).add(counts)
    return [(max(0.0, now - (bucket + 1) * BUCKET_S), sums[bucket]) for bucket in sorted(sums)]


def history_json(history: Iterable[tuple[float, HitCounts]]) -> list[Json]:
    """Return a history in the form of the cache's routes."""
    return [
        {"age_s": round(age, 1), "prompt_tokens": sums.prompt_tokens, "cached_tokens": sums.cached_tokens}
        for age, sums in history
    ]


def _rate(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
