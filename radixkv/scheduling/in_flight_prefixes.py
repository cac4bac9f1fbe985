# SPDX-License-Identifier: Apache-2.0
"""In-flight prefixes: lets a request wait for the tokens that another one, its producer, is computing.

There is one entry per prompt in progress: the identity of its whole blocks in the cache, and its tokens after
them up to and including the next one to compute. A waiting request looks up its own first missing token. That
is enough, and exact to the token: a prompt that computes that token has committed all before it, so the
waiting request's match ends just where that prompt has come to. The producer is remembered, with the number
of tokens that both have in common; the request is not looked at again until the producer has come there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from radixkv.cache.keys import frame_namespace
from radixkv.cache.prefix_cache import Lease, Match, PrefixCache
from radixkv.scheduling.sequence import Sequence

PrefixKey = tuple[tuple[str, ...], bytes, bytes]


def prefix_key(request: Sequence, identity: bytes, num_whole: int, num_tokens: int) -> PrefixKey:
    """Return the key of a request's first `num_tokens` tokens: namespace, whole blocks, tokens after these.

    Args:
        identity, num_whole: of its whole blocks in the cache, and their tokens.
    """
    tail = request.tokens(num_whole, num_tokens)
    return frame_namespace(request.namespace), identity, tail.tobytes()


class Producer(Protocol):
    """Maker of the next tokens of a waiting request: another request, or a load from a tier.

    Attributes:
        num_computed: tokens that are there.
        lease: None: it has ended.
    """

    num_computed: int
    lease: Lease | None


class ComingStates(Protocol):
    """States that the step being built leaves behind: `radixkv.scheduling.state_steps.StateSteps`."""

    def coming(self, request: Sequence, match: Match) -> tuple[Producer, int] | None:
        """Return who computes, in this step, a state that a waiting request should resume at, and where."""


class InFlightPrefixes:
    """The next token of every prompt being computed.

    Args:
        states: of a model with states: its requests wait until a step with the awaited tokens has run, and
            for states that one leaves behind; None: K/V is there at once.
    """

    def __init__(self, cache: PrefixCache, states: ComingStates | None = None) -> None:
        self._cache, self._states = cache, states
        # Several prompts may be at the same token: when one of them goes, the others still produce it.
        self._producers: dict[PrefixKey, dict[int, Sequence]] = {}
        self._key_of: dict[int, PrefixKey] = {}  # arrival order -> key
        # Tokens of running requests that are computed once the step being built has run.
        self._scheduled: dict[Producer, int] = {}
        # Producers of waiting requests, and up to which token they make what these need.
        self._awaited: dict[Sequence, tuple[Producer, int]] = {}

    def announce(self, request: Sequence, num_scheduled: int) -> None:
        """Record that a request computes its tokens up to `num_scheduled` in this step. O(block)."""
        if self._key_of:
            self._withdraw(request)
        self._scheduled[request] = num_scheduled
        if num_scheduled < request.num_tokens:
            lease = request.lease
            assert lease is not None
            # Replayed tokens are present: new ones come after them.
            known = max(num_scheduled, lease.num_committed)
            if known >= request.most_shared:
                return
            key = prefix_key(request, *lease.cached_identity, known + 1)
            self._key_of[request.arrival_order] = key
            self._producers.setdefault(key, {})[request.arrival_order] = request

    def forget(self, request: Sequence) -> None:
        """Note that a request neither computes tokens nor waits for any. O(1)."""
        self._withdraw(request)
        self._scheduled.pop(request, None)
        self._awaited.pop(request, None)

    def _withdraw(self, request: Sequence) -> None:
        key = self._key_of.pop(request.arrival_order, None)
        if key is not None:
            producers = self._producers[key]
            del producers[request.arrival_order]
            if not producers:
                del self._producers[key]

    def wait_for(self, request: Sequence, producer: Producer, until: int) -> None:
        """Let a request wait until its producer has come to the token `until`. O(1)."""
        self._awaited[request] = producer, until

    def admitted(self, request: Sequence) -> None:
        """Note that a request no longer waits. O(1)."""
        self._awaited.pop(request, None)

    def produced_until(self, request: Sequence) -> int:
        """Return the number of a waiting request's tokens that its producer makes."""
        return self._awaited[request][1]

    def is_produced(self, request: Sequence) -> bool:
        """Return True if the producer found before is still at work on this request's tokens. O(1)."""
        found = self._awaited.get(request)
        if found is None:
            return False
        producer, until = found
        if producer.lease is not None:
            has_come = producer.num_computed
            if self._states is None:
                has_come = self._scheduled.get(producer, has_come)
            if has_come < until:
                return True
        del self._awaited[request]
        return False

    def is_coming(self, request: Sequence, match: Match) -> bool:
        """Return True if a running request is about to compute the token after this one's match.

        The last token is always computed by the request itself, which needs its logits. O(block); O(tokens)
        once a producer is found.
        """
        if self._states is not None:
            if self.is_produced(request):
                return True
            coming = self._states.coming(request, match)
            if coming is not None:
                self._awaited[request] = coming
                return True
        num_matched = match.num_tokens
        if not self._producers or num_matched >= request.most_found or request.needs_prompt_logits:
            return False
        if self.is_produced(request):
            return True
        key = prefix_key(request, *self._cache.identity(match), num_matched + 1)
        producers = self._producers.get(key)
        if producers is None:
            return False
        producer = next(iter(producers.values()))
        most = min(producer.most_shared, request.most_found)
        differ = producer.tokens(0, most) != request.tokens(0, most)
        until = int(np.argmax(differ)) if differ.any() else most
        self._awaited[request] = producer, until
        if self._states is not None and producer.lease is not None and producer.lease.states is not None:
            producer.lease.states.want((min(until, request.num_tokens - 1),))
        # False: the identities were equal, not the tokens
        return self._scheduled[producer] < until

    def check(self, running: Collection[int]) -> None:
        """Assert that only running requests (by arrival order) are announced, each once."""
        for order, key in self._key_of.items():
            assert order in running, "a request that does not run is announced"
            assert self._producers[key][order].arrival_order == order
        assert sum(len(producers) for producers in self._producers.values()) == len(self._key_of)
