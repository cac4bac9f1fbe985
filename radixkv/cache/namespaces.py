"""Namespaces: who shares cached blocks with whom, remembered for as long as something refers to them.

A namespace is an object while blocks are cached or held in it, or a lookup in it is still in use; then it
vanishes by itself. So any number of names may come and go.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ref

from radixkv.cache.insight.prefix_hash import space_seed
from radixkv.cache.keys import Namespace, NamespaceKey, frame_namespace
from radixkv.cache.node import Space
from radixkv.cache.retention.quota import QuotaGroup


class _Reference(ref[Space]):
    """A weak reference that knows under which name it is filed."""

    __slots__ = ("name",)
    name: Namespace


class Namespaces:
    """The namespaces in use.

    Args:
        groups: the quota groups of those with a quota.
        common: that of all others.
    """

    __slots__ = ("__weakref__", "_common", "_groups", "_references")

    def __init__(self, groups: Mapping[NamespaceKey, QuotaGroup], common: QuotaGroup) -> None:
        self._groups = groups
        self._common = common
        self._references: dict[Namespace, _Reference] = {}  # by plain name where the key has only one part

    def __len__(self) -> int:
        return len(self._references)

    def __repr__(self) -> str:
        return f"Namespaces({len(self)} in use)"

    def known(self, namespace: Namespace) -> Space | None:
        """The namespace, if it is in use. O(1).

        Raises:
            InvalidRequestError: neither a string nor a tuple of strings.
        """
        if type(namespace) is str:
            reference = self._references.get(namespace)
        else:
            reference = self._references.get(_name(frame_namespace(namespace)))
        return None if reference is None else reference()

    def obtain(self, namespace: Namespace) -> Space:
        """The namespace, in use from now on for as long as something refers to it. O(1).

        Raises:
            InvalidRequestError: neither a string nor a tuple of strings.
        """
        space = self.known(namespace)
        if space is None:
            key = frame_namespace(namespace)
            space = Space(key, self.group(key), space_seed(key))
            reference = _Reference(space, self._forget)
            reference.name = _name(key)
            self._references[reference.name] = reference
        return space

    def _forget(self, reference: ref[Space]) -> None:
        assert isinstance(reference, _Reference)
        if self._references.get(reference.name) is reference:
            del self._references[reference.name]

    def group(self, key: NamespaceKey) -> QuotaGroup:
        """The quota group that a namespace counts in: its own, else its first part's (the tenant's). O(1)."""
        return self._groups.get(key) or self._groups.get(key[:1], self._common)


def _name(key: NamespaceKey) -> Namespace:
    return key[0] if len(key) == 1 else key
