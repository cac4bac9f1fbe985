# SPDX-License-Identifier: Apache-2.0
"""A process that has read a model, and whose copies serve it: ready in a second, the weights in memory once.

    python -m radixkv.cluster.remote.fork_server SOCKET     (the pickled configuration on stdin)

listens on a Unix socket and leaves the process group. `fork_engine` connects to it, or starts it, and names
a function; a copy of the process runs that with the model and the channel. Only for models on a CPU: a
GPU's driver can't be copied. The process ends when the last copy has ended as requested, and a while
after the last one otherwise, so that a killed copy is soon replaced.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from radixkv.channel import Channel, ChannelEnded, as_sent
from radixkv.engine.config import EngineConfig
from radixkv.errors import EngineStoppedError
from radixkv.helper_process import MODULE, helper_environment

if TYPE_CHECKING:
    from radixkv.model.loading.loader import LoadedModel

#: Seconds that it waits for the next engine when there is none.
KEEP_S = 60.0
_LOOK_S = 0.2
_PR_SET_NAME = 15

#: Function of a copy: gets the model and the channel to its requester, which receives its exceptions.
Serve = Callable[["LoadedModel", Channel], None]


def fork_engine(path: Path, config: EngineConfig, serve: Serve) -> Channel:
    """Run `serve` in a copy of the process that has the model of `config`; starts that where there is none.

    Blocks until the copy is there: as long as the model takes to load, the first time.

    Args:
        path: of the socket, in a folder of this user's own; processes that share it have the same `config`.
        serve: a function that can be pickled, such as a `partial` of a module's.

    Returns:
        The channel to the copy, which ends when the copy does.

    Raises:
        EngineStoppedError: the process could not be started, or ended. And what loading the model raised.
    """
    request = pickle.dumps(serve)
    for _ in range(3):  # the process may be about to end
        channel = _connected(path, config)
        try:
            channel.send(request)
            failure = channel.receive_object()
        except ChannelEnded:
            channel.close()
            continue
        if failure is None:
            return channel
        channel.close()
        raise failure
    raise EngineStoppedError("the process that loads the model has ended; its messages say why")


def _connected(path: Path, config: EngineConfig) -> Channel:
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several at once, one starts it
        try:
            return _connect(path)
        except OSError:
            _start(path, config)
        try:
            return _connect(path)
        except OSError as error:
            raise EngineStoppedError(f"the process that loads the model can't be reached: {error}") from error


def _connect(path: Path) -> Channel:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        return Channel.over(sock)


def _start(path: Path, config: EngineConfig) -> None:
    started = subprocess.run(
        [*MODULE, "radixkv.cluster.remote.fork_server", str(path)],
        input=pickle.dumps(config),
        env=helper_environment(),
        check=False,
    )
    if started.returncode:
        raise EngineStoppedError(f"the process that loads the model ended with {started.returncode}")


class _ForkServer:
    """Lives as long as its engines, see the module's text.

    Args:
        listener: its socket.
    """

    def __init__(self, listener: socket.socket, config: EngineConfig) -> None:
        self._listener = listener
        self._failure: BaseException | None = None
        self._loaded: LoadedModel | None = None
        self._children: set[int] = set()
        self._empty_since = time.monotonic()
        self._is_asked_to_end = False
        try:
            self._loaded = _load(config)
        except BaseException as error:
            self._failure = as_sent(error, EngineStoppedError)
            self._is_asked_to_end = True  # once who asked has been told

    def run(self) -> None:
        """Serve until the last user is gone."""
        self._listener.settimeout(_LOOK_S)
        self._empty_since = time.monotonic()
        while True:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                self._reap()
                if not self._children and (
                    self._is_asked_to_end or time.monotonic() - self._empty_since > KEEP_S
                ):
                    return
                continue
            self._answer(Channel.over(sock))

    def _answer(self, channel: Channel) -> None:
        with channel:
            try:
                request = channel.receive()
                channel.send_object(self._failure)
            except ChannelEnded:  # who asked has gone
                return
            if self._loaded is None:
                return
            child = os.fork()
            if child == 0:
                self._listener.close()
                _serve(self._loaded, request, channel)
            self._children.add(child)
            self._is_asked_to_end = False

    def _reap(self) -> None:
        for child in list(self._children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                self._children.discard(child)
                self._is_asked_to_end = status == 0
                self._empty_since = time.monotonic()


def _load(config: EngineConfig) -> LoadedModel:
    """Load the model with its layers as they are served, on this thread alone: others are not copied."""
    import torch  # heavy, as what follows is: whoever asks for an engine does without it

    from radixkv.engine.startup import return_freed_memory  # heavy: torch or transformers
    from radixkv.model.device_paths import check_instruction_set, rewrite_layers
    from radixkv.model.loading.loader import load_model

    check_instruction_set()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load_model(config)
    rewrite_layers(loaded.model, config.quantization, "cpu")
    for module in (
        "radixkv.entrypoints.async_engine",
        "radixkv.entrypoints.builder",
    ):  # what else its copies need
        importlib.import_module(module)
    torch.set_num_threads(num_threads)
    gc.collect()
    gc.freeze()  # so that pages stay shared
    return_freed_memory()
    return loaded


def _serve(loaded: LoadedModel, request: bytes, channel: Channel) -> NoReturn:
    """Serve in a copy of the process, and end it."""
    import numpy as np  # heavy: see `_load`
    import torch

    status = 1
    try:
        _name("radixkv-engine")
        random.seed()  # or all copies would draw the same
        np.random.seed()
        torch.seed()
        pickle.loads(request)(loaded, channel)
        status = 0
    except BaseException as error:
        with suppress(ChannelEnded):  # who asked has gone
            channel.send_object(as_sent(error, EngineStoppedError))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _name(name: str) -> None:
    """Set the process name that `ps -o comm` shows."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main(path: str) -> None:
    """See the module's text. The command itself ends at once when clients may connect."""
    config = pickle.loads(sys.stdin.buffer.read())
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _name("radixkv-fork")
    _ForkServer(listener, config).run()
    with suppress(FileNotFoundError):
        os.unlink(path)


if __name__ == "__main__":
    main(sys.argv[1])
