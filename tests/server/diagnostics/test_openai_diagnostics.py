# SPDX-License-Identifier: Apache-2.0
"""`prompt_cache_diagnostics` on responses and chats, by OpenAI's SDK: its types, reasons and exact counts."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from compared_prompts import prompts_of, shared_by
from fuzzing import examples
from live_server import LiveServer
from nightly import by_day
from openai import OpenAI
from openai.types.responses import Response

Body = dict[str, Any]
Change = Callable[[Body], None]
Route = Literal["responses", "chat"]
ROUTES = pytest.mark.parametrize("route", ["responses", "chat"])

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def function(name: str, **more: Any) -> Body:
    return {"name": name, "parameters": {"type": "object", "properties": {}}, **more}


def base(route: Route) -> Body:
    """A conversation of three messages after instructions, with two tools."""
    said = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A model."},
        {"role": "user", "content": "say:And who am I?"},
    ]
    if route == "chat":
        tools = [{"type": "function", "function": function(name)} for name in ("read", "write")]
        told = [{"role": "system", "content": "You are brief."}, *said]
        return {"model": "one", "max_tokens": 8, "tools": tools, "messages": told}
    tools = [{"type": "function", **function(name)} for name in ("read", "write")]
    return {
        "model": "one",
        "max_output_tokens": 16,
        "tools": tools,
        "instructions": "You are brief.",
        "input": said,
    }


def messages(body: Body) -> list[Body]:
    told: list[Body] = body["messages"] if "messages" in body else body["input"]
    return told


def set_format(body: Body) -> None:
    if "messages" in body:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    else:
        body.setdefault("text", {})["format"] = {"type": "json_schema", "name": "a", "schema": SCHEMA}


def set_effort(body: Body) -> None:
    body.update({"reasoning_effort": "low"} if "messages" in body else {"reasoning": {"effort": "low"}})


def set_verbosity(body: Body) -> None:
    if "messages" in body:
        body["verbosity"] = "low"
    else:
        body.setdefault("text", {})["verbosity"] = "low"


def set_instructions(body: Body) -> None:
    if "messages" in body:
        body["messages"][0]["content"] = "You are long."
    else:
        body["instructions"] = "You are long."


def say(index: int, text: str) -> Change:
    """Changes a message, counted after the instructions."""

    def change(body: Body) -> None:
        messages(body)[-3:][index]["content"] = text

    return change


def put(name: str, value: Any) -> Change:
    return lambda body: body.update({name: value})


def leave_out(body: Body) -> None:
    del messages(body)[-2:]


def add_tool(body: Body) -> None:
    one = function("list")
    tool = {"type": "function", "function": one} if "messages" in body else {"type": "function", **one}
    body["tools"].append(tool)


#: Name -> the change, the reason that OpenAI has for it, and the part that we name.
CHANGES: dict[str, tuple[Change, str, str]] = {
    "model": (put("model", "two"), "model_changed", "model"),
    "tools in another order": (lambda body: body["tools"].reverse(), "tools_changed", "tools"),
    "one tool more": (add_tool, "tools_changed", "tools"),
    "no tools": (lambda body: body["tools"].clear(), "tools_changed", "tools"),
    "instructions": (set_instructions, "input_changed", "system"),
    "first message": (say(0, "Who is it?"), "input_changed", "messages"),
    "answer": (say(1, "Nobody."), "input_changed", "messages"),
    "last message": (say(2, "say:And they?"), "input_changed", "messages"),
    "messages left out": (leave_out, "input_changed", "messages"),
    "template": (put("chat_template_kwargs", {"style": "x"}), "input_changed", "template"),
    "format": (set_format, "text_format_changed", "text_format"),
    "effort": (set_effort, "reasoning_effort_changed", "reasoning_effort"),
    "verbosity": (set_verbosity, "verbosity_changed", "verbosity"),
    "key": (put("prompt_cache_key", "k2"), "prompt_cache_key_changed", "prompt_cache_key"),
    "tier": (put("service_tier", "flex"), "service_tier_changed", "service_tier"),
    "salt": (put("cache_salt", "s"), "unavailable", "cache_salt"),
}
#: In which order they are looked for.
ORDER = [
    *("model", "tools", "system", "messages", "template", "text_format", "reasoning_effort", "verbosity"),
    *("prompt_cache_key", "service_tier", "cache_salt"),
]


@pytest.fixture
def ada(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai("key-a") as client:
        yield client


def ask(client: OpenAI, route: Route, body: Body, earlier: str | None = None, **more: Any) -> Any:
    """The answer; what the SDK has no type for goes into the body as it is."""
    sent = {**body, **({} if earlier is None else {"prompt_cache_options": compared(earlier)}), **more}
    beyond = {name: sent.pop(name) for name in ("cache_salt", "chat_template_kwargs") if name in sent}
    create: Any = client.responses.create if route == "responses" else client.chat.completions.create
    return create(**sent, extra_body=beyond)


def compared(earlier: str | None) -> Body:
    return {"comparison_response_id": earlier}


def told_by(answer: Any) -> Body:
    """The diagnostics of a response, which has a type for them, or of a chat."""
    if isinstance(answer, Response):
        assert answer.prompt_cache_diagnostics is not None
        return answer.prompt_cache_diagnostics.to_dict()
    return dict(answer.prompt_cache_diagnostics)


def cached_of(answer: Any) -> int:
    usage = answer.usage
    details = getattr(usage, "input_tokens_details", None) or usage.prompt_tokens_details
    return int(details.cached_tokens)


def check(server: LiveServer, answer: Any, reason: str, part: str, earlier: list[int]) -> None:
    """The answer gives a reason, names a part, and its counts are those of the two prompts."""
    told, own, prompt = told_by(answer), answer.cache_diagnosis, prompts_of(server, 1)[0]
    assert own["changed"] == part
    shared, cached = shared_by(earlier, prompt), cached_of(answer)
    missed = len(earlier) - (shared if cached >= len(prompt) - 1 else min(shared, cached))
    assert (own["shared_tokens"], own["missed_tokens"]) == (shared, missed)
    if reason == "unavailable":
        assert told == {"type": "unavailable"}
        return
    assert told == {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": missed,
        "comparison_reusable_tokens": len(earlier),
    }


@ROUTES
def test_the_types(ada: OpenAI, route: Route) -> None:
    first = ask(ada, route, base(route))
    assert getattr(first, "prompt_cache_diagnostics", None) is None
    assert not hasattr(first, "cache_diagnosis")
    assert told_by(ask(ada, route, base(route), first.id)) == {"type": "cache_hit"}
    longer = base(route)
    messages(longer).extend([{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}])
    assert told_by(ask(ada, route, longer, first.id)) == {"type": "cache_hit"}
    for unknown in ("resp_1", "", "msg_" + "0" * 32, "chatcmpl-1", "x" * 5000):
        assert told_by(ask(ada, route, base(route), unknown)) == {"type": "comparison_response_not_found"}
    asked = ask(ada, route, base(route), prompt_cache_options=compared(None))
    assert getattr(asked, "prompt_cache_diagnostics", None) is None, "null asks for nothing"


@ROUTES
@pytest.mark.parametrize("name", CHANGES)
def test_every_single_change_is_named(server: LiveServer, ada: OpenAI, route: Route, name: str) -> None:
    change, reason, part = CHANGES[name]
    first, body = ask(ada, route, base(route)), base(route)
    earlier = prompts_of(server, 1)[0]
    change(body)
    is_message = (route, part) == ("chat", "system")
    check(server, ask(ada, route, body, first.id), reason, "messages" if is_message else part, earlier)


@pytest.mark.parametrize("seed", by_day(range(examples(2)), 0))
def test_of_two_changes_the_first_one_is_named(server: LiveServer, ada: OpenAI, seed: int) -> None:
    rng, route = random.Random(seed), ("responses", "chat")[seed % 2]
    first = ask(ada, route, base(route))  # type: ignore[arg-type]
    earlier = prompts_of(server, 1)[0]
    for _ in range(100):
        done: list[str] = []
        body = base(route)  # type: ignore[arg-type]
        while len(done) < 2:
            name = rng.choice([name for name in CHANGES if name not in done])
            with contextlib.suppress(IndexError):  # what is to be changed is gone
                CHANGES[name][0](body)
                done.append(name)
        if "no tools" in done and len(body["tools"]) > 0:
            done.remove("no tools")
        parts = {CHANGES[name][2]: CHANGES[name][1] for name in done}
        part = min(parts, key=ORDER.index)
        answer = ask(ada, route, body, first.id)  # type: ignore[arg-type]
        shown = "messages" if (route, part) == ("chat", "system") else part
        check(server, answer, parts[part], shown, earlier)


@ROUTES
def test_what_shapes_no_prompt_changes_nothing(ada: OpenAI, route: Route) -> None:
    first, body = ask(ada, route, base(route)), base(route)
    body |= {"temperature": 0.5, "top_p": 0.5, "service_tier": "auto", "tool_choice": "none", "user": "u"}
    if route == "chat":
        body["response_format"] = {"type": "text"}
        body["messages"][1]["content"] = [{"type": "text", "text": "Who are you?"}]
    else:
        body["text"] = {"format": {"type": "text"}, "verbosity": "medium"}
        body["input"][0]["content"] = [{"type": "input_text", "text": "Who are you?"}]
    assert told_by(ask(ada, route, body, first.id)) == {"type": "cache_hit"}


def test_streams_of_responses(server: LiveServer, ada: OpenAI) -> None:
    first, body = ask(ada, "responses", base("responses")), base("responses")
    earlier = prompts_of(server, 1)[0]
    set_instructions(body)
    events = list(ask(ada, "responses", body, first.id, stream=True))
    with_response = [event for event in events if hasattr(event, "response")]
    assert [event.type for event in with_response] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    for event in with_response:
        assert event.response.prompt_cache_diagnostics.reason == "input_changed"
    check(server, with_response[-1].response, "input_changed", "system", earlier)
    assert with_response[-1].response.prompt_cache_options.comparison_response_id == first.id


def test_streams_of_chats(server: LiveServer, ada: OpenAI) -> None:
    first, body = ask(ada, "chat", base("chat")), base("chat")
    earlier = prompts_of(server, 1)[0]
    say(0, "Who is it?")(body)
    for more in ({}, {"stream_options": {"include_usage": True}}):
        server.engine.prefix_cache.evict(10**6)
        chunks = list(ask(ada, "chat", body, first.id, stream=True, **more))
        telling = [chunk for chunk in chunks if hasattr(chunk, "prompt_cache_diagnostics")]
        assert telling == ([chunks[0], chunks[-1]] if more else [chunks[0]])
        for chunk in telling:
            assert chunk.prompt_cache_diagnostics["reason"] == "input_changed"
    check(server, telling[-1], "input_changed", "messages", earlier)


def test_async(server: LiveServer) -> None:
    async def run() -> None:
        async with server.async_openai("key-a") as client:
            body = base("responses")
            first = await client.responses.create(**body)
            body["tools"].reverse()
            async with client.responses.stream(**body, prompt_cache_options=compared(first.id)) as stream:
                answer = await stream.get_final_response()
            assert told_by(answer)["reason"] == "tools_changed"

    asyncio.run(run())


def test_stored_conversations_are_compared_whole(server: LiveServer, ada: OpenAI) -> None:
    body = base("responses")
    first = ask(ada, "responses", body)
    goes_on = {**body, "previous_response_id": first.id, "input": "And now?"}
    assert told_by(ask(ada, "responses", goes_on, first.id)) == {"type": "cache_hit"}
    as_sent = {**body, "input": [*body["input"], {"role": "assistant", "content": first.output_text}]}
    again = {**as_sent, "input": [*as_sent["input"], {"role": "user", "content": "And now?"}]}
    second = ask(ada, "responses", goes_on)
    assert told_by(ask(ada, "responses", again, second.id)) == {"type": "cache_hit"}, "in other words"
    earlier = prompts_of(server, 1)[0]
    other = {**goes_on, "input": "And then?"}
    answer = ask(ada, "responses", other, second.id)
    check(server, answer, "input_changed", "messages", earlier)
    assert answer.cache_diagnosis["index"] == 4
    stored = ada.responses.retrieve(answer.id)
    assert told_by(stored)["reason"] == "input_changed"


def test_a_compacted_conversation(server: LiveServer, ada: OpenAI) -> None:
    body = base("responses")
    first = ask(ada, "responses", body)
    said = [*body["input"], {"role": "assistant", "content": "ok"}]
    short = ada.responses.compact(
        model="one",
        input=said,
        extra_body={"prompt_cache_options": compared(first.id)},
    )
    assert short.prompt_cache_diagnostics["reason"] == "tools_changed", "its prompt has none"  # type: ignore[attr-defined]
    items = [item.to_dict(warnings=False) for item in short.output]
    later = {**body, "input": [*items, {"role": "user", "content": "more"}]}
    second = ask(ada, "responses", later, first.id)
    assert told_by(second)["reason"] == "context_compacted"
    longer = {**later, "input": [*later["input"], {"role": "user", "content": "and more"}]}
    assert told_by(ask(ada, "responses", longer, second.id)) == {"type": "cache_hit"}
    longer["input"][-2] = {"role": "user", "content": "other"}
    assert told_by(ask(ada, "responses", longer, second.id))["reason"] == "input_changed"


@ROUTES
def test_a_request_that_still_runs_is_unavailable(server: LiveServer, ada: OpenAI, route: Route) -> None:
    server.engine.hold_at = 2
    server.engine.gate.clear()
    stream = ask(ada, route, base(route), stream=True)
    start = next(stream)
    name = start.response.id if route == "responses" else start.id
    short = {**base(route), **({"max_tokens": 1} if route == "chat" else {"max_output_tokens": 1})}
    answer = ask(ada, route, short, name)
    assert told_by(answer) == {"type": "unavailable"}
    assert answer.cache_diagnosis == {"compared_with": name, "state": "running"}
    server.engine.release()
    assert list(stream)
    assert told_by(ask(ada, route, base(route), name)) == {"type": "cache_hit"}


@ROUTES
def test_what_was_evicted_has_no_reason(server: LiveServer, ada: OpenAI, route: Route) -> None:
    first = ask(ada, route, base(route))
    server.engine.prefix_cache.evict(10**6)
    answer = ask(ada, route, base(route), first.id)
    assert told_by(answer) == {"type": "unavailable"}
    assert answer.cache_diagnosis["changed"] is None
    assert answer.cache_diagnosis["cache_miss"]["evicted_by"] == "evict()"


@ROUTES
def test_other_tenants_and_other_apis_ids_are_not_found(
    server: LiveServer, ada: OpenAI, route: Route
) -> None:
    mine: dict[str, Any] = {name: ask(ada, name, base(name)).id for name in ("responses", "chat")}
    with server.openai("key-b") as bob:
        assert told_by(ask(bob, route, base(route), mine[route])) == {"type": "comparison_response_not_found"}
    other = mine["chat" if route == "responses" else "responses"]
    assert told_by(ask(ada, route, base(route), other)) == {"type": "comparison_response_not_found"}


@ROUTES
@pytest.mark.parametrize("bad", [5, ["resp_1"], {"id": "resp_1"}, True])
def test_what_is_malformed_is_refused(server: LiveServer, route: Route, bad: Any) -> None:
    path = "/v1/responses" if route == "responses" else "/v1/chat/completions"
    with server.http(headers={"x-api-key": "key-a"}) as http:
        answer = http.post(path, json={**base(route), "prompt_cache_options": compared(bad)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_cache_options.comparison_response_id"
