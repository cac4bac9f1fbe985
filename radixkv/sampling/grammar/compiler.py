"""Compiles grammars in a thread of its own, one at a time, and keeps what it has compiled.

submit(spec) -> Future        known: at once; else checked and compiled in the worker, each spec once
worker                        lives while there is work; nicer than the steps; a large stack, since
                              llguidance follows references by recursion
watch                         a compile that has used its CPU time fails; its thread can't be stopped, so it
                              is left to itself with the least priority, and another one takes the rest
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import llguidance

from radixkv.errors import ENDS_PROCESS, EngineOverloadedError, InvalidRequestError
from radixkv.sampling.grammar.limits import TooComplex, check_lark, check_regex, check_schema, check_text
from radixkv.sampling.grammar.masks import GrammarMask, first_line
from radixkv.sampling.grammar.vocabulary import Vocabulary
from radixkv.sampling.logits_processors import MinTokens
from radixkv.structured import StructuredOutputs
from radixkv.thread_priority import yield_to_steps

#: Compiled grammars that are kept.
CAPACITY = 256
#: CPU time of a compile; what it is for is refused before (see `limits`), this is the last resort.
MAX_COMPILE_S = 1.0
#: Threads that were given up and still compute; no more than these are made.
_MAX_GIVEN_UP = 2
_STACK_BYTES = 256 * 2**20
_COMPILE_NICENESS = 10


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar: a prototype at its beginning, with the first mask behind it."""

    prototype: llguidance.LLMatcher
    vocabulary: Vocabulary

    def start(self, min_tokens: MinTokens | None = None) -> GrammarMask:
        """A processor for one sample. Some microseconds."""
        return GrammarMask(self.prototype.deep_copy(), self.vocabulary, min_tokens)


@dataclass(slots=True)
class _Job:
    spec: StructuredOutputs
    future: Future[Grammar]


class _Worker:
    """One thread that compiles until there is nothing left, or until it is given up.

    Attributes:
        job: what it compiles; changed under the compiler's lock.
    """

    def __init__(self, run: Callable[[_Worker], None]) -> None:
        self.job: _Job | None = None
        self.is_given_up = False
        self.thread = threading.Thread(target=run, args=(self,), name="radixkv-grammars", daemon=True)

    def start(self) -> None:
        before = threading.stack_size(_STACK_BYTES)
        try:
            self.thread.start()
        finally:
            threading.stack_size(before)

    def cpu_s(self) -> float:
        """CPU seconds of the thread so far; wall seconds where the system does not tell."""
        ident = self.thread.ident
        if ident is None or not hasattr(time, "pthread_getcpuclockid"):
            return time.monotonic()
        return time.clock_gettime(time.pthread_getcpuclockid(ident))


class GrammarCompiler:
    """The grammars of one engine. Methods may be called from any thread.

    Args:
        make_vocabulary: called in the worker, when the first grammar is compiled. May raise ValueError.
        capacity: compiled grammars to keep; the ones used longest ago are dropped.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], *, capacity: int = CAPACITY) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._capacity = capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()
        self._waiting: deque[_Job] = deque()
        self._worker: _Worker | None = None
        self._num_given_up = 0

    def __len__(self) -> int:
        """Grammars that are kept, those under way included."""
        return len(self._known)

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """`submit`, and wait for it."""
        return self.submit(spec).result()

    def submit(self, spec: StructuredOutputs) -> Future[Grammar]:
        """The grammar, soon: the future raises InvalidRequestError, naming what of the grammar is refused.

        Raises:
            EngineOverloadedError: several compiles were given up and still use the cores.
        """
        with self._lock:
            known = self._known.get(spec)
            if known is not None:
                self._known.move_to_end(spec)
                return _again(known)
            if self._num_given_up >= _MAX_GIVEN_UP:
                raise EngineOverloadedError(
                    "grammars that are too complex keep the compiler busy; try again later", retry_after_s=10
                )
            future: Future[Grammar] = Future()
            self._known[spec] = future
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
            self._waiting.append(_Job(spec, future))
            self._ensure_worker()
        return future

    # ------------------------------------------------------------------ the worker

    def _ensure_worker(self) -> None:
        if self._worker is None and self._waiting:
            self._worker = _Worker(self._run)
            self._worker.start()

    def _run(self, worker: _Worker) -> None:
        yield_to_steps(_COMPILE_NICENESS)
        while (job := self._next(worker)) is not None:
            try:
                with _refusing(job.spec):
                    result: Grammar | BaseException = self._compile(worker, job)
            except BaseException as error:
                result = error
            self._settle(job, result)

    def _compile(self, worker: _Worker, job: _Job) -> Grammar:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()  # before the watch: the first grammar can't help it
        watch = self._watch(worker, job, worker.cpu_s())
        try:
            return _compiled(job.spec, self._vocabulary)
        finally:
            watch.cancel()

    def _next(self, worker: _Worker) -> _Job | None:
        with self._lock:
            if worker.is_given_up:
                self._num_given_up -= 1
                return None
            worker.job = self._waiting.popleft() if self._waiting else None
            if worker.job is None:
                self._worker = None
            return worker.job

    def _settle(self, job: _Job, result: Grammar | BaseException) -> None:
        """Tell the waiters, unless they have been told that it took too long."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(result, Grammar):
                job.future.set_result(result)
                return
            with self._lock:
                if self._known.get(job.spec) is job.future:
                    del self._known[job.spec]
            job.future.set_exception(result)

    def _watch(self, worker: _Worker, job: _Job, started: float) -> threading.Timer:
        def look() -> None:
            with self._lock:  # while it has this job its thread lives: the clock of a dead one is none
                if worker.job is not job or job.future.done():
                    return
                left = MAX_COMPILE_S - (worker.cpu_s() - started)
            if left > 0:
                arm(left)
            else:
                self._give_up(worker, job)

        def arm(delay: float) -> threading.Timer:
            timer = threading.Timer(delay, look)
            timer.daemon = True
            timer.start()
            return timer

        return arm(MAX_COMPILE_S)

    def _give_up(self, worker: _Worker, job: _Job) -> None:
        with self._lock:
            if worker.job is not job or job.future.done():
                return
            worker.is_given_up = True
            self._num_given_up += 1
            self._worker = None
            self._ensure_worker()
        yield_to_steps(thread_id=worker.thread.native_id)
        # Its failure stays among the known: nobody has it compiled again soon.
        message = f"it takes longer than {MAX_COMPILE_S:g} s to compile; simplify it"
        with contextlib.suppress(InvalidStateError):
            job.future.set_exception(_refused(job.spec, message))


