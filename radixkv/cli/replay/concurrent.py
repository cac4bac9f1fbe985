# SPDX-License-Identifier: Apache-2.0
"""Replay with requests in flight: leases overlap, running requests share blocks, held blocks can't go.

The life of a request here: it arrives at its recorded time, waits for one of `concurrency` places and for
blocks, acquires its prompt and room for its whole answer, commits the prompt at once (so that others can
share it while it runs), holds everything for

    missed prompt tokens / prefill rate + answer tokens / decode rate

seconds of simulated time, and releases: the prompt's blocks stay cached, the answer's are freed (a trace does
not contain it). Requests start in the order of their arrival; one that does not fit waits for
releases, and later ones with it.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.cache.prefix_cache import Lease, PrefixCache
from radixkv.cli.replay.bounds import BoundHits
from radixkv.cli.replay.driver import ReplayResult
from radixkv.cli.replay.trace import Trace
from radixkv.errors import OutOfBlocks


@dataclass(frozen=True, slots=True)
class ServiceRates:
    """Parameters of a request's duration.

    Attributes:
        prefill_tokens_per_s: prompt tokens computed per second (of one request).
        decode_tokens_per_s: answer tokens per second (of one request).
    """

    prefill_tokens_per_s: float = 20_000.0
    decode_tokens_per_s: float = 40.0


@dataclass(frozen=True, slots=True)
class ConcurrentResult(ReplayResult):
    """A `ReplayResult` of overlapping requests, with what overlapping did.

    Attributes:
        concurrency: most requests in flight.
        hit_blocks_in_flight: hit blocks that another running request was holding.
        peak_held_blocks: most blocks held at once, answers included.
        mean_in_flight: requests in flight, averaged over simulated time.
        delayed_requests: requests that had to wait for blocks.
        delay_s: simulated seconds they waited for blocks, in total.
        refused_requests: requests larger than the whole cache; they count as misses.
    """

    concurrency: int
    hit_blocks_in_flight: int
    peak_held_blocks: int
    mean_in_flight: float
    delayed_requests: int
    delay_s: float
    refused_requests: int


class _Flight:
    """The requests that hold leases, by their time of completion."""

    def __init__(self) -> None:
        self._running: list[tuple[float, int, Lease]] = []
        self.now = 0.0
        self.busy_s = 0.0  # integral of the number in flight over time

    def __len__(self) -> int:
        return len(self._running)

    def advance(self, time_s: float) -> None:
        """Let time pass, releasing what completes until then."""
        while self._running and self._running[0][0] <= time_s:
            self.release_next()
        self._pass(time_s)

    def release_next(self) -> None:
        """Let time pass until the next completion and release it."""
        time_s, _, lease = self._running[0]
        self._pass(time_s)
        heapq.heappop(self._running)
        lease.release()

    def start(self, request: int, duration: float, lease: Lease) -> None:
        heapq.heappush(self._running, (self.now + duration, request, lease))

    def _pass(self, time_s: float) -> None:
        if time_s > self.now:
            self.busy_s += len(self._running) * (time_s - self.now)
            self.now = time_s


def replay_concurrent(
    trace: Trace,
    policy: str,
    capacity: int | None,
    concurrency: int,
    rates: ServiceRates | None = None,
) -> ConcurrentResult:
    """Replay a trace with up to `concurrency` requests in flight; see the module's text for the model.

    Args:
        trace: what to replay; arrivals out of order are taken as simultaneous with the latest before.
        policy: name of an eviction policy.
        capacity: blocks of the pool, held ones included; None: enough for everything.
        concurrency: most requests in flight, at least 1.
        rates: how long requests run.

    Raises:
        ConfigError: unknown policy.
        ValueError: concurrency below 1.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    began = time.perf_counter()
    run = _Overlap(trace, policy, capacity, concurrency, rates or ServiceRates())
    for request in range(trace.num_requests):
        run.serve(request)
    run.finish()
    hits = BoundHits.of(trace, run.hits)
    base = ReplayResult.of(trace, policy, capacity, hits, time.perf_counter() - began)
    flight = run.flight
    return ConcurrentResult(
        **{name: getattr(base, name) for name in ReplayResult.__dataclass_fields__},
        concurrency=concurrency,
        hit_blocks_in_flight=run.shared,
        peak_held_blocks=run.peak,
        mean_in_flight=round(flight.busy_s / flight.now, 4) if flight.now > 0 else 0.0,
        delayed_requests=run.delayed,
        delay_s=round(run.delay_s, 3),
        refused_requests=run.refused,
    )


class _Overlap:
    """A concurrent replay under way: the cache, the running requests, and the counts."""

    def __init__(
        self, trace: Trace, policy: str, capacity: int | None, concurrency: int, rates: ServiceRates
    ) -> None:
        self.trace = trace
        self.rates = rates
        self.concurrency = concurrency
        self.answers = np.maximum(-(-trace.output_lengths // trace.block_size), 1)
        if capacity is None:
            capacity = trace.num_unique + int(np.sort(self.answers)[-concurrency:].sum())
            capacity += trace.longest_request
        self.room = capacity
        self.cache = PrefixCache(num_blocks=capacity, block_size=1, policy=policy)
        self.flight = _Flight()
        self.hits = np.zeros(trace.num_requests, dtype=np.int64)
        self.shared = self.peak = self.delayed = self.refused = 0
        self.delay_s = 0.0

    def serve(self, request: int) -> None:
        """Let time pass until the request can start, and start it."""
        path = self.trace.path(request).astype(np.int32)
        answer = int(self.answers[request])
        self.flight.advance(float(self.trace.arrivals[request]))
        if len(path) + answer > self.room:
            self.refused += 1
            return
        while len(self.flight) >= self.concurrency:
            self.flight.release_next()
        prompt = np.concatenate((path, np.full(answer, self.trace.num_unique, dtype=np.int32)))
        lease, held = self._acquire(prompt)
        hit = lease.num_cached_tokens
        self.hits[request] = hit
        lease.commit(len(path))
        held_now = self.cache.stats.held_blocks
        self.peak = max(self.peak, held_now)
        self.shared += len(prompt) - (held_now - held)
        self.flight.start(request, self._duration(request, hit), lease)

    def finish(self) -> None:
        while len(self.flight):
            self.flight.release_next()

    def _acquire(self, prompt: npt.NDArray[np.int32]) -> tuple[Lease, int]:
        """A lease as soon as there is room for it, and the blocks held just before."""
        ready = self.flight.now
        while True:
            held = self.cache.stats.held_blocks
            try:
                lease = self.cache.acquire(prompt)
            except OutOfBlocks:
                self.flight.release_next()
                continue
            if self.flight.now > ready:
                self.delayed += 1
                self.delay_s += self.flight.now - ready
            return lease, held

    def _duration(self, request: int, hit_blocks: int) -> float:
        """Seconds that a request runs."""
        trace, rates = self.trace, self.rates
        missed = max(int(trace.input_lengths[request]) - hit_blocks * trace.block_size, 0)
        answer = int(trace.output_lengths[request])
        return missed / rates.prefill_tokens_per_s + answer / rates.decode_tokens_per_s
