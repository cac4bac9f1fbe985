# SPDX-License-Identifier: Apache-2.0
"""Files and batches of a running server, driven by OpenAI's SDK."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine
from waiting import until

from radixkv_server.tenants.api_keys import stored_form

KEYS = ("ada=key-a", "bob=key-b")
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(
        (one.encode() if isinstance(one, str) else json.dumps(one).encode()) + b"\n" for one in lines
    )


def start(client: openai.OpenAI, lines: Sequence[Any], **options: Any) -> Any:
    file = client.files.create(file=("asked.jsonl", jsonl(lines)), purpose="batch")
    options = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
    return client.batches.create(input_file_id=file.id, **options)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    until(lambda: client.batches.retrieve(batch_id).status in ENDED)
    return client.batches.retrieve(batch_id)


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({one["line"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(), api_keys=KEYS, max_files=6, max_batches=2) as running:
        yield running


def test_a_batch_goes_from_its_file_to_its_answers(server: LiveServer) -> None:
    client = server.openai("key-a")
    lines = [line(f"c{i}", f"say:{i}") for i in range(5)] + [line("refused", "say:x", temperature=-1)]
    batch = start(client, lines, metadata={"for": "test"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"for": "test"})
    done = ended(client, batch.id)
    assert done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (6, 5, 1)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    found = answers(client, done.output_file_id)
    said = {name: one["response"]["body"]["choices"][0]["message"]["content"] for name, one in found.items()}
    assert said == {f"c{i}": str(i) for i in range(5)}
    errors = answers(client, done.error_file_id)
    assert errors["refused"]["response"]["status_code"] == 400
    output = client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.bytes == len(client.files.content(output.id).content)
    engine: ScriptedEngine = server.engine
    assert all(asked.background and asked.session_done and asked.tenant == "ada" for asked in engine.requests)


def test_a_file_that_is_no_batch_fails_with_its_errors(server: LiveServer) -> None:
    client = server.openai("key-a")
    bad = [
        line("a", "say:1"),
        "no JSON",
        line("a", "say:2"),
        {**line("b", "say:3"), "url": "/v1/completions"},
        line("s", "say:x", stream=True),
    ]
    failed = ended(client, start(client, bad).id)
    assert failed.status == "failed"
    assert failed.failed_at is not None
    assert [(one.code, one.line) for one in failed.errors.data] == [
        ("invalid_line", 2),
        ("duplicate_custom_id", 3),
        ("mismatched_url", 4),
        ("invalid_line", 5),
    ]
    empty = ended(client, start(client, []).id)
    assert empty.errors.data[0].code == "empty_file"
    assert not server.engine.requests


def test_pages_tenants_and_deletion(server: LiveServer) -> None:
    ada, bob = server.openai("key-a"), server.openai("key-b")
    batches = [start(ada, [line("c", f"say:{i}")]) for i in range(2)]
    for batch in batches:
        ended(ada, batch.id)
    assert [one.id for one in ada.batches.list(limit=1)] == [batch.id for batch in batches[::-1]]
    assert {one.purpose for one in ada.files.list()} == {"batch", "batch_output"}
    inputs = list(ada.files.list(purpose="batch", order="asc", limit=1))
    assert [one.id for one in inputs] == [batch.input_file_id for batch in batches]
    assert not list(bob.files.list())
    assert not list(bob.batches.list())
    for call in (
        lambda: bob.files.retrieve(inputs[0].id),
        lambda: bob.files.content(inputs[0].id),
        lambda: bob.files.delete(inputs[0].id),
        lambda: bob.batches.retrieve(batches[0].id),
        lambda: bob.batches.cancel(batches[0].id),
        lambda: bob.batches.create(
            input_file_id=inputs[0].id, endpoint="/v1/completions", completion_window="24h"
        ),
        lambda: ada.files.retrieve("../../etc/passwd"),
        lambda: ada.files.retrieve(batches[0].id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.ConflictError):
        ada.batches.cancel(batches[0].id)
    assert ada.files.delete(inputs[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        ada.files.content(inputs[0].id)


def test_bounds_of_files_lines_and_batches() -> None:
    engine = ScriptedEngine()
    with live_server(engine, max_file_bytes=2000, max_files=3, max_batches=1, max_batch_lines=2) as server:
        client = server.openai()
        with pytest.raises(openai.APIStatusError, match="larger than 2,000 bytes") as large:
            client.files.create(file=("x", b"x" * 2001), purpose="batch")
        assert large.value.status_code == 413
        with pytest.raises(openai.APIStatusError) as large:
            client.files.create(file=("x", b"x" * 200_000), purpose="batch")
        assert large.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
            client.files.create(file=("x", b"x"), purpose="fine-tune")
        many = ended(client, start(client, [line(f"{i}", "say:x") for i in range(3)]).id)
        assert many.errors.data[0].code == "too_many_lines"
        engine.gate.clear()
        held = start(client, [line("a", "say:x")])
        with pytest.raises(openai.RateLimitError, match="max_batches"):
            client.batches.create(
                input_file_id=held.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        with pytest.raises(openai.ConflictError, match="reads this file"):
            client.files.delete(held.input_file_id)
        client.files.create(file=("x", b"x"), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="max_files"):
            client.files.create(file=("x", b"x"), purpose="batch")
        for wrong in ({"endpoint": "/v1/embeddings"}, {"completion_window": "tomorrow"}):
            asked = {"endpoint": "/v1/completions", "completion_window": "24h", **wrong}
            with pytest.raises(openai.BadRequestError):
                client.batches.create(input_file_id=held.input_file_id, **asked)
        engine.gate.set()


def test_a_cancelled_batch_keeps_the_answers_it_has(server: LiveServer) -> None:
    client, engine = server.openai("key-a"), server.engine
    engine.fail = lambda asked, given: engine.gate.clear() if "say:2" in asked.text else None
    batch = start(client, [line(f"c{i}", f"say:{i}") for i in range(40)])
    until(lambda: not engine.gate.is_set())
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch.id)
    assert done.status == "cancelled"
    assert done.cancelling_at <= done.cancelled_at
    assert 0 <= done.request_counts.completed < 40
    assert bool(done.output_file_id) is bool(done.request_counts.completed)
    until(lambda: all(asked.aborted or asked.text for asked in engine.requests))
    engine.fail = lambda asked, given: None
    engine.gate.set()
    assert ended(client, start(client, [line("next", "say:x")]).id).status == "completed"


def test_an_expired_batch_says_so_of_each_line_without_an_answer(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, engine = server.openai("key-a"), server.engine
    engine.gate.clear()
    batch = start(client, [line(f"c{i}", "say:x") for i in range(3)], completion_window="1m")
    until(lambda: engine.requests)
    later = time.time() + 61
    monkeypatch.setattr("radixkv_server.batches.worker.time.time", lambda: later)
    done = ended(client, batch.id)
    assert (done.status, done.output_file_id) == ("expired", None)
    errors = answers(client, done.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
    assert set(errors) == {"c0", "c1", "c2"}


def test_a_restarted_server_goes_on_and_asks_no_line_twice(tmp_path: Path) -> None:
    store = str(tmp_path / "responses")
    lines = [line(f"c{i}", f"say:{i}.") for i in range(30)]
    first = ScriptedEngine()
    answered: list[str] = []

    def stop_after_ten(asked: Any, given: int) -> None:
        if given == 0 and len(first.requests) > 10:
            first.gate.clear()

    first.fail = stop_after_ten
    with live_server(first, response_store=store, shutdown_grace_s=0.1) as server:
        client = server.openai()
        batch = start(client, lines)
        until(lambda: not first.gate.is_set())
        folder = next(tmp_path.glob("responses-batches/t-*"))
        until(lambda: list(folder.glob("*.answers")))
        text = next(folder.glob("*.answers"))
    answered = [json.loads(one)["custom_id"] for one in text.read_text().splitlines()]
    second = ScriptedEngine()
    with live_server(second, response_store=store) as server:
        client = server.openai()
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 30)
        assert set(answers(client, done.output_file_id)) == {f"c{i}" for i in range(30)}
        assert len(second.requests) == 30 - len(answered)


def test_a_line_that_finds_no_room_waits_and_limits_of_the_tenant_do_not_count(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    hashed = stored_form("key-ada-123456")
    keys.write_text(
        f'[tenants.ada]\nkeys = ["{hashed}"]\nrequests_per_minute = 1\nconcurrency = 1\n', "utf-8"
    )
    engine = ScriptedEngine()
    engine.is_full = True
    with live_server(engine, keys_file=str(keys)) as server:
        client = server.openai("key-ada-123456")
        batch = start(client, [line(f"c{i}", "say:x") for i in range(12)])
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        engine.is_full = False
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 12)
        message = [{"role": "user", "content": "say:x"}]
        assert client.chat.completions.create(model="scripted", messages=message).choices  # its one request
