# SPDX-License-Identifier: Apache-2.0
"""The compiler of grammars: what it keeps, whom it serves when, and the process that tries them out."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
from functools import reduce
from typing import Any

import psutil
import pytest
from grammar_trials import (
    BOMBS,
    END,
    accepts,
    make_compiler,
)
from scripted_engine import ByteTokenizer

from radixkv.errors import EngineOverloadedError, InvalidRequestError
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.tenants import Tenants
from radixkv.grammar.trial_process import TrialProcess
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.sampling.structured import StructuredOutputs


def test_known_grammars_are_bounded_and_compiled_once() -> None:
    compiler = make_compiler(max_known=8)
    for i in range(40):
        compiler.compile(StructuredOutputs(choice=[str(i)]))
    assert len(compiler) == 8
    first = compiler.submit(StructuredOutputs(choice=["39"]))
    assert first.done()
    assert first is compiler.submit(StructuredOutputs(choice=["39"]))


def test_who_keeps_most_gives_way() -> None:
    compiler = make_compiler(max_known=8)
    quiet = compiler.compile(StructuredOutputs(choice=["a"]), "quiet")
    for i in range(20):
        compiler.compile(StructuredOutputs(choice=[str(i)]), "loud")
    assert len(compiler) == 8
    assert compiler.submit(StructuredOutputs(choice=["a"]), "quiet").result() is quiet


def test_what_is_known_in_one_namespace_does_not_show_in_another() -> None:
    """Neither a grammar nor what it was refused for."""
    compiler = make_compiler()
    good, bad = StructuredOutputs(regex="a+b"), StructuredOutputs(**BOMBS["joined in Lark"][0])
    namespaces: list[str | tuple[str, ...]] = ["a", "b", ("a", "salt")]
    grammars = [compiler.compile(good, namespace) for namespace in namespaces]
    assert len({id(grammar) for grammar in grammars}) == 3
    assert [compiler.submit(good, namespace).result() for namespace in namespaces] == grammars
    for namespace in namespaces:
        before = len(compiler)
        with pytest.raises(InvalidRequestError):
            compiler.compile(bad, namespace)
        assert len(compiler) == before + 1
        with pytest.raises(InvalidRequestError):
            compiler.submit(bad, namespace).result(timeout=0)


#: Passes every check of its text; its one derivative takes all of the time and memory there is.
ENDLESS: dict[str, Any] = {"grammar": "start: X\nX: " + " & ".join(f"/(.*a.{{{i}}}b.*)/" for i in range(25))}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused by its text is tried out nevertheless, by compilers made from now on."""
    monkeypatch.setattr("radixkv.grammar.trial_process.SERVER", "unchecked_trials")