def _compiled(spec: StructuredOutputs, vocabulary: Vocabulary) -> Grammar:
    _check(spec)
    matcher = vocabulary.matcher(spec)
    if not matcher.is_error():
        vocabulary.masks([matcher])
    if matcher.is_error():
        raise ValueError(first_line(matcher))
    return Grammar(matcher, vocabulary)


@contextlib.contextmanager
def _refusing(spec: StructuredOutputs) -> Iterator[None]:
    """Says of an error in here that the grammar is refused for it."""
    try:
        yield
    except ENDS_PROCESS:
        raise
    except TooComplex as error:
        raise _refused(spec, str(error), code="grammar_too_complex") from None
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        raise _refused(spec, str(error)) from None


def _again(known: Future[Grammar]) -> Future[Grammar]:
    """The future, or where it has failed another one: a raised exception keeps the frames it went through."""
    error = known.exception() if known.done() else None
    if not isinstance(error, InvalidRequestError):
        return known
    again: Future[Grammar] = Future()
    again.set_exception(InvalidRequestError(str(error), param=error.param, code=error.code))
    return again


def _check(spec: StructuredOutputs) -> None:
    if spec.json is not None:
        check_schema(str(spec.json))
    if spec.regex is not None:
        check_regex(spec.regex)
    if spec.whitespace_pattern is not None:
        check_regex(spec.whitespace_pattern)
    if spec.grammar is not None:
        check_lark(spec.grammar)
    if spec.choice is not None:
        check_text("".join(spec.choice))


#: How llguidance says what it refuses, and the keyword that it means.
_KEYWORDS = (
    ("Resource ", "$ref or $schema: nothing is fetched, only what is in the schema is known: "),
    ("Pointer ", "$ref: "),
    ("circular references", "$ref: "),
    ("Unknown format", "format: "),
    ("Invalid type", "type: "),
    ("patternProperty regexes", "patternProperties: "),
    ("regex parse error", "pattern: "),
    ("oneOf constraints are not supported", "oneOf: its alternatives must exclude each other visibly: "),
    ("NoExtensionBias", "$ref, const or pattern: nothing matches, or a $ref leads back to itself: "),
    ("Invalid URI reference", "$ref or $id: "),
    ("Failed to generate regex for integer range", "minimum and maximum: "),
    ("Failed to generate regex for float range", "minimum and maximum: "),
    ("Unable to determine if regex is empty", "pattern, format or multipleOf, joined by allOf: "),
    ("schema too large", "allOf and anyOf: "),
)


#: Where in a Lark grammar a schema is refused; what follows is said of the schema.
_IN_LARK = "failed to compile JSON schema: "


def _refused(spec: StructuredOutputs, reason: str, *, code: str = "invalid_grammar") -> InvalidRequestError:
    before, mark, inner = reason.rpartition(_IN_LARK)
    if spec.json is not None or mark:
        keyword = next((says for begins, says in _KEYWORDS if inner.startswith(begins)), "")
        reason = before + mark + keyword + inner
    names = {"json": "the JSON Schema", "regex": "the regular expression", "grammar": "the Lark grammar"}
    what = names.get(spec.kind, f"the {spec.kind}")
    return InvalidRequestError(f"{what} can't be used: {reason}", param="structured", code=code)
