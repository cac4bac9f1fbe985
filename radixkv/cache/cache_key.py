"""The key under which a request's K/V is cached: whose it is, and what computed it.

Callers say who asks (`tenant`, and a `salt` that divides a tenant's own space); the engine adds what computes
(`adapter`, `model`). The parts are framed in a tuple and never joined, so that no choice of strings by one
tenant can name another's space.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Who asks, and what computes.

    Attributes:
        tenant: who is served; bound by the server to the API key, never taken from a request's body.
        salt: divides the tenant's own space; chosen by its clients.
        adapter: what is added to the model's weights; empty: nothing.
        model: fingerprint of configuration, weights and dtype; empty: unknown.

    >>> CacheKey("alice", "s").namespace
    ('alice', 's', '', '')
    """

    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    model: str = ""

    @property
    def namespace(self) -> tuple[str, str, str, str]:
        """The namespace of the prefix cache, tenant first: policies and quotas find it there."""
        return (self.tenant, self.salt, self.adapter, self.model)
