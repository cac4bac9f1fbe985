# SPDX-License-Identifier: Apache-2.0
"""`cache_control` in both chat APIs: which tokens are pinned, for how long, and what usage says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

ASK: dict[str, Any] = {"model": "scripted", "max_tokens": 4}
FIVE_MINUTES, HOUR = 300, 3600


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(caches=True), api_keys=("ada=key-a", "bob=key-b")) as running:
        yield running


def text(said: str, ttl: str | None = "") -> dict[str, Any]:
    """A block; with a breakpoint unless `ttl` is None."""
    block: dict[str, Any] = {"type": "text", "text": said}
    if ttl is not None:
        block["cache_control"] = {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}
    return block


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def pins(server: LiveServer) -> list[tuple[str, int]]:
    """What is pinned, as text, and for how many seconds, shortest first."""
    listed = asyncio.run(server.engine.cache.pins())
    found = []
    for pin in sorted(listed, key=lambda pin: pin.num_tokens):
        assert pin.expires_in_s is not None
        assert pin.num_tokens == len(pin.token_ids)
        shown = bytes(token for token in pin.token_ids if token < 256).decode()
        found.append((shown, -int(-pin.expires_in_s // 100) * 100))
    server.engine.prefix_cache.check()
    return found


def send(server: LiveServer, *, key: str = "key-a", **body: Any) -> Any:
    """A message's usage, whole and streamed alike."""
    with server.anthropic(key) as client:
        return client.messages.create(**{**ASK, **body}).usage


def numbers(usage: Any) -> tuple[int, int, int, int]:
    """Read, created for 1 h, created for 5 min, and the rest."""
    created = usage.cache_creation
    assert usage.cache_creation_input_tokens == (
        created.ephemeral_1h_input_tokens + created.ephemeral_5m_input_tokens
    )
    return (
        usage.cache_read_input_tokens,
        created.ephemeral_1h_input_tokens,
        created.ephemeral_5m_input_tokens,
        usage.input_tokens,
    )


TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("first", "second")]


def test_exactly_the_prefix_of_each_breakpoint_is_pinned(server: LiveServer) -> None:
    tools = [{**TOOLS[0], "cache_control": {"type": "ephemeral", "ttl": "1h"}}, TOOLS[1]]
    body = {
        "tools": tools,
        "system": [text("Rules", "1h"), text("more", None)],
        "messages": [
            user(text("Question", "5m"), text("detail", None)),
            {"role": "assistant", "content": "A"},
        ],
    }
    usage = send(server, **body, key="key-b")
    start = "tools:['first'"
    system = "tools:['first', 'second']\nsystem\nRules"
    question = system + "\nmore" + "user\nQuestion"
    assert pins(server) == [(start, HOUR), (system, HOUR), (question, FIVE_MINUTES)]
    prompt = server.engine.requests[-1].prompt
    cut = [len(start), len(system) + 1, len(question) + 3]  # with the control tokens
    assert numbers(usage) == (0, cut[1], cut[2] - cut[1], len(prompt) - cut[2])
    assert {pin.tenant for pin in asyncio.run(server.engine.cache.pins())} == {"bob"}


def test_a_request_again_reads_and_renews(server: LiveServer) -> None:
    first = user(text("a" * 40))
    send(server, messages=[first])
    kept = pins(server)
    usage = send(server, messages=[first, {"role": "assistant", "content": "yes"}, user(text("b" * 20))])
    prompt = len(server.engine.requests[-1].prompt)
    shared = len("user\n" + "a" * 40) + 2  # its two control tokens
    shared += len("assistant\n") + 1
    assert usage.cache_read_input_tokens == shared
    after = len("assistant\n") + 2
    assert numbers(usage) == (shared, 0, prompt - shared - after, after)
    assert pins(server)[0] == kept[0]
    assert len(pins(server)) == 2, "and the longer one"


def test_a_longer_pin_is_not_shortened(server: LiveServer) -> None:
    send(server, system=[text("Rules", "1h")], messages=[user(text("x", None))])
    send(server, system=[text("Rules", "5m")], messages=[user(text("y", None))])
    assert pins(server) == [("system\nRules", HOUR)]


