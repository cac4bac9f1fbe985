"""In-flight prefixes: lets a request wait for the tokens that another one, its producer, is computing.

There is one entry per prompt in progress, the hash of its tokens up to and including the next one to
compute. A waiting request looks up its own first missing token. That is enough, and exact to the token:
whoever computes that token has committed all before it, so the waiting request's match ends just where that
prompt has come to. Once found, the request remembers its producer and up to where the two agree, and neither
hashes nor matches again until the producer has come there.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import xxhash

from radixkv.cache.keys import frame_namespace
from radixkv.scheduling.request_state import Request

Key = tuple[tuple[str, ...], int]


class InFlightPrefixes:
    """The next token of every prompt being computed."""

    def __init__(self) -> None:
        # Several prompts may be at the same token: when one of them goes, the others still produce it.
        self._producers: dict[Key, dict[int, Request]] = {}
        self._key_of: dict[int, Key] = {}  # arrival order -> key

    @staticmethod
    def _key(request: Request, num_tokens: int) -> Key:
        prefix = request.tokens.view(0, num_tokens)
        return frame_namespace(request.namespace), xxhash.xxh3_64_intdigest(prefix.data)

    def announce(self, request: Request, num_scheduled: int) -> None:
        """`request` computes its tokens up to `num_scheduled` in this step, then goes on. O(prefix)."""
        if self._key_of:
            self.forget(request)
        request.num_scheduled = num_scheduled
        if num_scheduled < request.num_tokens:
            key = self._key_of[request.arrival_order] = self._key(request, num_scheduled + 1)
            self._producers.setdefault(key, {})[request.arrival_order] = request

    def forget(self, request: Request) -> None:
        """`request` computes nothing any more. O(1)."""
        key = self._key_of.pop(request.arrival_order, None)
        if key is not None:
            producers = self._producers[key]
            del producers[request.arrival_order]
            if not producers:
                del self._producers[key]

    @staticmethod
    def is_produced(request: Request) -> bool:
        """Whether the producer that was found before is still at work on this request's tokens. O(1)."""
        producer = request.producer
        if producer is None:
            return False
        if producer.lease is not None and producer.num_scheduled < request.produced_until:
            return True
        request.producer = None
        return False

    def is_coming(self, request: Request, num_matched: int) -> bool:
        """Whether a running request is about to compute the token behind this one's match.

        The last token is always computed by the request itself, which needs its logits.
        """
        if not self._producers or num_matched + 1 >= request.num_tokens or request.needs_prompt_logits:
            return False
        if self.is_produced(request):
            return True
        producers = self._producers.get(self._key(request, num_matched + 1))
        if producers is None:
            return False
        producer = next(iter(producers.values()))
        most = min(producer.num_tokens, request.num_tokens - 1)
        differ = producer.tokens.view(num_matched, most) != request.tokens.view(num_matched, most)
        request.producer = producer
        request.produced_until = num_matched + int(np.argmax(differ)) if differ.any() else most
        return producer.num_scheduled < request.produced_until  # False: the hashes were equal, not the tokens

    def check(self, running: Collection[int]) -> None:
        """Assert that only running requests (by arrival order) are announced, each once."""
        for order, key in self._key_of.items():
            assert order in running, "a request that does not run is announced"
            assert self._producers[key][order].arrival_order == order
        assert sum(len(producers) for producers in self._producers.values()) == len(self._key_of)
