# SPDX-License-Identifier: Apache-2.0
"""ResponseStore: stored answers and conversations by tenant and id, within bounds.

The store holds bytes, never prompts' token ids or K/V. A tenant's least recently used entries make room for
its new ones, and never another tenant's.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

#: Makes the bytes of an entry from its present ones; an error leaves the entry as it is.
Change = Callable[[bytes], bytes]


class StoreError(Exception):
    """Failure of a store, in a sentence for the user that tells nothing of its insides.

    Attributes:
        may_pass: whether trying again soon makes sense.
    """

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def check_size(data: bytes, most: int) -> bytes:
    """Check an entry's size, and return the entry.

    Raises:
        StoreError: it is larger than all entries of a tenant may be.
    """
    if len(data) > most:
        message = f"The entry would have {len(data):,} bytes, more than {most:,} (max_stored_bytes)."
        raise StoreError(message, may_pass=False)
    return data


class ResponseStore(Protocol):
    """Bytes by tenant and id. Each call ends within a bounded time; stores in a file raise `StoreError`."""

    @property
    def epoch(self) -> str:
        """Name of the current run of all servers that share the store.

        An entry that an earlier epoch left unfinished stays unfinished: no server works on it any more.
        """

    async def put(self, tenant: str, key: str, data: bytes) -> None:
        """Keep `data` as the tenant's latest entry; forget the oldest entries beyond the bounds."""

    async def get(self, tenant: str, key: str) -> bytes | None:
        """Return the tenant's entry and mark it as used now; None: there is none."""

    async def update(self, tenant: str, key: str, change: Change) -> bytes | None:
        """Replace the tenant's entry by the result of `change`, in a single transaction.

        Returns:
            The new bytes; None: there is no such entry.

        Raises:
            StoreError: the new bytes exceed the tenant's limit; the entry stays unchanged.
        """

    async def delete(self, tenant: str, key: str) -> bool:
        """Forget the tenant's entry; False: there was none."""

    async def close(self) -> None:
        """Write all pending changes; the store can't be used afterwards."""


class MemoryStore:
    """Entries in this process, lost with it. Every call is O(1), amortised.

    Args:
        max_responses: most entries of one tenant.
        max_bytes: most bytes of one tenant.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.epoch = uuid.uuid4().hex
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

    async def update(self, tenant: str, key: str, change: Change) -> bytes | None:
        data = await self.get(tenant, key)
        if data is None:
            return None
        changed = check_size(change(data), self._max_bytes)
        await self.put(tenant, key, changed)
        return changed

    async def delete(self, tenant: str, key: str) -> bool:
        data = self._tenants.get(tenant, OrderedDict()).pop(key, None)
        if data is not None:
            self._bytes[tenant] -= len(data)
        return data is not None

    async def close(self) -> None:
        self._tenants.clear()