AUTOMATIC: dict[str, Any] = {"extra_body": {"cache_control": {"type": "ephemeral"}}}


@pytest.mark.parametrize("own", [None, "", "5m"])
def test_the_automatic_breakpoint_is_after_the_last_block(server: LiveServer, own: str | None) -> None:
    send(server, messages=[user(text("one", None), text("two", own))], **AUTOMATIC)
    assert pins(server) == [("user\none\ntwo", FIVE_MINUTES)]


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}
CALL = {"type": "tool_use", "id": "c", "name": "first", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "rain"}


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"messages": [user(text("x", None)), {"role": "assistant", "content": [THOUGHT]}]}, "user\nx"),
        (
            {
                "messages": [
                    user(text("x", None)),
                    {"role": "assistant", "content": [text("A", None), THOUGHT]},
                ]
            },
            "user\nxassistant\nthink hm\nA",
        ),
        ({"messages": [user(text("x", None), text("", None))]}, "user\nx"),
        (
            {"system": "Rules", "messages": [{"role": "assistant", "content": [THOUGHT]}]},
            "system\nRules",
        ),
        (
            {"tools": TOOLS, "messages": [{"role": "assistant", "content": [THOUGHT]}]},
            "tools:['first', 'second'",
        ),
        ({"messages": [{"role": "assistant", "content": [THOUGHT]}]}, None),
        (
            {
                "tools": TOOLS,
                "messages": [user(text("x", None)), {"role": "assistant", "content": [CALL]}, user(RESULT)],
            },
            "tools:['first', 'second']\nuser\nxassistant\ncall first({'a': 1})tool\nrain",
        ),
        (
            {"messages": [user(text("x", None)), {"role": "system", "content": "Now be brief."}]},
            "user\nxsystem\nNow be brief.",
        ),
    ],
)
def test_it_walks_back_to_a_block_that_can_have_it(
    server: LiveServer, body: dict[str, Any], shown: str | None
) -> None:
    send(server, **body, **AUTOMATIC)
    assert pins(server) == ([] if shown is None else [(shown, FIVE_MINUTES)])


@pytest.mark.parametrize(("own", "automatic"), [("1h", None), ("1h", "5m"), ("5m", "1h"), ("", "1h")])
def test_another_time_than_the_last_blocks_is_refused(
    server: LiveServer, own: str, automatic: str | None
) -> None:
    control = {"type": "ephemeral", **({"ttl": automatic} if automatic else {})}
    for after in ([], [{"role": "assistant", "content": [THOUGHT]}]):
        with pytest.raises(anthropic.BadRequestError, match="different ttls"):
            send(server, messages=[user(text("x", own)), *after], extra_body={"cache_control": control})


def test_the_automatic_breakpoint_is_one_of_four(server: LiveServer) -> None:
    marked = [text(letter) for letter in "abcd"]
    with pytest.raises(anthropic.BadRequestError, match="at most"):
        send(server, messages=[user(*marked, text("e", None))], **AUTOMATIC)
    send(server, messages=[user(*marked[:3], text("e", None))], **AUTOMATIC)
    assert len(pins(server)) == 4
    send(server, messages=[user(*marked)], **AUTOMATIC)
    control = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    with pytest.raises(anthropic.BadRequestError, match="'1h' must not come after"):
        send(server, messages=[user(text("a", "5m"), text("b", None))], extra_body=control)


def test_after_results_and_calls(server: LiveServer) -> None:
    control = {"type": "ephemeral"}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}, "cache_control": control}
    inner = [text("rain"), text("cold", None)]
    result = {"type": "tool_result", "tool_use_id": "c", "content": inner, "is_error": True}
    send(
        server,
        tools=TOOLS,
        messages=[
            user(text("x", None)),
            {"role": "assistant", "content": [text("Let me see", None), call]},
            user({**result, "cache_control": control}),
        ],
    )
    start = "tools:['first', 'second']\nuser\nxassistant\nLet me see"
    called, first, whole = [shown for shown, _ in pins(server)]
    assert called == start + "call f({'a': 1"
    assert first == start + "call f({'a': 1})tool\nError: rain"
    assert whole == first + "\ncold"


