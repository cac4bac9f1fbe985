# SPDX-License-Identifier: Apache-2.0
"""The key under which a request's K/V is cached: its owner and its model.

Callers name the owner (`tenant`, and a `salt` that divides a tenant's own space); the engine adds the model
(`adapter`, `model`). The parts are framed in a tuple and never joined, so that no choice of strings by one
tenant can name another's space.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Owner of a prompt, and model of its K/V.

    Attributes:
        tenant: who is served; bound by the server to the API key, never taken from a request's body.
        salt: divides the tenant's own space; chosen by its clients.
        adapter: adapter on top of the model's weights; empty: none.
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
