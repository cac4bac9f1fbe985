# SPDX-License-Identifier: Apache-2.0
"""Adapters of an engine by name: the seam, and an engine without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.cache.keys import NamespaceKey, NamespaceName, frame_namespace
from radixkv.errors import ConfigError, InvalidRequestError

_ADAPTER_PART = 2  # of a namespace: (tenant, salt, adapter, model)


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """Description of an adapter.

    Attributes:
        name: name that requests give.
        identity: digest of its weights, which is part of the cache key.
        folder: folder of its files.
        rank: largest rank of its matrices.
        created: time of its registration, in seconds since 1970.
        in_memory: False: the next request for it reads its files.
        nbytes: memory of its matrices, in bytes.
        num_reads: number of times that its files were read.
        invocation: tokens that an activated adapter begins with; empty: it computes whole prompts.
    """

    name: str
    identity: str
    folder: str
    rank: int
    created: int
    in_memory: bool
    nbytes: int
    num_reads: int
    invocation: tuple[int, ...] = ()

    @property
    def namespace_part(self) -> str:
        """The adapter in the namespace of its shared prefixes; empty: they are the base's."""
        return "" if self.invocation else self.identity


class Adapters:
    """The adapters of an engine; this base has none. Any thread may call it."""

    is_enabled = False  # False: nothing can be registered

    def cards(self) -> Sequence[AdapterCard]:
        """List the registered adapters by name."""
        return ()

    def card(self, name: str) -> AdapterCard | None:
        """Return a registered adapter; None: there is none of that name."""
        return None

    def in_memory(self, name: str) -> bool:
        """Return True if `acquire` would not read files. O(1)."""
        return True

    def name_of(self, identity: str) -> str | None:
        """Return the name of the adapter with these weights, the first by name; None: it is gone."""
        return None

    def acquire(self, name: str) -> Any:
        """Return an adapter in memory, with its `identity` and `invocation`.

        It stays there while it is referenced.

        Reads its files if it is not in memory.

        Raises:
            InvalidRequestError: the name is unknown, or its files have changed or are missing.
        """
        raise InvalidRequestError(
            f"there is no adapter {name[:200]!r}: this engine was started without any (--lora, --lora-dir)",
            param="lora",
            code="model_not_found",
        )

    def load(self, name: str, folder: str) -> AdapterCard:
        """Read an adapter's folder and register it, in the place of one of that name.

        Requests that began with that one end with it.

        Raises:
            AdapterLoadError: the folder can't be read or does not fit the base.
            ConfigError: the name can't be one, or this engine takes no adapters.
        """
        raise ConfigError("this engine was started without adapters (--lora, --lora-dir)")

    def unload(self, name: str) -> bool:
        """Forget an adapter; requests that have begun end with it. False: there is none of that name."""
        return False


def adapted(namespace: NamespaceName, identity: str) -> NamespaceKey:
    """Return the namespace of an owner's text under an adapter.

    >>> adapted(("alice", "s"), "4f2a"), adapted("alice", "")
    (('alice', 's', '4f2a'), ('alice', '', ''))
    """
    key = frame_namespace(namespace)
    key += ("",) * (_ADAPTER_PART + 1 - len(key))
    return (*key[:_ADAPTER_PART], identity, *key[_ADAPTER_PART + 1 :])


def adapter_part(namespace: NamespaceName) -> str:
    """Return the adapter that a namespace names; empty: none."""
    key = frame_namespace(namespace)
    return key[_ADAPTER_PART] if len(key) > _ADAPTER_PART else ""
