"""Declarations: what users declare to a cache, which outlives what is cached: quotas, public prefixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from radixkv.cache.block_identity import what_computes
from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey, NamespaceName, TokenIds, encode_tokens
from radixkv.cache.retention.quota import Quota, framed_quotas
from radixkv.cache.state import CacheState
from radixkv.errors import ConfigError


class Declared(NamedTuple):
    """What users declared to a cache.

    Attributes:
        quotas: by framed namespace.
        public_prefixes: what computes them, and their encoded tokens.
    """

    quotas: dict[NamespaceKey, Quota]
    public_prefixes: tuple[tuple[NamespaceKey, bytes], ...]


class Declarations:
    """What was declared to one cache."""

    __slots__ = ("_state",)

    def __init__(self, state: CacheState) -> None:
        self._state = state

    def publish(self, token_ids: TokenIds, namespace: NamespaceName) -> int:
        """As `PrefixCache.publish`."""
        state = self._state
        length = state.namespaces.declare(self._computes(namespace), encode_tokens(token_ids))
        state.lookup.outdate()
        return length // TOKEN_BYTES

    def _computes(self, namespace: NamespaceName) -> NamespaceKey:
        return what_computes(self._state.namespaces.key(namespace))

    def unpublish(self, token_ids: TokenIds, namespace: NamespaceName) -> bool:
        """As `PrefixCache.unpublish`."""
        state = self._state
        state.lookup.outdate()
        return state.namespaces.undeclare(self._computes(namespace), encode_tokens(token_ids))

    def set_quotas(self, quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]]) -> None:
        """As `PrefixCache.set_quotas`."""
        state = self._state
        groups = state.capacity.groups
        framed = {state.namespaces.quota_key(name): quota for name, quota in framed_quotas(quotas).items()}
        used = {space.key for space in state.tree.roots} | {lease.space.key for lease in state.leases}
        for key in framed:
            if not groups.is_known(key) and any(key in (name, name[:1]) for name in used):
                raise ConfigError(
                    f"{key[0]!r} has blocks in the cache already, which count for those without a quota: "
                    "give its quota before its first request, or reset the cache"
                )
        groups.set(framed)
        state.namespaces.regroup()
        state.capacity.keep_ceilings()

    @property
    def current(self) -> Declared:
        """What is declared now. O(quotas and prefixes)."""
        return Declared(self._state.capacity.groups.quotas, self._state.namespaces.declared())

    def adopt(self, declared: Declared) -> None:
        """Declare what was declared to another cache, on one that is new.

        Raises:
            ConfigError: the quotas' floors exceed the pool.
        """
        self._state.capacity.groups.set(declared.quotas)
        for computes, prefix in declared.public_prefixes:
            self._state.namespaces.declare(computes, prefix)
