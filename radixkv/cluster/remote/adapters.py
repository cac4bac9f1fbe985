# SPDX-License-Identifier: Apache-2.0
"""RemoteAdapters: the adapters of the engine at the other end of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, cast

from radixkv.cluster.remote.channel import Status
from radixkv.engine.adapters import AdapterCard, Adapters


class MakesCalls(Protocol):
    """The methods of `radixkv.cluster.remote.engine.Link` used here."""

    status: Status

    def ask_status(self) -> None: ...

    async def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any: ...


class RemoteAdapters(Adapters):
    """See `Adapters`. `load` and `unload` wait for the other end, so call them in a thread."""

    def __init__(self, link: MakesCalls) -> None:
        self._link = link
        self.is_enabled = link.status.adapters is not None

    def cards(self) -> Sequence[AdapterCard]:
        self._link.ask_status()  # for the next caller
        return self._link.status.adapters or ()

    def card(self, name: str) -> AdapterCard | None:
        return next((card for card in self._link.status.adapters or () if card.name == name), None)

    def name_of(self, identity: str) -> str | None:
        return next((card.name for card in self.cards() if card.identity == identity), None)

    def load(self, name: str, folder: str) -> AdapterCard:
        self.check_enabled()
        return cast(AdapterCard, asyncio.run(self._link.call("adapters.load", (name, folder), {})))

    def unload(self, name: str) -> bool:
        return cast(bool, asyncio.run(self._link.call("adapters.unload", (name,), {})))
