# SPDX-License-Identifier: Apache-2.0
"""Caller: whose part of the cache a request is about, and what it may be told of it.

Counts of others' entries are for admins. Text is for nobody but its own tenant, admins included: an operator
who has to know what a tenant caches can ask the tenant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        tenant: by the API key.
        salt: the part of the tenant's space that is asked about; "" is the undivided one.
        is_admin: may see all tenants' counts.
    """

    tenant: str
    salt: str
    is_admin: bool

    @property
    def scope(self) -> str | None:
        """The tenant whose nodes are asked for; None: all."""
        return None if self.is_admin else self.tenant

    def may_read(self, tenant: str | None, salt: str | None) -> bool:
        """Whether text cached there may be shown; admins read all salts of their own tenant."""
        return tenant == self.tenant and (self.is_admin or salt == self.salt)


class Onlooker(Caller):
    """Who runs a proxy, or has a log: may read all that is in it."""

    def __init__(self) -> None:
        super().__init__("", "", is_admin=True)

    def may_read(self, tenant: str | None, salt: str | None) -> bool:
        return True
