# SPDX-License-Identifier: Apache-2.0
"""Try a grammar out: check it, compile it and follow it for a while, and measure its cost.

This runs in a process that may be killed (see `trial_process`), so that a grammar that breaks the compiler
breaks that process alone. An accepted grammar is then compiled again beside the engine, by the same
deterministic work, since a compiled one can't leave its process. That takes 1 to 5 ms, a tenth of the trial.
"""

from __future__ import annotations

import ctypes
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np

from radixkv.grammar.limits import TooComplex, check_spec
from radixkv.grammar.loosened import Place, SchemaPart, find_drops, find_fault, without
from radixkv.grammar.vocabulary import Bitmasks, Vocabulary
from radixkv.grammar.work import PROMISED_S, Effort
from radixkv.sampling.structured import StructuredOutputs

#: CPU time of all of a trial.
MAX_TRIAL_S = 1.0
#: Memory that a grammar may take during its trial, and the part it may keep.
MAX_TRIAL_BYTES = 512 * 2**20
MAX_GRAMMAR_BYTES = 64 * 2**20
#: CPU time of one mask or one token; nothing of a common grammar takes a tenth of it.
MAX_CALL_S = 0.025

_WALKS = 3
_WALK_TOKENS = 24
#: CPU time after which no further walk begins; a grammar's first masks take longest.
_ENOUGH_S = 0.015


#: Words of llguidance's errors about its limits.
_TOO_MUCH = re.compile(r"too (many|big|large)|fuel|max is|increase", re.IGNORECASE)

#: Before llguidance's error about a schema in a Lark grammar.
IN_LARK = "failed to compile JSON schema: "

#: CPU time of a search for the parts of schemas that can't be compiled; it need not find all of them.
_SEARCH_S = 0.3
#: Limit of the list of these parts in a verdict.
_MAX_DROPS_CHARS = 2_000 if sys.platform == "linux" else 300

#: Beginning of its errors about the automaton of all regular expressions.
_BROKEN = "lexer error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a trial.

    Args:
        refused: the reason why the grammar can't be used; None: it can.
        is_too_complex: it is refused for its cost, not for its content.
        drops: parts of schemas that are left free, see `loosened`: the grammar can be used without them.
        cpu_s: CPU time of the trial.
        num_bytes: memory that the compiled grammar keeps.
    """

    refused: str | None = None
    is_too_complex: bool = False
    cpu_s: float = 0.0
    num_bytes: int = 0
    drops: Sequence[Place] = ()


def try_out(spec: StructuredOutputs, vocabulary: Vocabulary) -> Verdict:
    """Check, compile and follow a grammar; faults of the grammar are in the verdict, not raised."""
    started, before = time.process_time(), _used_bytes()
    failure = _failure(spec, vocabulary)
    drops: Sequence[Place] = ()
    if failure is not None and spec.grammar is not None:
        drops, failure = _loosened(spec.grammar, vocabulary, failure)
    refused = str(failure) if failure is not None else None
    is_too_complex = isinstance(failure, TooComplex)
    num_bytes = max(0, _used_bytes() - before)
    if refused is None and num_bytes > MAX_GRAMMAR_BYTES:
        refused, is_too_complex = f"it takes more than {MAX_GRAMMAR_BYTES >> 20} MiB of memory", True
    return Verdict(refused, is_too_complex, time.process_time() - started, num_bytes, drops)


def _failure(
    spec: StructuredOutputs, vocabulary: Vocabulary, num_answers: int = _WALKS
) -> BaseException | None:
    """Check, compile and follow a grammar; return the error, if any."""
    try:
        check_spec(spec)
        follow(vocabulary.matcher(spec), vocabulary, num_answers)
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        return error
    return None


def _loosened(
    grammar: str, vocabulary: Vocabulary, failure: BaseException
) -> tuple[Sequence[Place], BaseException | None]:
    """Find the parts of a failed grammar's lenient schemas to leave free, and the error that remains."""
    ends = time.process_time() + _SEARCH_S

    def compiles(one: str) -> bool:
        return time.process_time() < ends and _failure(StructuredOutputs(grammar=one), vocabulary, 0) is None

    drops = find_drops(grammar, compiles)
    if len(json.dumps(drops)) > _MAX_DROPS_CHARS:
        drops = [[number] for number in sorted({place[0] for place in drops})]
    if drops:
        again = _failure(StructuredOutputs(grammar=without(grammar, drops)), vocabulary)
        if again is None:
            return drops, None
        failure = again
    ends = time.process_time() + _SEARCH_S
    fault = find_fault(grammar, compiles)
    return (), failure if fault is None else _named(grammar, *fault, failure, vocabulary)


