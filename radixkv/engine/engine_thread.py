"""The thread that owns an engine, and the queue through which everybody else reaches it.

A command is run between two steps, or cancelled when the thread has ended: whoever waits for one hears of it
either way. Commands given after the end are refused.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future

from radixkv.engine.counters import EngineStats
from radixkv.engine.engine import Engine
from radixkv.engine.output_processor import StepResult
from radixkv.errors import EngineStoppedError

logger = logging.getLogger("radixkv")


class Command(ABC):
    """Something to be done with the engine, on its thread."""

    @abstractmethod
    def run(self, engine: Engine) -> None:
        """Do it; what it raises ends the thread."""

    def cancel(self, error: EngineStoppedError) -> None:
        """The thread has ended before it could be done; called once, instead of `run`."""
        del error  # nobody waits for it


class Snapshot(Command):
    """Nothing but new figures."""

    def run(self, engine: Engine) -> None:
        return None


class EngineThread:
    """Makes an engine, steps it while it has work, and runs commands in between.

    Creating one blocks until the engine is ready; what making it raises is raised here.

    Args:
        source: the engine; from now on only this thread may touch it. Or a function that makes it there.
        on_result: called on the thread with the engine and what a step gave.
        on_end: called on the thread, after the last command, with the error that waiters get.

    Attributes:
        engine: what of it never changes may be read by all.
        stats: its counters as of the last step or command.
    """

    def __init__(
        self,
        source: Engine | Callable[[], Engine],
        on_result: Callable[[Engine, StepResult], None],
        on_end: Callable[[EngineStoppedError], None],
    ) -> None:
        self._on_result = on_result
        self._on_end = on_end
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # around `_stopped`: no command may slip in behind the last one
        self._stopped: EngineStoppedError | None = None
        made: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=self._make_and_run, args=(source, made), name="radixkv-engine", daemon=True
        )
        self.stats: EngineStats
        self._thread.start()
        self.engine = made.result()

    @property
    def is_running(self) -> bool:
        """Whether commands are taken."""
        return self._stopped is None

    def submit(self, command: Command) -> None:
        """Have a command run, soon; any thread may call it.

        Raises:
            EngineStoppedError: the thread has ended, or was told to.
        """
        with self._lock:
            if self._stopped is not None:
                raise EngineStoppedError(str(self._stopped))
            self._commands.put(command)

    def stop(self) -> None:
        """Run what was submitted before, then end the thread; may be called again. Does not wait."""
        with self._lock:
            if self._stopped is None:
                self._stopped = EngineStoppedError("the engine has been closed")
                self._commands.put(None)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    # ------------------------------------------------------------------ on the thread

    def _make_and_run(self, source: Engine | Callable[[], Engine], made: Future[Engine]) -> None:
        try:
            engine = source if isinstance(source, Engine) else source()
            self.stats = engine.stats()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(engine)
        try:
            self._run(engine)
        except BaseException as error:
            logger.exception("the engine's thread failed")
            with self._lock:
                self._stopped = EngineStoppedError(f"the engine has failed: {error}")
        finally:
            self._cancel_rest()

    def _run(self, engine: Engine) -> None:
        while self._run_commands(engine):
            result = engine.step() if engine.has_work else engine.take_result()
            self.stats = engine.stats()  # before anybody can have seen what the step gave
            self._on_result(engine, result)

    def _run_commands(self, engine: Engine) -> bool:
        """Run what callers have asked for, waiting for it if there is nothing else to do; False: stop."""
        wait = not engine.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run(engine)
            self.stats = engine.stats()
            wait = False

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