def test_the_last_tool(server: LiveServer) -> None:
    tools = [TOOLS[0], {**TOOLS[1], "cache_control": {"type": "ephemeral"}}]
    send(server, tools=tools, messages=[user(text("x", None))])
    assert pins(server) == [("tools:['first', 'second'", FIVE_MINUTES)]


def test_digits_and_equal_beginnings_do_not_move_a_breakpoint(server: LiveServer) -> None:
    for before, after in (("1", "0 more"), ("a", "0"), ("9", "x"), ("", "0")):
        send(server, messages=[user(text("z" + before), text(after, None))], extra_body={"cache_salt": "s"})
        assert pins(server)[-1][0] == "user\nz" + before
        asyncio.run(server.engine.cache.reset())


def test_a_full_budget_fails_no_request(server: LiveServer) -> None:
    """Half of the pool, 800 tokens."""
    for letter in "abc":
        usage = send(server, messages=[user(text(letter * 1000))])
        assert sum(numbers(usage)) == len(server.engine.requests[-1].prompt)
    assert [len(shown) for shown, _ in pins(server)] == [799]
    assert server.engine.prefix_cache.stats.num_pins == 1


def openai(server: LiveServer, **body: Any) -> Any:
    with server.openai("key-a") as client:
        return client.chat.completions.create(model="scripted", max_tokens=4, **body).usage


def test_openais_parts_messages_and_tools(server: LiveServer) -> None:
    functions = [{"type": "function", "function": {"name": tool["name"]}} for tool in TOOLS]
    kept = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    plain = openai(server, tools=functions, messages=[user(text("one", None), text("two", None))])
    usage = openai(
        server,
        tools=[{**functions[0], **kept}, functions[1]],
        messages=[
            {"role": "system", "content": "Rules", **kept},
            user(text("one", "5m"), text("two", None)),
        ],
    )
    start, system = "tools:['first'", "tools:['first', 'second']\nsystem\nRules"
    assert pins(server) == [(start, HOUR), (system, HOUR), (system + "user\none", FIVE_MINUTES)]
    assert usage.prompt_tokens == plain.prompt_tokens + len("system\nRules") + 2, "no more is shown"


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([user({**text("x"), "cache_control": {"type": "bogus"}})], id="type"),
        pytest.param([user(text("x", "2h"))], id="time"),
        pytest.param([user(*[text("x")] * 5)], id="five"),
        pytest.param([user(text("x", "5m"), text("x", "1h"))], id="order"),
        pytest.param([{"role": "user", "content": "x", "cache_control": {"type": "bogus"}}], id="message"),
    ],
)
def test_openais_bad_breakpoints_are_refused(server: LiveServer, messages: Any) -> None:
    with server.http(headers={"x-api-key": "key-a"}) as client:
        answer = client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert "cache_control" in answer.json()["error"]["param"]


def test_streams_pin_and_count_the_same(server: LiveServer) -> None:
    body = {"system": [text("Rules")], "messages": [user(text("x", None))]}
    with server.anthropic("key-a") as client, client.messages.stream(**ASK, **body) as stream:
        first = next(iter(stream)).message.usage
        last = stream.get_final_message().usage
    assert numbers(first) == numbers(last)
    assert numbers(last)[2] == len("system\nRules") + 1
    assert pins(server) == [("system\nRules", FIVE_MINUTES)]


def test_nothing_is_pinned_unasked(server: LiveServer) -> None:
    usage = send(server, messages=[user(text("hello", None))])
    assert numbers(usage) == (0, 0, 0, len(server.engine.requests[-1].prompt))
    assert pins(server) == []


def test_breakpoints_do_not_change_the_prompt(server: LiveServer) -> None:
    with server.anthropic("key-a") as client:
        counts = [
            client.messages.count_tokens(
                model="scripted", system=[text("Rules", ttl)], messages=[user(text("x", ttl))]
            ).input_tokens
            for ttl in ("1h", None)
        ]
    assert counts[0] == counts[1]
