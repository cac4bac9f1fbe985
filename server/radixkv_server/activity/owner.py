# SPDX-License-Identifier: Apache-2.0
"""Owner: whose cached K/V, and what computed it."""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class OwnerNames(TypedDict):
    """An owner as arguments of `CacheClient`."""

    tenant: str
    salt: str
    adapter: str


class Owner(NamedTuple):
    """The owner of cached K/V, and the adapter that computed it; empty: the base alone."""

    tenant: str
    salt: str
    adapter: str

    @property
    def names(self) -> OwnerNames:
        """The owner as arguments of `CacheClient`."""
        return {"tenant": self.tenant, "salt": self.salt, "adapter": self.adapter}
