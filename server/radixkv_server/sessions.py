# SPDX-License-Identifier: Apache-2.0
"""Sessions: the latest prompt of each session that clients name, so that its end can be said by name.

Nothing depends on a session: prompts are found by their tokens. It is remembered only for `end`, which has
what it alone has cached evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from radixkv.cache.keys import EncodedTokens
from radixkv.engine.cache_client import CacheClient, Owner

#: Most sessions of a tenant, and most tokens of their prompts (4 bytes each); the least recent are forgotten.
MAX_SESSIONS = 1024
MAX_TOKENS = 4 * 1024 * 1024


@dataclass(slots=True)
class _OfTenant:
    latest: OrderedDict[str, tuple[Owner, EncodedTokens]] = field(default_factory=OrderedDict)
    num_tokens: int = 0

    def pop(self, name: str) -> tuple[Owner, EncodedTokens] | None:
        found = self.latest.pop(name, None)
        if found is not None:
            self.num_tokens -= len(found[1])
        return found


class Sessions:
    """The sessions of all tenants, each with its own."""

    def __init__(self, cache: CacheClient) -> None:
        self._cache = cache
        self._tenants: dict[str, _OfTenant] = {}

    def note(self, name: str, owner: Owner, prompt: EncodedTokens) -> None:
        """Remember a session's latest prompt. O(1), amortised."""
        own = self._tenants.setdefault(owner.tenant, _OfTenant())
        own.pop(name)
        own.latest[name] = (owner, prompt)
        own.num_tokens += len(prompt)
        while len(own.latest) > MAX_SESSIONS or own.num_tokens > MAX_TOKENS:
            own.pop(next(iter(own.latest)))

    async def end(self, tenant: str, name: str) -> int:
        """Have a session's prompt evicted first, and forget the session.

        Returns:
            Its cached tokens; 0: nothing changes, as for a session that is not known.
        """
        own = self._tenants.get(tenant)
        found = None if own is None else own.pop(name)
        if own is not None and not own.latest:
            del self._tenants[tenant]
        if found is None:
            return 0
        owner, prompt = found
        return await self._cache.put_first(prompt.token_ids, owner)
