"""Namespaces: who shares cached blocks with whom, remembered for as long as something refers to them.

A namespace is an object while blocks are cached or held in it, or a lookup in it is still in use; then it
vanishes by itself. So any number of names may come and go.
"""

from __future__ import annotations

from weakref import ref

from radixkv.cache.block_identity import BlockIdentities
from radixkv.cache.keys import Namespace, NamespaceKey, frame_namespace
from radixkv.cache.node import Space
from radixkv.cache.retention.quota import QuotaGroups


class _Reference(ref[Space]):
    """A weak reference that knows under which name it is filed."""

    __slots__ = ("name",)
    name: Namespace


class Namespaces:
    """The namespaces in use.

    Args:
        groups: what their blocks count in.
        identities: give each its seed.
    """

    __slots__ = ("__weakref__", "_groups", "_identities", "_references")

    def __init__(self, groups: QuotaGroups, identities: BlockIdentities) -> None:
        self._identities = identities
        self._groups = groups
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
            space = Space(key, self._groups.of(key), self._identities.seed(key))
            reference = _Reference(space, self._forget)
            reference.name = _name(key)
            self._references[reference.name] = reference
        return space

    def _forget(self, reference: ref[Space]) -> None:
        assert isinstance(reference, _Reference)
        if self._references.get(reference.name) is reference:
            del self._references[reference.name]

    def regroup(self) -> None:
        """There are new groups: namespaces that have no blocks may count in them. O(namespaces in use)."""
        for reference in list(self._references.values()):
            space = reference()
            if space is not None:
                space.group = self._groups.of(space.key)


def _name(key: NamespaceKey) -> Namespace:
    return key[0] if len(key) == 1 else key
