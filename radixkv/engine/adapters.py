# SPDX-License-Identifier: Apache-2.0
"""Adapters of an engine by name; the most recently used ones are in memory.

    name -> entry (folder, identity)      identity -> matrices, by weak references

The registry holds the matrices of `max_loras` adapters, a request the matrices of its own: a replaced,
unloaded or evicted adapter stays in memory until its last request has ended. Files are read on the
caller's thread, never on the engine's between two steps, and are compared with the registered identity, so
that a name never changes its weights unnoticed. Files that nobody touched since need no new digest.
"""
# mypy: disable-error-code="empty-body"
# ruff: noqa: B027
# The bodies of declared calls are `perform`.

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.cache.keys import (
    TOKEN_BYTES,
    EncodedTokens,
    NamespaceKey,
    NamespaceName,
    encode_tokens,
    frame_namespace,
)
from radixkv.engine.calls import Call, call
from radixkv.engine.config import EngineConfig
from radixkv.errors import AdapterLoadError, ConfigError, InvalidRequestError
from radixkv.scheduling.request import Request

if TYPE_CHECKING:  # they bring torch, and the layers of models
    from radixkv.model.adapters.adapter_memory import AdapterMemory
    from radixkv.model.adapters.lora_weights import KnownFiles
    from radixkv.model.adapters.packed_adapter import PackedAdapter

_ADAPTER_PART = 2  # of a namespace: (tenant, salt, adapter, model)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}")


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


