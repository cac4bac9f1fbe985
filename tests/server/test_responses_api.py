"""The Responses API as the real openai client sees it, over the scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, live_server
from openai import OpenAI
from scripted_engine import Asked, ScriptedEngine
from scripted_parser import ScriptedParser

from radixkv.errors import EngineOverloadedError, RequestFailedError
from radixkv_server.apis.responses import parse
from radixkv_server.chat.chat import AnswerReaders, chat_request
from radixkv_server.generation.request import PromptRequest
from radixkv_server.response_file import SqliteStore
from radixkv_server.response_store import StoreError

URL = "/v1/responses"


def fail(asked: Asked, given: int) -> BaseException | None:
    last = asked.text.rpartition("user\n")[2]
    if "overload" in last:
        return EngineOverloadedError("full", retry_after_s=2)
    return RequestFailedError("broke") if "break" in last and given == 2 else None


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(max_model_len=4096, fail=fail)
    with live_server(engine, api_keys=("ada=key-a", "bob=key-b")) as running:
        yield running


@pytest.fixture
def ada(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai("key-a") as client:
        yield client


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": "key-a"}) as client:
        yield client


def last_asked(server: LiveServer) -> Asked:
    asked = server.engine.requests[-1]
    assert isinstance(asked, Asked)
    return asked


def messages_in(asked: Asked) -> list[str]:
    """What the scripted template made of each message, and the assistant's turn at the end."""
    return asked_text(asked).split("<|im_start|>")[1:]


def asked_text(asked: Asked) -> str:
    names = {256: b"<|im_start|>", 257: b"<|im_end|>"}
    return b"".join(names.get(token) or bytes([token]) for token in asked.prompt).decode()


# ---------------------------------------------------------------------- whole answers


def test_a_whole_answer(server: LiveServer, ada: OpenAI) -> None:
    answer = ada.responses.create(
        model="scripted",
        input="say:hello",
        instructions="Be brief.",
        metadata={"run": "7"},
        temperature=0.5,
        user="u",
    )
    asked = last_asked(server)
    assert (answer.status, answer.output_text, answer.error) == ("completed", "hello", None)
    assert answer.object == "response"
    assert answer.id.startswith("resp_")
    assert answer.completed_at is not None
    assert asked.request_id.startswith(answer.id)
    assert asked.owner == ("ada", "")
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"run": "7"}, 0.5)
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    assert messages_in(asked) == ["system\nBe brief.<|im_end|>", "user\nsay:hello<|im_end|>", "assistant\n"]
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = answer.usage
    assert usage.input_tokens == len(asked.prompt)
    assert usage.input_tokens_details.cached_tokens == len(asked.prompt) // 2
    assert usage.input_tokens_details.cache_write_tokens == len(asked.prompt) - len(asked.prompt) // 2
    assert usage.output_tokens == len("hello") + 1
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_an_answer_that_was_cut(ada: OpenAI) -> None:
    answer = ada.responses.create(model="scripted", input="say:hello", max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "hel")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


def test_all_kinds_of_items_reach_the_template(server: LiveServer, ada: OpenAI) -> None:
    ada.responses.create(
        model="scripted",
        input=[
            {"role": "developer", "content": "rules"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "?"}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "see"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "two"}],
            },
            {"role": "user", "content": "say:ok"},
        ],
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    )
    assert messages_in(last_asked(server)) == [
        "system\nrules<|im_end|>",
        "user\na\nb<|im_end|>",
        "assistant\nthink ?\nseecall f({'x': 1})call g({})<|im_end|>",
        "tool\none<|im_end|>",
        "tool\ntwo<|im_end|>",
        "user\nsay:ok<|im_end|>",
        "assistant\n",
    ]
    assert asked_text(last_asked(server)).startswith("tools:['f']\n")


def test_logprobs(ada: OpenAI) -> None:
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ada.responses.create(model="scripted", input="say:hi", **options)
    logprobs = answer.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == ["h", "i"]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    stream = ada.responses.create(model="scripted", input="say:hi", stream=True, **options)
    events = list(stream)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [[entry.token for entry in event.logprobs] for event in deltas] == [["h"], ["i"]]
    assert events[-1].response.output[0].content[0].logprobs == logprobs


# ---------------------------------------------------------------------- streams

TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def test_a_stream_tells_everything_in_order(ada: OpenAI) -> None:
    events = list(ada.responses.create(model="scripted", input="say:hi", stream=True))
    assert [event.type for event in events] == TEXT_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.usage) == ("in_progress", [], None)
    assert (last.status, last.output_text, last.id) == ("completed", "hi", first.id)
    assert last.usage.output_tokens == 3
    added, done = events[2].item, events[-2].item
    assert (added.id, added.content, added.status) == (done.id, [], "in_progress")
    assert done == last.output[0]
    assert ada.responses.retrieve(last.id).output_text == "hi"


