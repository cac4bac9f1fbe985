# SPDX-License-Identifier: Apache-2.0
"""Compile grammars off the engine's thread, fairly among tenants, and cache the compiled ones for each.

submit(spec, namespace) -> Future   known there: at once; a small one (see `small_specs`) is compiled; any
                                    other one is tried out, then compiled
trial                               in a process that can be killed (see `trial_process`): a grammar that
                                    takes too much time or memory ends there, and is refused
workers                             threads that live while there is work: each takes a tenant's next grammar,
                                    the tenants in turns, one worker a tenant; with a lower priority than the
                                    steps, and a large stack, since llguidance follows references by recursion
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

from radixkv.cache.keys import NamespaceName, frame_namespace
from radixkv.engine.hooks import StepHook
from radixkv.errors import ENDS_PROCESS, EngineOverloadedError, InvalidRequestError
from radixkv.grammar.limits import TooComplex, check_spec
from radixkv.grammar.loosened import schemas_of_lark, without
from radixkv.grammar.masks import Grammar
from radixkv.grammar.small_specs import MAX_BYTES, is_small
from radixkv.grammar.special_tokens import shown_names
from radixkv.grammar.tenants import CompileTask, TenantGrammars, Tenants
from radixkv.grammar.trial import IN_LARK, follow
from radixkv.grammar.trial_process import TrialProcess, shared_trials
from radixkv.grammar.trial_server import NICENESS, STACK_BYTES
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.thread_priority import yield_to_steps

#: Tenants whose grammars are compiled at the same time.
_MAX_WORKERS = 4
#: CPU time of a compile that a tenant's account does not pay for.
_FREE_COMPILE_S = 0.1


class GrammarCompiler(StepHook):
    """Compiler of one engine's grammars. Methods may be called from any thread.

    Args:
        make_vocabulary: called when the first grammar is compiled. May raise ValueError.
        tenants: limits and accounts of each tenant; None: the documented ones.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], *, tenants: Tenants | None = None) -> None:
        self.grammars = self
        self._make_vocabulary = make_vocabulary
        self._lock = threading.Lock()
        self._tenants = tenants if tenants is not None else Tenants()
        self._num_workers = 0
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._trials: TrialProcess | None = None

    def __len__(self) -> int:
        """Number of kept grammars, including those being compiled."""
        with self._lock:
            return self._tenants.num_known

    @property
    def trial_process_id(self) -> int | None:
        """Id of the process in which grammars are tried out; None: it does not run."""
        return self._trials.process_id if self._trials is not None else None

    def compile(self, spec: StructuredOutputs, namespace: NamespaceName = "") -> Grammar:
        """Compile a grammar and wait for it; see `submit`."""
        return self.submit(spec, namespace).result()

    def submit(self, spec: StructuredOutputs, namespace: NamespaceName = "") -> Future[Grammar]:
        """Compile a grammar soon; the future raises InvalidRequestError, which names the refused part.

        Args:
            namespace: owner of the grammar, whose first part is the tenant. Other namespaces can't tell that
                the grammar is known.

        Raises:
            EngineOverloadedError: the tenant has too many grammars waiting, or has used its CPU time up.
        """
        if spec.prefix:
            return _after(self.submit(replace(spec, prefix=""), namespace), spec.prefix)
        key = frame_namespace(namespace)
        with self._lock:
            tenant = self._tenants[key[0]]
            known = tenant.known(key, spec)
            if known is not None:
                return _again(known)
            self._tenants.check(tenant)
            task = tenant.add(key, spec)
            self._start_worker()
        return task.future

    # ------------------------------------------------------------------ workers

    def _start_worker(self) -> None:
        if self._num_workers >= min(_MAX_WORKERS, self._tenants.num_ready):
            return
        self._num_workers += 1
        thread = threading.Thread(target=self._run, name="radixkv-grammars", daemon=True)
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        yield_to_steps(NICENESS)
        while True:
            with self._lock:
                taken = self._tenants.take()
                if taken is None:
                    self._num_workers -= 1
                    return
            tenant, task = taken
            started = time.thread_time()
            result: Grammar | BaseException
            try:
                with _refusing(task.spec):
                    result = self._compile(tenant, task)
            except BaseException as error:
                result = error
            with self._lock:
                self._tenants.finish(tenant, task, result)
            tenant.compiling.charge(max(0.0, time.thread_time() - started - _FREE_COMPILE_S))
            if isinstance(result, Grammar):
                task.future.set_result(result)
            else:
                task.future.set_exception(result)

    def _compile(self, tenant: TenantGrammars, task: CompileTask) -> Grammar:
        vocabulary, trials = self._machinery()
        spec, num_bytes = task.spec, MAX_BYTES
        if is_small(spec):
            check_spec(spec)
        else:
            spec, num_bytes = _try_out(trials, tenant, spec)
        matcher = vocabulary.matcher(spec)
        try:
            follow(matcher, vocabulary, 1)  # steps find its automaton made
        except TooComplex:
            if matcher.is_error():
                raise
        return Grammar(matcher, vocabulary, tenant.following, num_bytes)

    def _machinery(self) -> tuple[Vocabulary, TrialProcess]:
        with self._vocabulary_lock:
            if self._vocabulary is None or self._trials is None:
                self._vocabulary = self._make_vocabulary()
                self._trials = shared_trials(self._vocabulary.recipe())
            return self._vocabulary, self._trials


