# SPDX-License-Identifier: Apache-2.0
"""`diagnostics` on /v1/messages, by Anthropic's SDK: its four states, its six reasons, and exact counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message
from compared_prompts import prompts_of, shared_by
from fuzzing import examples
from live_server import LiveServer
from nightly import by_day

EDIT = "clear_tool_uses_20250919"
BEYOND_THE_SDK = ("cache_salt", "context_management", "speed", "temperature")

Body = dict[str, Any]
Change = Callable[[Body], None]


def base() -> Body:
    """A conversation of three messages, with two tools and two blocks of the system."""
    return {
        "model": "one",
        "max_tokens": 8,
        "tools": [
            {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}},
            {"name": "write", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}},
        ],
        "system": [{"type": "text", "text": "You are brief."}, {"type": "text", "text": "Today is Monday."}],
        "messages": [
            {"role": "user", "content": "Who are you?"},
            {"role": "assistant", "content": "A model."},
            {"role": "user", "content": [{"type": "text", "text": "say:And who am I?"}]},
        ],
    }


def put(*path: str | int, value: Any) -> Change:
    def change(body: Body) -> None:
        at: Any = body
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


def reverse(body: Body) -> None:
    body["tools"].reverse()


def add_tool(body: Body) -> None:
    body["tools"].append({"name": "list", "input_schema": {"type": "object"}})


def drop_last(body: Body) -> None:
    del body["messages"][-2:]


REORDERED = {"properties": {"path": {"type": "string"}}, "type": "object"}
#: Name -> the change, and what must be named: a part and its index.
CHANGES: dict[str, tuple[Change, str, int | None]] = {
    "model": (put("model", value="two"), "model", None),
    "speed": (put("speed", value="fast"), "model", None),
    "tool described": (put("tools", 0, "description", value="Reads."), "tools", 0),
    "schema's keys": (put("tools", 1, "input_schema", value=REORDERED), "tools", 1),
    "tools in another order": (reverse, "tools", 0),
    "one tool more": (add_tool, "tools", 2),
    "no tools": (put("tools", value=None), "tools", 0),
    "system's first block": (put("system", 0, "text", value="You are not."), "system", 0),
    "system's last block": (put("system", 1, "text", value="Today is Tuesday."), "system", 1),
    "another system": (put("system", value="You are brief."), "system", 1),
    "first message": (put("messages", 0, "content", value="Who is it?"), "messages", 0),
    "answer": (put("messages", 1, "content", value="Nobody."), "messages", 1),
    "last message": (put("messages", 2, "content", value="say:And they?"), "messages", 2),
    "messages left out": (drop_last, "messages", 1),
    "thinking": (put("thinking", value={"type": "disabled"}), "thinking", None),
    "tool_choice": (put("tool_choice", value={"type": "none"}), "tool_choice", None),
    "effort": (put("output_config", value={"effort": "low"}), "output_config", None),
    "context management": (
        put("context_management", value={"edits": [{"type": EDIT}]}),
        "context_management",
        None,
    ),
    "salt": (put("cache_salt", value="s"), "cache_salt", None),
}
REASONS = {"model": "model_changed", "tools": "tools_changed", "system": "system_changed"}


def kind_of(part: str) -> str:
    return {**REASONS, "messages": "messages_changed"}.get(part, "unavailable")


@pytest.fixture
def ada(server: LiveServer) -> Iterator[Anthropic]:
    with server.anthropic("key-a") as client:
        yield client


def ask(client: Anthropic, body: Body, previous: str | None = None) -> Message:
    own = {name: body[name] for name in BEYOND_THE_SDK if name in body}
    known = {name: value for name, value in body.items() if name not in own and value is not None}
    asked: Message = client.messages.create(
        **known, diagnostics={"previous_message_id": previous}, extra_body=own
    )
    return asked


def check(server: LiveServer, answer: Message, part: str, index: int | None, *, exact: bool = True) -> None:
    """The answer names a part, and its counts are those of the two prompts."""
    assert answer.diagnostics is not None
    reason = answer.diagnostics.cache_miss_reason
    assert reason is not None
    assert reason.type == kind_of(part)
    own: Any = answer.model_extra["cache_diagnosis"]  # type: ignore[index]
    assert (own["changed"], own["index"]) == (part, index)
    if not exact:
        return
    earlier, prompt = prompts_of(server)
    shared, cached = shared_by(earlier, prompt), answer.usage.cache_read_input_tokens or 0
    assert (own["compared_tokens"], own["prompt_tokens"]) == (len(earlier), len(prompt))
    assert own["shared_tokens"] == shared
    missed = len(earlier) - (shared if cached >= len(prompt) - 1 else min(shared, cached))
    assert own["missed_tokens"] == missed
    if kind_of(part) != "unavailable":
        assert reason.cache_missed_input_tokens == missed  # type: ignore[union-attr]


def test_the_states(ada: Anthropic) -> None:
    silent = ada.messages.create(**base())
    assert "diagnostics" not in silent.model_fields_set
    first = ask(ada, base())
    assert "diagnostics" in first.model_fields_set
    assert first.diagnostics is None
    assert ask(ada, base(), first.id).diagnostics is None, "nothing differs"
    assert ask(ada, base(), silent.id).diagnostics is None, "requests that did not ask can be named"
    body = base()
    body["messages"] += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
    assert ask(ada, body, first.id).diagnostics is None, "only longer"
    for unknown in ("msg_1", "", "gen-1762-abc", "resp_" + "0" * 32, "x" * 5000, "\u0000"):
        told = ask(ada, base(), unknown).diagnostics
        assert told is not None
        assert told.cache_miss_reason is not None
        assert told.cache_miss_reason.type == "previous_message_not_found"


@pytest.mark.parametrize("name", CHANGES)
def test_every_single_change_is_named(server: LiveServer, ada: Anthropic, name: str) -> None:
    change, part, index = CHANGES[name]
    first = ask(ada, base())
    body = base()
    change(body)
    check(server, ask(ada, body, first.id), part, index)


def listed(body: Body, part: str) -> list[str]:
    """A part of a request as a list of JSON texts, in which texts are blocks."""

    def blocks(content: Any) -> list[Any]:
        return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())

    if part == "messages":
        messages = [{**message, "content": blocks(message["content"])} for message in body["messages"]]
        return list(map(json.dumps, messages))
    return list(map(json.dumps, blocks(body[part])))


def first_change(body: Body) -> tuple[str, int | None]:
    """The first of the parts in which a request is not the base, in the order of the documentation."""
    if [body["model"], body.get("speed")] != ["one", None]:
        return "model", None
    for part in ("tools", "system", "messages"):
        mine, its = listed(base(), part), listed(body, part)
        if mine != its[: len(mine)] or (part != "messages" and mine != its):
            same = [one == other for one, other in zip(mine, its, strict=False)]
            return part, same.index(False) if False in same else len(same)
    changed = [part for _, part, _ in CHANGES.values() if part in body and part not in base()]
    return changed[0], None


@pytest.mark.parametrize("seed", by_day(range(examples(2)), 0))
def test_of_two_changes_the_first_one_is_named(server: LiveServer, ada: Anthropic, seed: int) -> None:
    rng = random.Random(seed)
    first = ask(ada, base())
    base_prompt = prompts_of(server, 1)[0]
    for _ in range(100):
        body = base()
        while body == base():
            pair = rng.sample(list(CHANGES), 2)
            with contextlib.suppress(IndexError, TypeError, AttributeError):  # what is to be changed is gone
                for name in pair:
                    CHANGES[name][0](body)
        part, index = first_change(body)
        answer = ask(ada, body, first.id)
        if part in REASONS or part == "messages":
            check(server, answer, part, index, exact=False)
        else:
            check(server, answer, answer.model_extra["cache_diagnosis"]["changed"], None, exact=False)  # type: ignore[index]
            assert kind_of(part) == "unavailable"
        own: Any = answer.model_extra["cache_diagnosis"]  # type: ignore[index]
        assert own["shared_tokens"] == shared_by(base_prompt, prompts_of(server, 1)[0])


def test_what_is_for_the_cache_alone_changes_nothing(ada: Anthropic) -> None:
    first, body = ask(ada, base()), base()
    kept = {"cache_control": {"type": "ephemeral"}}
    body["system"][1] |= kept
    body["tools"][1] |= kept
    body["messages"][0]["content"] = [{"type": "text", "text": "Who are you?", **kept}]
    body["messages"][2]["content"] = "say:And who am I?"
    body |= {"temperature": 0.5, "metadata": {"user_id": "u"}, "stop_sequences": ["x"], "max_tokens": 3}
    assert ask(ada, body, first.id).diagnostics is None


def test_streams_say_it_at_their_start(server: LiveServer, ada: Anthropic) -> None:
    first, body = ask(ada, base()), base()
    body["system"][0]["text"] = "You are long."
    with ada.messages.stream(**body, diagnostics={"previous_message_id": first.id}) as stream:
        events = list(stream)
        final = stream.get_final_message()
    start = events[0]
    assert start.type == "message_start"
    check(server, start.message, "system", 0)
    check(server, final, "system", 0)
    [end] = [event for event in events if event.type == "message_delta"]
    assert "diagnostics" not in end.to_dict()


def test_async_and_beta(server: LiveServer) -> None:
    async def run() -> None:
        async with server.async_anthropic("key-a") as client:
            beta = client.beta.messages
            body, own = base(), {"previous_message_id": None}
            named: Any = {"betas": ["cache-diagnosis-2026-04-07"]}
            first = await beta.create(**body, diagnostics=own, **named)
            assert first.diagnostics is None
            body["messages"][0]["content"] = "Who am I?"
            for more in (named, dict[str, Any]()):
                async with beta.stream(**body, diagnostics={"previous_message_id": first.id}, **more) as told:
                    answer = await told.get_final_message()
                assert answer.diagnostics is not None
                assert answer.diagnostics.cache_miss_reason is not None
                assert answer.diagnostics.cache_miss_reason.type == "messages_changed"

    asyncio.run(run())


def test_a_request_that_still_runs_is_not_compared_yet(server: LiveServer, ada: Anthropic) -> None:
    server.engine.hold_at = 2
    server.engine.gate.clear()
    with ada.messages.stream(**base()) as stream:
        start = next(iter(stream))
        assert start.type == "message_start"
        told = ask(ada, {**base(), "max_tokens": 1}, start.message.id).diagnostics
        assert told is not None
        assert told.cache_miss_reason is None
        server.engine.release()
        stream.until_done()
    assert ask(ada, base(), start.message.id).diagnostics is None


def test_an_answer_that_its_client_left_can_be_compared(server: LiveServer, ada: Anthropic) -> None:
    server.engine.hold_at = 2
    server.engine.gate.clear()
    with ada.messages.stream(**base()) as stream:
        start = next(iter(stream))
        assert start.type == "message_start"
    server.engine.wait_until(lambda: server.engine.requests[-1].aborted)
    server.engine.release()
    body = base()
    body["messages"][2]["content"] = "say:Something else"
    told = ask(ada, body, start.message.id).diagnostics
    assert told is not None
    assert told.cache_miss_reason is not None
    assert told.cache_miss_reason.type == "messages_changed"


def test_other_tenants_ids_are_not_found(server: LiveServer, ada: Anthropic) -> None:
    first = ask(ada, base())
    with server.anthropic("key-b") as bob:
        told = ask(bob, base(), first.id).diagnostics
    assert told is not None
    assert told.cache_miss_reason is not None
    assert told.cache_miss_reason.type == "previous_message_not_found"


def test_what_was_evicted_is_no_change(server: LiveServer, ada: Anthropic) -> None:
    first = ask(ada, base())
    server.engine.prefix_cache.evict(1000)
    answer = ask(ada, base(), first.id)
    assert answer.diagnostics is None, "the requests are the same"
    own: Any = answer.model_extra["cache_diagnosis"]  # type: ignore[index]
    assert own["missed_tokens"] == own["compared_tokens"] == own["shared_tokens"]
    assert (own["cache_miss"]["reason"], own["cache_miss"]["evicted_by"]) == ("evicted", "evict()")
    assert own["cache_miss"]["age_s"] >= 0


def test_the_text_around_the_break(server: LiveServer, ada: Anthropic) -> None:
    first, body = ask(ada, base()), base()
    body["system"][1]["text"] = "Today is Tuesday."
    own: Any = ask(ada, body, first.id).model_extra["cache_diagnosis"]  # type: ignore[index]
    assert own["place"] == "the system prompt"
    around = own["around"]
    assert around["before"].endswith("Today is ")
    assert around["prompt"].startswith("Tuesday.")
    assert around["cached"].startswith("Monday.")


@pytest.mark.parametrize(
    "bad",
    [5, "msg_1", [1], True, {"previous_message_id": 5}, {"previous_message_id": ["x"]}, {"other": None}],
)
def test_what_is_malformed_is_refused(server: LiveServer, bad: Any) -> None:
    with server.http(headers={"x-api-key": "key-a"}) as http:
        answer = http.post("/v1/messages", json={**base(), "diagnostics": bad})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "diagnostics" in answer.json()["error"]["message"]


def test_raw_answers(server: LiveServer) -> None:
    """What SDKs can't tell apart: a field that is null, and one that is not there."""

    def fields(http: httpx.Client, **more: Any) -> dict[str, Any]:
        return dict(http.post("/v1/messages", json={**base(), **more}).json())

    with server.http(headers={"x-api-key": "key-a"}) as http:
        assert not {"diagnostics", "cache_diagnosis"} & set(fields(http))
        assert "diagnostics" not in fields(http, diagnostics=None)
        for first in ({}, {"previous_message_id": None}):
            answer = fields(http, diagnostics=first)
            assert answer["diagnostics"] is None
            assert answer["cache_diagnosis"] == {"compared_with": None, "state": "first_turn"}
        stream = http.post("/v1/messages", json={**base(), "diagnostics": {}, "stream": True}).text
        start = json.loads(stream.split("data: ", 2)[1].split("\n")[0])
        assert start["message"]["diagnostics"] is None


