# SPDX-License-Identifier: Apache-2.0
"""The hints of the cache's views: what breaks a prompt, where, how much of the family, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from live_server import live_server
from scripted_engine import ScriptedEngine

from radixkv.observe.explanation import word_at
from radixkv.observe.message_places import place_name
from radixkv.observe.recoverable import recoverable_tokens

RULES = "You are the assistant of the harbour office. Count the ships every evening, and be brief."
QUESTION = "How many ships?"


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with live_server(ScriptedEngine(max_model_len=8192, caches=True)) as running, running.http() as made:
        yield made


def chat(system: str, *turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    return [{"role": "system", "content": system}, *said]


def send(client: httpx.Client, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Ask, and tell what the request's view says of it."""
    name = client.post("/v1/chat/completions", json={"messages": messages}).json()["id"]
    told: dict[str, Any] = client.get(f"/v1/cache/requests/{name}").json()
    return told


# ---------------------------------------------------------------------- every view, over HTTP


@pytest.mark.parametrize(
    ("what", "systems"),
    [
        ("A timestamp", [f"It is 2026-11-21 09:{n}:07." for n in range(10, 30)]),
        ("A date", [f"Today is {n} May 2026." for n in range(10, 30)]),
        ("An id", [f"Session {n}1c9a7e-11d3-4b2a-8888-123456789abc." for n in range(10, 30)]),
        ("A number", [f"Visit {n} of yours." for n in range(110, 130)]),
        ("Text that differs", [f"For {name}." for name in ("Ann", "Robert", "Mary", "Li", "Carlotta")]),
    ],
)
def test_every_view_says_what_breaks_where_how_often_and_what_to_do(
    client: httpx.Client, what: str, systems: list[str]
) -> None:
    prompts = [chat(f"{system} {RULES}", QUESTION) for system in systems]
    first, *others, last = prompts
    for messages in (first, *others):
        send(client, messages)
    explained = client.post("/v1/cache/explain", json={"messages": last}).json()
    request = send(client, last)
    advice = client.get("/v1/cache/advice").json()["data"][0]
    compared = client.post("/v1/cache/explain", json={"compare": {"prompt": last, "with": first}}).json()
    told = request["explanation"]
    for one in (told, explained, advice, compared):
        assert one["place"] == "the system prompt"
        assert one["advice"].startswith(f"{what} at token "), one["advice"]
        assert ", in the system prompt (“" in one["advice"]
        breaker = one["breaker"]
        is_known = breaker is not None and breaker["kind"] != "unknown"
        remedy = breaker["remedy"] if is_known else "move it to the end of the prompt"
        assert one["advice"].count(remedy) == 1
        assert is_known != ("move it to the end" in one["advice"]), "one remedy"
        assert "about " in one["advice"]
        assert one["recoverable_tokens"] >= len(RULES)
    for one in (told, explained, advice):
        assert "% of this family's misses (" in one["advice"], one["advice"]
    assert told["family"]["anywhere"] >= len(others)
    assert f"{told['recoverable_tokens']:,} of the {told['missed_tokens']:,} tokens" in told["advice"]
    assert told["around"]["cached"][2:50].strip()


def test_advice_is_about_the_request_that_is_shown(client: httpx.Client) -> None:
    client.post("/v1/cache/reset")
    for system in ("It is 09:15.", "It is 09:16.", "For Ann.", "For Robert.", "It is 09:17."):
        send(client, chat(f"{system} {RULES}", QUESTION))
    told = client.get("/v1/cache/advice").json()["data"]
    kinds = {one["breaker"]["kind"]: one for one in told}
    assert set(kinds) == {"timestamp", "unknown"}, told
    time, names = kinds["timestamp"], kinds["unknown"]
    assert time["kind"] == "a time"
    assert time["breaker"]["now"] == "17"
    assert "“09:17”" in time["advice"]
    assert names["kind"] == "text"
    assert "(“Robert” instead of “Ann”)" in names["advice"]


def test_the_cause_is_found_against_the_text_that_is_shown(client: httpx.Client) -> None:
    client.post("/v1/cache/reset")
    questions = ("Which berth?", "When are fees due?", "Who enters?", "What is announced?", "Which berth?")
    for minute, question in enumerate(questions, 20):  # the first one is the most alike: it asks the same
        told = send(client, chat(f"Now is 2026-11-21 07:{minute}. {RULES}", question))["explanation"]
    assert told["breaker"]["kind"] == "timestamp"
    shown = told["around"]["before"] + told["around"]["cached"]
    minute = told["breaker"]["earlier"][-2:]
    assert f"07:{minute}" in shown, (told["breaker"], shown[:200])


def test_a_break_before_little_that_is_the_same_is_told_as_that(client: httpx.Client) -> None:
    for system in ("It is 9:15. Answer.", "It is 9:16. Answer."):
        told = send(client, [{"role": "system", "content": system}, {"role": "user", "content": "Go"}])
    explanation = told["explanation"]
    assert explanation["reason"] == "diverged"
    assert "not the same" not in explanation["advice"]
    assert explanation["advice"].count(": ") <= 4
    same = client.post(
        "/v1/cache/explain", json={"compare": {"prompt": "It is 9:15. Go", "with": "It is 9:16. Go"}}
    ).json()
    assert "not the same either" not in same["advice"]


def test_an_ordinary_next_turn_gets_no_advice(client: httpx.Client) -> None:
    turns = ["A first question?", "An answer.", "A second question, which is new?"]
    send(client, chat(f"Steady. {RULES}", *turns[:1]))
    told = send(client, chat(f"Steady. {RULES}", *turns))
    assert told["reason"] == "first_seen"
    assert told["explanation"]["advice"] is None
    assert told["cached_tokens"] > len(RULES) / 2