def _named(
    grammar: str, part: SchemaPart, path: Place, failure: BaseException, vocabulary: Vocabulary
) -> BaseException:
    """Return the failure of a schema in a grammar with its line there and the path in it."""
    alone = _failure(StructuredOutputs(grammar=f"start: %json {json.dumps(part.schema)}"), vocabulary)
    if alone is None or not path:
        return failure
    line = grammar.count("\n", 0, part.begin) + 1
    reason = str(alone).rpartition(IN_LARK)[2].split("\n   1 | ", 1)[0]
    keyword = f"{path[-1]}: "
    place = ".".join(map(str, path))
    kind = TooComplex if isinstance(alone, TooComplex) else ValueError
    return kind(f"{line}(1): {IN_LARK}{place}: {reason.removeprefix(keyword)}")


def follow(matcher: llguidance.LLMatcher, vocabulary: Vocabulary, num_answers: int = _WALKS) -> None:
    """Write some answers; the automaton explored by them stays with the matcher.

    Raises:
        ValueError: the matcher is in error.
        TooComplex: most of the answers reach a point where nothing can follow, or take too much work.
    """
    started = time.thread_time()
    if not matcher.is_error():
        vocabulary.masks([matcher])
        _check_call(time.thread_time() - started, "what may come first")
    if matcher.is_error():
        reason = first_line(matcher)
        raise (TooComplex if _TOO_MUCH.search(reason) else ValueError)(reason)
    failures, num_walks = [], 0
    while num_walks < num_answers and time.thread_time() - started < _ENOUGH_S:
        failure = _walk(matcher.deep_copy(), vocabulary, random.Random(num_walks))
        num_walks += 1
        if failure is not None:
            failures.append(failure)
        # All answers share the automaton: once it has come to a limit, none can be followed any more.
        is_broken = failure is not None and failure.startswith(_BROKEN)
        if is_broken or 2 * len(failures) > num_answers:
            raise TooComplex(f"its answers can't be followed: {failures[0]}")
    if 2 * len(failures) > num_walks:
        raise TooComplex(f"its answers can't be followed: {failures[0]}")


def _walk(matcher: llguidance.LLMatcher, vocabulary: Vocabulary, draws: random.Random) -> str | None:
    """Write one answer of random tokens; return the reason why it can't go on, or None."""
    effort = Effort()
    for _ in range(_WALK_TOKENS):
        masks, (cost,) = vocabulary.timed_masks([matcher])
        _check_call(cost, "what may follow")
        effort.add(cost, promised_s=PROMISED_S)
        if matcher.is_error():
            return first_line(matcher)
        token = _choose(masks[0], vocabulary, draws)
        if token is None:
            return None if matcher.is_accepting() or matcher.is_stopped() else "nothing can follow"
        before = time.thread_time()
        accepted = matcher.consume_token(token)
        cost = time.thread_time() - before
        _check_call(cost, "where a token leads")
        effort.add(cost)
        if matcher.is_error() or not accepted:
            return first_line(matcher)
        if effort.is_too_much:
            return "it takes too much work to find what may follow"
        if matcher.is_stopped():
            return None
    return None


def _choose(mask: Bitmasks, vocabulary: Vocabulary, draws: random.Random) -> int | None:
    """Draw an allowed token that does not end the answer, every other time a short one."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocabulary.size, bitorder="little")
    bits[[end for end in vocabulary.end_token_ids if end < vocabulary.size]] = 0
    allowed = np.flatnonzero(bits)
    if not allowed.size:
        return None
    # Tokens with low ids are bytes, punctuation and frequent words, in nearly all vocabularies.
    most = allowed.size if draws.random() < 0.5 else max(1, allowed.size // 50)
    return int(allowed[draws.randrange(most)])


def _check_call(cost_s: float, what: str) -> None:
    if cost_s > MAX_CALL_S:
        raise TooComplex(
            f"it takes {cost_s * 1e3:.0f} ms of CPU time to find {what}, but at most "
            f"{MAX_CALL_S * 1e3:.0f} are allowed; simplify it"
        )


def first_line(matcher: llguidance.LLMatcher) -> str:
    """Return the error of a matcher, without the state that it adds for its developers."""
    return str(matcher.get_error()).split("\n<", 1)[0].strip()[:1000] or "unknown error"


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = (
        *((f"_{i}", ctypes.c_size_t) for i in range(4)),
        ("hblkhd", ctypes.c_size_t),
        *((f"_{i}", ctypes.c_size_t) for i in range(5, 7)),
        ("uordblks", ctypes.c_size_t),
        *((f"_{i}", ctypes.c_size_t) for i in range(8, 10)),
    )


def _used_bytes() -> int:
    """Bytes that are allocated in this process; 0 where the C library does not say."""
    if sys.platform != "linux":
        return 0
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
