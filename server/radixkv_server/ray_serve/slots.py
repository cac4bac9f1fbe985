# SPDX-License-Identifier: Apache-2.0
"""Slots: numbers of a machine's replicas, which give each its own folders and ports.

A replica takes the first number that no living process holds. So the successor of a replica finds its disk
tier, and begins with that cache.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from radixkv.cluster.events.spec import parse_events
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.tiers.spec import parse_tiers

MAX_SLOTS = 1024


def private_folder() -> Path:
    """Return the folder shared by a machine's replicas; private to the user, as its sockets are trusted.

    Raises:
        ConfigError: it can't be made, or others could write there.
    """
    folder = Path(tempfile.gettempdir()) / f"radixkv-{getpass.getuser()}"
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder} can't hold what replicas share: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{folder} must be a folder of this user that others can't write to: remove it, or set TMPDIR"
        )
    return folder


@dataclass(slots=True)
class Slot:
    """Number held by this process until its end, even by a crash."""

    number: int
    _lock: int  # a file descriptor

    @classmethod
    def take(cls, config: EngineConfig) -> Slot:
        """Take the first free number among this machine's replicas with the same tiers, events and model.

        Raises:
            ConfigError: the folder of the locks can't be used, or there are too many.
        """
        shared = repr((config.model, config.kv_tier, config.kv_events)).encode()
        folder = private_folder() / hashlib.sha256(shared).hexdigest()[:16]
        try:
            folder.mkdir(exist_ok=True, mode=0o700)
            for number in range(MAX_SLOTS):
                lock = os.open(folder / f"{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock)
                else:
                    return cls(number, lock)
        except OSError as error:
            raise ConfigError(f"{folder} can't hold the locks of the replicas: {error.strerror}") from error
        raise ConfigError(f"more than {MAX_SLOTS} replicas on one machine: {folder}")

    def config(self, config: EngineConfig) -> EngineConfig:
        """Return the settings with this replica's own folders (`PATH/replica-0`) and ports (two for each)."""
        tiers = []
        for text, spec in zip(config.kv_tier, parse_tiers(config.kv_tier), strict=True):
            own = Path(spec.where) / f"replica-{self.number}"
            tiers.append(
                text if spec.kind != "disk" else text.replace(f"disk:{spec.where}", f"disk:{own}", 1)
            )
        return replace(config, kv_tier=tuple(tiers), kv_events=self._events(config.kv_events))

    def _events(self, text: str | None) -> str | None:
        if text is None:
            return None
        spec = parse_events(text)
        shifted = []
        for endpoint in (spec.endpoint, spec.replay):
            host, _, port = endpoint.rpartition(":")
            shifted.append(f"{host}:{int(port) + 2 * self.number}" if int(port) else endpoint)
        options = [
            option
            for option in text.removeprefix(spec.endpoint).split(",")[1:]
            if not option.startswith("replay=")
        ]
        return ",".join([shifted[0], f"replay={shifted[1]}", *options])

    def release(self) -> None:
        """Release the number for another replica."""
        os.close(self._lock)