def test_a_new_question_is_no_mistake(client: httpx.Client) -> None:
    send(client, chat(RULES, "Hello?", "Good morning.", "Which berth does a ferry take?"))
    told = send(client, chat(RULES, "Hello?", "Good morning.", "May a cargo ship enter?"))["explanation"]
    assert told["place"] == "the last user message"
    assert "(“May” instead of “Which”), is where the prompt parts from what is cached" in told["advice"]
    assert told["advice"].endswith("are new, and there is nothing to win by moving them.")
    other = chat(RULES, "Hello?", "Good evening.", "Which berth does a ferry take?")
    assert send(client, other)["explanation"]["place"] == "the assistant message"


def test_prompts_without_messages_have_a_token_alone(client: httpx.Client) -> None:
    for hour in range(2, 9):
        body = {"prompt": f"It is {hour}:00. {RULES}"}
        name = client.post("/v1/completions", json=body).json()["id"]
    told = client.get(f"/v1/cache/requests/{name}").json()["explanation"]
    assert told["place"] is None
    assert told["advice"].startswith("A time at token 6 (“8:00” instead of “")


def test_a_request_leads_to_its_path_in_the_tree(client: httpx.Client) -> None:
    told = send(client, chat(RULES, QUESTION))
    nodes = client.get("/v1/cache/tree").json()["nodes"]
    assert told["nodes"] == [node["id"] for node in nodes]


def test_no_text_of_others_is_told() -> None:
    keys = {"api_keys": ("ada=ada-key",), "admin_keys": ("operator=operator-key",)}
    with live_server(ScriptedEngine(caches=True), **keys) as server:
        with server.http(headers={"x-api-key": "ada-key"}) as ada:
            for minute in range(10, 14):
                send(ada, chat(f"It is 08:{minute}. {RULES}", QUESTION))
        with server.http(headers={"x-api-key": "operator-key"}) as admin:
            name = admin.get("/v1/cache/requests").json()["data"][0]["id"]
            told = admin.get(f"/v1/cache/requests/{name}").json()
            (advice,) = admin.get("/v1/cache/advice").json()["data"]
        assert told["tenant"] == "ada"
        for one in (told["explanation"], advice):
            assert one["advice"].startswith("Something at token ")
            assert ", in the system prompt, breaks 100% of this family's misses" in one["advice"]
            assert "08:" not in str(one)


# ---------------------------------------------------------------------- the parts


def test_places_of_a_chat() -> None:
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hello there, how is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "It rains."},
        {"role": "user", "content": "Hello there, how is the sea?"},
        {"role": "user", "content": "Thank you."},
    ]
    tools = [{"type": "function", "function": {"name": "look_up", "description": "Looks something up."}}]
    prompt = (
        b"[tools]look_up: Looks something up.[system]Be brief.[user]Hello there, how is the weather?"
        b"[tool]It rains.[user]Hello there, how is the sea?[user]Thank you.[assistant]"
    )

    def at(text: bytes, size: int = 40) -> str | None:
        place = prompt.index(text)
        return place_name(messages, tools, prompt[max(0, place - size) : place], prompt[place : place + size])

    assert at(b"something up") == "the tools"
    assert at(b"Be brief") == at(b"brief") == "the system prompt"
    assert at(b"weather") == at(b"?[tool]") == "the 1st user message"
    assert at(b"rains") == "the tool result"
    assert at(b"sea?") == "the 2nd user message"
    assert at(b"Thank") == at(b"[assistant]") == "the last user message"
    assert at(b"ser]Thank") is None, "the template's own text"
    twice = [{"role": "user", "content": "Say it again."}] * 2
    assert place_name(twice, [], b"Say it ", b"again.") is None, "it may be either"
    long = [{"role": "user", "content": "abcdefg " * 1000 + "the end"}]
    assert place_name(long, [], b"abcdefg " * 6, b"abcdefg " * 6) == "the user message"


def test_what_is_the_same_further_on() -> None:
    rng = np.random.default_rng(0)
    rest = rng.integers(0, 30_000, 300).astype(np.int32)
    other = rng.integers(0, 30_000, 300).astype(np.int32)

    def joined(*parts: Any) -> Any:
        return np.concatenate([np.array(part, np.int32) for part in parts])

    assert recoverable_tokens(joined([1], rest), joined([2], rest)) == 300
    assert recoverable_tokens(joined([1, 2, 3], rest), joined([4], rest, other)) == 300, "one is longer"
    assert recoverable_tokens(joined([4], rest), joined(other[:20], rest)) == 300
    assert recoverable_tokens(rest, other) == 0
    assert recoverable_tokens(joined(rest[:5], [7], rest[6:]), joined(other[:5], [8], rest[6:])) == 294
    ends = joined([1], rest[:10]), joined([2], rest[:10])
    assert recoverable_tokens(*ends) == 0, "a template's end is no win"
    assert recoverable_tokens(joined([]), rest) == recoverable_tokens(rest, joined([])) == 0


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ("It is 08:0", "1. Be", "08:01"),
        ("<|user|>\n", "May I?", "May"),
        ("the end", "<|im_end|>", ""),
        ("a ", "b", "b"),
        ("", "", ""),
        ("x" * 100, "y" * 100, "x" * 20 + "y" * 20),
    ],
)
def test_the_word_in_which_prompts_part(before: str, after: str, word: str) -> None:
    assert word_at(before, after) == word
