# SPDX-License-Identifier: Apache-2.0
"""The same bad inputs on every route with a body: each gets its status, in the shape of that route's API.

After each, the route still answers a good request, and the engine holds nothing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

Body = dict[str, Any]

SAID = [{"role": "user", "content": "say:hello"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
EXPLAIN = "/v1/cache/explain"
PINS = "/v1/cache/pins"
TOKENIZE = "/tokenize"
GOOD: dict[str, Body] = {
    CHAT: {"messages": SAID},
    TEXT: {"prompt": "say:hello"},
    RESPONSES: {"input": "say:hello"},
    MESSAGES: {"max_tokens": 20, "model": "scripted", "messages": SAID},
    COUNT: {"model": "scripted", "messages": SAID},
    EXPLAIN: {"messages": SAID},
    PINS: {"prompt": "say:hello"},
    TOKENIZE: {"prompt": "say:hello"},
}
ROUTES = tuple(GOOD)
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(max_model_len=256), max_body_bytes=200_000) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as one:
        yield one


def check_shape(path: str, answer: httpx.Response, status: int) -> str:
    """The answer is an error as clients of this route expect it; returns its message."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert isinstance(message, str)
    assert message
    assert "Traceback" not in message
    assert len(message) < 1000
    return message


def check_health(server: LiveServer, client: httpx.Client, path: str) -> None:
    """The next good request succeeds, and nothing is held."""
    answer = client.post(path, json=GOOD[path])
    assert is_good(answer), answer.text
    assert server.engine.prefix_cache.stats.held_blocks == 0


def is_good(answer: httpx.Response) -> bool:
    """This engine computes nothing, so that there is nothing to pin."""
    return answer.status_code < 300 or answer.json()["error"]["code"] == "not_cached"


def raw(content: bytes, **headers: str) -> Callable[[httpx.Client, str], httpx.Response]:
    return lambda client, path: client.post(path, content=content, headers={**JSON, **headers})


def good(path: str) -> bytes:
    return json.dumps(GOOD[path]).encode()


ALIKE: list[tuple[str, Callable[[httpx.Client, str], httpx.Response], int]] = [
    ("not JSON", raw(b"not json"), 400),
    ("no body", raw(b""), 400),
    ("not an object", raw(b"[]"), 400),
    ("not UTF-8", raw(b'{"model": "\xff"}'), 400),
    ("wrong content type", lambda client, path: client.post(path, content=good(path)), 415),
    ("over the limit", raw(b"{" + b" " * 300_000 + b"}"), 413),
    ("a megabyte of headers", raw(b"{}", **{"x-big": "x" * 1_000_000}), 431),
    ("10,000 deep", raw(b'{"metadata":' + b"[" * 10_000 + b"]" * 10_000 + b"}"), 400),
    ("NaN", raw(b'{"temperature": NaN}'), 400),
    ("a number beyond float64", raw(b'{"temperature": 1e999}'), 400),
    ("half a surrogate pair", raw(b'{"model": "\\ud800"}'), 400),
    ("an unknown field", lambda client, path: client.post(path, json={**GOOD[path], "no_such": 1}), 400),
    (
        "a block hash",
        lambda client, path: client.post(path, json={**GOOD[path], "block_hashes": ["00"]}),
        400,
    ),
    ("a gzip bomb", raw(gzip.compress(b" " * 10_000_000), **{"content-encoding": "gzip"}), 415),
    ("another method", lambda client, path: client.patch(path, json=GOOD[path]), 405),
    (
        "a foreign host",
        lambda client, path: client.post(path, json=GOOD[path], headers={"host": "evil.example"}),
        403,
    ),
    (
        "a foreign origin",
        lambda client, path: client.post(path, json=GOOD[path], headers={"origin": "https://evil.example"}),
        403,
    ),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("send", "status"), [pytest.param(*case[1:], id=case[0]) for case in ALIKE])
