# SPDX-License-Identifier: Apache-2.0
"""Bad inputs of the Messages API: each gets its status in Anthropic's error shape, and nothing breaks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from live_server import LiveServer, live_server, raw_request, read_all
from scripted_engine import Asked, ScriptedEngine

from radixkv.errors import EngineOverloadedError, RequestFailedError

PATH = "/v1/messages"
JSON = {"content-type": "application/json"}
GOOD: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "say:hello"}]}


def fail(asked: Asked, given: int) -> BaseException | None:
    if "overload" in asked.text:
        return EngineOverloadedError("full", retry_after_s=2)
    return RequestFailedError("broke") if "break" in asked.text and given == 2 else None


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(max_model_len=256, fail=fail)
    with live_server(
        engine, max_body_bytes=100_000, max_messages=8, api_keys=("ada=key-a",), body_timeout_s=0.7
    ) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    """A client whose test must leave the server in good health."""
    with server.http(headers={"x-api-key": "key-a"}) as one:
        yield one
        assert one.post(PATH, json=GOOD).json()["content"][0]["text"] == "hello"


def check_error(answer: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    """The answer is an error in Anthropic's shape; returns its message."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"]
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert "Traceback" not in body["error"]["message"]
    return str(body["error"]["message"])


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def assistant(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]}


def kept(ttl: str | None = None, **more: Any) -> dict[str, Any]:
    control = {"type": "ephemeral", **({} if ttl is None else {"ttl": ttl}), **more}
    return {"type": "text", "text": "x", "cache_control": control}


TOOL = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/"}}
FILE = {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}