def _try_out(
    trials: TrialProcess, tenant: TenantGrammars, spec: StructuredOutputs
) -> tuple[StructuredOutputs, int]:
    """Try a grammar out on its tenant's account; return the form that can be used, and its bytes.

    In schemas that are enforced only as far as possible, parts that can't be compiled are left free, or
    the whole schemas, where the faulty parts are not found.

    Raises:
        ValueError: the grammar is refused; TooComplex: for its cost.
    """
    verdict = trials.try_out(spec)
    tenant.compiling.charge(max(0.0, verdict.cpu_s - _FREE_COMPILE_S))
    if spec.grammar is not None and verdict.refused is not None:
        drops = [[part.number] for part in schemas_of_lark(spec.grammar, lenient=True)]
        if drops:
            spec = replace(spec, grammar=without(spec.grammar, drops))
            verdict = trials.try_out(spec)
            tenant.compiling.charge(max(0.0, verdict.cpu_s - _FREE_COMPILE_S))
    if verdict.refused is not None:
        raise (TooComplex if verdict.is_too_complex else ValueError)(verdict.refused)
    if spec.grammar is not None and verdict.drops:
        spec = replace(spec, grammar=without(spec.grammar, verdict.drops))
    return spec, verdict.num_bytes


@contextlib.contextmanager
def _refusing(spec: StructuredOutputs) -> Iterator[None]:
    """Turn an error within into a refusal of the grammar."""
    try:
        yield
    except (EngineOverloadedError, *ENDS_PROCESS):
        raise
    except TooComplex as error:
        raise _refused(spec, str(error), code="grammar_too_complex") from None
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        raise _refused(spec, str(error)) from None


def _after(compiling: Future[Grammar], prefix: str) -> Future[Grammar]:
    """Return the future of the grammar that continues after a text, once the whole one is compiled."""
    going_on: Future[Grammar] = Future()

    def go_on(compiled: Future[Grammar]) -> None:
        try:
            going_on.set_result(compiled.result().after(prefix))
        except BaseException as error:
            going_on.set_exception(error)

    compiling.add_done_callback(go_on)
    return going_on


def _again(known: Future[Grammar]) -> Future[Grammar]:
    """Return the future, or a copy if it failed: a raised exception keeps the frames it went through."""
    error = known.exception() if known.done() else None
    if not isinstance(error, InvalidRequestError):
        return known
    again: Future[Grammar] = Future()
    again.set_exception(InvalidRequestError(str(error), param=error.param, code=error.code))
    return again


#: Beginnings of llguidance's refusals, and the keyword behind each.
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
    ("its answers can't be followed: lexer error", "pattern, patternProperties, format or maxLength: "),
    ("its answers can't be followed", "properties, enum, anyOf or items: "),
)


def _refused(spec: StructuredOutputs, reason: str, *, code: str = "invalid_grammar") -> InvalidRequestError:
    before, mark, inner = shown_names(reason).rpartition(IN_LARK)
    reason = before + mark + inner
    if spec.json is not None or mark:
        keyword = next((says for begins, says in _KEYWORDS if inner.startswith(begins)), "")
        reason = before + mark + keyword + inner
    names = {"json": "the JSON Schema", "regex": "the regular expression", "grammar": "the Lark grammar"}
    what = names.get(spec.kind, f"the {spec.kind}")
    return InvalidRequestError(f"{what} can't be used: {reason}", param="structured", code=code)