def test_the_clients_own_accumulation_agrees(ada: OpenAI) -> None:
    with ada.responses.stream(model="scripted", input="say:hello") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "hello"


def test_the_async_client(server: LiveServer) -> None:
    async def run() -> tuple[list[str], str]:
        async with server.async_openai("key-a") as client:
            stream = await client.responses.create(model="scripted", input="say:hi", stream=True)
            kinds = [event.type async for event in stream]
            whole = await client.responses.create(model="scripted", input="say:yes")
            return kinds, whole.output_text

    assert asyncio.run(run()) == (TEXT_EVENTS, "yes")


def test_a_stream_that_is_cut(ada: OpenAI) -> None:
    events = list(ada.responses.create(model="scripted", input="say:hello", stream=True, max_output_tokens=2))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-2].item.status == "incomplete"


def test_an_error_inside_a_stream(ada: OpenAI) -> None:
    events = list(ada.responses.create(model="scripted", input="say:break", stream=True))
    assert [event.type for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[-2].code, events[-2].message) == ("request_failed", "broke")
    failed = events[-1].response
    assert (failed.status, failed.error.message, failed.output_text) == ("failed", "broke", "br")
    with pytest.raises(openai.NotFoundError):
        ada.responses.retrieve(failed.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_never_began_has_a_real_status(ada: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ada.responses.create(model="scripted", input="overload", stream=stream)
    assert (caught.value.status_code, caught.value.code) == (503, "engine_overloaded")


# ---------------------------------------------------------------------- reasoning and calls


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def request_with_readers(*args: Any, **options: Any) -> tuple[PromptRequest, AnswerReaders]:
        prompt_request, _ = await chat_request(*args, **options)
        return prompt_request, AnswerReaders(ScriptedParser)

    monkeypatch.setattr(parse, "chat_request", request_with_readers)


MARKED = 'say:(hm)so<f{"x":1}><g{}>'
TOOLS: Any = [{"type": "function", "name": name, "parameters": {}, "strict": False} for name in "fg"]


@pytest.mark.usefixtures("marked")
def test_reasoning_and_calls_are_items(server: LiveServer, ada: OpenAI) -> None:
    answer = ada.responses.create(model="scripted", input=MARKED, tools=TOOLS)
    thought, said, *calls = answer.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "hm", [])
    assert said.content[0].text == answer.output_text == "so"
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"x":1}'), ("g", "{}")]
    assert calls[0].call_id != calls[1].call_id
    assert answer.usage.output_tokens_details.reasoning_tokens == len("(hm")
    assert [tool.name for tool in answer.tools] == ["f", "g"]
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "one"}
    for history in (
        {"previous_response_id": answer.id, "input": [result]},
        {"input": [{"role": "user", "content": MARKED}, *answer.output, result]},
    ):
        ada.responses.create(model="scripted", tools=TOOLS, **history)
        assert messages_in(last_asked(server))[1:3] == [
            "assistant\nthink hm\nsocall f({'x': 1})call g({})<|im_end|>",
            "tool\none<|im_end|>",
        ]


@pytest.mark.usefixtures("marked")
def test_reasoning_and_calls_are_streamed(ada: OpenAI) -> None:
    events = list(ada.responses.create(model="scripted", input=MARKED, tools=TOOLS, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "output_item.added",
        *["function_call_arguments.delta"] * len('{"x":1}'),
        *("function_call_arguments.done", "output_item.done"),
        "output_item.added",
        *["function_call_arguments.delta"] * len("{}"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    last = events[-1].response
    assert last.usage.output_tokens_details.reasoning_tokens == len("(hm")
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item for event in done] == last.output
    assert [event.output_index for event in done] == [0, 1, 2, 3]
    arguments = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.name, event.arguments) for event in arguments] == [("f", '{"x":1}'), ("g", "{}")]


# ---------------------------------------------------------------------- stored responses


def test_a_chain_renders_what_the_turns_before_were(server: LiveServer, ada: OpenAI) -> None:
    first = ada.responses.create(model="scripted", input="say:one", instructions="Be brief.")
    one = last_asked(server)
    second = ada.responses.create(
        model="scripted", input="say:two", instructions="Be brief.", previous_response_id=first.id
    )
    two = last_asked(server)
    ada.responses.create(
        model="scripted", input="say:three", instructions="Be brief.", previous_response_id=second.id
    )
    three = last_asked(server)
    computed = [*one.prompt, *b"one", 257]
    assert two.prompt[: len(computed)] == computed, "what was computed is found again"
    computed = [*two.prompt, *b"two", 257]
    assert three.prompt[: len(computed)] == computed
    assert second.previous_response_id == first.id
    ada.responses.create(model="scripted", input="say:x", previous_response_id=second.id)
    assert not asked_text(last_asked(server)).startswith("<|im_start|>system"), (
        "instructions are not inherited"
    )


