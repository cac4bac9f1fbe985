# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `prompt_cache_options` and breakpoints on parts: what is pinned, what is kept, prewarming."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

HALF_HOUR, HALF_DAY = 1800, 43200
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
BOTH = pytest.mark.parametrize("url", [CHAT, RESPONSES])


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live_server(
        ScriptedEngine(caches=True, num_blocks=400), api_keys=("ada=key-a", "bob=key-b")
    ) as running:
        yield running


def part(url: str, said: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    """A part of a message; with a breakpoint unless `mark` is None."""
    shown = {"type": "text" if url == CHAT else "input_text", "text": said}
    return shown if mark is None else {**shown, "prompt_cache_breakpoint": {"mode": "explicit", **mark}}


def body_of(url: str, *messages: tuple[str, list[dict[str, Any]]], **fields: Any) -> dict[str, Any]:
    said = [{"role": role, "content": parts} for role, parts in messages]
    return {"model": "scripted", "messages" if url == CHAT else "input": said, **fields}


def send(server: LiveServer, url: str, body: dict[str, Any], key: str = "key-a") -> dict[str, Any]:
    with server.http(headers={"x-api-key": key}) as client:
        answer = client.post(url, json=body)
    assert answer.status_code == 200, answer.text
    server.engine.prefix_cache.check()
    value: dict[str, Any] = answer.json()
    return value


def cached(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    found: int = details["cached_tokens"]
    return found


def pins(server: LiveServer) -> list[tuple[str, int]]:
    """What is pinned, as text, and for how many seconds, shortest first."""
    listed = server.engine.prefix_cache.pins()
    found = []
    for pin in sorted(listed, key=lambda pin: pin.num_tokens):
        assert pin.expires_in_s is not None
        shown = bytes(token for token in pin.token_ids if token < 256).decode()
        found.append((shown, -int(-pin.expires_in_s // 100) * 100))
    return found


WHOLE = "system\nRules\nmoreuser\nQuestion\ndetailassistant\n"


def conversation(url: str, first: Any, second: Any, third: Any, **fields: Any) -> dict[str, Any]:
    return body_of(
        url,
        ("system", [part(url, "Rules", first), part(url, "more", second)]),
        ("user", [part(url, "Question", third), part(url, "detail")]),
        **fields,
    )


@BOTH
@pytest.mark.parametrize(
    ("options", "marks", "expected"),
    [
        (None, (None, None, None), []),
        ({}, (None, None, None), []),
        ({"comparison_response_id": "resp_x"}, (None, None, None), []),
        ({"mode": "implicit"}, (None, None, None), [(WHOLE, HALF_HOUR)]),
        ({"ttl": "12h"}, (None, None, None), [(WHOLE, HALF_DAY)]),
        ({"ttl": "30m", "mode": "implicit"}, (None, None, None), [(WHOLE, HALF_HOUR)]),
        ({"mode": "explicit", "ttl": "12h"}, (None, None, None), []),
        (None, (None, {}, None), [("system\nRules\nmore", HALF_HOUR), (WHOLE, HALF_HOUR)]),
        (
            {"ttl": "12h"},
            ({}, {"ttl": "30m"}, None),
            [("system\nRules", HALF_DAY), ("system\nRules\nmore", HALF_HOUR), (WHOLE, HALF_DAY)],
        ),
        (
            {"mode": "explicit"},
            (None, {"ttl": "12h"}, {}),
            [("system\nRules\nmore", HALF_DAY), ("system\nRules\nmoreuser\nQuestion", HALF_HOUR)],
        ),
    ],
)
def test_each_breakpoint_is_a_pin(
    server: LiveServer, url: str, options: Any, marks: Any, expected: list[tuple[str, int]]
) -> None:
    fields = {} if options is None else {"prompt_cache_options": options}
    answer = send(server, url, conversation(url, *marks, **fields))
    assert pins(server) == expected
    if url == RESPONSES and options:
        told = {"mode": "implicit", "ttl": "30m", "comparison_response_id": None, **options}
        assert answer["prompt_cache_options"] == told


@BOTH
@pytest.mark.parametrize(("mode", "written"), [("implicit", 3), ("explicit", 4)])
def test_the_latest_breakpoints_are_written(server: LiveServer, url: str, mode: str, written: int) -> None:
    parts = [part(url, letter * 10, {}) for letter in "abcdef"] + [part(url, "end")]
    send(server, url, body_of(url, ("user", parts), prompt_cache_options={"mode": mode}))
    found = [shown for shown, _ in pins(server)]
    marked = [
        "user\n" + "\n".join(letter * 10 for letter in "abcdef"[:count]) for count in range(7 - written, 7)
    ]
    whole = ["user\n" + "\n".join([letter * 10 for letter in "abcdef"] + ["end"]) + "assistant\n"]
    assert found == marked + (whole if mode == "implicit" else [])


@BOTH
@pytest.mark.parametrize("length", [1, 9, 10, 11, 25, 26, 27, 40])
def test_an_explicit_breakpoint_is_exact(server: LiveServer, url: str, length: int) -> None:
    """Whatever its place in a block: no token less is found, and no token more."""
    options = {"mode": "explicit"}
    parts = [part(url, "a" * length, {}), part(url, "b" * 50)]
    body = body_of(url, ("user", parts), prompt_cache_options=options)
    first = send(server, url, body)
    exact = 1 + len("user\n") + length
    assert cached(first) == 0
    [(shown, _)] = pins(server)
    assert len(shown) + 1 == exact
    assert cached(send(server, url, body)) == exact
    server.engine.prefix_cache.evict(400)
    assert cached(send(server, url, body)) == exact


@BOTH
def test_explicit_without_breakpoints_keeps_nothing(server: LiveServer, url: str) -> None:
    body = conversation(url, None, None, None, prompt_cache_options={"mode": "explicit"})
    assert [cached(send(server, url, body)) for _ in range(3)] == [0, 0, 0]
    assert server.engine.prefix_cache.stats.cached_blocks == 0
    # What another request cached is found, and stays.
    plain = conversation(url, None, None, None)
    send(server, url, plain)
    found = cached(send(server, url, body))
    assert found > 30
    assert cached(send(server, url, body)) == cached(send(server, url, plain)) == found
    assert cached(send(server, url, body, key="key-b")) == 0


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_options": {"prewarm": True}},
        {"prompt_cache_options": {"prewarm": True}, "generate": True},
        {"generate": False},
        {"prompt_cache_options": {"prewarm": False, "ttl": "30m"}, "generate": False},
        {"prompt_cache_options": {"prewarm": True, "mode": "explicit"}, "temperature": 0.5, "min_tokens": 3},
    ],
)
def test_a_prewarm_generates_nothing(server: LiveServer, url: str, fields: dict[str, Any]) -> None:
    body = conversation(url, None, None, {}, **fields)
    answer = send(server, url, body)
    usage = answer["usage"]
    asked = server.engine.requests[-1]
    assert asked.params.max_tokens == 0
    assert (usage.get("output_tokens"), usage.get("completion_tokens")) in ((0, None), (None, 0))
    if url == RESPONSES:
        assert (answer["status"], answer["output"], answer["incomplete_details"]) == ("completed", [], None)
        assert usage["input_tokens"] == usage["total_tokens"] == len(asked.prompt)
    else:
        [choice] = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
        assert usage["prompt_tokens"] == usage["total_tokens"] == len(asked.prompt)
    again = send(server, url, conversation(url, None, None, None))
    if fields.get("prompt_cache_options", {}).get("mode") == "explicit":
        assert cached(again) == 3 + len("system\nRules\nmoreuser\nQuestion")
    else:
        assert cached(again) == len(asked.prompt) - 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Rules " * 10, [list(range(40))]])
def test_completions_of_nothing_prewarm(server: LiveServer, prompt: Any, stream: bool) -> None:
    body = {"model": "scripted", "prompt": prompt}
    with server.openai("key-a") as client:
        if stream:
            chunks = list(client.completions.create(**body, max_tokens=0, stream=True))
            assert [choice.text for chunk in chunks for choice in chunk.choices if choice.text] == []
        else:
            warmed = client.completions.create(**body, max_tokens=0)
            assert [(choice.text, choice.finish_reason) for choice in warmed.choices] == [("", "length")]
            assert warmed.usage is not None
            assert warmed.usage.completion_tokens == 0
        usage = client.completions.create(**body, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


@BOTH
@pytest.mark.parametrize(
    "fields", [{"generate": True}, {"prompt_cache_options": {"prewarm": False}}, {"generate": None}]
)
def test_what_is_no_prewarm(server: LiveServer, url: str, fields: dict[str, Any]) -> None:
    assert "ok" in str(send(server, url, conversation(url, None, None, None, **fields)))


def test_a_prewarmed_response_is_continued(server: LiveServer) -> None:
    with server.openai("key-a") as client:
        options: Any = {"prewarm": True}
        warmed = client.responses.create(
            model="scripted", instructions="Rules " * 20, input="first", prompt_cache_options=options
        )
        assert (warmed.output, warmed.status, warmed.output_text) == ([], "completed", "")
        after = client.responses.create(
            model="scripted", instructions="Rules " * 20, input="say:hello", previous_response_id=warmed.id
        )
        assert after.output_text == "hello"
        assert after.usage is not None
        # All that the first prompt had but the turn of the assistant's that it ended with.
        assert after.usage.input_tokens_details.cached_tokens >= warmed.usage.input_tokens - 12  # type: ignore[union-attr]
        assert client.responses.retrieve(warmed.id).output == []


def test_streams_of_a_prewarm(server: LiveServer) -> None:
    options: Any = {"prewarm": True}
    with server.openai("key-a") as client:
        events = list(
            client.responses.create(model="scripted", input="x", prompt_cache_options=options, stream=True)
        )
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        done = events[-1].response  # type: ignore[union-attr]
        assert (done.output, done.usage.output_tokens) == ([], 0)
        chunks = list(
            client.chat.completions.create(
                model="scripted",
                messages=[{"role": "user", "content": "x"}],
                prompt_cache_options=options,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == ""
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 0


async def test_the_asynchronous_client_prewarms(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key-a") as client:
        options: Any = {"prewarm": True, "ttl": "12h"}
        first, second = await asyncio.gather(
            *(
                client.responses.create(model="scripted", input="x", prompt_cache_options=options)
                for _ in "ab"
            )
        )
    assert first.output == second.output == []
    assert [seconds for _, seconds in pins(server)] == [HALF_DAY]


def test_breakpoints_in_outputs_of_tools_and_in_shortened_conversations(server: LiveServer) -> None:
    mark = {"mode": "explicit"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [
            {"type": "input_text", "text": "rain", "prompt_cache_breakpoint": mark},
            {"type": "input_text", "text": "cold"},
        ],
    }
    old = {"role": "user", "content": "x" * 4090}
    asked = {"role": "user", "content": "weather?"}
    body = {
        "model": "scripted",
        "input": [old, asked, call, output],
        "truncation": "auto",
        "prompt_cache_options": {"mode": "explicit"},
    }
    send(server, RESPONSES, body)
    [(shown, _)] = pins(server)
    assert shown == "user\nweather?assistant\ncall f({})tool\nrain"


@BOTH
@pytest.mark.parametrize(
    ("mark", "param"),
    [({"mode": "implicit"}, "mode"), ({"mode": "explicit", "ttl": "1h"}, "ttl"), (True, "")],
)
def test_bad_breakpoints_are_refused(server: LiveServer, url: str, mark: Any, param: str) -> None:
    said = {**part(url, "x"), "prompt_cache_breakpoint": mark}
    with server.http(headers={"x-api-key": "key-a"}) as client:
        answer = client.post(url, json=body_of(url, ("user", [said])))
    assert answer.status_code == 400
    assert "prompt_cache_breakpoint" in answer.text
    assert param in answer.text


@BOTH
def test_two_lifetimes_are_refused(server: LiveServer, url: str) -> None:
    for retention in ("24h", "in_memory"):
        body = conversation(
            url, None, None, None, prompt_cache_retention=retention, prompt_cache_options={"ttl": "30m"}
        )
        with server.http(headers={"x-api-key": "key-a"}) as client:
            answer = client.post(url, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt_cache_retention"
        assert "prompt_cache_options.ttl" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prewarm_counts_no_answer(server: LiveServer, stream: bool) -> None:
    def figures() -> dict[str, float]:
        with server.http(headers={"x-api-key": "key-a"}) as client:
            lines = client.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[:1] != "#"}

    body = body_of(RESPONSES, ("user", [part(RESPONSES, "x")]), generate=False, stream=stream)
    with server.http(headers={"x-api-key": "key-a"}) as client:
        assert client.post(RESPONSES, json=body).status_code == 200
    found = figures()
    counted = {name: value for name, value in found.items() if 'tenant="ada"' in name}
    assert counted['radixkv_prompt_tokens_total{tenant="ada"}'] == len(server.engine.requests[-1].prompt)
    assert counted['radixkv_generated_tokens_total{tenant="ada"}'] == 0
    assert not any("time_to_first_token_seconds" in name and value for name, value in counted.items())
    assert counted['radixkv_finished_samples_total{reason="length",tenant="ada"}'] == 1
