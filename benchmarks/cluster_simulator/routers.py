# SPDX-License-Identifier: Apache-2.0
"""Routers: which replica gets a request; the policy that serves, and simple ones to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.cluster_simulator.step_cost import StepCost
from radixkv.cache.block_identity import each_identity
from radixkv.cache.keys import frame_namespace
from radixkv.cache.reporting.events import BlockChanges
from radixkv.cluster.events.block_keys import NO_CHAIN, BlockKeys, block_key, chains
from radixkv.cluster.routing import replica as routed
from radixkv.cluster.routing import router as routing


@dataclass(frozen=True, slots=True)
class ArrivingPrompt:
    """Facts of a request that a router sees.

    Attributes:
        number: its number in the trace.
        tokens: int32 [prompt].
        identities: of its whole blocks, in order.
        block_size: tokens of each.
    """

    number: int
    tokens: npt.NDArray[np.int32]
    identities: Sequence[bytes]
    block_size: int


class ClusterRouter(Protocol):
    """Chooses replicas. Times are seconds of simulated time."""

    def route(self, prompt: ArrivingPrompt, now: float) -> int:
        """The replica that gets this request."""

    def on_changes(self, replica: int, changes: BlockChanges, now: float) -> None:
        """Take in changes of a replica's cache."""

    def on_first_token(self, number: int, now: float) -> None:
        """A request's prompt is computed."""

    def on_end(self, number: int, now: float) -> None:
        """A request has left its replica."""


class RoundRobin:
    """Each replica in turn, whatever it has."""

    def __init__(self, num_replicas: int, cost: StepCost, block_size: int) -> None:
        self._count = num_replicas
        self._next = -1

    def route(self, prompt: ArrivingPrompt, now: float) -> int:
        """The next one."""
        self._next = (self._next + 1) % self._count
        return self._next

    def on_changes(self, replica: int, changes: BlockChanges, now: float) -> None:
        """Does not matter."""

    def on_first_token(self, number: int, now: float) -> None:
        """Does not matter."""

    def on_end(self, number: int, now: float) -> None:
        """Does not matter."""


class LeastRequests(RoundRobin):
    """The replica with the fewest requests; of several, the next one."""

    def __init__(self, num_replicas: int, cost: StepCost, block_size: int) -> None:
        super().__init__(num_replicas, cost, block_size)
        self._requests = [0] * num_replicas
        self._where: dict[int, int] = {}

    def route(self, prompt: ArrivingPrompt, now: float) -> int:
        """The least busy one."""
        first = super().route(prompt, now)
        turn = [(first + i) % self._count for i in range(self._count)]
        chosen = min(turn, key=self._requests.__getitem__)
        self._requests[chosen] += 1
        self._where[prompt.number] = chosen
        return chosen

    def on_end(self, number: int, now: float) -> None:
        """Take in the end of a request."""
        self._requests[self._where.pop(number)] -= 1


class LongestMatch(LeastRequests):
    """The replica that has most of the prompt, however busy; of several, the one with the fewest requests."""

    def __init__(self, num_replicas: int, cost: StepCost, block_size: int) -> None:
        super().__init__(num_replicas, cost, block_size)
        self._resident: list[set[bytes]] = [set() for _ in range(num_replicas)]

    def route(self, prompt: ArrivingPrompt, now: float) -> int:
        """The longest match."""
        matches = [_matched(prompt.identities, resident) for resident in self._resident]
        most = max(matches)
        if not most:
            return super().route(prompt, now)
        chosen = min(
            (i for i, matched in enumerate(matches) if matched == most), key=self._requests.__getitem__
        )
        self._requests[chosen] += 1
        self._where[prompt.number] = chosen
        return chosen

    def on_changes(self, replica: int, changes: BlockChanges, now: float) -> None:
        """Follow what it has."""
        for gone in changes.removed:
            self._resident[replica].difference_update(gone.block_hashes)
        for run in changes.stored:
            self._resident[replica].update(run.block_hashes)


def _matched(identities: Sequence[bytes], resident: set[bytes]) -> int:
    """How many leading blocks are resident; by bisection, since a block is resident with those before it."""
    low, high = 0, len(identities)
    while low < high:
        middle = (low + high + 1) // 2
        if identities[middle - 1] in resident:
            low = middle
        else:
            high = middle - 1
    return low


class ExpectedTtft:
    """The policy that serves, `radixkv.cluster.routing`, by the events of the caches."""

    def __init__(self, num_replicas: int, cost: StepCost, block_size: int) -> None:
        keys = BlockKeys(bytes(16))
        self._owner = keys.owner(frame_namespace(""))
        self._chains = chains(block_size)
        self._blocks: list[dict[bytes, tuple[bytes, int]]] = [{} for _ in range(num_replicas)]
        self._router = routing.Router(keys)
        self._replicas = [
            routed.Replica(str(index), block_size=block_size, prefill_rate=cost.prefill_tokens_per_s)
            for index in range(num_replicas)
        ]
        for replica in self._replicas:
            self._router.add(replica)
        self._routes: dict[int, routing.Route] = {}

    def route(self, prompt: ArrivingPrompt, now: float) -> int:
        """Choose the replica where the first token is expected soonest."""
        route = self._routes[prompt.number] = self._router.route(prompt.tokens, now)
        return int(route.replica.name)

    def on_changes(self, replica: int, changes: BlockChanges, now: float) -> None:
        """What its events say, in the keys by which they name blocks."""
        known, watcher = self._blocks[replica], self._replicas[replica]
        for gone in changes.removed:
            watcher.removed([known.pop(identity)[1] for identity in gone.block_hashes])
        for run in changes.stored:
            before = NO_CHAIN if run.parent_hash is None else known[run.parent_hash][0]
            links = each_identity(self._chains.chain(before, run.key))
            keys = [block_key(self._owner, link) for link in links]
            known.update(zip(run.block_hashes, zip(links, keys, strict=True), strict=True))
            watcher.stored(keys)

    def on_first_token(self, number: int, now: float) -> None:
        """Its prompt is no longer to be computed."""
        self._router.computed(self._routes[number], now)

    def on_end(self, number: int, now: float) -> None:
        """It is gone."""
        self._router.ended(self._routes.pop(number), now)


#: Makes a router of so many replicas, of what their steps cost, and of the tokens of their blocks.
MakeRouter = Callable[[int, StepCost, int], ClusterRouter]

ROUTERS: dict[str, MakeRouter] = {
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "longest-match": LongestMatch,
    "expected-ttft": ExpectedTtft,
}
