# SPDX-License-Identifier: Apache-2.0
"""The engine of a replica: in the replica's own process, or in a fork of one that has loaded the model.

The second is ready in a second, and replicas on one machine share the memory of their weights. Ray's own
process of the replica then only watches it: when one of the two ends, so does the other.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from radixkv.channel import Channel, ChannelEnded
from radixkv.cluster.loop_thread import LoopThread
from radixkv.cluster.remote.fork_server import fork_engine
from radixkv.cluster.remote.tcp import EngineAddress, EngineListener
from radixkv.engine.config import EngineConfig
from radixkv.engine.interpreter import settle_process
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv.errors import EngineStoppedError
from radixkv_server.log_format import configure_logging
from radixkv_server.ray_serve.slots import Slot, private_folder

if TYPE_CHECKING:
    from radixkv.model.loading.loader import LoadedModel

# Seconds between two words of a forked engine about itself; one that is silent for longer hangs, and is
# killed, as is one that takes longer to close.
_TELL_S = 0.2
_SILENT_S = 10.0
_CLOSE_S = 12.0


class ReplicaEngine(Protocol):
    """Engine served at an address.

    Attributes:
        num_clients: connected to it now.
    """

    address: EngineAddress

    @property
    def is_healthy(self) -> bool: ...

    @property
    def num_clients(self) -> int: ...

    def close(self) -> None:
        """Write pending blocks to the tiers, and end the engine; running requests fail."""


def may_fork(config: EngineConfig, num_gpus: int) -> bool:
    """Return True if an engine with these settings can be a copy of a process that has its model."""
    uses_gpu = config.device == "cuda" or (config.device == "auto" and num_gpus > 0)
    return sys.platform == "linux" and not uses_gpu and config.tensor_parallel == 1


class OwnEngine:
    """Engine in this process, which has nothing else to do.

    Args:
        config: for all replicas; folders and ports become this one's own (`Slot`).
        host: to listen on.
    """

    def __init__(self, config: EngineConfig, host: str, *, loaded: LoadedModel | None = None) -> None:
        self._slot = Slot.take(config)
        self._engine = AsyncEngine.from_config(self._slot.config(config), loaded=loaded)
        settle_process()
        self._listener = EngineListener(self._engine, host)
        self.address = self._listener.address

    @property
    def is_healthy(self) -> bool:
        return self._engine.is_healthy

    @property
    def num_clients(self) -> int:
        return self._listener.num_clients

    def close(self) -> None:
        """See `ReplicaEngine`."""
        self._listener.close()
        closing = LoopThread("radixkv-close")
        closing.run(self._engine.close())
        closing.stop()
        self._slot.release()


class _Word(NamedTuple):
    """A forked engine's report of itself, which it sends again and again, after its address."""

    pid: int
    is_healthy: bool
    num_clients: int


class ForkedEngine:
    """Engine in a fork of this machine's process with the model of `config`; see `fork_engine`.

    Args:
        cluster: names the sharing group of the process: it never outlives that by more than a minute.
        on_end: called in a thread when the engine's process has ended unasked.

    Raises:
        ConfigError, ModelLoadError, EngineStoppedError: it can't be made.
    """

    def __init__(self, config: EngineConfig, host: str, cluster: str, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._is_closing = False
        self._channel = fork_engine(_path(config, cluster), config, partial(_serve, config, host))
        try:
            first = self._channel.receive_object()
            if isinstance(first, BaseException):
                raise first
            self.address: EngineAddress = first
            self._word: _Word = self._channel.receive_object()
        except ChannelEnded:
            raise EngineStoppedError("the engine's process ended before its engine was ready") from None
        self._reading = threading.Thread(target=self._read, name="radixkv-engine-words", daemon=True)
        self._reading.start()

    @property
    def is_healthy(self) -> bool:
        return self._word.is_healthy

    @property
    def num_clients(self) -> int:
        return self._word.num_clients

    def close(self) -> None:
        """See `ReplicaEngine`."""
        self._is_closing = True
        with suppress(ChannelEnded):
            self._channel.send_object(None)
        self._reading.join(_CLOSE_S)
        if self._reading.is_alive():
            os.kill(self._word.pid, signal.SIGKILL)

    def _read(self) -> None:
        with suppress(ChannelEnded):
            while True:
                if not self._channel.has_message(_SILENT_S) and not self._is_closing:
                    os.kill(self._word.pid, signal.SIGKILL)
                self._word = self._channel.receive_object()
        self._word = self._word._replace(is_healthy=False, num_clients=0)
        if not self._is_closing:
            self._on_end()


def _path(config: EngineConfig, cluster: str) -> Path:
    shared = repr((cluster, sys.executable, __file__, config)).encode()
    return private_folder() / f"fork-{hashlib.sha256(shared).hexdigest()[:16]}.sock"


def _serve(config: EngineConfig, host: str, loaded: LoadedModel, channel: Channel) -> None:
    """Serve in the fork until it is told to end, or the replica's process has exited."""
    configure_logging("text", None)
    engine = OwnEngine(config, host, loaded=loaded)
    try:
        channel.send_object(engine.address)
        while True:
            channel.send_object(_Word(os.getpid(), engine.is_healthy, engine.num_clients))
            if channel.has_message(_TELL_S):
                channel.receive_object()
                break
    except ChannelEnded:
        os._exit(1)  # at once: clients see it, and another may take the slot
    engine.close()
