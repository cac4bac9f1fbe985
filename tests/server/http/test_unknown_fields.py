# SPDX-License-Identifier: Apache-2.0
"""One rule for fields that do not work: taken with a warning, refused by name, or unknown; in every API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import live_server
from nightly import by_day
from scripted_engine import ScriptedEngine

from radixkv_server.app import APIS
from radixkv_server.http.fields import field_rows

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "say:hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_completion_tokens": 9},
    "/v1/completions": {"prompt": "say:hi"},
    "/v1/responses": {"input": "say:hi", "max_output_tokens": 9},
    "/v1/responses/input_tokens": {"input": "say:hi"},
    "/v1/responses/compact": {"input": "say:hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"prompt": "hi"},
    "/v1/cache/explain": {"prompt": "hi"},
}
MODELS = {operation.split()[1]: model for api in APIS for operation, model in api.bodies.items()}
NOTHING = [None, False, [], {}, {"a": None, "b": {"c": []}}]


@pytest.fixture(scope="module")
def strict() -> Iterator[httpx.Client]:
    with live_server(ScriptedEngine()) as server, server.http() as client:
        yield client


@pytest.fixture(scope="module")
def lenient() -> Iterator[httpx.Client]:
    with live_server(ScriptedEngine(), unknown_fields="warn") as server, server.http() as client:
        yield client


def top_level(path: str, state: str) -> list[str]:
    rows = (row for row in field_rows(MODELS[path]) if row.state == state)
    return [row.path for row in rows if not set(row.path) & set(".[")]


@pytest.mark.parametrize("path", by_day(GOOD, CHAT, "/v1/messages"))
def test_what_asks_for_nothing_is_taken_without_a_word(strict: httpx.Client, path: str) -> None:
    body = GOOD[path]
    for state in ("supported", "without effect", "refused"):
        for name in top_level(path, state):
            if name in {
                *body,
                "add_special",
                "parse_special",
                "prompt",
                "messages",
                "input",
                "compare",
                "node",
                "id",
            }:
                continue
            for value in NOTHING[:4] if state == "supported" else NOTHING:
                if name in ("allowed_token_ids", "guided_choice") and value == []:
                    continue  # nothing could be said
                answer = strict.post(path, json={**body, name: value})
                assert answer.status_code == 200, (name, value, answer.text)
                assert "warning" not in answer.headers, (name, value)


@pytest.mark.parametrize("path", GOOD)
def test_fields_without_effect_are_named_in_a_header(strict: httpx.Client, path: str) -> None:
    for name in top_level(path, "without effect"):
        value = "12345" if name != "service_tier" else "priority"
        answer = strict.post(path, json={**GOOD[path], name: value})
        if name == "service_tier" and answer.status_code == 400:
            continue
        assert answer.status_code == 200, answer.text
        assert answer.headers["warning"] == f'299 radixkv "without effect: {name}"'


@pytest.mark.parametrize("path", GOOD)
def test_refused_fields_are_named(strict: httpx.Client, lenient: httpx.Client, path: str) -> None:
    for name in top_level(path, "refused"):
        for client in (strict, lenient):
            answer = client.post(path, json={**GOOD[path], name: {"x": "12345"}})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert name in error["message"]
            assert error.get("code", "unsupported_parameter") == "unsupported_parameter"


@pytest.mark.parametrize(
    ("path", "name", "ours"),
    [
        (CHAT, "max_new_tokens", "max_tokens"),
        (CHAT, "repeat_penalty", "repetition_penalty"),
        (CHAT, "system_prompt", "messages"),
        ("/v1/completions", "n_predict", "max_tokens"),
        ("/v1/responses", "max_length", "max_output_tokens"),
        ("/v1/messages", "system_prompt", "system"),
        (CHAT, "mesages", "messages"),
    ],
)
def test_names_of_other_servers_are_translated(strict: httpx.Client, path: str, name: str, ours: str) -> None:
    message = strict.post(path, json={**GOOD[path], name: 5}).json()["error"]["message"]
    assert message == f"Unrecognized request argument supplied: {name}. Did you mean {ours}?"


@pytest.mark.parametrize("path", GOOD)
def test_settings_of_a_template_name_the_field_to_use(strict: httpx.Client, path: str) -> None:
    for name in ("enable_thinking", "thinking_budget", "reasoning_effort", "chat_template_kwargs"):
        answer = strict.post(path, json={**GOOD[path], name: "?"}).json()
        message = answer.get("error", {}).get("message", "")
        if message.startswith("Unrecognized") and "reasoning.effort" not in message:
            assert "chat_template_kwargs" in message.split(f"{name}.", 1)[1]
    assert "SDK" in strict.post(path, json={**GOOD[path], "extra_body": {"a": 1}}).text


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_tool_in_the_form_of_responses_is_told_the_form_of_chats(strict: httpx.Client, kind: str) -> None:
    answer = strict.post(CHAT, json={**GOOD[CHAT], "tools": [{"type": kind, "name": "look"}]})
    assert f"tools[0].name. Did you mean {kind}.name?" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", GOOD)
def test_unknown_fields_are_refused_or_left_out(
    strict: httpx.Client, lenient: httpx.Client, path: str
) -> None:
    body = {**GOOD[path], "no_such_field": 1}
    answer = strict.post(path, json=body)
    assert answer.status_code == 400
    assert "no_such_field" in answer.json()["error"]["message"]
    answer = lenient.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"] == '299 radixkv "without effect: no_such_field (unknown)"'
    assert "warning" not in lenient.post(path, json=GOOD[path]).headers


@pytest.mark.parametrize(
    ("path", "more", "where"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "tex": 1}]}]},
         "messages[0].content[0].tex"),
        (CHAT, {"tools": [{**TOOL, "naem": 1}]}, "tools[0].naem"),
        (CHAT, {"tools": [TOOL, {"type": "function", "function": {"name": "g", "parms": {}}}]},
         "tools[1].function.parms"),
        (CHAT, {"response_format": {"type": "text", "typ": 1}}, "response_format.typ"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}, "tools": [TOOL]},
         "tool_choice.function.x"),
        ("/v1/responses", {"reasoning": {"efort": "low"}}, "reasoning.efort"),
        ("/v1/responses", {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
        ("/v1/responses", {"input": [{"role": "user", "content": "say:hi", "x": 1}]}, "input[0].x"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f", "x": 1}]}, "tools[0].x"),
        ("/v1/messages", {"thinking": {"type": "disabled", "x": 1}}, "thinking.x"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
         "messages[0].content[0].x"),
    ],
)  # fmt: skip
def test_nested_fields_too(
    strict: httpx.Client, lenient: httpx.Client, path: str, more: dict[str, Any], where: str
) -> None:
    body = {**GOOD[path], **more}
    answer = strict.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert f"supplied: {where}." in error["message"]
    assert error.get("param", where) == where
    answer = lenient.post(path, json=body)
    assert answer.status_code == 200, answer.text
    every = where.replace("[0]", "[]").replace("[1]", "[]")
    assert answer.headers["warning"].startswith(f'299 radixkv "without effect: {every} (unknown)')


def test_a_typo_gets_a_suggestion_from_its_own_object(strict: httpx.Client) -> None:
    body = {**GOOD[CHAT], "stream": True, "stream_options": {"include_usag": True}}
    assert "Did you mean include_usage?" in strict.post(CHAT, json=body).text


def test_streams_have_the_header_too_and_its_names_can_not_break_it(lenient: httpx.Client) -> None:
    body = {**GOOD[CHAT], "stream": True, "metadata": {"a": "b"}, 'x"\r\ny: é' + "z" * 2000: 1}
    answer = lenient.post(CHAT, json=body)
    assert answer.status_code == 200
    header = answer.headers["warning"]
    assert header.startswith('299 radixkv "without effect: metadata, x???y: ?zzz')
    assert len(header) < 1100
    assert "y" not in answer.headers


def test_options_of_a_stream_that_ask_for_nothing_need_no_stream(strict: httpx.Client) -> None:
    for options in ({}, {"include_usage": False}, {"include_usage": None}):
        assert strict.post(CHAT, json={**GOOD[CHAT], "stream_options": options}).status_code == 200
    assert (
        strict.post(CHAT, json={**GOOD[CHAT], "stream_options": {"include_usage": True}}).status_code == 400
    )


def test_false_counts_where_it_says_something(strict: httpx.Client) -> None:
    given = strict.post("/tokenize", json={"messages": USER, "add_generation_prompt": True}).json()["count"]
    without = strict.post("/tokenize", json={"messages": USER, "add_generation_prompt": False}).json()[
        "count"
    ]
    assert without < given


def test_an_unknown_policy_is_a_config_error() -> None:
    with pytest.raises(Exception, match="unknown_fields"), live_server(ScriptedEngine(), unknown_fields="x"):
        pass
