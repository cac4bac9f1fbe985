# SPDX-License-Identifier: Apache-2.0
"""Grammars made to do harm, beside an engine at work: others' steps and memory stay bounded.

RADIXKV_HOSTILE_GRAMMARS=N tries N of them instead of a few; RADIXKV_HOSTILE_SEED=N others.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
from paged_language_model import LetterTokenizer, make_engine
from waiting import until

from radixkv.entrypoints.llm import LLM
from radixkv.errors import EngineOverloadedError, InvalidRequestError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request

ROUNDS = int(os.environ.get("RADIXKV_HOSTILE_GRAMMARS", "8"))
SEED = int(os.environ.get("RADIXKV_HOSTILE_SEED", "0"))
#: CPU time of one step, in which one answer's grammar may go wrong; and of all steps of a round.
MAX_STEP_S = 1.0
MAX_ROUND_S = 4.0
MAX_GROWTH_BYTES = 512 * 2**20
VICTIMS = [[1, 2, 3, 4, 5, 6, 7, n] for n in range(8, 11)]

#: Letters that go on where a grammar is at its worst.
LIKELY = {ord(letter) - 33: 20.0 for letter in "abxc"}

Made = dict[str, Any]


def regex(draws: random.Random) -> str:
    letters = "abcxyz"
    kinds: tuple[Callable[[], str], ...] = (
        lambda: f".*{draws.choice(letters)}.{{{draws.randrange(40)}}}{draws.choice(letters)}.*",
        lambda: f"({draws.choice(letters)}?){{{draws.randrange(1, 1000)}}}",
        lambda: (
            f"([{''.join(sorted(draws.sample(letters, 3)))}]{{1, {draws.randrange(1, 2000)}}}){{ 1 , 50}}"
        ),
        lambda: (
            f"({draws.choice(letters)}|.{draws.choice(letters)})*{draws.choice(letters)}.{{{draws.randrange(99)}}}"
        ),
        lambda: draws.choice([r"\w{3,90}\W", r"[^\s]{1,400}", r"(\S+){2,30}", r".{1,5000}z"]),
    )
    return draws.choice(kinds)()


def joined(draws: random.Random) -> Made:
    terms = [draws.choice(["", "~"]) + f"/{regex(draws)}/" for _ in range(draws.choice([2, 2, 3, 6, 25]))]
    return {"grammar": "start: X\nX: " + " & ".join(terms)}


def ambiguous(draws: random.Random) -> Made:
    parts = ["s s", "s s s", "s t", "t s t", '"a"', '"a" s', '"x"?', '""', "/[a-z]*/", "t*", "(s | t)+"]
    rules = [" | ".join(draws.sample(parts, draws.randint(2, 5))) for _ in "st"]
    return {"grammar": f'start: s\ns: {rules[0]} | "a"\nt: {rules[1]} | "b"'}


def long(draws: random.Random) -> Made:
    constant = "x" * draws.choice([3, 100, 1000])
    most = draws.choice([50, 10**4, 10**6])
    schema = draws.choice(
        [
            {"type": "array", "items": {"const": constant}, "minItems": most // 2, "maxItems": most},
            {"type": "string", "minLength": most // 2, "maxLength": most},
            {"const": [constant] * (20_000 // len(constant))},
        ]
    )
    return {"json": schema}


def wide(draws: random.Random) -> Made:
    count = draws.choice([100, 700, 3000])
    if draws.random() < 0.5:
        return {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}}
    rules = [f'r{i}: "a" r{draws.randrange(count)} | "b{i % 7}" | "a"' for i in range(count)]
    return {"grammar": "\n".join(["start: " + " | ".join(f"r{i}" for i in range(count)), *rules])}


def patterns(draws: random.Random) -> Made:
    several = [regex(draws) for _ in range(draws.choice([2, 3, 8]))]
    schema = draws.choice(
        [
            {"allOf": [{"type": "string", "pattern": one} for one in several]},
            {"type": "object", "patternProperties": {f"^{i}{one}": {} for i, one in enumerate(several)}},
            {"type": "string", "pattern": several[0], "maxLength": 3000, "minLength": 200},
            {"type": "number", "multipleOf": draws.choice([0.01, 9973, 7919.5])},
        ]
    )
    return {"json": schema}


def late(draws: random.Random) -> Made:
    """The harm begins where no trial comes."""
    made = draws.choice([joined, ambiguous, wide])(draws)
    if "grammar" not in made:
        return {"grammar": f"start: /x{{40}}/ rest\nrest: %json {json.dumps(made['json'])}"}
    return {"grammar": made["grammar"].replace("start: ", "start: /x{40}/ rest\nrest: ", 1)}


def literal(draws: random.Random) -> Made:
    return {"grammar": f'start: /[ab]{{1,40}}/ "c" s\ns: "{"y" * draws.choice([10, 1000])}" s'}


def slower(draws: random.Random) -> Made:
    """Each token takes more to place than the one before."""
    late = draws.choice(["", "/x{40}/ ", "/[a-z]{1,30}/ "])
    return {"grammar": f'start: {late}s\ns: s s s | s s | "a" | ""'}


KINDS = (slower, joined, ambiguous, long, wide, patterns, late, literal)


def grammar_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "radixkv-grammars"]


def test_nobody_else_is_harmed() -> None:
    model = LLM.from_engine(make_engine(tokenizer=LetterTokenizer(), num_blocks=512)[0])
    engine = model.engine
    plain = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in model.generate(VICTIMS, plain)]
    grammars = next(hook.grammars for hook in engine.hooks if hook.grammars is not None)
    engine.input_processor.compile(SamplingParams(structured={"regex": "a"}))
    process, draws = psutil.Process(), random.Random(SEED)
    size, ends = process.memory_info().rss, Counter[str]()
    for turn in range(ROUNDS):
        kind = KINDS[turn % len(KINDS)]
        made, namespace = kind(draws), f"loud {turn % 3}"
        try:
            params = SamplingParams(
                structured=made, max_tokens=200, logit_bias=LIKELY, seed=turn, n=draws.choice([1, 3])
            )
            grammar = engine.input_processor.compile(params, namespace)
        except InvalidRequestError:
            ends["refused"] += 1
            grammar = None
        except EngineOverloadedError as error:
            assert error.retry_after_s > 0  # noqa: PT017
            ends["overloaded"] += 1
            grammar = None
        if grammar is None and turn % 4:
            continue
        outputs: dict[str, Any] = {}
        victims = [engine.add_request(prompt, plain, namespace="quiet") for prompt in VICTIMS]
        if grammar is not None:
            request = Request([50, 51], params, namespace=namespace)
            request.grammar = grammar
            hostile = engine.add(request)
        started, slowest = time.thread_time(), 0.0
        while engine.has_work:
            before = time.thread_time()
            result = engine.step()
            slowest = max(slowest, time.thread_time() - before)
            outputs |= {output.request_id: output for output in result.finished}
        assert slowest < MAX_STEP_S, made
        assert time.thread_time() - started < MAX_ROUND_S, made
        assert [outputs[name].outputs[0].token_ids for name in victims] == expected
        if grammar is not None:
            failed = outputs[hostile].error
            assert outputs[hostile].error_code in (None, "grammar_failed"), failed
            ends["failed" if failed else "followed"] += 1
        engine.check()
        assert process.memory_info().rss < size + MAX_GROWTH_BYTES, made
    assert ends["refused"] > 0
    assert ends["failed"] > 0
    assert ends["followed"] > 0
    server = grammars.trial_process_id
    assert server is not None
    until(lambda: not psutil.Process(server).children() and not grammar_threads())
    assert psutil.Process(server).memory_info().rss < 2**29
    assert engine.input_processor.compile(SamplingParams(structured={"regex": "b"}), "quiet") is not None
