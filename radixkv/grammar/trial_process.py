# SPDX-License-Identifier: Apache-2.0
"""TrialProcess: the engine's end of `trial_server`, which starts that process on demand and after a crash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import subprocess
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from multiprocessing import Pipe
from typing import Any

from radixkv.channel import Channel, ChannelEnded
from radixkv.errors import EngineOverloadedError
from radixkv.grammar.trial import Verdict
from radixkv.grammar.trial_server import MAX_VERDICT_BYTES
from radixkv.grammar.vocabulary import VocabularyRecipe
from radixkv.helper_process import MODULE, helper_environment
from radixkv.sampling.structured import StructuredOutputs

#: The module that the process runs.
SERVER = "radixkv.grammar.trial_server"
_LOST = "the process that tries out grammars has ended; try again"


#: Processes by the sources of their vocabularies, while anything refers to them.
SHARED: weakref.WeakValueDictionary[bytes, TrialProcess] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_trials(recipe: VocabularyRecipe) -> TrialProcess:
    """Return the process of a vocabulary, which all engines with this vocabulary share."""
    key = hashlib.sha256(SERVER.encode() + pickle.dumps(recipe)).digest()
    with _shared_lock:
        process = SHARED.get(key)
        if process is None:
            process = SHARED[key] = TrialProcess(recipe)
        return process


class TrialProcess:
    """Tries out grammars over one vocabulary. Methods may be called from any thread.

    The process ends when this object does, or when its parent does.
    """

    def __init__(self, recipe: VocabularyRecipe) -> None:
        self._recipe = recipe
        self._lock = threading.Lock()
        self._server: _TrialServer | None = None

    @property
    def process_id(self) -> int | None:
        """Id of the process; None: it does not run."""
        connection = self._server
        return connection.process.pid if connection is not None and connection.is_alive else None

    def try_out(self, spec: StructuredOutputs) -> Verdict:
        """Return the verdict on a grammar; waits for it.

        Raises:
            EngineOverloadedError: the process was lost, or can't be started.
        """
        with self._lock:
            if self._server is None or not self._server.is_alive:
                self._server = _TrialServer(self._recipe)
                weakref.finalize(self, self._server.close)
            future = self._server.send(spec)
        return future.result()


class _TrialServer:
    """One process, from its start to its end."""

    def __init__(self, recipe: VocabularyRecipe) -> None:
        try:
            jobs, our_jobs = Pipe(duplex=False)
            our_verdicts, their_verdicts = Pipe(duplex=False)
            self._jobs = Channel(our_jobs)
            verdicts = Channel(our_verdicts, max_bytes=MAX_VERDICT_BYTES)
            with jobs, their_verdicts:  # ends of the process, which has copies
                self.process = subprocess.Popen(
                    [*MODULE, SERVER],
                    stdin=jobs.fileno(),
                    stdout=their_verdicts.fileno(),
                    env=helper_environment(),
                    start_new_session=True,  # an interrupt of the server's terminal is the server's
                )
        except OSError as error:
            raise EngineOverloadedError(f"grammars can't be tried out: {error}") from error
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Verdict]] = {}
        self._last = 0
        self.is_alive = True
        reader = threading.Thread(target=self._read, args=(verdicts,), name="radixkv-trials", daemon=True)
        reader.start()
        self._write(recipe)

    def send(self, spec: StructuredOutputs) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        with self._lock:
            if not self.is_alive:
                raise EngineOverloadedError(_LOST)
            self._last += 1
            self._futures[self._last] = future
            job = self._last
        self._write((job, spec))
        return future

    def _write(self, message: object) -> None:
        with contextlib.suppress(ChannelEnded):  # it has ended: the reader fails the waiting futures
            self._jobs.send_object(message)

    def _read(self, verdicts: Channel) -> None:
        with verdicts, contextlib.suppress(ChannelEnded):
            while True:
                message: dict[str, Any] = json.loads(verdicts.receive())
                with self._lock:
                    future = self._futures.pop(message.pop("job") or 0, None)
                if future is not None:
                    future.set_result(Verdict(**message))
        with self._lock:
            self.is_alive = False
            lost, self._futures = self._futures, {}
        for future in lost.values():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(EngineOverloadedError(_LOST))
        self.process.wait()

    def close(self) -> None:
        self._jobs.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
