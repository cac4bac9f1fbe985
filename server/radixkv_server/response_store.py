"""ResponseStore: answers that may be asked for again, by tenant and id, within bounds.

What is stored is bytes; neither prompts' token ids nor K/V are. A tenant's least recently used answers make
room for its new ones, and never another tenant's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class StoreError(Exception):
    """A store can't do what was asked of it, now or at all; a sentence for the user, without its insides.

    Attributes:
        may_pass: whether trying again soon makes sense.
    """

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class ResponseStore(Protocol):
    """Bytes by tenant and id. Each call ends within a bounded time; those on a file raise `StoreError`."""

    async def put(self, tenant: str, key: str, data: bytes) -> None:
        """Keep `data`, the tenant's latest; what the bounds no longer allow is forgotten."""

    async def get(self, tenant: str, key: str) -> bytes | None:
        """What was put, used just now; None: nothing of this tenant's."""

    async def delete(self, tenant: str, key: str) -> bool:
        """Forget it; False: there was nothing of this tenant's."""

    async def close(self) -> None:
        """Write what is not written yet; the store is not used again."""


class MemoryStore:
    """Responses in this process, lost with it. Every call is O(1), amortised.

    Args:
        max_responses: of one tenant.
        max_bytes: bytes of all of them.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[str, bytes]] = {}
        self._bytes: dict[str, int] = {}

    async def put(self, tenant: str, key: str, data: bytes) -> None:
        await self.delete(tenant, key)
        kept = self._tenants.setdefault(tenant, OrderedDict())
        kept[key] = data
        size = self._bytes.get(tenant, 0) + len(data)
        while len(kept) > self._max_responses or size > self._max_bytes:
            size -= len(kept.popitem(last=False)[1])
        self._bytes[tenant] = size

    async def get(self, tenant: str, key: str) -> bytes | None:
        kept = self._tenants.get(tenant, OrderedDict())
        data = kept.get(key)
        if data is not None:
            kept.move_to_end(key)
        return data

    async def delete(self, tenant: str, key: str) -> bool:
        data = self._tenants.get(tenant, OrderedDict()).pop(key, None)
        if data is not None:
            self._bytes[tenant] -= len(data)
        return data is not None

    async def close(self) -> None:
        self._tenants.clear()
