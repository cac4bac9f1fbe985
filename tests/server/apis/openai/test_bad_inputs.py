# SPDX-License-Identifier: Apache-2.0
"""Bad inputs: each gets its status in OpenAI's error shape, and the next good request succeeds."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, live_server, raw_request, read_all
from scripted_engine import ScriptedEngine

MESSAGES = [{"role": "user", "content": "say:hello"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(max_model_len=256), max_body_bytes=200_000) as running:
        yield running


@pytest.fixture(scope="module")
def impatient() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(), header_timeout_s=0.7, body_timeout_s=0.7) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    """A client whose test must leave the server in good health."""
    with server.http() as one:
        yield one
    with server.http() as another:
        answer = another.post(CHAT, json={"messages": MESSAGES})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "hello"


def check_error(
    answer: httpx.Response, status: int, *, param: str | None = None, code: str | None = None
) -> str:
    """The answer is an error in OpenAI's shape; returns its message."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in error["message"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error["message"]


def nested(depth: int) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param(b"not json", "invalid_json", id="not JSON"),
        pytest.param(b"", "invalid_json", id="empty"),
        pytest.param(b"[]", "invalid_json", id="not an object"),
        pytest.param(b'{"messages": "\xff"}', "invalid_json", id="not UTF-8"),
        pytest.param(nested(10_000), "invalid_json", id="10,000 deep"),
        pytest.param(b'{"a":' * 20_000, "invalid_json", id="unclosed and deep"),
        pytest.param(b'{"temperature": NaN}', "invalid_json", id="NaN"),
        pytest.param(b'{"temperature": -Infinity}', "invalid_json", id="Infinity"),
        pytest.param(b'{"temperature": 1e999}', "invalid_json", id="overflow"),
        pytest.param(b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json", id="5,000 digits"),
        pytest.param(
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json", id="surrogate"
        ),
    ],
)
def test_bodies_that_are_not_sound_json(client: httpx.Client, body: bytes, code: str) -> None:
    check_error(client.post(CHAT, content=body, headers=JSON), 400, code=code)
    check_error(client.post(TEXT, content=body, headers=JSON), 400, code=code)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_wrong_content_type(client: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    check_error(client.post(CHAT, content=json.dumps({"messages": MESSAGES}), headers=headers), 415)


def test_json_with_charset_is_fine(client: httpx.Client) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    answer = client.post(CHAT, content=json.dumps({"messages": MESSAGES}), headers=headers)
    assert answer.status_code == 200


def test_body_over_the_limit(client: httpx.Client) -> None:
    big = json.dumps({"messages": [{"role": "user", "content": "x" * 300_000}]}).encode()
    check_error(client.post(CHAT, content=big, headers=JSON), 413, code="request_too_large")

    def undeclared() -> Iterator[bytes]:
        for start in range(0, len(big), 10_000):
            yield big[start : start + 10_000]

    check_error(client.post(CHAT, content=undeclared(), headers=JSON), 413, code="request_too_large")


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/detokenize"])
def test_bodies_beyond_the_context_are_refused_by_their_size(path: str) -> None:
    """Parsing millions of small parts would hold up everybody else."""
    tools = b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b"[1]," * 500_000 + b"[1]]}"
    with live_server(ScriptedEngine(max_model_len=256)) as small, small.http() as client:
        check_error(client.post(path, content=tools, headers=JSON), 413, code="request_too_large")
        chunks = [tools[start : start + 100_000] for start in range(0, len(tools), 100_000)]
        check_error(client.post(path, content=iter(chunks), headers=JSON), 413, code="request_too_large")
        several = client.post(TEXT, json={"prompt": ["say:x" + " " * 200] * 200, "user": "x" * 1_500_000})
        assert several.status_code == 200, "many prompts need more room"


def test_compressed_body(client: httpx.Client) -> None:
    bomb = gzip.compress(b" " * 10_000_000)
    headers = {**JSON, "content-encoding": "gzip"}
    check_error(client.post(CHAT, content=bomb, headers=headers), 415)


def test_headers_over_the_limit(server: LiveServer, client: httpx.Client) -> None:
    with server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Big: " + b"x" * 1_000_000)
        answer = read_all(sock)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize("where", ["header", "url"])
def test_headers_over_the_limit_that_arrive_at_once(server: LiveServer, where: str) -> None:
    path, header = ("/health", "x" * 100_000) if where == "header" else ("/" + "x" * 70_000, "x")
    with server.connect() as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Big: {header}\r\n\r\n".encode())
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert len(answer) < 2000


def test_a_long_url_is_not_echoed(client: httpx.Client) -> None:
    message = check_error(client.get("/" + "x" * 10_000), 404, code="not_found")
    assert len(message) < 500


@pytest.mark.parametrize("encoding", ["chunked", "identity", "gzip, chunked"])
def test_two_lengths_of_one_body_are_refused(server: LiveServer, client: httpx.Client, encoding: str) -> None:
    """What one end of a chain of proxies takes for a body, the other could take for the next request."""
    before = len(server.engine.requests)
    hidden = raw_request(TEXT, {"prompt": "say:hidden"})
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: 4\r\nTransfer-Encoding: {encoding}\r\n\r\n"
    )
    with server.connect() as sock:
        sock.sendall(head.encode() + b"0\r\n\r\n" + hidden)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"\r\n\r\n") == 1, "one answer"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert len(server.engine.requests) == before


