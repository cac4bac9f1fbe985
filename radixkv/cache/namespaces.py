# SPDX-License-Identifier: Apache-2.0
"""Namespaces: who shares cached blocks with whom. Each is remembered while something refers to it.

The key of a namespace says whose it is, (tenant, salt), and then what computes its K/V, (adapter, model).
Public text is shared by those whose keys agree in the latter.

A namespace is an object while blocks are cached or held in it, or a lookup in it is still in use; then it
vanishes by itself. So any number of names may come and go.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from radixkv.cache.accounts import BlockAccounts
from radixkv.cache.block_identity import BlockIdentities, what_computes
from radixkv.cache.keys import NamespaceKey, NamespaceName, frame_namespace, whole_key
from radixkv.cache.node import Namespace
from radixkv.cache.public_prefixes import PublicPrefixes
from radixkv.errors import InvalidRequestError


class Namespaces:
    """The namespaces in use, and the public prefixes that they share."""

    def __init__(
        self,
        accounts: BlockAccounts,
        identities: BlockIdentities,
        block_bytes: int,
        model: str = "",
        past_models: frozenset[str] = frozenset(),
    ) -> None:
        self._identities = identities  # give each its seed
        self._block_bytes = block_bytes  # bytes of a block's token ids
        # The model of keys in which callers name less than all four parts; empty: none.
        self._model = model
        # Models that this one has replaced: callers may have made keys before, which mean this one now.
        self._past_models = past_models
        # The public text, by model, as far as some was ever asked for.
        self.publics: dict[NamespaceKey, Namespace] = {}
        self.any_declared = False  # whether a prefix is declared public
        self._accounts = accounts  # what their blocks count in
        self._in_use: WeakValueDictionary[NamespaceKey, Namespace] = WeakValueDictionary()
        self._last: tuple[object, NamespaceKey] = (object(), ())  # the name asked for last, its key

    def __len__(self) -> int:
        return len(self._in_use)

    def key(self, namespace: NamespaceName) -> NamespaceKey:
        """Return the whole key of a namespace. O(1).

        Raises:
            InvalidRequestError: neither a string nor a tuple of strings, or it names another model.
        """
        name, key = self._last
        if namespace is name:
            return key
        key = whole_key(frame_namespace(namespace), self._model)
        if self._model and key[3] != self._model:
            if key[3] in self._past_models:
                return (*key[:3], self._model, *key[4:])
            raise InvalidRequestError(
                f"the namespace {key!r} names the model {key[3]!r}, but this one is {self._model!r}: name "
                "at most (tenant, salt, adapter)",
                param="namespace",
            )
        self._last = namespace, key
        return key

    def public_of(self, namespace: NamespaceName) -> Namespace:
        """Return the public text that a namespace shares. O(1)."""
        return self._public(what_computes(self.key(namespace)))

    def _public(self, computes: NamespaceKey) -> Namespace:
        owner = self.publics.get(computes)
        if owner is None:
            declared, seed = PublicPrefixes(self._block_bytes), self._identities.public_seed(computes)
            owner = self.publics[computes] = Namespace((), self._accounts.common, seed, declared, None)
        return owner

    def known(self, namespace: NamespaceName) -> Namespace | None:
        """Return the namespace if it is in use, else None. O(1)."""
        return self._in_use.get(self.key(namespace))

    def of_owner(self, namespace: NamespaceName) -> list[Namespace]:
        """Return the namespaces in use of this one's tenant and salt, of all adapters. O(namespaces)."""
        owner = self.key(namespace)[:2]
        return [one for one in self._in_use.values() if one.key[:2] == owner]

    def obtain(self, namespace: NamespaceName) -> Namespace:
        """Return the namespace; it is in use for as long as something refers to it. O(1)."""
        key = self.key(namespace)
        owner = self._in_use.get(key)
        if owner is None:
            public = self._public(what_computes(key))
            owner = Namespace(
                key, self._accounts.of(key), self._identities.seed(key), public.declared, public
            )
            self._in_use[key] = owner
        return owner

    # ------------------------------------------------------------------ public prefixes and quotas

    def quota_key(self, key: NamespaceKey) -> NamespaceKey:
        """Return the key of a quota: a tenant's name alone stands for all of its namespaces."""
        return key if len(key) == 1 else whole_key(key, self._model)

    def declare(self, computes: NamespaceKey, data: bytes) -> int:
        """Declare a prefix public; returns its length in bytes, of whole blocks."""
        length = self._public(computes).declared.add(data)
        self.any_declared |= length > 0
        return length

    def undeclare(self, computes: NamespaceKey, data: bytes) -> bool:
        """Take a declaration back; False: there was none."""
        done = self._public(computes).declared.discard(data)
        self.any_declared = any(owner.declared.prefixes for owner in self.publics.values())
        return done

    def declared(self) -> tuple[tuple[NamespaceKey, bytes], ...]:
        """Return what computes each public prefix, and its tokens. O(prefixes)."""
        return tuple(
            (computes, data) for computes, owner in self.publics.items() for data in owner.declared.prefixes
        )

    def move_to_accounts(self) -> None:
        """Have namespaces count in the accounts of new quotas; they have no blocks. O(namespaces in use)."""
        for owner in list(self._in_use.values()):
            owner.account = self._accounts.of(owner.key)
