# SPDX-License-Identifier: Apache-2.0
"""SharedNamespaces: namespaces with quotas and public prefixes."""

from __future__ import annotations

from radixkv.cache.keys import NamespaceKey, whole_key
from radixkv.cache.namespaces import Namespaces
from radixkv.tenancy.public_prefixes import PublicPrefixes


class SharedNamespaces(Namespaces):
    """The namespaces in use, and the public prefixes that they share."""

    def _new_public_text(self) -> PublicPrefixes:
        return PublicPrefixes(self._block_bytes)

    def _declared(self, computes: NamespaceKey) -> PublicPrefixes:
        declared = self._public(computes).declared
        assert isinstance(declared, PublicPrefixes)
        return declared

    def quota_key(self, key: NamespaceKey) -> NamespaceKey:
        """The key of a quota: a tenant's alone stands for all of its namespaces."""
        return key if len(key) == 1 else whole_key(key, self._model)

    def declare(self, computes: NamespaceKey, data: bytes) -> int:
        """Declare a prefix public; returns its length in bytes, of whole blocks."""
        length = self._declared(computes).add(data)
        self.any_declared |= length > 0
        return length

    def undeclare(self, computes: NamespaceKey, data: bytes) -> bool:
        """Take a declaration back; False: there was none."""
        done = self._declared(computes).discard(data)
        self.any_declared = any(owner.declared.prefixes for owner in self.publics.values())
        return done

    def declared(self) -> tuple[tuple[NamespaceKey, bytes], ...]:
        """Model and tokens of every public prefix. O(prefixes)."""
        return tuple(
            (computes, data) for computes, owner in self.publics.items() for data in owner.declared.prefixes
        )

    def regroup(self) -> None:
        """There are new groups: namespaces that have no blocks may count in them. O(namespaces in use)."""
        for owner in list(self._in_use.values()):
            owner.group = self._groups.of(owner.key)
