"""Namespaces: who shares cached blocks with whom, remembered for as long as something refers to them.

The key of a namespace says whose it is, (tenant, salt), and then what computes its K/V, (adapter, model).
Public text is shared by those whose keys agree in the latter.

A namespace is an object while blocks are cached or held in it, or a lookup in it is still in use; then it
vanishes by itself. So any number of names may come and go.
"""

from __future__ import annotations

from weakref import ref

from radixkv.cache.block_identity import BlockIdentities, what_computes
from radixkv.cache.keys import NamespaceKey, NamespaceName, frame_namespace, whole_key
from radixkv.cache.node import Namespace
from radixkv.cache.retention.public_prefixes import PublicPrefixes
from radixkv.cache.retention.quota import QuotaGroups
from radixkv.errors import InvalidRequestError


class _Reference(ref[Namespace]):
    """A weak reference that knows under which name it is filed."""

    __slots__ = ("name",)
    name: NamespaceName


class Namespaces:
    """The namespaces in use.

    Args:
        groups: what their blocks count in.
        identities: give each its seed.
        block_bytes: bytes of a block's token ids.
        model: what computes, in the keys of which callers name less than all four parts; empty: nothing.

    Attributes:
        publics: the public text, by what computes it, as far as some was ever asked for.
        any_declared: whether a prefix is declared public.
    """

    def __init__(
        self, groups: QuotaGroups, identities: BlockIdentities, block_bytes: int, model: str = ""
    ) -> None:
        self._identities = identities
        self._block_bytes = block_bytes
        self._model = model
        self.publics: dict[NamespaceKey, Namespace] = {}
        self.any_declared = False
        self._groups = groups
        # By plain name where the key has only one part.
        self._references: dict[NamespaceName, _Reference] = {}

    def __len__(self) -> int:
        return len(self._references)

    def __repr__(self) -> str:
        return f"Namespaces({len(self)} in use)"

    def key(self, namespace: NamespaceName) -> NamespaceKey:
        """The whole key of a namespace. O(1).

        Raises:
            InvalidRequestError: neither a string nor a tuple of strings, or it names another model.
        """
        key = whole_key(frame_namespace(namespace), self._model)
        if self._model and key[3] != self._model:
            raise InvalidRequestError(
                f"the namespace {key!r} names the model {key[3]!r}, but this one is {self._model!r}: name "
                "at most (tenant, salt, adapter)",
                param="namespace",
            )
        return key

    def quota_key(self, key: NamespaceKey) -> NamespaceKey:
        """The key of a quota: a tenant's alone stands for all of its namespaces."""
        return key if len(key) == 1 else whole_key(key, self._model)

    def public_of(self, namespace: NamespaceName) -> Namespace:
        """The public text that a namespace shares. O(1)."""
        return self._public(what_computes(self.key(namespace)))

    def _public(self, computes: NamespaceKey) -> Namespace:
        space = self.publics.get(computes)
        if space is None:
            declared, seed = PublicPrefixes(self._block_bytes), self._identities.public_seed(computes)
            space = self.publics[computes] = Namespace((), self._groups.common, seed, declared, None)
        return space

    def declare(self, computes: NamespaceKey, data: bytes) -> int:
        """Declare a prefix public; returns its length in bytes, of whole blocks."""
        length = self._public(computes).declared.add(data)
        self.any_declared |= length > 0
        return length

    def undeclare(self, computes: NamespaceKey, data: bytes) -> bool:
        """Take a declaration back; False: there was none."""
        done = self._public(computes).declared.discard(data)
        self.any_declared = any(space.declared.prefixes for space in self.publics.values())
        return done

    def declared(self) -> tuple[tuple[NamespaceKey, bytes], ...]:
        """What computes and the tokens of every public prefix. O(prefixes)."""
        return tuple(
            (computes, data) for computes, space in self.publics.items() for data in space.declared.prefixes
        )

    def known(self, namespace: NamespaceName) -> Namespace | None:
        """The namespace, if it is in use. O(1).

        Raises:
            InvalidRequestError: as `key`.
        """
        if type(namespace) is str and not self._model:
            reference = self._references.get(namespace)
        else:
            reference = self._references.get(_name(self.key(namespace)))
        return None if reference is None else reference()

    def obtain(self, namespace: NamespaceName) -> Namespace:
        """The namespace, in use from now on for as long as something refers to it. O(1).

        Raises:
            InvalidRequestError: as `key`.
        """
        space = self.known(namespace)
        if space is None:
            key = self.key(namespace)
            public = self._public(what_computes(key))
            space = Namespace(key, self._groups.of(key), self._identities.seed(key), public.declared, public)
            reference = _Reference(space, self._forget)
            reference.name = _name(key)
            self._references[reference.name] = reference
        return space

    def _forget(self, reference: ref[Namespace]) -> None:
        assert isinstance(reference, _Reference)
        if self._references.get(reference.name) is reference:
            del self._references[reference.name]

    def regroup(self) -> None:
        """There are new groups: namespaces that have no blocks may count in them. O(namespaces in use)."""
        for reference in list(self._references.values()):
            space = reference()
            if space is not None:
                space.group = self._groups.of(space.key)


def _name(key: NamespaceKey) -> NamespaceName:
    return key[0] if len(key) == 1 else key
