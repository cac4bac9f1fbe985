# SPDX-License-Identifier: Apache-2.0
"""Responses in the background: polling, resumed streams, cancel, restarts, bounds, tenants."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, live_server
from openai import OpenAI
from response_prompts import last_asked, messages_in
from scripted_engine import Asked, ScriptedEngine

from radixkv.errors import RequestFailedError

URL = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


def fail(asked: Asked, given: int) -> BaseException | None:
    return RequestFailedError("broke") if "break" in asked.text and given == 2 else None


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(max_model_len=4096, fail=fail, caches=True)
    with live_server(
        engine, api_keys=("ada=key-a", "bob=key-b"), max_background_responses=3, background_timeout_s=60
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _open_gate(server: LiveServer) -> Iterator[None]:
    yield
    server.engine.release()


@pytest.fixture
def held(server: LiveServer) -> ScriptedEngine:
    """The engine, which stops each answer after two tokens until the test releases it."""
    engine: ScriptedEngine = server.engine
    engine.hold_at = 2
    engine.gate.clear()
    return engine


def begin(client: OpenAI, said: str = "say:hello", **options: Any) -> Any:
    return client.responses.create(model="scripted", input=said, background=True, **options)


def poll(client: OpenAI, response_id: str) -> Any:
    deadline = time.monotonic() + 60
    while (response := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
    return response


def at_two_tokens(engine: ScriptedEngine, client: OpenAI, response_id: str) -> None:
    """Wait until the response has begun."""
    with client.responses.retrieve(response_id, stream=True) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                return


def test_polling_finds_the_answer_of_a_plain_request(ada: OpenAI, held: ScriptedEngine) -> None:
    begun = begin(ada, metadata={"a": "b"})
    assert (begun.status, begun.background, begun.output, begun.usage) == ("queued", True, [], None)
    at_two_tokens(held, ada, begun.id)
    assert ada.responses.retrieve(begun.id).status == "in_progress"
    held.release()
    done = poll(ada, begun.id)
    assert (done.status, done.output_text, done.metadata) == ("completed", "hello", {"a": "b"})
    plain = ada.responses.create(model="scripted", input="say:hello")
    assert done.usage.output_tokens == plain.usage.output_tokens
    assert ada.responses.input_items.list(begun.id).data[0].content[0].text == "say:hello"


def test_a_stream_is_taken_up_again_without_a_gap(ada: OpenAI, held: ScriptedEngine) -> None:
    seen = []
    stream = begin(ada, stream=True)
    for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            stream.close()  # the client leaves; the answer goes on
            break
    names = [event.type.removeprefix("response.") for event in seen[:3]]
    assert names == ["created", "queued", "in_progress"]
    response_id = seen[0].response.id
    rest = ada.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    first = next(iter(rest))
    held.release()
    seen += [first, *rest]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "hello"
    assert seen[-1].type == "response.completed"
    again = list(ada.responses.retrieve(response_id, stream=True))
    assert again == seen, "an ended response's events are kept, too"
    assert list(ada.responses.retrieve(response_id, stream=True, starting_after=len(seen) - 2)) == seen[-1:]
    with ada.responses.stream(response_id=response_id) as whole:
        assert whole.get_final_response().output_text == "hello"


def test_cancel_in_every_state(ada: OpenAI, held: ScriptedEngine) -> None:
    held.hold_at = 0
    waiting = begin(ada)
    cancelled = ada.responses.cancel(waiting.id)
    assert (cancelled.status, cancelled.output, cancelled.usage) == ("cancelled", [], None)
    held.hold_at = 2
    running = begin(ada)
    at_two_tokens(held, ada, running.id)
    cancelled = ada.responses.cancel(running.id)
    [said] = cancelled.output
    assert (cancelled.status, said.status, said.content[0].text) == ("cancelled", "incomplete", "he")
    assert ada.responses.cancel(running.id) == cancelled == ada.responses.retrieve(running.id)
    held.wait_until(lambda: all(asked.aborted for asked in held.requests[-2:]))
    last = list(ada.responses.retrieve(running.id, stream=True))[-1]
    assert (last.type, last.response["status"]) == ("response.cancelled", "cancelled"), (
        "no event of the SDK's"
    )
    held.release()
    done = poll(ada, begin(ada).id)
    failed = poll(ada, begin(ada, "say:break").id)
    assert (done.status, failed.status, failed.error.message) == ("completed", "failed", "broke")
    for ended in (done, failed):
        with pytest.raises(openai.BadRequestError) as caught:
            ada.responses.cancel(ended.id)
        assert caught.value.code == "response_ended"
    with pytest.raises(openai.NotFoundError):
        ada.responses.cancel("resp_x")


def test_what_a_next_turn_may_go_on_from(ada: OpenAI, held: ScriptedEngine, server: LiveServer) -> None:
    running = begin(ada)
    with pytest.raises(openai.BadRequestError) as caught:
        ada.responses.create(model="scripted", input="say:x", previous_response_id=running.id)
    assert caught.value.code == "previous_response_unfinished"
    at_two_tokens(held, ada, running.id)
    ada.responses.cancel(running.id)
    held.release()
    ada.responses.create(model="scripted", input="say:x", previous_response_id=running.id)
    assert messages_in(last_asked(server))[1] == "assistant\nhe<|im_end|>", "a cancelled turn is one"
    done = poll(ada, begin(ada).id)
    following = poll(ada, begin(ada, "say:more", previous_response_id=done.id).id)
    cached = following.usage.input_tokens_details.cached_tokens
    assert cached >= done.usage.input_tokens - 16, "a next turn hits the prefix of the one before"
    failed = poll(ada, begin(ada, "say:break").id)
    with pytest.raises(openai.BadRequestError) as caught:
        ada.responses.create(model="scripted", input="say:x", previous_response_id=failed.id)
    assert caught.value.code == "previous_response_failed"


def test_structured_output_and_tools(ada: OpenAI, marked: None) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    done = poll(ada, begin(ada, 'say:{"n":5}', text=text).id)
    assert done.output_text == '{"n":5}'
    done = poll(ada, begin(ada, 'say:<add{"a":1}>', tools=[TOOL]).id)
    [call] = done.output
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a":1}')
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    following = begin(ada, [output], tools=[TOOL], previous_response_id=done.id)  # type: ignore[arg-type]
    assert poll(ada, following.id).status == "completed"


def test_a_deleted_response_ends(ada: OpenAI, held: ScriptedEngine) -> None:
    running = begin(ada)
    at_two_tokens(held, ada, running.id)
    ada.responses.delete(running.id)
    held.wait_until(lambda: held.requests[-1].aborted)
    with pytest.raises(openai.NotFoundError):
        ada.responses.retrieve(running.id)


def test_tenants_see_their_own_and_have_their_own_bound(
    server: LiveServer, ada: OpenAI, held: ScriptedEngine
) -> None:
    mine = [begin(ada).id for _ in range(3)]
    with pytest.raises(openai.RateLimitError) as caught:
        begin(ada)
    assert caught.value.code == "too_many_background_responses"
    with server.openai("key-b") as bob:
        for ask in (
            lambda: bob.responses.retrieve(mine[0]),
            lambda: bob.responses.retrieve(mine[0], stream=True),
            lambda: bob.responses.cancel(mine[0]),
            lambda: bob.responses.delete(mine[0]),
            lambda: bob.responses.create(model="scripted", input="x", previous_response_id=mine[0]),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        held.release()
        assert poll(bob, begin(bob).id).output_text == "hello"
    assert {poll(ada, one).output_text for one in mine} == {"hello"}


def test_many_at_once(server: LiveServer) -> None:
    with live_server(ScriptedEngine(max_model_len=4096)) as many, many.openai() as client:
        with ThreadPoolExecutor(16) as threads:
            ids = list(threads.map(lambda number: begin(client, f"say:number {number}").id, range(50)))
        texts = [poll(client, response_id).output_text for response_id in ids]
    assert texts == [f"number {number}" for number in range(50)]


def test_usage_is_counted_once() -> None:
    def counted(http: httpx.Client, name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    requests = 'radixkv_http_requests_total{route="/v1/responses'
    names = ("radixkv_prompt_tokens_total", "radixkv_generated_tokens_total", requests)
    with live_server(ScriptedEngine()) as server, server.http() as http:
        before = [counted(http, name) for name in names]
        begun = http.post(URL, json={"input": "say:hello", "background": True}).json()
        with http.stream("GET", f"{URL}/{begun['id']}?stream=true") as events:
            events.read()
        after = [counted(http, name) for name in names]
        usage = http.get(f"{URL}/{begun['id']}").json()["usage"]
    grown = [new - old for old, new in zip(before, after, strict=True)]
    assert grown[:2] == [usage["input_tokens"], usage["output_tokens"]]
    assert grown[2] == 2, "one that began it, one that watched it"


def test_it_ends_in_time() -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    with live_server(engine, background_timeout_s=0.05) as hurried, hurried.openai() as client:
        failed = poll(client, begin(client).id)
        assert (failed.status, "background_timeout_s" in failed.error.message) == ("failed", True)
        engine.wait_until(lambda: engine.requests[-1].aborted)
        engine.release()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=maybe", "stream"),
        ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("include=everything", "include"),
    ],
)
def test_refusals_of_queries(http: httpx.Client, query: str, param: str) -> None:
    begun = http.post(URL, json={"input": "say:x", "background": True}).json()
    answer = http.get(f"{URL}/{begun['id']}?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_is_not_stored_is_not_in_the_background(http: httpx.Client) -> None:
    answer = http.post(URL, json={"input": "say:x", "background": True, "store": False})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "store")


class StuckEngine(ScriptedEngine):
    """Stops each answer after two tokens until its gate is opened: the end of a test does not open it."""

    def __init__(self) -> None:
        super().__init__()
        self.hold_at = 2
        self.gate.clear()

    def release(self) -> None:
        pass


def test_shutdown_finishes_what_ends_in_time_and_fails_the_rest(tmp_path: Path) -> None:
    path, engine = str(tmp_path / "responses.db"), StuckEngine()
    with live_server(engine, response_store=path, shutdown_grace_s=60) as one, one.openai() as client:
        done = begin(client)
        at_two_tokens(engine, client, done.id)
        threading.Timer(0.1, engine.gate.set).start()  # after the end of the server has begun
    engine = StuckEngine()
    with live_server(engine, response_store=path, shutdown_grace_s=0) as two, two.openai() as client:
        assert client.responses.retrieve(done.id).output_text == "hello"
        cut = begin(client)
        at_two_tokens(engine, client, cut.id)
    engine.gate.set()
    with live_server(ScriptedEngine(), response_store=path) as three, three.openai() as client:
        failed = client.responses.retrieve(cut.id)
        assert (failed.status, failed.error.message) == ("failed", "The server is shutting down.")
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.retrieve(cut.id, stream=True)
        assert caught.value.code == "events_not_kept"


#: Another server of a file, as far as its lock goes.
_OTHER = """
import fcntl, sys

with open(sys.argv[1], "r+") as file:
    fcntl.lockf(file, fcntl.LOCK_SH)
    print(flush=True)
    sys.stdin.read()
"""


def test_a_restart_fails_what_a_killed_server_left_unfinished(tmp_path: Path) -> None:
    engine = StuckEngine()
    engine.hold_at = 0
    paths = [str(tmp_path / name) for name in ("one.db", "two.db")]
    with live_server(engine, response_store=paths[0]) as killed, killed.openai() as client:
        running = begin(client)
        for file in filter(Path.is_file, tmp_path.glob("one.db*")):  # what is there when it is killed
            shutil.copy(file, tmp_path / file.name.replace("one", "two"))
        engine.gate.set()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _OTHER, f"{paths[1]}-servers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with live_server(ScriptedEngine(), response_store=paths[1]) as beside, beside.openai() as client:
            assert client.responses.retrieve(running.id).status == "queued", "another server may run it"
            with pytest.raises(openai.ConflictError):
                client.responses.cancel(running.id)
        other.communicate()
    with live_server(ScriptedEngine(), response_store=paths[1]) as after, after.openai() as client:
        failed = client.responses.retrieve(running.id)
        assert failed.status == "failed"
        assert "restarted" in failed.error.message