def test_counting_tokens_knows_no_diagnostics(server: LiveServer, ada: Anthropic) -> None:
    counted = {name: value for name, value in base().items() if name != "max_tokens"}
    before = len(server.engine.requests)
    assert "diagnostics" not in ada.messages.count_tokens(**counted).to_dict()
    assert len(server.engine.requests) == before


def test_what_is_held_constant_changes_nothing(server: LiveServer, ada: Anthropic) -> None:
    """Clients' own text at the head of the system prompt: the prompt stays the same."""

    def body(checksum: str, head: str = "cli") -> Body:
        header = f"x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint={head}; cch={checksum};"
        return {**base(), "system": [{"type": "text", "text": header}, *base()["system"]]}

    first = ask(ada, body("56445"))
    assert ask(ada, body("aa001"), first.id).diagnostics is None
    check(server, ask(ada, body("aa002", "sdk"), first.id), "system", 0)


def test_the_list_of_requests_has_it(server: LiveServer, ada: Anthropic) -> None:
    first, body = ask(ada, base()), base()
    body["messages"][0]["content"] = "Who is it?"
    second = ask(ada, body, first.id)
    ada.messages.create(**base())
    own: Any = second.model_extra["cache_diagnosis"]  # type: ignore[index]
    with server.http(headers={"x-api-key": "key-a"}) as http:
        latest = http.get("/v1/cache/requests", params={"limit": 3}).json()["data"]
        seen = {one["id"]: one["comparison"] for one in latest}
        assert http.get(f"/v1/cache/requests/{second.id}").json()["comparison"] == seen[second.id]
    told = seen.pop(second.id)
    assert (told["compared_with"], told["changed"], told["index"]) == (first.id, "messages", 0)
    assert told.items() <= own.items()
    assert {"compared_with": None, "state": "first_turn"} in seen.values()
    assert None in seen.values(), "whose client did not ask"


