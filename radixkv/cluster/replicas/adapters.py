# SPDX-License-Identifier: Apache-2.0
"""ReplicatedAdapters: the adapters of several engines, which all have the same ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from radixkv.cluster.replicas.members import Members
from radixkv.engine.adapters import AdapterCard, Adapters
from radixkv.errors import AdapterLoadError, EngineStoppedError


class ReplicatedAdapters(Adapters):
    """See `Adapters`. Engines that come later repeat all loads and unloads.

    Args:
        members: the engines.
        enabled: whether they take adapters.
    """

    def __init__(self, members: Members, enabled: bool) -> None:
        self.is_enabled = enabled
        self._members = members
        self._lock = threading.Lock()  # one change at a time
        self._changes: dict[str, str | None] = {}  # name -> folder; None: unloaded

    def cards(self) -> Sequence[AdapterCard]:
        members = self._members.present()
        told = [member for member in members if member.replica.is_open] or members
        return told[0].engine.adapters.cards() if told else ()

    def load(self, name: str, folder: str) -> AdapterCard:
        """See `Adapters.load`; also AdapterLoadError where the folder is not the same for all engines."""
        self.check_enabled()
        with self._lock:
            done: list[tuple[Adapters, AdapterCard | None, AdapterCard]] = []
            try:
                for member in self._members.present():
                    adapters = member.engine.adapters
                    before = adapters.card(name)
                    with contextlib.suppress(EngineStoppedError):  # it gets all of them when it is back
                        done.append((adapters, before, adapters.load(name, folder)))
                if not done:
                    raise EngineStoppedError("no replica is there", retry_after_s=1.0)
                if len({card.identity for _, _, card in done}) > 1:
                    raise AdapterLoadError(
                        f"The adapter {name!r} can't be loaded: {folder} holds different adapters on "
                        "different replicas."
                    )
            except BaseException:
                for adapters, before, _ in done:
                    with contextlib.suppress(EngineStoppedError):
                        _restore(adapters, name, before)
                raise
            self._changes[name] = folder
            return done[0][2]

    def unload(self, name: str) -> bool:
        with self._lock:
            found = False
            for member in self._members.present():
                with contextlib.suppress(EngineStoppedError):
                    found |= member.engine.adapters.unload(name)
            self._changes[name] = None
            return found

    def prepare(self, adapters: Adapters) -> None:
        """Repeat all earlier changes in a new engine. Blocks."""
        with self._lock:
            for name, folder in self._changes.items():
                if folder is not None:
                    adapters.load(name, folder)
                else:
                    adapters.unload(name)


def _restore(adapters: Adapters, name: str, before: AdapterCard | None) -> None:
    if before is None:
        adapters.unload(name)
    else:
        adapters.load(name, before.folder)
