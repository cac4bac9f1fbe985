# SPDX-License-Identifier: Apache-2.0
"""FingerprintStore: fingerprints of the latest requests by tenant and id, within bounds, in memory alone."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from radixkv_server.diagnostics.fingerprint import Fingerprint

#: Most requests of a tenant, and most bytes of them: prompts of four million tokens.
MAX_REQUESTS = 1000
MAX_BYTES = 16 * 1024 * 1024


@dataclass(slots=True, eq=False)
class KeptRequest:
    """A request whose answer has begun.

    Attributes:
        reusable_tokens: tokens of its prompt that the cache held after its computation.
        is_running: its answer has not ended.
    """

    fingerprint: Fingerprint
    reusable_tokens: int
    is_running: bool = True


class FingerprintStore:
    """Keeps requests of each tenant; its oldest make room for its new ones, never another tenant's.

    All methods are O(1), amortised.

    Args:
        max_requests, max_bytes: bounds of one tenant.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[str, KeptRequest]] = {}
        self._bytes: dict[str, int] = {}

    def put(self, tenant: str, request_id: str, kept: KeptRequest) -> None:
        """Keep a request, the tenant's latest; its id is new."""
        requests = self._tenants.setdefault(tenant, OrderedDict())
        requests[request_id] = kept
        size = self._bytes.get(tenant, 0) + kept.fingerprint.num_bytes
        while len(requests) > self._max_requests or size > self._max_bytes:
            size -= requests.popitem(last=False)[1].fingerprint.num_bytes
        self._bytes[tenant] = size

    def get(self, tenant: str, request_id: str, api: str) -> KeptRequest | None:
        """Return a tenant's request of one API and count it as used; None: there is none, or no longer."""
        requests = self._tenants.get(tenant, OrderedDict())
        kept = requests.get(request_id)
        if kept is None or kept.fingerprint.api != api:
            return None
        requests.move_to_end(request_id)
        return kept

    def num_bytes(self, tenant: str) -> int:
        """Return the size of a tenant's fingerprints."""
        return self._bytes.get(tenant, 0)