def test_nothing_is_shown_where_nothing_broke(ada: Anthropic) -> None:
    first, body = ask(ada, base()), base()
    body["messages"] += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
    own: Any = ask(ada, body, first.id).model_extra["cache_diagnosis"]  # type: ignore[index]
    assert (own["missed_tokens"], own["place"], own["around"]) == (0, None, None)


def test_a_template_that_renders_earlier_turns_otherwise(
    server: LiveServer, ada: Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are the same and the prompts are not: no part of a request is to blame."""
    first, tokenizer = ask(ada, base()), server.engine.tokenizer
    render = tokenizer.apply_chat_template

    def dated(messages: Any, *others: Any, **options: Any) -> list[int]:
        return render([{"role": "system", "content": "It is Tuesday."}, *messages], *others, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", dated)
    answer = ask(ada, base(), first.id)
    assert answer.diagnostics is not None
    assert answer.diagnostics.cache_miss_reason is not None
    assert answer.diagnostics.cache_miss_reason.type == "unavailable"
    own: Any = answer.model_extra["cache_diagnosis"]  # type: ignore[index]
    assert own["changed"] is None
    assert own["shared_tokens"] == shared_by(*prompts_of(server)) < own["compared_tokens"]
    assert own["around"]["position"] == own["shared_tokens"]
