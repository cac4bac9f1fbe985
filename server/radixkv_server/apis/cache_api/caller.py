# SPDX-License-Identifier: Apache-2.0
"""Caller: the part of the cache that a request concerns, and the caller's rights to its contents.

Counts of others' entries are for admins. Text is shown to its own tenant alone, not to admins: an operator
who has to know a tenant's cached text can ask the tenant.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.cache.keys import Owner
from radixkv_server.tenants.tenant import Tenant


@dataclass(frozen=True, slots=True)
class Caller:
    """Client of a route, with its rights.

    Attributes:
        tenant: tenant of the API key.
        salt: salt of the requested part of the tenant's space; "": the unsalted part.
        is_admin: True if counts of all tenants may be shown.
        adapter: identity of the requested adapter; "": the base model.
    """

    tenant: str
    salt: str
    is_admin: bool
    adapter: str = ""

    @property
    def owner(self) -> Owner:
        """Owner of the K/V that is asked about."""
        return Owner(self.tenant, self.salt, self.adapter)

    @property
    def as_tenant(self) -> Tenant:
        """The caller as the sender of requests."""
        return Tenant(self.tenant, "admin" if self.is_admin else "user")

    @property
    def scope(self) -> str | None:
        """Tenant whose nodes are requested; None: all."""
        return None if self.is_admin else self.tenant

    def may_read(self, tenant: str | None, salt: str | None) -> bool:
        """Tell whether text cached there may be shown; admins read all salts of their own tenant."""
        return tenant == self.tenant and (self.is_admin or salt == self.salt)


class Onlooker(Caller):
    """Operator of a proxy, or owner of a log: may read all its contents."""

    def __init__(self) -> None:
        super().__init__("", "", is_admin=True)

    def may_read(self, tenant: str | None, salt: str | None) -> bool:
        return True