def test_retrieving_and_deleting(ada: OpenAI) -> None:
    first = ada.responses.create(model="scripted", input="say:one")
    second = ada.responses.create(model="scripted", input="say:two", previous_response_id=first.id)
    assert ada.responses.retrieve(second.id) == second
    items = ada.responses.input_items.list(second.id, order="asc").data
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "say:one"),
        ("assistant", "one"),
        ("user", "say:two"),
    ]
    assert len({item.id for item in items}) == 3
    ada.responses.delete(first.id)
    for gone in (ada.responses.retrieve, ada.responses.delete, ada.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            gone(first.id)
    third = ada.responses.create(model="scripted", input="say:three", previous_response_id=second.id)
    assert third.output_text == "three", "a deleted turn stays part of the conversations that went on from it"


def test_pages_of_input_items(ada: OpenAI, http: httpx.Client) -> None:
    given = [{"role": "user", "content": f"say:{number}"} for number in range(5)]
    answer = ada.responses.create(model="scripted", input=given)
    listed = list(ada.responses.input_items.list(answer.id, limit=2))
    assert [item.content[0].text for item in listed] == [f"say:{number}" for number in range(4, -1, -1)]
    page = http.get(f"{URL}/{answer.id}/input_items?limit=2").json()
    assert (page["has_more"], page["last_id"]) == (True, page["data"][-1]["id"])
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        assert http.get(f"{URL}/{answer.id}/input_items?{query}").status_code == 400


def test_an_item_reference(server: LiveServer, ada: OpenAI) -> None:
    first = ada.responses.create(model="scripted", input="say:one")
    [said] = first.output
    reference = {"type": "item_reference", "id": said.id}
    ada.responses.create(model="scripted", input=[reference, {"role": "user", "content": "say:x"}])
    assert messages_in(last_asked(server))[0] == "assistant\none<|im_end|>"
    with pytest.raises(openai.NotFoundError) as caught:
        ada.responses.create(model="scripted", input=[{"type": "item_reference", "id": "msg_nothing_0"}])
    assert caught.value.param == "input"


def test_what_is_not_stored_is_not_there(ada: OpenAI) -> None:
    answer = ada.responses.create(model="scripted", input="say:one", store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError) as caught:
        ada.responses.create(model="scripted", input="say:two", previous_response_id=answer.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_another_tenants_responses_are_not_there(server: LiveServer, ada: OpenAI) -> None:
    answer = ada.responses.create(model="scripted", input="say:secret")
    with server.openai("key-b") as bob:
        for ask in (
            lambda: bob.responses.retrieve(answer.id),
            lambda: bob.responses.delete(answer.id),
            lambda: bob.responses.input_items.list(answer.id),
            lambda: bob.responses.create(model="scripted", input="x", previous_response_id=answer.id),
            lambda: bob.responses.create(
                model="scripted", input=[{"type": "item_reference", "id": answer.output[0].id}]
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
    assert ada.responses.retrieve(answer.id).output_text == "secret"


def test_the_store_is_bounded_and_keeps_what_is_used(server: LiveServer) -> None:
    with (
        live_server(ScriptedEngine(max_model_len=4096), max_stored_responses=2) as small,
        small.openai() as client,
    ):
        ids = []
        for number in range(3):
            ids.append(client.responses.create(model="scripted", input=f"say:{number}").id)
            if number == 1:
                client.responses.retrieve(ids[0])
        assert client.responses.retrieve(ids[0]).output_text == "0"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(ids[1])


def test_a_store_in_a_file_outlives_the_server(tmp_path: Any) -> None:
    path = str(tmp_path / "responses.db")
    with live_server(ScriptedEngine(max_model_len=4096), response_store=path) as one, one.openai() as client:
        answer = client.responses.create(model="scripted", input="say:one")
    with live_server(ScriptedEngine(max_model_len=4096), response_store=path) as two, two.openai() as client:
        assert client.responses.retrieve(answer.id) == answer
        client.responses.create(model="scripted", input="say:two", previous_response_id=answer.id)
        assert messages_in(last_asked(two))[1] == "assistant\none<|im_end|>"


def test_a_locked_store_costs_each_answer_a_bounded_wait_and_nobody_else_anything(tmp_path: Any) -> None:
    path = str(tmp_path / "responses.db")
    with (
        live_server(ScriptedEngine(max_model_len=4096), response_store=path) as server,
        server.http() as http,
    ):
        kept = http.post(URL, json={"input": "say:one"}).json()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            started = time.monotonic()
            with ThreadPoolExecutor(12) as threads:
                bodies = [{"input": "say:two", "stream": number % 2 == 0} for number in range(12)]
                answers = list(threads.map(lambda body: http.post(URL, json=body), bodies))
            assert time.monotonic() - started < 8, "they waited side by side, not one after another"
            assert [answer.status_code for answer in answers] == [200] * 12
            assert answers[1].json()["store"] is False
            assert '"store":false' in answers[0].text.rpartition("event: response.completed")[2]
            assert http.get(f"{URL}/{kept['id']}").json() == kept, "what is stored is read meanwhile"
            refused = http.delete(f"{URL}/{kept['id']}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "response_store_busy")
            assert refused.headers["Retry-After"] == "1"
            other.execute("ROLLBACK")
        again = http.post(URL, json={"input": "say:three", "previous_response_id": kept["id"]}).json()
        assert again["store"] is True
        assert http.get(f"{URL}/{again['id']}").json() == again
        assert http.delete(f"{URL}/{kept['id']}").json()["deleted"] is True


async def fill_store(path: Any, number: int) -> None:
    store = SqliteStore(str(path), number, 10**9)
    for i in range(number):
        await store.put("", f"resp_{i}", b"{}" * 1000)
    await store.close()


def test_a_damaged_store_is_an_error_and_serving_goes_on(tmp_path: Any) -> None:
    path = tmp_path / "responses.db"
    asyncio.run(fill_store(path, 100))
    whole = path.read_bytes()
    path.write_bytes(whole[: 3 * 4096] + b"damaged!" * ((len(whole) - 3 * 4096) // 8))
    with (
        live_server(ScriptedEngine(max_model_len=4096), response_store=str(path)) as server,
        server.http() as http,
    ):
        for ask in (
            lambda: http.get(f"{URL}/resp_7"),
            lambda: http.get(f"{URL}/resp_7/input_items"),
            lambda: http.delete(f"{URL}/resp_7"),
            lambda: http.post(URL, json={"input": "x", "previous_response_id": "resp_7"}),
        ):
            refused = ask()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "response_store_failed")
        for stream in (False, True):
            answer = http.post(URL, json={"input": "say:two", "stream": stream})
            assert (answer.status_code, '"store":false' in answer.text) == (200, True)
            assert '"text":"two"' in answer.text
        message = {"max_tokens": 9, "messages": [{"role": "user", "content": "say:hi"}]}
        assert http.post("/v1/messages", json={**message, "thread": {"type": "create"}}).status_code == 200


def test_a_damaged_response_is_an_error(tmp_path: Any) -> None:
    path = tmp_path / "responses.db"
    asyncio.run(fill_store(path, 1))  # no response
    with (
        live_server(ScriptedEngine(max_model_len=4096), response_store=str(path)) as server,
        server.http() as http,
    ):
        refused = http.get(f"{URL}/resp_0")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "response_store_failed")


async def test_a_full_store_is_an_error_and_can_be_read(tmp_path: Any) -> None:
    store = SqliteStore(str(tmp_path / "responses.db"), 100, 10**9)
    await store.put("ada", "one", b"1")
    await store._writer.run(lambda db: db.execute("PRAGMA max_page_count = 1"))
    with pytest.raises(StoreError, match="full") as caught:
        await store.put("ada", "two", b"2" * 10**6)
    assert not caught.value.may_pass
    assert await store.get("ada", "one") == b"1"
    assert await store.get("ada", "two") is None
    await store.close()


# ---------------------------------------------------------------------- retention


def test_retention_is_a_pin_within_the_budget(server: LiveServer, ada: OpenAI) -> None:
    cache = server.engine.prefix_cache
    question = "say:" + "long " * 20
    for options in (
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"ttl": "12h"}},
        {"prompt_cache_options": {"ttl": "12h"}, "stream": True},
    ):
        answer: Any = ada.responses.create(model="scripted", input=question, **options)
        if "stream" in options:
            answer = list(answer)[-1].response
        assert answer.usage.input_tokens_details.pinned_tokens == 0, "the scripted engine caches nothing"
    ids = last_asked(server).prompt
    lease = cache.acquire(ids, server.engine.cache.namespace("ada"))
    lease.commit(len(ids))
    lease.release()
    chat = [{"role": "user", "content": question}]
    one = ada.chat.completions.create(model="scripted", messages=chat, prompt_cache_retention="24h")
    assert one.usage.prompt_tokens_details.pinned_tokens == len(ids)
    [pin] = cache.pins()
    assert 86000 < pin.expires_in_s <= 86400
    cache.reset()
    two = ada.chat.completions.create(model="scripted", messages=chat, prompt_cache_retention="in_memory")
    assert not hasattr(two.usage.prompt_tokens_details, "pinned_tokens")
    assert not cache.pins()


def test_a_cache_key_names_the_family_of_a_request(server: LiveServer, ada: OpenAI) -> None:
    ada.responses.create(model="scripted", input="x", prompt_cache_key="agent-7")
    assert last_asked(server).cache_key_hint == "agent-7"
    chat: Any = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}
    ada.chat.completions.create(**chat, prompt_cache_key="agent-8")
    assert last_asked(server).cache_key_hint == "agent-8"
    ada.chat.completions.create(**chat)
    assert last_asked(server).cache_key_hint == ""


@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
@pytest.mark.parametrize(
    "field",
    [
        {"prompt_cache_retention": "1h"},
        {"prompt_cache_key": 5},
        {"prompt_cache_options": {"ttl": "1h"}},
        {"prompt_cache_options": {"prewarm": True}},
    ],
)
def test_retention_outside_what_there_is_is_refused(
    http: httpx.Client, url: str, field: dict[str, Any]
) -> None:
    prompt = {"input": "x"} if url == URL else {"messages": [{"role": "user", "content": "x"}]}
    answer = http.post(url, json={"model": "scripted", **prompt, **field})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(next(iter(field)))


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        pytest.param({"input": None}, "missing_required_parameter", "input", id="no input"),
        pytest.param({"input": 5}, "invalid_type", "input", id="type"),
        pytest.param({"input": []}, "invalid_value", "input", id="empty"),
        pytest.param({"input": ["x"]}, "invalid_type", "input[0]", id="item"),
        pytest.param({"input": [{"type": "web_search_call"}]}, "unsupported_content", "input[0]", id="kind"),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "unsupported_content",
            "input[0].content[0]",
            id="image",
        ),
        pytest.param(
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "invalid_value",
            "input",
            id="arguments",
        ),
        pytest.param({"tools": [{"type": "x"}]}, "unsupported_parameter", "tools[0]", id="tool"),
        pytest.param({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0]", id="name"),
        pytest.param(
            {"text": {"format": {"type": "grammar"}}}, "unsupported_parameter", "text.format", id="json"
        ),
        pytest.param({"tool_choice": "required"}, "invalid_value", "tool_choice", id="choice"),
        pytest.param({"background": True}, "unsupported_parameter", "background", id="background"),
        pytest.param({"conversation": "conv_1"}, "unsupported_parameter", "conversation", id="conversation"),
        pytest.param({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt", id="prompt"),
        pytest.param({"include": ["everything"]}, "invalid_value", "include", id="include"),
        pytest.param({"metadata": {"k" * 65: "v"}}, "invalid_value", "metadata", id="metadata key"),
        pytest.param({"metadata": {"k": 5}}, "invalid_type", "metadata.k", id="metadata value"),
        pytest.param({"max_output_tokens": 0}, "invalid_value", "max_output_tokens", id="tokens"),
        pytest.param({"top_logprobs": 21}, "invalid_value", "top_logprobs", id="logprobs"),
        pytest.param({"max_tokens": 5}, "unknown_parameter", "max_tokens", id="unknown"),
        pytest.param({"input": "x" * 5000}, "context_length_exceeded", "input", id="long"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, body: dict[str, Any], code: str, param: str) -> None:
    answer = http.post(URL, json={"model": "scripted", "input": "say:x", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)
    assert error["message"]


def test_routes_that_do_nothing_say_why(ada: OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.BadRequestError, match="background"):
        ada.responses.cancel("resp_x")
    answer = ada.responses.create(model="scripted", input="say:x")
    assert http.get(f"{URL}/{answer.id}?stream=true").status_code == 400


def test_a_harmless_field_changes_nothing(http: httpx.Client) -> None:
    body = {
        "model": "scripted",
        "input": "say:x",
        "service_tier": "auto",
        "safety_identifier": "s",
        "max_tool_calls": 3,
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False},
        "stream": True,
        "background": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "none",
    }
    answer = http.post(URL, json=body)
    frames = [frame.split("\n") for frame in answer.text.strip().split("\n\n")]
    assert [name.removeprefix("event: ") for name, _ in frames] == [
        json.loads(data.removeprefix("data: "))["type"] for _, data in frames
    ]
