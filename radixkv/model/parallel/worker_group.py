# SPDX-License-Identifier: Apache-2.0
"""WorkerGroup: the processes of the ranks after the first, watched from rank 0.

A rank that ends, or that lets the others wait for too long, breaks the group: all of its processes are
killed then, which ends rank 0's waits, and `failure` gives the reason. A broken group is not mended: its user
makes another one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from radixkv.channel import Channel, ChannelEnded
from radixkv.engine.config import EngineConfig
from radixkv.errors import ENDS_PROCESS, ConfigError, EngineStoppedError
from radixkv.helper_process import MODULE, helper_environment
from radixkv.model.loading.loader import fetch
from radixkv.model.parallel.communicator import Communicator

logger = logging.getLogger("radixkv")

#: Longest that ranks wait for each other before they serve: they read weights, compile and pack.
_STARTUP_S = 900.0
_END_S = 5.0
_WORKER = "radixkv.model.parallel.worker"


@dataclass(frozen=True, slots=True)
class Start:
    """Settings of a rank, which rank 0 sends once. Messages of the start are pickled, a few times in all."""

    config: EngineConfig
    rank: int


class Loaded(NamedTuple):
    """Message of a rank that has loaded the model of this fingerprint, and waits for the meeting place."""

    fingerprint: str


class RankFailed(NamedTuple):
    """Message of a rank that ends for this reason."""

    reason: str


class _Worker:
    """A process, and rank 0's ends of its sockets."""

    def __init__(self, rank: int, config: EngineConfig) -> None:
        self.rank = rank
        self.loaded: Future[str] = Future()
        self.reason = ""  # of its end, if it could report one
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        try:
            self.process = subprocess.Popen(
                [*MODULE, _WORKER, *(str(end.fileno()) for end in theirs)],
                stdin=subprocess.DEVNULL,
                env=_environment(rank, config),
                pass_fds=[end.fileno() for end in theirs],
                # An interrupt of the terminal is rank 0's. The session is the same: when rank 0 ends, so
                # do the stopped processes of its other groups, which could not end themselves.
                process_group=0,
            )
        finally:
            for end in theirs:
                end.close()
        self.commands, self.data = map(Channel.over, ours)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    @property
    def how_it_is(self) -> str:
        """State of its process, as the system reports it."""
        try:
            return f"{self} is {psutil.Process(self.process.pid).status()}"
        except psutil.Error:
            return f"{self} is gone"

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped its process."""
        try:
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def close(self) -> None:
        self.commands.close()
        self.data.close()


def _environment(rank: int, config: EngineConfig) -> dict[str, str]:
    environment = helper_environment()
    if config.device != "cpu" and torch.cuda.is_available():
        visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        has_list = len(visible) > rank
        environment["CUDA_VISIBLE_DEVICES"] = visible[rank].strip() if has_list else str(rank)
    return environment


class WorkerGroup:
    """Starts the processes of ranks 1 to N - 1; they load the model at once.

    Args:
        config: `tensor_parallel` is N.

    Attributes:
        failure: the reason why it can't be used any more; None: it can.
        workers: by rank, from 1.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.tensor_parallel
        _check_gpus(config)
        # One process fetches and converts the files that the others then find.
        fetch(config)
        self.failure: EngineStoppedError | None = None
        self._timeout_s, self._limit_s = config.tensor_parallel_timeout_s, _STARTUP_S
        self._communicator: Communicator | None = None
        self._waiting_since: dict[int, float] = {}  # by thread
        self._on_failure: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._ended = threading.Event()  # it is broken, or closed
        self.workers: list[_Worker] = []
        try:
            for rank in range(1, self.size):
                self.workers.append(_Worker(rank, config))
                self.workers[-1].commands.send_object(Start(config, rank))
        except BaseException:
            self.close()
            raise
        threads = [threading.Thread(target=self._listen, args=(worker,)) for worker in self.workers]
        for thread in [*threads, threading.Thread(target=self._watch)]:
            thread.name, thread.daemon = "radixkv-ranks", True
            thread.start()

    # ------------------------------------------------------------------ starting

    def meet(self, fingerprint: str, device: torch.device, *, in_order: bool) -> Communicator:
        """Wait until all ranks have loaded the model, and connect them.

        Raises:
            EngineStoppedError: a rank has failed, or has loaded something else.
        """
        for worker in self.workers:
            try:
                found = worker.loaded.result(_STARTUP_S)
            except TimeoutError:
                self.lost(f"{worker} has not loaded the model within {_STARTUP_S:g} s")
                raise self.broken() from None
            if found != fingerprint:
                self.lost(f"{worker} has loaded other weights: the model's files have changed meanwhile")
                raise self.broken()
        with tempfile.TemporaryDirectory(prefix="radixkv-ranks-") as folder:
            meeting = Path(folder, "meeting")
            for worker in self.workers:
                with self.waiting():
                    worker.commands.send_object(meeting)
            with self.together(), self.waiting():
                communicator = Communicator(meeting, 0, self.size, device, in_order=in_order)
        self._communicator = communicator
        return communicator

    def serves(self) -> None:
        """Apply the settings' limit to the ranks' answers from now on."""
        self._limit_s = self._timeout_s

    def on_failure(self, call: Callable[[], None]) -> None:
        """Call a function, on any thread, when the group breaks."""
        self._on_failure = call
        if self.failure is not None:
            call()

    # ------------------------------------------------------------------ failing

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Watch the time while this thread waits for a rank.

        Raises:
            EngineStoppedError: the group is broken, or an error in the block breaks it now.
        """
        if self.failure is not None:
            raise self.broken()
        thread = threading.get_ident()
        self._waiting_since[thread] = time.monotonic()
        try:
            yield
        except (OSError, EOFError) as error:
            raise self._broken_by(error) from error
        finally:
            self._waiting_since.pop(thread, None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Compute the same on all ranks in the block: an error on this one breaks the group.

        Raises:
            EngineStoppedError: it is broken.
        """
        try:
            yield
        except ENDS_PROCESS:
            self.lost("a step was interrupted")
            raise
        except ConfigError:  # on every rank
            raise
        except BaseException as error:
            raise self._broken_by(error) from error
        if self.failure is not None:
            raise self.broken()

    def _broken_by(self, error: BaseException) -> EngineStoppedError:
        self._ended.wait(1.0)  # the listener knows the reason
        self.lost(f"a step failed on rank 0: {error}")
        return self.broken()

    def broken(self) -> EngineStoppedError:
        """The error to raise for a group that can't be used any more."""
        return EngineStoppedError("it has been closed" if self.failure is None else str(self.failure))

    def lost(self, reason: str) -> None:
        """Mark the group as broken; any thread may call this."""
        with self._lock:
            if self._ended.is_set():
                return
            self.failure = EngineStoppedError(f"the group of {self.size} ranks broke: {reason}")
            self._ended.set()
        logger.error("%s", self.failure)
        self._kill()
        if self._communicator is not None:
            self._communicator.abort()
        for worker in self.workers:
            if not worker.loaded.done():
                worker.loaded.set_exception(self.broken())
        self._on_failure()

    def _listen(self, worker: _Worker) -> None:
        """Receive the messages of a rank until it ends."""
        with suppress(ChannelEnded):
            while True:
                said = worker.commands.receive_object()
                if isinstance(said, Loaded):
                    worker.loaded.set_result(said.fingerprint)
                elif isinstance(said, RankFailed):
                    worker.reason = said.reason
        code = worker.process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self.lost(f"{worker} {how}" + (f" ({worker.reason})" if worker.reason else ""))

    def _watch(self) -> None:
        """Break the group if this process waits for a rank for too long."""
        all_run = time.monotonic()  # when no rank was stopped, as of the last look
        while not self._ended.wait(min(0.5, self._timeout_s / 4)):
            if self._limit_s > self._timeout_s:  # a rank that still starts may not be waited for
                if not any(worker.is_stopped for worker in self.workers):
                    all_run = time.monotonic()
                elif time.monotonic() - all_run > self._timeout_s:
                    self._lost_for_waiting(self._timeout_s)
            times = list(self._waiting_since.values())
            if self._communicator is not None and (since := self._communicator.waiting_since) is not None:
                times.append(since)
            if times and time.monotonic() - min(times) > self._limit_s:
                self._lost_for_waiting(self._limit_s)

    def _lost_for_waiting(self, limit_s: float) -> None:
        how = ", ".join(worker.how_it_is for worker in self.workers)
        self.lost(
            f"a rank has let the others wait for more than {limit_s:g} s (tensor_parallel_timeout_s): {how}"
        )

    # ------------------------------------------------------------------ ending

    def close(self) -> None:
        """End the processes; may be called again."""
        with self._lock:
            self._ended.set()
        for worker in self.workers:
            worker.close()
        end = time.monotonic() + _END_S
        for worker in self.workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, end - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(_END_S)


def _check_gpus(config: EngineConfig) -> None:
    if config.device == "cpu" or not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    if count < config.tensor_parallel:
        raise ConfigError(
            f"--tensor-parallel {config.tensor_parallel} needs a GPU for each rank, and there are {count}: "
            f"use at most {count}, or --device cpu"
        )


def threads_of_rank(config: EngineConfig) -> int:
    """Return the value of `--threads`, or an equal part of the cores of this process; at least one."""
    if config.threads is not None:
        return config.threads
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(psutil.cpu_count(logical=False) or usable, usable)
    return max(1, cores // config.tensor_parallel)
