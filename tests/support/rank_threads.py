# SPDX-License-Identifier: Apache-2.0
"""Ranks in threads of the test process: what `WorkerGroup` offers, without the time that processes take."""

from __future__ import annotations

import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from radixkv.channel import Channel
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.entrypoints.builder import engine_for_model
from radixkv.model.loading.loader import load_model
from radixkv.model.make_runner import make_runner
from radixkv.model.parallel.communicator import Communicator
from radixkv.model.parallel.parallel_runner import block_sizes
from radixkv.model.parallel.shard_model import shard_model
from radixkv.model.parallel.worker import Rank


class _Worker:
    """A rank's thread, and the ends of its connections that are rank 0's."""

    def __init__(self, config: EngineConfig, rank: int, meeting: Path) -> None:
        self._config, self._rank, self._meeting = config, rank, meeting
        self.error: BaseException | None = None
        self.has_loaded = threading.Event()  # or has failed
        self._theirs: list[Channel] = []
        ours = []
        for own, other in (socket.socketpair(), socket.socketpair()):
            ours.append(Channel.over(own))
            self._theirs.append(Channel.over(other))
        self.commands, self.data = ours
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        config = self._config
        try:
            loaded = load_model(config, show_progress=False)
            self.has_loaded.set()
            communicator = Communicator(
                self._meeting,
                self._rank,
                config.tensor_parallel,
                loaded.device,
                in_order=config.deterministic,
            )
            runner, _ = make_runner(config, shard_model(loaded, communicator), communicator)
            block_sizes(runner, communicator)
            Rank(runner, communicator, self._theirs[1]).serve(self._theirs[0])
        except BaseException as error:
            self.error = error
            self.has_loaded.set()


class RankThreads:
    """See `radixkv.model.parallel.worker_group.WorkerGroup`; nothing of it ever breaks."""

    failure = None

    def __init__(self, config: EngineConfig) -> None:
        # Each sum needs the interpreter in every thread; a thread keeps it for so long.
        sys.setswitchinterval(min(sys.getswitchinterval(), 0.0002))
        self.size = config.tensor_parallel
        self._folder = tempfile.TemporaryDirectory()
        self._meeting = Path(self._folder.name, "meeting")
        self.workers = [_Worker(config, rank, self._meeting) for rank in range(1, self.size)]

    def meet(self, fingerprint: str, device: torch.device, *, in_order: bool) -> Communicator:
        for worker in self.workers:
            worker.thread.start()
        for worker in self.workers:
            worker.has_loaded.wait()
            if worker.error is not None:
                raise worker.error
        return Communicator(self._meeting, 0, self.size, device, in_order=in_order)

    def serves(self) -> None:
        pass

    def on_failure(self, call: Callable[[], None]) -> None:
        pass

    @contextmanager
    def waiting(self) -> Iterator[None]:
        yield

    together = waiting

    def close(self) -> None:
        for worker in self.workers:
            worker.commands.close()
        for worker in self.workers:
            if worker.thread.ident is not None:
                worker.thread.join(120)
                assert not worker.thread.is_alive()
            worker.data.close()
        self._folder.cleanup()
        assert [worker.error for worker in self.workers] == [None] * len(self.workers)


def engine_on_ranks(model: Path, num_ranks: int, **options: Any) -> Engine:
    """An engine of a model on so many ranks; on one, an ordinary engine."""
    options = {"num_blocks": 64, "threads": 1, "block_size": 8} | options
    config = EngineConfig(model=str(model), tensor_parallel=num_ranks, **options)
    loaded = load_model(config, show_progress=False)
    if num_ranks == 1:
        return engine_for_model(config, loaded)
    ranks: Any = RankThreads(config)
    try:
        return engine_for_model(config, loaded, ranks=ranks)
    except BaseException:
        ranks.close()
        raise
