# SPDX-License-Identifier: Apache-2.0
"""In-flight prefixes: lets a request wait for the tokens that another one, its producer, is computing.

There is one entry per prompt in progress: the identity of its whole blocks in the cache, and its tokens
after them up to and including the next one to compute. A waiting request looks up its own first missing
token. That is enough, and exact to the token: whoever computes that token has committed all before it, so
the waiting request's match ends just where that prompt has come to. Once found, the request remembers its
producer and up to where their tokens agree, and is not looked at again until the producer has come there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from radixkv.cache.keys import frame_namespace
from radixkv.cache.prefix_cache import Match, PrefixCache
from radixkv.scheduling.sequence_state import SequenceState

PrefixKey = tuple[tuple[str, ...], bytes, bytes]


def prefix_key(request: SequenceState, identity: bytes, num_whole: int, num_tokens: int) -> PrefixKey:
    """Key of a request's first `num_tokens` tokens: namespace, whole blocks, tokens after these.

    Args:
        identity, num_whole: of its whole blocks in the cache, and their tokens.
    """
    tail = request.tokens(num_whole, num_tokens)
    return frame_namespace(request.namespace), identity, tail.tobytes()


class ComingStates(Protocol):
    """States that the step being built leaves behind: `radixkv.scheduling.state_steps.StateSteps`."""

    def is_coming(self, request: SequenceState, match: Match) -> bool:
        """Return True if a running request computes a state that a waiting one should resume at."""
        ...


class InFlightPrefixes:
    """The next token of every prompt being computed.

    Args:
        states: of a model with states: its requests wait until a step with the awaited tokens has run, and
            for states that one leaves behind; None: K/V is there at once.
    """

    def __init__(self, cache: PrefixCache, states: ComingStates | None = None) -> None:
        self._cache, self._states = cache, states
        # Several prompts may be at the same token: when one of them goes, the others still produce it.
        self._producers: dict[PrefixKey, dict[int, SequenceState]] = {}
        self._key_of: dict[int, PrefixKey] = {}  # arrival order -> key

    def announce(self, request: SequenceState, num_scheduled: int) -> None:
        """`request` computes its tokens up to `num_scheduled` in this step, then goes on. O(block)."""
        if self._key_of:
            self.forget(request)
        request.num_scheduled = num_scheduled
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

    def forget(self, request: SequenceState) -> None:
        """`request` computes nothing any more. O(1)."""
        key = self._key_of.pop(request.arrival_order, None)
        if key is not None:
            producers = self._producers[key]
            del producers[request.arrival_order]
            if not producers:
                del self._producers[key]

    def is_produced(self, request: SequenceState) -> bool:
        """True if the producer found before is still at work on this request's tokens. O(1)."""
        producer = request.producer
        if producer is None:
            return False
        if producer.lease is not None:
            has_come = producer.num_scheduled if self._states is None else producer.num_computed
            if has_come < request.produced_until:
                return True
        request.producer = None
        return False

    def is_coming(self, request: SequenceState, match: Match) -> bool:
        """True if a running request is about to compute the token after this one's match.

        The last token is always computed by the request itself, which needs its logits. O(block); O(tokens)
        once a producer is found.
        """
        num_matched = match.num_tokens
        if self._states is not None and (self.is_produced(request) or self._states.is_coming(request, match)):
            return True
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
        request.producer = producer
        request.produced_until = int(np.argmax(differ)) if differ.any() else most
        if self._states is not None and producer.lease is not None and producer.lease.states is not None:
            producer.lease.states.want((min(request.produced_until, request.num_tokens - 1),))
        # False: the identities were equal, not the tokens
        return producer.num_scheduled < request.produced_until

    def check(self, running: Collection[int]) -> None:
        """Assert that only running requests (by arrival order) are announced, each once."""
        for order, key in self._key_of.items():
            assert order in running, "a request that does not run is announced"
            assert self._producers[key][order].arrival_order == order
        assert sum(len(producers) for producers in self._producers.values()) == len(self._key_of)