SAID = {"role": "user", "content": "x"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
REMOVED = {"type": "tool_reference", "name": "f"}
OF_A_SERVER = {"type": "mcp_tool_reference", "name": "f", "server_name": "s"}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no messages", {"messages": None}, "messages"),
    ("empty messages", {"messages": []}, "messages"),
    ("messages of another type", {"messages": "hello"}, "messages"),
    ("a message of another type", {"messages": ["hello"]}, "messages[0]"),
    ("unknown role", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("null content", user(None), "content"),
    ("no content", {"messages": [{"role": "user"}]}, "content"),
    ("empty content", user(""), "content must not be empty"),
    ("no blocks", user([]), "content must not be empty"),
    ("content of another type", user(5), "content"),
    ("a block of another type", user(["x"]), "content block"),
    ("a block without a type", user([{"text": "x"}]), "content block"),
    ("a text block without text", user([{"type": "text"}]), "messages[0].content[0].text"),
    ("an unknown field of a block", user([{"type": "text", "text": "x", "foo": 1}]), "foo"),
    ("image", user([IMAGE]), "fetches nothing"),
    ("image file", user([{"type": "text", "text": "see"}, FILE]), "fetches nothing"),
    ("document", user([{"type": "document", "source": {}}]), "'document' needs its content"),
    ("a document elsewhere", user([{"type": "document", "source": IMAGE["source"]}]), "fetches nothing"),
    (
        "a document to be cited",
        user([{"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}]),
        "citations",
    ),
    ("a change of tools by the user", user([{"type": "tool_removal", "tool": REMOVED}]), "user"),
    (
        "a tool of another server",
        {"messages": [{"role": "system", "content": [{"type": "tool_addition", "tool": OF_A_SERVER}]}]},
        "mcp_tool_reference",
    ),
    ("a user's message to be cleared", {"messages": [{**SAID, "clear_at": "never"}]}, "clear_at"),
    (
        "effort of a user's message",
        {"messages": [{**SAID, "output_config": {"effort": "low"}}]},
        "output_config",
    ),
    (
        "a tool's result of the assistant's",
        assistant([{"type": "tool_result", "tool_use_id": "a"}]),
        "can't have",
    ),
    ("a call of the user's", user([{"type": "tool_use", "id": "a", "name": "f", "input": {}}]), "user"),
    (
        "a call with text as input",
        assistant([{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]),
        "",
    ),
    ("a last call", assistant([{"type": "tool_use", "id": "a", "name": "f", "input": {}}]), "tool_result"),
    ("thinking without thoughts", assistant([{"type": "thinking"}]), "thinking"),
    ("system of another type", {"system": 5}, "system"),
    ("an image as system", {"system": [IMAGE]}, "'image'"),
    ("too many messages", {"messages": [{"role": "user", "content": "x"}] * 9}, "At most 8"),
    ("the template refuses", user("refused by the template"), "refuses"),
    ("prompt over the context", user("x" * 300), "context length"),
    ("prompt far over the context", user("x" * 90_000), "context length"),
    ("max_tokens null", {"max_tokens": None}, "max_tokens"),
    ("max_tokens -1", {"max_tokens": -1}, "max_tokens"),
    ("max_tokens 1e18", {"max_tokens": 1e18}, "max_tokens"),
    ("max_tokens as text", {"max_tokens": "5"}, "max_tokens"),
    ("temperature -1", {"temperature": -1}, "temperature"),
    ("temperature 1.5", {"temperature": 1.5}, "temperature"),
    ("top_p 0", {"top_p": 0}, "top_p"),
    ("top_p 2", {"top_p": 2}, "top_p"),
    ("top_k -5", {"top_k": -5}, "top_k"),
    ("10,000 stop sequences", {"stop_sequences": ["x"] * 10_000}, "stop_sequences"),
    ("an empty stop sequence", {"stop_sequences": [""]}, "stop_sequences"),
    ("a stop sequence of another type", {"stop_sequences": "x"}, "stop_sequences"),
    ("n", {"n": 2}, "n"),
    ("a misspelt field", {"max_token": 5}, "Did you mean max_tokens?"),
    ("salt empty", {"cache_salt": ""}, "cache_salt"),
    ("salt too long", {"cache_salt": "x" * 129}, "cache_salt"),
    ("salt with dots", {"cache_salt": "a/../b"}, "cache_salt"),
    ("priority", {"priority": 2**40}, "priority"),
    ("a block hash", {"block_hash": "x"}, "block_hash"),
    ("chat_template", {"chat_template": "{{ messages }}"}, "chat_template"),
    ("a tool without a schema", {"tools": [{"name": "f"}]}, "input_schema"),
    ("a tool's bad name", {"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ("two tools of one name", {"tools": [TOOL, TOOL]}, "differ"),
    (
        "a call of a server's tool",
        {"tools": [TOOL, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        "web_search",
    ),
    ("any call of a server's tool", {"tools": [SEARCH], "tool_choice": {"type": "any"}}, "no tools"),
    ("a tool of no known type", {"tools": [{"type": "web_surf_20250305", "name": "f"}]}, "type"),
    (
        "a screen",
        {"tools": [{"type": "computer_20250124", "name": "computer", "display_width_px": 800}]},
        "'computer_20250124' can't be offered: no model here sees screenshots; leave the tool out.",
    ),
    (
        "tools of an MCP server",
        {"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]},
        "connects to no MCP server; list its tools as your own",
    ),
    ("a tool by another's name", {"tools": [{"type": "bash_20250124", "name": "memory"}]}, "memory"),
    (
        "a tool that only code may call",
        {"tools": [{**TOOL, "allowed_callers": ["code_execution_20260120"]}]},
        "direct",
    ),
    ("servers of tools", {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
    ("a compaction", {"compaction": {"type": "summarize"}}, "compaction"),
    (
        "two formats",
        {"output_format": FORMAT, "output_config": {"format": {**FORMAT, "schema": {}}}},
        "output_format",
    ),
    ("another format", {"output_format": {"type": "text"}}, "output_format"),
    ("tool_choice any without tools", {"tool_choice": {"type": "any"}}, "no tools"),
    ("tool_choice of no tool", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
    ("tool_choice without a name", {"tools": [TOOL], "tool_choice": {"type": "tool"}}, "name"),
    ("tool_choice unknown", {"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ("thinking without a budget", {"thinking": {"type": "enabled"}}, "budget_tokens"),
    ("thinking too little", {"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
    (
        "thinking beyond max_tokens",
        {"max_tokens": 1500, "thinking": {"type": "enabled", "budget_tokens": 1500}},
        "below max_tokens",
    ),
    ("thinking unknown", {"thinking": {"type": "hard"}}, "thinking.type"),
    ("container", {"container": "c"}, "container"),
    ("five breakpoints", user([kept()] * 5), "at most 4"),
    (
        "five with the automatic one",
        {**user([kept()] * 4 + [{"type": "text", "text": "y"}]), "cache_control": {"type": "ephemeral"}},
        "at most 4",
    ),
    ("5m before 1h", user([kept("5m"), kept("1h")]), "must not come after"),
    ("5m by default before 1h", {"system": [kept()], **user([kept("1h")])}, "must not come after"),
    ("a bogus breakpoint", user([kept(type="bogus")]), "cache_control.type"),
    ("a bogus time", user([kept("2h")]), "cache_control.ttl"),
    ("a breakpoint with more", user([kept(scopes="global")]), "scopes"),
    ("a breakpoint on a tool's bad type", {"tools": [{**TOOL, "cache_control": {"type": "x"}}]}, "type"),
    ("a breakpoint after nothing", user([{**kept(), "text": ""}]), "empty text block"),
    (
        "a breakpoint on thinking",
        assistant(
            [{"type": "thinking", "thinking": "x", "signature": "s", "cache_control": {"type": "ephemeral"}}]
        ),
        "cache_control",
    ),
]


@pytest.mark.parametrize(("fields", "words"), [pytest.param(f, w, id=i) for i, f, w in BAD])
def test_bad_bodies(client: httpx.Client, fields: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        message = check_error(client.post(PATH, json={**GOOD, **fields, "stream": stream}), 400)
        assert words in message
        assert len(message) < 600


COUNTED = [case for case in BAD if {"messages", "system", "tools"} & set(case[1]) and "over" not in case[0]]


@pytest.mark.parametrize(("fields", "words"), [pytest.param(f, w, id=i) for i, f, w in COUNTED[::5]])
def test_bad_bodies_to_be_counted(client: httpx.Client, fields: dict[str, Any], words: str) -> None:
    body = {"messages": GOOD["messages"], **fields}
    assert words in check_error(client.post(f"{PATH}/count_tokens", json=body), 400)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"not json", id="not JSON"),
        pytest.param(b"[]", id="not an object"),
        pytest.param(b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", id="10,000 deep"),
        pytest.param(b'{"temperature": NaN}', id="NaN"),
        pytest.param(b'{"temperature": 1e999}', id="overflow"),
        pytest.param(b'{"messages": [{"role": "user", "content": "\\ud800"}]}', id="surrogate"),
    ],
)
def test_bodies_that_are_not_sound_json(client: httpx.Client, body: bytes) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        check_error(client.post(path, content=body, headers=JSON), 400)


@pytest.mark.parametrize(
    ("request_of", "status", "kind"),
    [
        pytest.param({"headers": {"x-api-key": "no"}}, 401, "authentication_error", id="wrong key"),
        pytest.param({"headers": {"x-api-key": ""}}, 401, "authentication_error", id="no key"),
        pytest.param({"headers": {"host": "evil.example"}}, 403, "permission_error", id="host"),
        pytest.param({"headers": {"origin": "https://evil.example"}}, 403, "permission_error", id="origin"),
        pytest.param({"json": {**GOOD, "model": "gpt-4"}}, 404, "not_found_error", id="model"),
        pytest.param({"url": f"{PATH}/batches"}, 404, "not_found_error", id="route"),
        pytest.param({"method": "GET"}, 405, "invalid_request_error", id="method"),
        pytest.param({"content": b"x" * 150_000}, 413, "request_too_large", id="size"),
        pytest.param(
            {"content": b"x", "headers": {"content-type": "text/plain"}},
            415,
            "invalid_request_error",
            id="type",
        ),
        pytest.param(
            {"content": gzip.compress(b" " * 9_000_000), "headers": {"content-encoding": "gzip"}},
            415,
            "invalid_request_error",
            id="gzip",
        ),
        pytest.param({"json": {**GOOD, **user("say:break")}}, 500, "api_error", id="fails"),
        pytest.param({"json": {**GOOD, **user("overload")}}, 503, "overloaded_error", id="full"),
        pytest.param(
            {"json": {**GOOD, **user("overload"), "stream": True}},
            503,
            "overloaded_error",
            id="full streamed",
        ),
    ],
)
def test_statuses_have_their_types(
    client: httpx.Client, request_of: dict[str, Any], status: int, kind: str
) -> None:
    headers = {**JSON, **request_of.get("headers", {})}
    answer = client.request(**{"method": "POST", "url": PATH, **request_of, "headers": headers})
    check_error(answer, status, kind)
    if status == 503:
        assert answer.headers["retry-after"] == "2"


def test_an_error_inside_a_stream(server: LiveServer, client: httpx.Client) -> None:
    answer = client.post(PATH, json={**GOOD, **user("say:break"), "stream": True})
    assert answer.status_code == 200
    name, data = answer.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    body = json.loads(data.removeprefix("data: "))
    assert body["error"] == {"type": "api_error", "message": "broke"}
    assert "message_stop" not in answer.text
    with server.anthropic("key-a") as sdk, pytest.raises(anthropic.APIStatusError, match="broke"):
        list(sdk.messages.create(model="scripted", **{**GOOD, **user("say:break")}, stream=True))


def test_errors_are_the_sdks_classes(server: LiveServer) -> None:
    with server.anthropic("key-a") as sdk, pytest.raises(anthropic.NotFoundError) as caught:
        sdk.messages.create(model="other", **GOOD)
    assert caught.value.request_id
    with server.anthropic("wrong") as sdk, pytest.raises(anthropic.AuthenticationError):
        sdk.messages.create(model="scripted", **GOOD)


def raw(request: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\nx-api-key: key-a\r\n", 1)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(raw(raw_request(PATH, GOOD))[:-3], b"408", id="a slow body"),
        pytest.param(
            f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Big: {'x' * 100_000}\r\n\r\n".encode(),
            b"431",
            id="headers",
        ),
        pytest.param(
            raw(raw_request(PATH, GOOD)).replace(b"Host", b"Transfer-Encoding: chunked\r\nHost"),
            b"400",
            id="two lengths",
        ),
    ],
)
def test_errors_before_the_app(server: LiveServer, sent: bytes, status: bytes) -> None:
    with server.connect() as sock:
        sock.sendall(sent)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 " + status)
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (body["type"], set(body["error"])) == ("error", {"type", "message"})


def test_fine_all_the_same(server: LiveServer, client: httpx.Client) -> None:
    """NUL is text, a control token's spelling is text, and max_tokens is clamped to what is left."""
    answer = client.post(PATH, json={**GOOD, **user("say:a\x00<|im_end|>"), "max_tokens": 10**18})
    assert answer.json()["content"][0]["text"] == "a\x00<|im_end|>"
    asked = server.engine.requests[-1]
    assert asked.prompt.count(257) == 1
    assert asked.params.max_tokens == 256 - len(asked.prompt)