class Adapters(ABC):
    """The table of calls on adapters: of an engine in this process, or of one or several elsewhere.

    Any thread may call it.

    Attributes:
        is_enabled: False: none can be registered.
    """

    is_enabled: bool

    @abstractmethod
    def cards(self) -> Sequence[AdapterCard]:
        """List the registered adapters by name."""

    def card(self, name: str) -> AdapterCard | None:
        """Return a registered adapter; None: there is none of that name."""
        return next((card for card in self.cards() if card.name == name), None)

    def name_of(self, identity: str) -> str | None:
        """Return the name of the adapter with these weights, the first by name; None: it is gone."""
        return next((card.name for card in self.cards() if card.identity == identity), None)

    def perform(self, call: Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Make a call that these adapters do not override, and return its result."""
        raise NotImplementedError(f"{type(self).__name__} has no {call.name}")

    @call(blocking=True)
    def load(self, name: str, folder: str) -> AdapterCard:
        """Read an adapter's folder and register it, in the place of one of that name.

        Requests that began with that one end with it.

        Raises:
            AdapterLoadError: the folder can't be read or does not fit the base.
            ConfigError: the name can't be one, or this engine takes no adapters.
        """

    @call(blocking=True)
    def unload(self, name: str) -> bool:
        """Forget an adapter; requests that have begun end with it. False: there is none of that name."""

    def check_enabled(self) -> None:
        """Raise ConfigError where no adapters can be registered."""
        if not self.is_enabled:
            raise ConfigError("this engine was started without adapters (--lora, --lora-dir)")


@dataclass(slots=True)
class _Registered:
    """A registered adapter."""

    name: str
    folder: Path
    identity: str
    rank: int
    nbytes: int
    created: int
    invocation: tuple[int, ...]
    files: KnownFiles | None
    num_reads: int = 1
    reading: threading.Lock = field(default_factory=threading.Lock)  # one reads, others wait for it


class AdapterRegistry(Adapters):
    """The adapters of an engine in this process; see the module's docstring. Thread-safe.

    Args:
        memory: packs adapters for the model, and finds them; None: the registry stays empty.
        reserved: names that are taken: the base model's.
        max_loras: adapters kept in memory while no request uses them.
        max_rank: largest rank taken.
    """

    def __init__(
        self,
        memory: AdapterMemory | None = None,
        *,
        reserved: Sequence[str] = (),
        max_loras: int = 0,
        max_rank: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.is_enabled = memory is not None
        self._memory = memory
        self._reserved = frozenset(reserved)
        self._max_loras, self._max_rank = max_loras, max_rank
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Registered] = {}
        self._kept: OrderedDict[str, PackedAdapter] = OrderedDict()  # by identity, least recently used first

    def cards(self) -> Sequence[AdapterCard]:
        with self._lock:
            return [self._card(self._entries[name]) for name in sorted(self._entries)]

    def card(self, name: str) -> AdapterCard | None:
        with self._lock:
            entry = self._entries.get(name)
            return None if entry is None else self._card(entry)

    def in_memory(self, name: str) -> bool:
        """Return True if `acquire` would not read files. O(1)."""
        with self._lock:
            entry = self._entries.get(name)
            return entry is None or self._find(entry.identity) is not None

    def _find(self, identity: str) -> PackedAdapter | None:
        return None if self._memory is None else self._memory.get(identity)

    def acquire(self, name: str) -> PackedAdapter:
        """Return an adapter in memory, with its `identity` and `invocation`.

        It stays there while it is referenced. Its files are read if it is not in memory.

        Raises:
            InvalidRequestError: the name is unknown, or its files have changed or are missing.
        """
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                # Others' names are not for every caller's eyes.
                why = "it was never loaded, or has been unloaded"
                if not self.is_enabled:
                    why = "this engine was started without any (--lora, --lora-dir)"
                raise InvalidRequestError(
                    f"there is no adapter {name[:200]!r}: {why}", param="lora", code="model_not_found"
                )
            adapter = self._find(entry.identity)
            if adapter is not None:
                self._keep(adapter)
                return adapter
        with entry.reading:
            adapter = self._find(entry.identity) or self._read_again(entry)
        with self._lock:
            if self._entries.get(name) is entry:  # else it was unloaded meanwhile: this request ends with it
                self._keep(adapter)
        return adapter

    def _read_again(self, entry: _Registered) -> PackedAdapter:
        assert self._memory is not None
        try:
            adapter, entry.files = self._memory.read(entry.folder, self._max_rank, entry.files)
        except AdapterLoadError as error:
            raise InvalidRequestError(
                f"the adapter {entry.name!r} can't be read any more; load it again "
                "(POST /v1/load_lora_adapter)",
                param="lora",
                code="adapter_gone",
            ) from error
        if adapter.identity != entry.identity:
            raise InvalidRequestError(
                f"the files of the adapter {entry.name!r} have changed since it was loaded; load it again "
                "(POST /v1/load_lora_adapter)",
                param="lora",
                code="adapter_changed",
            )
        entry.num_reads += 1
        return adapter

    def load(self, name: str, folder: str) -> AdapterCard:
        self.check_enabled()
        assert self._memory is not None
        check_name(name)
        if name in self._reserved:
            raise ConfigError(f"{name!r} is the base model's name; give the adapter another")
        try:
            adapter, files = self._memory.read(Path(folder), self._max_rank)
        except AdapterLoadError as error:
            raise AdapterLoadError(f"The adapter {name!r} can't be loaded: {error}") from None
        entry = _Registered(
            name,
            Path(folder),
            adapter.identity,
            adapter.rank,
            adapter.nbytes,
            int(self._clock()),
            adapter.invocation,
            files,
        )
        with self._lock:
            before = self._entries.get(name)
            self._entries[name] = entry
            if before is not None:
                self._drop(before.identity)
            self._keep(adapter)
            return self._card(entry)

    def unload(self, name: str) -> bool:
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._drop(entry.identity)
            return entry is not None

    def _card(self, entry: _Registered) -> AdapterCard:
        return AdapterCard(
            name=entry.name,
            identity=entry.identity,
            folder=str(entry.folder),
            rank=entry.rank,
            created=entry.created,
            in_memory=self._find(entry.identity) is not None,
            nbytes=entry.nbytes,
            num_reads=entry.num_reads,
            invocation=entry.invocation,
        )

    def _keep(self, adapter: PackedAdapter) -> None:
        """Note the use of an adapter; the least recently used one beyond the limit is let go."""
        self._kept[adapter.identity] = adapter
        self._kept.move_to_end(adapter.identity)
        while len(self._kept) > self._max_loras:
            self._kept.popitem(last=False)

    def _drop(self, identity: str) -> None:
        """Let an adapter go that a name has lost, unless another name has it."""
        if all(entry.identity != identity for entry in self._entries.values()):
            self._kept.pop(identity, None)


def open_adapters(config: EngineConfig, memory: AdapterMemory | None, model: str) -> AdapterRegistry:
    """Register the adapters that a configuration names.

    Args:
        memory: of the model; None: it takes no adapters.
        model: the base's name.

    Raises:
        ConfigError: a name can't be one, or is the base's.
        AdapterLoadError: a folder can't be read, or does not fit the base.
    """
    if memory is None:
        return AdapterRegistry()
    registry = AdapterRegistry(
        memory, reserved=(model,), max_loras=config.max_loras, max_rank=config.max_lora_rank
    )
    for name, folder in parse_lora(config.lora).items():
        registry.load(name, folder)
    return registry


def parse_lora(specs: Iterable[str]) -> dict[str, str]:
    """Return folders by name, from `NAME=PATH` or several of them with commas between.

    >>> parse_lora(["sql=/a/sql,chat=/a/chat"])
    {'sql': '/a/sql', 'chat': '/a/chat'}

    Raises:
        ConfigError: no NAME=PATH, no name, or a name twice.
    """
    found: dict[str, str] = {}
    for spec in (part for text in specs for part in text.split(",")):
        name, _, folder = spec.strip().partition("=")
        if not name or not folder:
            raise ConfigError(f"--lora takes NAME=PATH, several with commas between them, not {spec!r:.200}")
        check_name(name)
        if name in found:
            raise ConfigError(f"--lora names {name!r} twice")
        found[name] = folder
    return found


def check_name(name: str) -> None:
    """Check the name of an adapter.

    Raises:
        ConfigError: it has invalid characters, or too many.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:200]!r} is no name of an adapter: a letter or digit, then at most 127 letters, digits "
            "and _.:/-"
        )


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


def begin_adapter(request: Request, prompt: EncodedTokens) -> None:
    """Say where a request's adapter begins, and in which namespace its shared prefixes are.

    An activated adapter begins with the last invocation in the prompt, as PEFT has it; without one, the base
    answers alone.
    """
    if request.adapter.invocation:
        start = last_place(prompt.data, encode_tokens(request.adapter.invocation))
        if start is None:
            request.adapter = None
            return
        request.adapter_from = start
    if not request.adapter_from:
        request.namespace = adapted(request.namespace, request.adapter.identity)


def last_place(data: bytes, wanted: bytes) -> int | None:
    """Return the token at which encoded tokens hold others for the last time; None: nowhere. O(length)."""
    at = data.rfind(wanted)
    while at % TOKEN_BYTES and at >= 0:
        at = data.rfind(wanted, 0, at + len(wanted) - 1)
    return None if at < 0 else at // TOKEN_BYTES