def test_not_http(server: LiveServer, client: httpx.Client) -> None:
    with server.connect() as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
        raw_request(CHAT, {"messages": MESSAGES})[:-5],
    ],
    ids=["headers", "body"],
)
def test_slow_clients_are_cut_off(impatient: LiveServer, sent: bytes) -> None:
    with impatient.connect() as sock:
        sock.sendall(sent)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert httpx.post(impatient.url + CHAT, json={"messages": MESSAGES}).status_code == 200


def test_silent_connections_are_closed(impatient: LiveServer) -> None:
    with impatient.connect() as sock:
        assert read_all(sock) == b""


def test_deadlines_spare_kept_alive_connections(impatient: LiveServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", impatient.port, timeout=30)

    def ask() -> None:
        connection.request("POST", CHAT, json.dumps({"messages": MESSAGES}), JSON)
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()

    with contextlib.closing(connection):
        ask()
        first = connection.sock
        # Past the deadlines for headers and body, which must not run while nothing is being sent.
        first.settimeout(0.9)
        with pytest.raises(TimeoutError):
            first.recv(1)
        first.settimeout(30)
        ask()
        assert connection.sock is first


def test_pipelined_requests_are_answered_in_order(server: LiveServer, client: httpx.Client) -> None:
    first = raw_request(TEXT, {"prompt": "say:first"})
    last = raw_request(TEXT, {"prompt": "say:last"}).replace(b"Host:", b"Connection: close\r\nHost:")
    with server.connect() as sock:
        sock.sendall(first + last)
        answers = read_all(sock)
    assert answers.count(b"HTTP/1.1 200 ") == 2
    assert 0 < answers.index(b'"first"') < answers.index(b'"last"')


BAD_CHATS: list[tuple[str, dict[str, Any], str | None]] = [
    ("empty messages", {"messages": []}, "messages"),
    ("no messages", {"messages": None}, "messages"),
    ("messages of another type", {"messages": "hello"}, "messages"),
    ("a message of another type", {"messages": ["hello"]}, "messages[0]"),
    ("unknown role", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("no role", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("null content", {"messages": [{"role": "user", "content": None}]}, "messages[0]"),
    ("null content of an assistant", {"messages": [{"role": "assistant", "content": None}]}, "messages[0]"),
    ("content of another type", {"messages": [{"role": "user", "content": 5}]}, "messages[0]"),
    (
        "image",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}],
                }
            ]
        },
        "messages[0].content[0]",
    ),
    (
        "image file",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "see"},
                        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
                    ],
                }
            ]
        },
        "messages[0].content[1]",
    ),
    ("part without text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None),
    (
        "tool arguments that are not JSON",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
                    ],
                }
            ]
        },
        "messages",
    ),
    (
        "the template refuses",
        {"messages": [{"role": "user", "content": "refused by the template"}]},
        "messages",
    ),
    ("chat_template", {"chat_template": "{{ messages }}"}, "chat_template"),
    ("tokenize through kwargs", {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ("messages through kwargs", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("json_schema", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ("format", {"response_format": {"type": "structural_tag"}}, "response_format"),
    ("two grammars", {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ("grammar", {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ("guided", {"guided_choice": []}, "guided_choice"),
    ("choice of no tool", {"tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    ("forced tool", {"tool_choice": "required"}, "tool_choice"),
    ("audio", {"modalities": ["text", "audio"]}, "modalities"),
    ("functions", {"functions": [{"name": "f"}]}, "functions"),
    ("tool without a name", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ("top_logprobs without logprobs", {"top_logprobs": 2}, "top_logprobs"),
    ("top_logprobs over the cap", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("logprobs as a number", {"logprobs": 5}, "logprobs"),
    ("contradicting limits", {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ("max_tokens 0", {"max_tokens": 0}, "max_tokens"),
    ("max_completion_tokens 0", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("context", {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
]

BAD_TEXTS: list[tuple[str, dict[str, Any], str | None]] = [
    ("no prompt", {"prompt": None}, "prompt"),
    ("samples of nothing", {"echo": True, "max_tokens": 0, "n": 2}, "n"),
    ("samples of a prewarm", {"max_tokens": 0, "n": 2}, "n"),
    ("the best of nothing", {"echo": True, "max_tokens": 0, "best_of": 2}, "n"),
    ("empty prompt", {"prompt": ""}, "prompt"),
    ("empty list", {"prompt": []}, "prompt"),
    ("an empty prompt among others", {"prompt": ["a", ""]}, "prompt"),
    ("an empty list of ids", {"prompt": [[]]}, "prompt"),
    ("mixed list", {"prompt": ["a", 1]}, "prompt"),
    ("booleans", {"prompt": [True]}, "prompt"),
    ("object", {"prompt": {"a": 1}}, "prompt"),
    ("a token id too large", {"prompt": [1, 258]}, "prompt"),
    ("a negative token id", {"prompt": [-1]}, "prompt"),
    ("a huge token id", {"prompt": [10**30]}, "prompt"),
    ("context", {"prompt": "x" * 256}, "prompt"),
    ("context far over", {"prompt": "x" * 150_000}, "prompt"),
    ("context in ids", {"prompt": [1] * 256}, "prompt"),
    ("too many prompts", {"prompt": ["x"] * 300}, "prompt"),
    ("too many samples", {"prompt": ["x"] * 200, "n": 100}, "n"),
    ("best_of over the cap", {"best_of": 1000}, None),
    ("best_of below n", {"n": 3, "best_of": 2}, "best_of"),
    ("best_of streamed", {"best_of": 2, "stream": True}, "best_of"),
    ("logprobs over the cap", {"logprobs": 21}, "logprobs"),
    ("suffix", {"suffix": "end"}, "suffix"),
]

BAD_SAMPLING: list[tuple[str, dict[str, Any], str | None]] = [
    ("max_tokens -1", {"max_tokens": -1}, "max_tokens"),
    ("max_tokens 1e18", {"max_tokens": 1e18}, "max_tokens"),
    ("max_tokens as text", {"max_tokens": "5"}, "max_tokens"),
    ("max_tokens true", {"max_tokens": True}, "max_tokens"),
    ("n 1e9", {"n": 10**9}, "n"),
    ("n 0", {"n": 0}, "n"),
    ("temperature -1", {"temperature": -1}, "temperature"),
    ("temperature as text", {"temperature": "0.5"}, "temperature"),
    ("top_p 0", {"top_p": 0}, "top_p"),
    ("top_p 2", {"top_p": 2}, "top_p"),
    ("top_k -5", {"top_k": -5}, "top_k"),
    ("min_p 3", {"min_p": 3}, "min_p"),
    ("min_tokens above max_tokens", {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ("repetition_penalty 0", {"repetition_penalty": 0}, "repetition_penalty"),
    ("presence_penalty 3", {"presence_penalty": 3}, "presence_penalty"),
    ("10,000 stop strings", {"stop": ["x"] * 10_000}, "stop"),
    ("an empty stop string", {"stop": ["a", ""]}, "stop"),
    ("stop of another type", {"stop": [1]}, "stop"),
    ("logit_bias out of the vocabulary", {"logit_bias": {"258": 1}}, "logit_bias"),
    ("logit_bias for no id", {"logit_bias": {"abc": 1}}, "logit_bias"),
    ("logit_bias for a negative id", {"logit_bias": {"-1": 1}}, "logit_bias"),
    ("logit_bias too strong", {"logit_bias": {"1": 101}}, "logit_bias"),
    ("stop_token_ids out of the vocabulary", {"stop_token_ids": [999]}, "stop_token_ids"),
    ("seed 2**70", {"seed": 2**70}, "seed"),
    ("empty cache_salt", {"cache_salt": ""}, "cache_salt"),
    ("long cache_salt", {"cache_salt": "x" * 129}, "cache_salt"),
    ("path in cache_salt", {"cache_salt": "a/../b"}, "cache_salt"),
    ("control character in cache_salt", {"cache_salt": "a\x00b"}, "cache_salt"),
    ("newline in cache_salt", {"cache_salt": "ab\n"}, "cache_salt"),
    ("huge priority", {"priority": 2**40}, "priority"),
    ("unknown field", {"temprature": 1}, "temprature"),
    ("a caller's block hash", {"block_hashes": ["00"]}, "block_hashes"),
    ("stream as text", {"stream": "yes"}, "stream"),
    ("stream_options without stream", {"stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *(pytest.param(CHAT, fields, param, id=f"chat-{name}") for name, fields, param in BAD_CHATS),
        *(pytest.param(TEXT, fields, param, id=f"text-{name}") for name, fields, param in BAD_TEXTS),
        *(pytest.param(CHAT, fields, param, id=f"chat-{name}") for name, fields, param in BAD_SAMPLING),
        *(pytest.param(TEXT, fields, param, id=f"text-{name}") for name, fields, param in BAD_SAMPLING),
    ],
)
def test_bad_fields(client: httpx.Client, path: str, fields: dict[str, Any], param: str | None) -> None:
    good = {"messages": MESSAGES} if path == CHAT else {"prompt": "say:hello"}
    check_error(client.post(path, json={**good, **fields}), 400, param=param)
    if "stream" not in fields and "stream_options" not in fields:
        # Refused before the first token, a stream gets the same status and no event.
        streamed = client.post(path, json={**good, **fields, "stream": True})
        check_error(streamed, 400, param=param)


def test_an_unknown_field_suggests_the_known_one(client: httpx.Client) -> None:
    answer = client.post(CHAT, json={"messages": MESSAGES, "temprature": 1})
    assert "Did you mean temperature?" in check_error(answer, 400, code="unknown_parameter")


def test_context_length_exceeded(client: httpx.Client) -> None:
    answer = client.post(TEXT, json={"prompt": "x" * 256})
    message = check_error(answer, 400, param="prompt", code="context_length_exceeded")
    assert "maximum context length is 256" in message
    answer = client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 400}], "stream": True})
    check_error(answer, 400, param="messages", code="context_length_exceeded")


def test_many_bad_items_make_one_error(server: LiveServer) -> None:
    with live_server(ScriptedEngine(max_model_len=100_000)) as roomy, roomy.http() as client:
        body = b'{"messages": [' + b"{}," * 190_000 + b"{}]}"
        message = check_error(client.post(CHAT, content=body, headers=JSON), 400)
        assert len(message) < 500


def test_nul_is_text(client: httpx.Client) -> None:
    assert client.post(TEXT, json={"prompt": "say:a\x00b"}).json()["choices"][0]["text"] == "a\x00b"


def test_surrogate_pairs_are_text(client: httpx.Client) -> None:
    body = b'{"prompt": "say:\\ud83d\\ude00 \\\\ud800"}'
    answer = client.post(TEXT, content=body, headers=JSON)
    assert answer.status_code == 200


def test_base64_cache_salts_are_fine(client: httpx.Client) -> None:
    answer = client.post(CHAT, json={"messages": MESSAGES, "cache_salt": "ab+/cd12=="})
    assert answer.status_code == 200


@pytest.mark.parametrize("model", ["gpt-4", "", "../etc/passwd"])
def test_unknown_model(client: httpx.Client, model: str) -> None:
    body = {"messages": MESSAGES, "model": model}
    check_error(client.post(CHAT, json=body), 404, param="model", code="model_not_found")
    check_error(client.post(CHAT, json={**body, "stream": True}), 404, code="model_not_found")
    check_error(client.post(TEXT, json={"prompt": "x", "model": model}), 404, code="model_not_found")


def test_embeddings_are_refused_with_the_reason(client: httpx.Client) -> None:
    for body in ({"model": "scripted", "input": "x"}, {}):
        message = check_error(client.post("/v1/embeddings", json=body), 400, code="unsupported_endpoint")
        assert "generates text" in message


def test_unknown_route_and_method(client: httpx.Client) -> None:
    check_error(client.get("/v1/nothing"), 404, code="not_found")
    answer = client.get(CHAT)
    check_error(answer, 405, code="method_not_allowed")
    assert answer.headers["allow"] == "POST"
    check_error(client.delete("/v1/models"), 405)
    check_error(client.get("/v1/models/other"), 404, code="model_not_found")


def test_tokenize_errors(client: httpx.Client) -> None:
    check_error(client.post("/tokenize", json={}), 400)
    check_error(client.post("/tokenize", json={"prompt": "x", "messages": MESSAGES}), 400)
    check_error(client.post("/detokenize", json={"tokens": [999]}), 400, param="tokens")
    check_error(client.post("/detokenize", json={"tokens": ["a"]}), 400)
    check_error(client.post("/tokenize", json={"prompt": "x", "model": "other"}), 404)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "8.8.8.8"])
def test_hosts_that_are_not_ours(client: httpx.Client, host: str) -> None:
    check_error(client.get("/v1/models", headers={"host": host}), 403, code="host_not_allowed")


@pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_loopback_hosts(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["", "host:port", "user@127.0.0.1", "127.0.0.1/x"])
def test_malformed_host(client: httpx.Client, host: str) -> None:
    check_error(client.get("/v1/models", headers={"host": host}), 400)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example"])
def test_origins_that_are_not_ours(client: httpx.Client, origin: str) -> None:
    answer = client.post(CHAT, json={"messages": MESSAGES}, headers={"origin": origin})
    check_error(answer, 403, code="origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers


def test_another_origin_is_told_what_would_let_it_in(client: httpx.Client) -> None:
    answer = client.get("/v1/models", headers={"origin": "https://app.example"})
    assert "--allowed-origin https://app.example" in check_error(answer, 403, code="origin_not_allowed")


def test_allowed_origins_and_hosts() -> None:
    options = {"allowed_hosts": ("models.example",), "allowed_origins": ("https://app.example",)}
    with live_server(ScriptedEngine(), **options) as server, server.http() as client:
        assert client.get("/v1/models", headers={"host": "models.example"}).status_code == 200
        origin = {"origin": "https://app.example"}
        answer = client.get("/v1/models", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        preflight = client.options(
            CHAT,
            headers={
                **origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "x-y",
            },
        )
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-headers"] == "x-y"
        check_error(client.get("/v1/models", headers={"origin": "https://other.example"}), 403)


def test_errors_are_the_clients_own_classes(server: LiveServer) -> None:
    with server.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
