# SPDX-License-Identifier: Apache-2.0
"""Batches: a file of requests, answered once each, in the order of their prefixes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_language_model import LetterTokenizer, make_engine
from scripted_engine import ScriptedEngine

from radixkv import AsyncEngine
from radixkv.engine.client import EngineClient
from radixkv.errors import ConfigError, EngineStoppedError
from radixkv_server.app import create_app
from radixkv_server.batches.lines import InputFile, OutputFile
from radixkv_server.batches.prefix_order import PrefixOrder
from radixkv_server.batches.runner import BatchCounts, BatchRunner
from radixkv_server.settings import ServerSettings


def chat(custom_id: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def answers_in(path: Path) -> dict[Any, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({answer["line"] for answer in found}) == len(found), "a line is answered once"
    assert len({answer["id"] for answer in found}) == len(found)
    return {answer["custom_id"] or answer["line"]: answer for answer in found}


async def run(engine: EngineClient, requests: Path, answers: Path, *, max_concurrent: int = 4) -> BatchCounts:
    app = create_app(engine, ServerSettings(console=False, access_log=False))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=None)
    async with app.router.lifespan_context(app), client:
        runner = BatchRunner(client, max_concurrent=max_concurrent, is_healthy=lambda: engine.is_healthy)
        with closing(InputFile(requests)) as asked, closing(OutputFile(answers, asked)) as told:
            return await runner.run(asked, told)


async def test_each_line_gets_its_answer_and_bad_ones_an_error(tmp_path: Path) -> None:
    lines = [
        chat("one", "say:first"),
        "",
        "no JSON",
        {"custom_id": "nowhere", "url": "/v1/embeddings", "body": {}},
        {"url": "/v1/completions", "body": {}},
        chat("stream", "say:x", stream=True),
        chat("refused", "say:x", temperature=-1),
        {"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}},
        {"custom_id": "old", "url": "/v1/completions", "body": {"model": "scripted", "prompt": "say:second"}},
        {
            "custom_id": "response",
            "url": "/v1/responses",
            "body": {"model": "scripted", "input": "say:third"},
        },
        {
            "custom_id": "message",
            "url": "/v1/messages",
            "body": {
                "model": "scripted",
                "max_tokens": 50,
                "messages": [{"role": "user", "content": "say:fourth"}],
            },
        },
        "[1]",
        "[" * 100_000,
    ]
    counts = await run(ScriptedEngine(), write(tmp_path / "in", lines), tmp_path / "out")
    found = answers_in(tmp_path / "out")
    assert (counts.answered, counts.failed, counts.total) == (4, 8, 12)
    bodies = {
        name: found[name]["response"]["body"] for name in ("one", "old", "response", "message", "refused")
    }
    assert bodies["one"]["choices"][0]["message"]["content"] == "first"
    assert bodies["old"]["choices"][0]["text"] == "second"
    assert bodies["response"]["output"][0]["content"][0]["text"] == "third"
    assert bodies["message"]["content"][0]["text"] == "fourth"
    assert found["one"]["response"]["status_code"] == 200
    assert found["one"]["response"]["request_id"]
    assert found["refused"]["response"]["status_code"] == 400
    assert "temperature" in bodies["refused"]["error"]["message"]
    for name in (3, "nowhere", 5, "stream", "get", 12, 13):
        assert found[name]["response"] is None
        assert found[name]["error"]["code"] == "invalid_line"
    assert "/v1/chat/completions" in found["nowhere"]["error"]["message"]


async def test_a_batch_that_was_cut_off_goes_on_and_asks_no_line_twice(tmp_path: Path) -> None:
    lines = [chat(f"c{i}", f"say:{i}") for i in range(20)] + ["bad"]
    requests, answers = write(tmp_path / "in", lines), tmp_path / "out"
    engine = ScriptedEngine()
    engine.gate.clear()
    running = asyncio.create_task(run(engine, requests, answers))
    while len(engine.requests) < 4:
        await asyncio.sleep(0)
    engine.gate.set()
    while not answers.exists() or answers.read_bytes().count(b"\n") < 6:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    done = answers.read_bytes().count(b"\n")
    with answers.open("ab") as file:
        file.write(b'{"id": "batch_req_cut off in the mid')

    again = ScriptedEngine()
    counts = await run(again, requests, answers)
    assert counts.total == 21 - done
    assert len(again.requests) == 21 - done, "the bad line had its error before anything was asked"
    assert set(answers_in(answers)) == {f"c{i}" for i in range(20)} | {21}

    finished = await run(again, requests, answers)
    assert (finished.total, finished.ended) == (0, 0)


async def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    requests = write(tmp_path / "in", [chat("a", "say:x"), chat("b", "say:y")])
    await run(ScriptedEngine(), requests, tmp_path / "out")
    text = (tmp_path / "out").read_bytes()
    (tmp_path / "notes").write_text("my notes\n")
    with closing(InputFile(write(tmp_path / "other", [chat("b", "say:x")]))) as file:
        with pytest.raises(ConfigError, match="something else than answers to this file"):
            OutputFile(tmp_path / "out", file)
        with pytest.raises(ConfigError, match="name another file"):
            OutputFile(tmp_path / "notes", file)
    assert (tmp_path / "notes").read_text() == "my notes\n"
    assert (tmp_path / "out").read_bytes() == text
    with pytest.raises(ConfigError, match="No such file"):
        InputFile(tmp_path / "missing")
    with pytest.raises(ConfigError, match="regular file"):
        InputFile(Path("/dev/null"))


async def test_an_engine_that_stops_ends_the_batch_and_writes_no_failures(tmp_path: Path) -> None:
    requests = write(tmp_path / "in", [chat(f"c{i}", f"say:{i}") for i in range(8)])
    engine = ScriptedEngine()

    def fail(asked: Any, given: int) -> BaseException | None:
        if "say:5" not in "".join(map(chr, asked.prompt)):
            return None
        engine.is_healthy = False
        return EngineStoppedError("out of order")

    engine.fail = fail
    with pytest.raises(ExceptionGroup) as failed:
        await run(engine, requests, tmp_path / "out", max_concurrent=1)
    assert failed.group_contains(EngineStoppedError)
    assert set(answers_in(tmp_path / "out")) == {f"c{i}" for i in range(5)}
    await run(ScriptedEngine(), requests, tmp_path / "out")
    assert len(answers_in(tmp_path / "out")) == 8


@pytest.mark.parametrize("max_concurrent", [1, 16])
async def test_a_shared_prefix_is_computed_once_in_a_pool_for_two_of_ten(
    max_concurrent: int, tmp_path: Path
) -> None:
    shuffled = random.Random(3)
    families = [[shuffled.randrange(1, 90) for _ in range(160)] for _ in range(10)]
    prompts = [
        [*family, *(shuffled.randrange(1, 90) for _ in range(8))] for family in families for _ in range(12)
    ]
    shuffled.shuffle(prompts)
    body: dict[str, Any] = {"model": "m", "max_tokens": 1, "temperature": 0}
    lines: list[dict[str, Any]] = [
        {"custom_id": str(i), "url": "/v1/completions", "body": {**body, "prompt": prompt}}
        for i, prompt in enumerate(prompts)
    ]
    async with AsyncEngine(
        make_engine(num_blocks=48, block_size=8, tokenizer=LetterTokenizer())[0]
    ) as engine:
        lines = [{**line, "body": {**line["body"], "model": engine.model_name}} for line in lines]
        counts = await run(
            engine, write(tmp_path / "in", lines), tmp_path / "out", max_concurrent=max_concurrent
        )
        stats = engine.stats()
    assert counts.answered == len(prompts)
    assert stats.prompt_tokens == sum(map(len, prompts))
    ideal = 10 * 160 + len(prompts) * 8
    assert stats.computed_prompt_tokens <= 1.05 * ideal


@given(st.lists(st.lists(st.integers(0, 3), max_size=200), max_size=30))
def test_prompts_with_a_common_prefix_are_neighbours(prompts: list[list[int]]) -> None:
    tree = PrefixOrder()
    keys = [tree.key(prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: (keys[i], i))
    for length in (32, 64, 160):
        met: set[tuple[int, ...]] = set()
        before: tuple[int, ...] | None = None
        for number in order:
            prefix = tuple(prompts[number][:length])
            if len(prefix) == length and prefix != before:
                assert prefix not in met
                met.add(prefix)
            before = prefix if len(prefix) == length else before
