# SPDX-License-Identifier: Apache-2.0
"""The thread that owns an engine, and the queue through which everybody else reaches it.

A command is run between two steps, or cancelled when the thread has ended: whoever waits for one hears of it
either way. Commands given after the end are refused.
"""

from __future__ import annotations

import gc
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from radixkv.engine.client import EngineFacts
from radixkv.engine.counts import EngineStats
from radixkv.engine.engine import Engine
from radixkv.engine.input_processor import InputProcessor
from radixkv.engine.output_processor import StepResult
from radixkv.errors import EngineStoppedError

if TYPE_CHECKING:
    from radixkv.engine.startup import EngineSummary

logger = logging.getLogger("radixkv")


class _Command(NamedTuple):
    """Work to do with the engine on its thread, and a function called once if that ends instead."""

    run: Callable[[Engine], object]
    cancel: Callable[[EngineStoppedError], object]


#: After each command the figures are taken again: that is all that this one does.
_NOTHING = _Command(lambda engine: None, lambda error: None)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts and clients of an engine that every thread may use. Holds no memory of the model's.

    Attributes:
        summary: figures for the start-up banner; None: the engine was not made by `build_engine`.
    """

    facts: EngineFacts
    summary: EngineSummary | None
    input_processor: InputProcessor

    @classmethod
    def of(cls, engine: Engine) -> EngineInfo:
        """Collect it of an engine, on the thread that owns that."""
        model = engine.model
        facts = EngineFacts(
            config=engine.config,
            model_name=model.name,
            model_fingerprint=model.fingerprint,
            limits=engine.limits,
            default_sampling=model.default_sampling,
            tokenizer=model.tokenizer,
            image_processor=model.image_processor,
        )
        return cls(facts, engine.summary, engine.input_processor)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Bound on the restarts of a failed engine.

    Args:
        max_restarts: within `within_s`; one more failure is the end.
        pause_s: before the first of them; each further one in a row waits twice as long.
        healthy_s: an engine that has run for this long ends the row.
    """

    max_restarts: int = 5
    within_s: float = 600.0
    pause_s: float = 1.0
    healthy_s: float = 60.0