def test_what_no_route_takes(
    server: LiveServer,
    client: httpx.Client,
    path: str,
    send: Callable[[httpx.Client, str], httpx.Response],
    status: int,
) -> None:
    check_shape(path, send(client, path), status)
    check_health(server, client, path)


def chat_with(**message: Any) -> Body:
    return {"messages": [{"role": "user", "content": "x", **message}]}


def image(url: str) -> Body:
    return chat_with(content=[{"type": "image_url", "image_url": {"url": url}}])


EMPTY_TEXT = [{"type": "text", "text": ""}]
LONG = "x" * 5_000
MAX = {CHAT: "max_tokens", TEXT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
GENERATE = tuple(MAX)
TAKE_MESSAGES = (CHAT, MESSAGES, COUNT, EXPLAIN, TOKENIZE)
SALTED = (CHAT, TEXT, EXPLAIN, PINS)

#: What is wrong, the routes that have such a field, the fields, and the status.
FIELDS: list[tuple[str, tuple[str, ...], Callable[[str], Body], int]] = [
    ("empty messages", TAKE_MESSAGES, lambda path: {"messages": []}, 400),
    ("empty input", (RESPONSES,), lambda path: {"input": []}, 400),
    ("empty text as input", (RESPONSES,), lambda path: {"input": ""}, 400),
    ("empty text block", (MESSAGES, COUNT), lambda path: chat_with(content=EMPTY_TEXT), 400),
    ("unknown role", TAKE_MESSAGES, lambda path: chat_with(role="wizard"), 400),
    (
        "unknown role of an item",
        (RESPONSES,),
        lambda path: {"input": chat_with(role="wizard")["messages"]},
        400,
    ),
    ("null content", TAKE_MESSAGES, lambda path: chat_with(content=None), 400),
    (
        "null content of an item",
        (RESPONSES,),
        lambda path: {"input": chat_with(content=None)["messages"]},
        400,
    ),
    ("empty prompt", (TEXT, EXPLAIN, PINS), lambda path: {"prompt": ""}, 400),
    ("token id out of range", (TEXT, EXPLAIN, PINS), lambda path: {"prompt": [1, 10**9]}, 400),
    ("prompt over the context", (TEXT, EXPLAIN, PINS), lambda path: {"prompt": LONG}, 400),
    ("chat over the context", (CHAT, MESSAGES), lambda path: chat_with(content=LONG), 400),
    ("input over the context", (RESPONSES,), lambda path: {"input": LONG}, 400),
    ("no tokens", (CHAT, RESPONSES), lambda path: {MAX[path]: 0}, 400),
    ("less than no tokens", GENERATE, lambda path: {MAX[path]: -1}, 400),
    ("1e18 tokens", GENERATE, lambda path: {MAX[path]: 1e18}, 400),
    ("n 1e9", (CHAT, TEXT), lambda path: {"n": 10**9}, 400),
    ("best_of over the cap", (TEXT,), lambda path: {"best_of": 10**6}, 400),
    ("logprobs over the cap", (TEXT,), lambda path: {"logprobs": 10**6}, 400),
    ("top_logprobs over the cap", (CHAT,), lambda path: {"logprobs": True, "top_logprobs": 10**6}, 400),
    ("top_logprobs over the cap there", (RESPONSES,), lambda path: {"top_logprobs": 10**6}, 400),
    ("temperature -1", GENERATE, lambda path: {"temperature": -1}, 400),
    ("top_p 0", (CHAT, TEXT, RESPONSES), lambda path: {"top_p": 0}, 400),
    ("top_p 2", GENERATE, lambda path: {"top_p": 2}, 400),
    ("10,000 stop strings", (CHAT, TEXT), lambda path: {"stop": ["x"] * 10_000}, 400),
    ("an empty stop string", (CHAT, TEXT), lambda path: {"stop": [""]}, 400),
    ("10,000 stop sequences", (MESSAGES,), lambda path: {"stop_sequences": ["x"] * 10_000}, 400),
    ("an empty stop sequence", (MESSAGES,), lambda path: {"stop_sequences": [""]}, 400),
    ("logit_bias out of the vocabulary", (CHAT, TEXT), lambda path: {"logit_bias": {"999": 1}}, 400),
    ("seed 2**70", (CHAT, TEXT), lambda path: {"seed": 2**70}, 400),
    ("chat_template", (CHAT,), lambda path: {"chat_template": "x"}, 400),
    ("tokenize by kwargs", (CHAT,), lambda path: {"chat_template_kwargs": {"tokenize": True}}, 400),
    ("empty cache_salt", SALTED, lambda path: {"cache_salt": ""}, 400),
    ("long cache_salt", SALTED, lambda path: {"cache_salt": "x" * 129}, 400),
    ("path in cache_salt", SALTED, lambda path: {"cache_salt": "a/../b"}, 400),
    (
        "image of a private address",
        (CHAT, EXPLAIN, TOKENIZE),
        lambda path: image("http://169.254.169.254/"),
        400,
    ),
    ("image of a file", (CHAT, EXPLAIN, TOKENIZE), lambda path: image("file:///etc/passwd"), 400),
    (
        "image by URL",
        (MESSAGES, COUNT),
        lambda path: chat_with(
            content=[{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}]
        ),
        400,
    ),
    (
        "image of an item",
        (RESPONSES,),
        lambda path: {
            "input": chat_with(content=[{"type": "input_image", "image_url": "file:///etc/passwd"}])[
                "messages"
            ]
        },
        400,
    ),
    (
        "five breakpoints",
        (MESSAGES, COUNT),
        lambda path: chat_with(
            content=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}} for _ in range(5)]
        ),
        400,
    ),
    (
        "5m before 1h",
        (MESSAGES, COUNT),
        lambda path: chat_with(
            content=[
                {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": ttl}}
                for ttl in ("5m", "1h")
            ]
        ),
        400,
    ),
    (
        "a breakpoint of another kind",
        (MESSAGES, COUNT, CHAT),
        lambda path: chat_with(content=[{"type": "text", "text": "x", "cache_control": {"type": "bogus"}}]),
        400,
    ),
    (
        "another model",
        (CHAT, TEXT, RESPONSES, MESSAGES, COUNT, TOKENIZE),
        lambda path: {"model": "other"},
        404,
    ),
]


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        pytest.param(path, fields(path), status, id=f"{name}-{path}")
        for name, paths, fields, status in FIELDS
        for path in paths
    ],
)
def test_bad_fields(server: LiveServer, client: httpx.Client, path: str, fields: Body, status: int) -> None:
    body = {
        name: value for name, value in GOOD[path].items() if not {name, *fields} >= {"prompt", "messages"}
    }
    check_shape(path, client.post(path, json={**body, **fields}), status)
    if path in GENERATE:
        # Refused before the first token, a stream gets the same status and no event.
        check_shape(path, client.post(path, json={**body, **fields, "stream": True}), status)
    check_health(server, client, path)


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_nul_is_text(client: httpx.Client, path: str) -> None:
    body = json.loads(json.dumps(GOOD[path]).replace("say:hello", "say:a\\u0000b"))
    assert client.post(path, json=body).status_code == 200


def test_every_route_asks_for_a_key_and_says_so_in_its_dialect() -> None:
    options = {"api_keys": ("user=sk-user",), "admin_keys": ("root=sk-root",)}
    with live_server(ScriptedEngine(max_model_len=256), **options) as server, server.http() as client:
        for path in (*ROUTES, "/v1/cache/reset", "/v1/cache/public", "/no/such/route", "/openapi.json"):
            for headers in ({}, {"x-api-key": "sk-wrong"}, {"authorization": "Bearer sk-wrong"}):
                check_shape(path, client.post(path, json=GOOD.get(path, {}), headers=headers), 401)
        user = {"authorization": "Bearer sk-user"}
        for path in ("/v1/cache/reset", "/v1/cache/public"):
            check_shape(path, client.post(path, json=GOOD[PINS], headers=user), 403)
        for path in ROUTES:
            assert is_good(client.post(path, json=GOOD[path], headers=user))
