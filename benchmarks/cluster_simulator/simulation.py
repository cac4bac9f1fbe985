# SPDX-License-Identifier: Apache-2.0
"""Simulation: a trace arrives at a cluster, and time passes from event to event.

    arrival -> router -> replica: waits, is computed in steps, each of which takes what `StepCost` says
                  ^          |
                  +----------+  block changes, first tokens, ends (as late as `event_delay_s` says)

Every replica's scheduler and prefix cache are the real ones, and so are the token budget, chunks, evictions
and preemptions. What a trace does not say: the tokens inside a block (all that matters is which are equal),
and an answer's, which nobody shares until a later prompt of the trace has them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from benchmarks.cluster_simulator.routers import ArrivingPrompt, MakeRouter
from benchmarks.cluster_simulator.simulated_replica import ReplicaConfig, ServedRequest, SimulatedReplica
from benchmarks.cluster_simulator.step_cost import StepCost
from radixkv.cache.block_identity import BlockIdentities, each_identity
from radixkv.cache.keys import TOKEN_BYTES
from radixkv.cache.reporting.events import BlockChanges
from radixkv.cli.replay.trace import Trace

_SAMPLES = 200  # how often what the caches hold is looked at


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A cluster and how a trace comes to it.

    Attributes:
        speed: requests arrive so many times as fast as recorded.
        event_delay_s: after which the router hears of block changes.
        max_answer_tokens: longer answers are cut; None: none is.
    """

    num_replicas: int
    replica: ReplicaConfig
    cost: StepCost
    speed: float = 1.0
    event_delay_s: float = 0.0
    max_answer_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """Result of a simulation.

    Attributes:
        requests: in the order of the trace.
        seconds: simulated, from the first arrival to the last token.
        busy_s: of each replica.
        steps: of each replica.
        gaps: float64, seconds between tokens of an answer that follow each other, of all answers.
        preemptions: of all replicas.
        resident_blocks: in all caches together, averaged over arrivals.
        distinct_blocks: of these, equal ones counted once.
    """

    requests: list[ServedRequest]
    seconds: float
    busy_s: list[float]
    steps: list[int]
    gaps: npt.NDArray[np.float64]
    preemptions: int
    resident_blocks: float
    distinct_blocks: float


class ClusterSimulation:
    """Simulation of one cluster and trace; see the module.

    Args:
        make_router: makes the router.
    """

    def __init__(self, trace: Trace, config: ClusterConfig, make_router: MakeRouter) -> None:
        self._trace, self._config = trace, config
        self._router = make_router(config.num_replicas, config.cost, trace.block_size)
        self.now = self._next_arrival = 0.0
        self._events: list[tuple[float, int, int]] = []  # time, tie-break, replica whose step ends
        self._delayed: deque[tuple[float, int, BlockChanges]] = deque()
        self._identities = BlockIdentities(trace.block_size * TOKEN_BYTES)
        self._replicas = [self._replica(index) for index in range(config.num_replicas)]
        self._seed = self._identities.seed(self._replicas[0].cache.namespace_key(""))
        self._samples: list[tuple[int, int]] = []

    def _replica(self, index: int) -> SimulatedReplica:
        config = self._config
        replica = SimulatedReplica(
            config.replica,
            config.cost,
            lambda: self.now,
            lambda number: self._router.on_first_token(number, self.now),
            lambda number: self._router.on_end(number, self.now),
        )
        replica.cache.subscribe(partial(self._changed, index))
        return replica

    def _changed(self, replica: int, changes: BlockChanges) -> None:
        if self._config.event_delay_s:
            self._delayed.append((self.now + self._config.event_delay_s, replica, changes))
        else:
            self._router.on_changes(replica, changes, self.now)

    def run(self, on_arrival: Callable[[], None] = lambda: None) -> ClusterRun:
        """Serve all requests.

        Args:
            on_arrival: is called at each, to show progress.
        """
        trace = self._trace
        arrivals = np.maximum.accumulate(trace.arrivals - trace.arrivals.min()) / self._config.speed
        requests: list[ServedRequest] = []
        every = max(1, trace.num_requests // _SAMPLES)
        for number in range(trace.num_requests):
            arrival = float(arrivals[number])
            self._advance(arrival)
            self.now = arrival
            self._next_arrival = float(arrivals[number + 1]) if number + 1 < len(arrivals) else float("inf")
            requests.append(self._arrive(number))
            if number % every == 0:
                self._sample()
            on_arrival()
        self._advance(float("inf"))
        resident, distinct = np.mean(self._samples, axis=0) if self._samples else (0.0, 0.0)
        return ClusterRun(
            requests=requests,
            seconds=self.now,
            busy_s=[replica.busy_s for replica in self._replicas],
            steps=[replica.num_steps for replica in self._replicas],
            gaps=np.concatenate(
                [np.frombuffer(replica.gaps, dtype=np.float64) for replica in self._replicas]
            ),
            preemptions=sum(replica.num_preemptions for replica in self._replicas),
            resident_blocks=float(resident),
            distinct_blocks=float(distinct),
        )

    def _advance(self, until: float) -> None:
        """Let the steps end that do so before a time, and the next ones begin."""
        while self._events and self._events[0][0] <= until:
            self.now, _, index = heapq.heappop(self._events)
            self._replicas[index].end_step(self.now)
            self._begin_step(index)

    def _begin_step(self, index: int, *, wakes: bool = False) -> None:
        seconds = self._replicas[index].begin_step(self._next_arrival - self.now, wakes=wakes)
        if seconds is not None:
            heapq.heappush(self._events, (self.now + seconds, index, index))

    def _arrive(self, number: int) -> ServedRequest:
        """Route a request, or refuse it where it can never run."""
        trace, config = self._trace, self._config
        answer = max(1, int(trace.output_lengths[number]))
        if config.max_answer_tokens is not None:
            answer = min(answer, config.max_answer_tokens)
        length = max(1, int(trace.input_lengths[number]))
        served = ServedRequest(self.now, length, answer, trace.num_unique + number)
        if not config.replica.holds(length + answer):
            served.refused = True
            return served
        while self._delayed and self._delayed[0][0] <= self.now:
            _, where, changes = self._delayed.popleft()
            self._router.on_changes(where, changes, self.now)
        tokens = self._tokens(number, length, served.answer_token)
        chain = self._identities.chain(
            self._seed, tokens[: length // trace.block_size * trace.block_size].tobytes()
        )
        prompt = ArrivingPrompt(number, tokens, each_identity(chain), trace.block_size)
        served.replica = index = self._router.route(prompt, self.now)
        replica = self._replicas[index]
        replica.add(number, tokens, served)
        if replica.is_idle:
            self._begin_step(index, wakes=True)
        return served

    def _tokens(self, number: int, length: int, own: int) -> npt.NDArray[np.int32]:
        """Tokens that are equal where the trace's blocks are: each block begins with its id.

        What the trace says nothing about, after the last block, is the request's own.
        """
        path, size = self._trace.path(number), self._trace.block_size
        tokens = np.zeros(max(length, 1), dtype=np.int32)
        starts = np.arange(len(path)) * size
        tokens[starts] = path
        tokens[len(path) * size :] = own
        return tokens

    def _sample(self) -> None:
        caches = [replica.resident for replica in self._replicas]
        self._samples.append((sum(map(len, caches)), len(set().union(*caches))))