class EngineThread:
    """Makes an engine, steps it while it has work, and runs commands in between.

    Creating one blocks until the engine is ready; what making it raises is raised here.

    Args:
        source: the engine; from now on only this thread may touch it. Or a function that makes it there.
        on_result: called on the thread with the engine and a step's result.
        on_end: called on the thread when the engine has ended, after the last command, with the error that
            waiters get.
        restart: replace a failed engine; needs a function as `source`. None: its failure is the end.

    Attributes:
        info: of the engine; after a restart, of the new one.
        stats: its counters as of the last step or command.
    """

    def __init__(
        self,
        source: Engine | Callable[[], Engine],
        on_result: Callable[[Engine, StepResult], None],
        on_end: Callable[[EngineStoppedError], None],
        restart: RestartPolicy | None = None,
    ) -> None:
        self._on_result = on_result
        self._on_end = on_end
        self._restart = None if isinstance(source, Engine) else restart
        self._failures: deque[float] = deque()
        self._num_in_row = 0  # failures without a healthy run between them
        self._running_since = math.inf
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # around `_stopped`: no command may slip in after the last one
        self._stopped: EngineStoppedError | None = None
        self._closing = threading.Event()
        made: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._live, args=([source], made), name="radixkv-engine", daemon=True
        )
        self._declared: Any  # to the cache of the engine that has failed
        self.info: EngineInfo
        self.stats: EngineStats
        self._thread.start()
        made.result()

    @property
    def is_running(self) -> bool:
        """True if commands are taken."""
        return self._stopped is None and self._thread.is_alive()

    def submit(
        self,
        run: Callable[[Engine], object],
        cancel: Callable[[EngineStoppedError], object] = lambda error: None,
    ) -> None:
        """Have a function run on the engine's thread, between two steps; any thread may call it.

        Args:
            run: its exceptions end the thread.
            cancel: called once where the thread ends before it was run, or because of it.

        Raises:
            EngineStoppedError: the engine has ended, or was told to.
        """
        with self._lock:
            if self._stopped is not None:
                raise EngineStoppedError(str(self._stopped), retry_after_s=self._stopped.retry_after_s)
            self._commands.put(_Command(run, cancel))

    def stop(self) -> None:
        """Run the submitted commands, then end the thread; may be called again. Does not wait."""
        with self._lock:
            self._closing.set()
            was_running = self._stopped is None
            if self._stopped is None or self._stopped.retry_after_s is not None:
                self._stopped = EngineStoppedError("the engine has been closed")
            if was_running:
                self._commands.put(None)  # last: the thread reads the reason without the lock

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    # ------------------------------------------------------------------ on the thread

    def _live(self, sources: list[Engine | Callable[[], Engine]], made: Future[None]) -> None:
        """From the first engine to the last."""
        source = sources.pop()  # nothing else may keep an engine that has failed
        try:
            engine = source if isinstance(source, Engine) else source()
            self._publish(engine)
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(None)
        if isinstance(source, Engine):
            self._serve(engine)
            return
        engines = [engine]
        del engine
        while engines:
            self._serve(engines.pop())
            engines += self._make_anew(source)

    def _serve(self, engine: Engine) -> None:
        """Until it ends, or is told to."""
        is_whole = False
        try:
            self._run(engine)
            is_whole = True
        except BaseException as error:
            self._declared = engine.cache.declared
            logger.exception("the engine's thread failed")
            self._note_failure(error)
        finally:
            self._cancel_rest()
            self._close(engine, save=is_whole)

    @staticmethod
    def _close(engine: Engine, *, save: bool) -> None:
        try:
            engine.close(save=save)
        except Exception:  # who waits for the engine's answers must hear of its end
            logger.exception("the engine could not be closed properly")

    def _make_anew(self, source: Callable[[], Engine]) -> list[Engine]:
        """Another engine, if the last one failed and may be replaced; an empty list: this is the end."""
        while True:
            stopped = self._stopped
            assert stopped is not None
            if stopped.retry_after_s is None or self._closing.wait(stopped.retry_after_s):
                return []
            engine: Engine | None = None
            try:
                gc.unfreeze()  # the old engine is among what was thought to stay for good
                gc.collect()
                engine = source()
                engine.cache.declare(self._declared)
                self._publish(engine)
            except BaseException as error:
                logger.exception("the engine could not be made anew")
                if engine is not None:
                    self._close(engine, save=False)
                self._note_failure(error)
                continue
            with self._lock:
                is_wanted = not self._closing.is_set()
                if is_wanted:
                    self._stopped = None
            if not is_wanted:
                self._close(engine, save=False)
                return []
            logger.warning("the engine has been made anew")
            return [engine]

    def _publish(self, engine: Engine) -> None:
        self._running_since = time.monotonic()
        self.stats = engine.stats()
        self.info = EngineInfo.of(engine)

    def publish_facts(self, engine: Engine) -> None:
        """Tell of an engine's facts, which have changed; on the thread."""
        self.info = EngineInfo.of(engine)

    def _note_failure(self, error: BaseException) -> None:
        pause: float | None = None
        if self._restart is not None:
            now = time.monotonic()
            while self._failures and now - self._failures[0] > self._restart.within_s:
                self._failures.popleft()
            if now - self._running_since >= self._restart.healthy_s:
                self._num_in_row = 0
            self._running_since = math.inf
            if len(self._failures) < self._restart.max_restarts:
                pause = self._restart.pause_s * 2**self._num_in_row
            self._num_in_row += 1
            self._failures.append(now)
        what = "the engine has failed" if pause is None else "the engine has failed and is being restarted"
        with self._lock:
            if self._closing.is_set():
                pause = None
            self._stopped = EngineStoppedError(f"{what}: {error}", retry_after_s=pause)

    def _run(self, engine: Engine) -> None:
        engine.wake_with(partial(self._commands.put, _NOTHING))
        while self._run_commands(engine):
            result = engine.step() if engine.has_work else engine.take_result()
            self.stats = engine.stats()  # before anybody can have seen what the step gave
            self._on_result(engine, result)

    def _run_commands(self, engine: Engine) -> bool:
        """Run what callers have asked for, waiting for it if there is nothing else to do; False: stop."""
        idle_s = engine.idle_s
        while True:
            try:
                command = self._commands.get(block=idle_s != 0.0, timeout=idle_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            try:
                command.run(engine)
            except BaseException as error:
                command.cancel(EngineStoppedError(f"the engine has failed: {error}"))
                raise
            self.stats = engine.stats()
            idle_s = 0.0

    def _cancel_rest(self) -> None:
        error = self._stopped
        assert error is not None
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                command.cancel(error)
        self._on_end(error)
