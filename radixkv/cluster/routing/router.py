# SPDX-License-Identifier: Apache-2.0
"""Router: sends each request where it is expected to be answered soonest. Pure: no clock, no sockets, no Ray.

    cost of a replica    its queue in seconds + tokens that it does not have / its prefill rate

The queue is charged when a request is sent, not when its replica says so. What of it computes this very
prompt for another request does not count: elsewhere that would have to be computed, too. What follows:

- A prompt goes where its prefix is, unless the queue there costs more than computing it elsewhere. A prefix
  wanted by all is thus computed on a second replica when the first is saturated, and only then.
- A burst of one new prompt stays together until its unshared parts cost more than the shared one.
- A new or emptied replica gets its share and no more: each request lengthens its queue.
- Among equal costs, the longest prefix decides, then the session, then the least load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import xxhash

from radixkv.cache.keys import NamespaceName, TokenIds
from radixkv.cluster.events.block_keys import BlockKeys
from radixkv.cluster.routing.prompt_blocks import PromptBlocks
from radixkv.cluster.routing.replica import Charge, PrefixOnReplica, Replica
from radixkv.errors import EngineOverloadedError

#: Seconds by which two replicas may differ and still begin at the same time.
SAME_S = 0.001
#: Sessions whose latest replica is remembered.
MAX_SESSIONS = 100_000


#: What decided where a request goes: its prefix is there; a longer one is elsewhere, but so is a queue that
#: costs more; its session was there before; it has least to do there.
Reason = Literal["prefix", "queue_elsewhere", "session", "least_queue"]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The chosen replica of a request, and the `reason`; pass it to the router's `computed` and `ended`.

    Attributes:
        found: part of the prompt expected to be there.
        queue_s: seconds until the replica has computed its earlier prompts.
        begins_s: seconds until the answer is expected to begin.
        cost_s: the compared cost; see the module's text.
    """

    replica: Replica
    found: PrefixOnReplica
    queue_s: float
    begins_s: float
    cost_s: float
    charge: Charge
    reason: Reason


@dataclass(frozen=True, slots=True)
class _Candidate:
    replica: Replica
    found: PrefixOnReplica
    queue_s: float
    begins_s: float
    cost_s: float


class Router:
    """Chooses among replicas. Times are seconds of any clock that does not go back; not thread-safe.

    Args:
        keys: with the secret of the replicas' streams, or any if they tell their token ids.

    Attributes:
        replicas: by name; add and remove as they come and go.
    """

    def __init__(self, keys: BlockKeys) -> None:
        self.replicas: dict[str, Replica] = {}
        self._keys = keys
        self._sessions: OrderedDict[str, str] = OrderedDict()  # session -> the replica that had it last

    def add(self, replica: Replica) -> None:
        """A replica takes requests from now on."""
        assert replica.name not in self.replicas, "a replica's name is used twice"
        self.replicas[replica.name] = replica

    def remove(self, name: str) -> None:
        """A replica is gone; routes to it may still be given back."""
        self.replicas.pop(name, None)

    def prompt(self, token_ids: TokenIds, namespace: NamespaceName = "") -> PromptBlocks:
        """A prompt, to be routed. O(tokens).

        Raises:
            InvalidRequestError: no token ids.
        """
        return PromptBlocks(self._keys, token_ids, namespace)

    def route(
        self,
        token_ids: TokenIds,
        now: float,
        *,
        namespace: NamespaceName = "",
        session: str | None = None,
        excluded: Collection[str] = (),
    ) -> Route:
        """Choose a replica for a prompt of these tokens; see `route_prompt` and `prompt`."""
        prompt = self.prompt(token_ids, namespace)
        return self.route_prompt(prompt, now, session=session, excluded=excluded)

    def route_prompt(
        self,
        prompt: PromptBlocks,
        now: float,
        *,
        session: str | None = None,
        excluded: Collection[str] = (),
        tells_first_token: bool = True,
    ) -> Route:
        """Choose a replica for a prompt, and charge it. O(tokens + replicas * log blocks).

        Args:
            session: what requests have in common that continue one another.
            excluded: replicas that have failed at this request.
            tells_first_token: `computed` will be called when its first token comes; else the prompt counts
                as computed once it should be, and once its blocks are there.

        Raises:
            EngineOverloadedError: no replica takes requests.
        """
        candidates = [
            self._candidate(replica, prompt, now)
            for replica in self.replicas.values()
            if replica.is_open and replica.name not in excluded
        ]
        if not candidates:
            raise EngineOverloadedError("no replica takes requests now; try again later")
        enough = min(candidate.cost_s for candidate in candidates) + SAME_S
        stays = None if session is None else self._sessions.get(session)
        seed = xxhash.xxh32_intdigest(session.encode("utf-8", "replace")) if session else prompt.digest

        def rank(candidate: _Candidate) -> tuple[float, ...]:
            replica = candidate.replica
            scattered = xxhash.xxh32_intdigest(replica.name.encode(), seed)
            rest = (replica.name != stays, candidate.queue_s, replica.num_running, scattered)
            return (-candidate.found.tokens, *rest)

        best = min((candidate for candidate in candidates if candidate.cost_s <= enough), key=rank)
        if session is not None:
            self._sessions[session] = best.replica.name
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        charge = best.replica.charge(prompt, best.found, now, tells_first_token=tells_first_token)
        if best.found.tokens < max(candidate.found.tokens for candidate in candidates):
            reason: Reason = "queue_elsewhere"
        elif best.found.tokens:
            reason = "prefix"
        else:
            reason = "session" if best.replica.name == stays else "least_queue"
        return Route(best.replica, best.found, best.queue_s, best.begins_s, best.cost_s, charge, reason)

    @staticmethod
    def _candidate(replica: Replica, prompt: PromptBlocks, now: float) -> _Candidate:
        found, queue_s = replica.find(prompt), replica.queue_s(now)
        computes_s = (prompt.num_tokens - found.tokens) / replica.prefill_rate
        others_s = max(0.0, queue_s - found.expected / replica.prefill_rate)
        return _Candidate(replica, found, queue_s, queue_s + computes_s, others_s + computes_s)

    @staticmethod
    def computed(route: Route, now: float) -> None:
        """The first token of a request has come."""
        route.replica.computed(route.charge, now)

    @staticmethod
    def ended(route: Route, now: float) -> None:
        """A request has ended, however that was. Once for each route."""
        route.replica.ended(route.charge, now)
