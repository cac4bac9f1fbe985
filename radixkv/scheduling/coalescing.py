"""Which tokens are about to be computed: lets a request wait for a prefix that another one computes.

There is one entry per prompt in progress, the hash of its tokens up to and including the next one to
compute. A waiting request looks up its own first missing token. That is enough, and exact to the token:
whoever computes that token has committed all before it, so the waiting request's match ends just where that
prompt has come to. Once found, the request remembers its provider and up to where the two agree, and neither
hashes nor matches again until the provider has come there.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import xxhash

from radixkv.cache.keys import frame_namespace
from radixkv.scheduling.request_state import Request

Key = tuple[tuple[str, ...], int]


class ComingTokens:
    """The next token of every prompt being computed."""

    def __init__(self) -> None:
        # Several prompts may be at the same token: when one of them goes, the others still provide it.
        self._providers: dict[Key, dict[int, Request]] = {}
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
            self._providers.setdefault(key, {})[request.arrival_order] = request

    def forget(self, request: Request) -> None:
        """`request` computes nothing any more. O(1)."""
        key = self._key_of.pop(request.arrival_order, None)
        if key is not None:
            providers = self._providers[key]
            del providers[request.arrival_order]
            if not providers:
                del self._providers[key]

    @staticmethod
    def is_provided(request: Request) -> bool:
        """Whether the provider that was found before is still at work on this request's tokens. O(1)."""
        provider = request.provider
        if provider is None:
            return False
        if provider.lease is not None and provider.num_scheduled < request.provided_until:
            return True
        request.provider = None
        return False

    def is_coming(self, request: Request, num_matched: int) -> bool:
        """Whether a running request is about to compute the token behind this one's match.

        The last token is always computed by the request itself, which needs its logits.
        """
        if not self._providers or num_matched + 1 >= request.num_tokens or request.needs_prompt_logits:
            return False
        if self.is_provided(request):
            return True
        providers = self._providers.get(self._key(request, num_matched + 1))
        if providers is None:
            return False
        provider = next(iter(providers.values()))
        most = min(provider.num_tokens, request.num_tokens - 1)
        differ = provider.tokens.view(num_matched, most) != request.tokens.view(num_matched, most)
        request.provider = provider
        request.provided_until = num_matched + int(np.argmax(differ)) if differ.any() else most
        return provider.num_scheduled < request.provided_until  # False: the hashes were equal, not the tokens

    def check(self, running: Collection[int]) -> None:
        """Assert that only running requests (by arrival order) are announced, each once."""
        for order, key in self._key_of.items():
            assert order in running, "a request that does not run is announced"
            assert self._providers[key][order].arrival_order == order
        assert sum(len(providers) for providers in self._providers.values()) == len(self._key_of)