def descendants(pid: int) -> set[int]:
    """Processes that are under a process."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


@pytest.mark.usefixtures("unchecked")
def test_a_trial_that_does_not_end_is_killed_and_nothing_of_it_stays() -> None:
    compiler = make_compiler()
    compiler.compile(StructuredOutputs(regex="a"))
    server = compiler.trial_process_id
    assert server is not None
    size = psutil.Process(server).memory_info().rss
    with pytest.raises(InvalidRequestError, match=r"takes (longer|more)") as caught:
        compiler.compile(StructuredOutputs(**ENDLESS))
    assert caught.value.code == "grammar_too_complex"
    assert not descendants(server)
    assert psutil.Process(server).memory_info().rss < size + 2**24
    with pytest.raises(InvalidRequestError, match=r"takes (longer|more)"):  # at once: it is remembered
        compiler.submit(StructuredOutputs(**ENDLESS)).result(timeout=0)
    assert accepts(compiler.compile(StructuredOutputs(regex="b")), "b")


@pytest.mark.usefixtures("unchecked")
def test_a_tenant_does_not_wait_for_anothers_grammars() -> None:
    compiler = make_compiler()
    compiler.compile(StructuredOutputs(regex="a"))
    stuck = [
        compiler.submit(StructuredOutputs(grammar=f"{ENDLESS['grammar']}\n// {i}"), f"loud {i % 2}")
        for i in range(4)
    ]
    compiler.compile(StructuredOutputs(regex="b"), "quiet")
    assert not stuck[-1].done()
    for future in stuck:
        with pytest.raises(InvalidRequestError, match="takes"):
            future.result(timeout=60)


@pytest.mark.usefixtures("unchecked")
def test_who_has_used_up_the_time_for_compiling_waits() -> None:
    compiler = make_compiler(compiling=(0.1, 0.001))
    with pytest.raises(InvalidRequestError, match="takes"):
        compiler.compile(StructuredOutputs(**ENDLESS), "loud")
    with pytest.raises(EngineOverloadedError, match="CPU time to compile") as caught:
        compiler.compile(StructuredOutputs(regex="a"), "loud")
    assert 0 < caught.value.retry_after_s < 1000
    assert compiler.compile(StructuredOutputs(regex="a"), "quiet").start().failure is None


def test_a_tenants_queue_is_bounded() -> None:
    begun, made = threading.Event(), threading.Event()

    def make() -> Vocabulary:
        begun.set()
        assert made.wait(60)
        return Vocabulary(ByteTokenizer(), {END})

    compiler = GrammarCompiler(make, tenants=Tenants(max_waiting=3))
    futures = [compiler.submit(StructuredOutputs(regex="b"), "loud")]
    assert begun.wait(60)  # from here on it is under way, and does not wait
    futures += [compiler.submit(StructuredOutputs(regex=f"a{i}"), "loud") for i in range(3)]
    with pytest.raises(EngineOverloadedError, match="wait to be compiled"):
        compiler.submit(StructuredOutputs(regex="c"), "loud")
    futures.append(compiler.submit(StructuredOutputs(regex="a"), "quiet"))
    made.set()
    for future in futures:
        assert future.result(timeout=60).start().failure is None


@pytest.mark.usefixtures("trapped_folder")
def test_a_lost_process_fails_whom_it_served_and_is_replaced() -> None:
    compiler = make_compiler()
    compiler.compile(StructuredOutputs(regex="a"))
    server = compiler.trial_process_id
    assert server is not None
    os.kill(server, signal.SIGKILL)
    psutil.Process(server).wait(60)
    for i in range(100):  # until it is noticed
        with contextlib.suppress(EngineOverloadedError):
            assert accepts(compiler.compile(StructuredOutputs(regex=f"b{i}")), f"b{i}")
            break
    assert compiler.trial_process_id not in (None, server)


#: Small schemas, and what refuses them; None: nothing.
SMALL: tuple[tuple[Any, str | None], ...] = (
    ({"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"enum": [1, "x"]}]}}}, None),
    ({"type": "strange"}, "type: "),
    ({"type": "integer", "enum": []}, "enum: there is no value"),
    ({"const": json.loads("[" * 70 + "]" * 70)}, "nested deeper than 64"),
)
#: Schemas that might cost more than they look.
OTHERS: tuple[Any, ...] = (
    {"properties": {"a": {"pattern": "a"}}},
    {"anyOf": [{"items": {"$ref": "#"}}]},
    {"const": "x" * 9000},
    reduce(lambda inner, _: {"items": inner}, range(9), {}),
)


def test_small_grammars_are_compiled_without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, tried = make_compiler(), []
    with monkeypatch.context() as patched:
        patched.setattr(TrialProcess, "try_out", lambda _, spec: tried.append(spec))
        assert accepts(compiler.compile(StructuredOutputs(choice=["yes", "no"])), "no")
        for schema, refused in SMALL:
            if refused is None:
                assert accepts(compiler.compile(StructuredOutputs(json=schema)), '{"a":"x"}')
            else:
                with pytest.raises(InvalidRequestError, match=refused):
                    compiler.compile(StructuredOutputs(json=schema))
        assert not tried
        for schema in OTHERS:
            with pytest.raises(InvalidRequestError):  # by the patched trial
                compiler.compile(StructuredOutputs(json=schema))
        assert len(tried) == len(OTHERS)


def test_no_process_is_left_when_the_compiler_is() -> None:
    compiler = GrammarCompiler(lambda: Vocabulary(ByteTokenizer(), {END, 256}))  # as no other test's
    compiler.compile(StructuredOutputs(json_object=True))
    assert compiler.trial_process_id is None
    compiler.compile(StructuredOutputs(regex="a"))
    assert compiler.trial_process_id is not None
    process = psutil.Process(compiler.trial_process_id)
    del compiler
    gc.collect()
    process.wait(60)
