# SPDX-License-Identifier: Apache-2.0
"""Real clients through the proxy, and what it writes of them."""

from __future__ import annotations

import asyncio
import base64
import errno
import gzip
import json
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic
from free_ports import free_ports
from live_server import live_server
from openai import AsyncOpenAI, OpenAI
from raw_http import connect, exchange, request_of
from running_proxy import RunningProxy, running_proxy
from scripted_engine import ScriptedEngine
from scripted_upstream import ScriptedUpstream, scripted_upstream
from waiting import until

from radixkv.observe.audit.body_limits import BodyLimits
from radixkv.observe.audit.exchange import Exchange, make_record
from radixkv_server.proxy.feed import Feed
from radixkv_server.proxy.key_removal import record_without_keys
from radixkv_server.proxy.observer import ObserverSettings
from radixkv_server.proxy.passage import Passage
from radixkv_server.proxy.redaction import Redaction

KEY = "sk-secret-0123456789abcdef"
QUESTION = "Which ships are in the harbour of Bergen at 08:01?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a file; the last line may not be written to its end yet."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def ask(url: str, model: str) -> list[str]:
    """The same question by each SDK, whole and streamed, and by asynchronous clients; the answers' texts."""
    texts = []
    options: dict[str, Any] = {"api_key": KEY, "max_retries": 0}
    chat: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 8}
    with OpenAI(base_url=f"{url}/v1", **options) as openai:
        assert [one.id for one in openai.models.list()] == [model]
        texts.append(openai.chat.completions.create(**chat).choices[0].message.content or "")
        stream = openai.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
        texts.append("".join(c.choices[0].delta.content or "" for c in stream if c.choices))
        texts.append(openai.responses.create(model=model, input=QUESTION, max_output_tokens=16).output_text)
    with Anthropic(base_url=url, **options) as anthropic:
        answer = anthropic.messages.create(**chat)
        texts.append("".join(block.text for block in answer.content if block.type == "text"))
        with anthropic.messages.stream(**chat) as events:
            texts.append(events.get_final_text())

    async def concurrently() -> list[str]:
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", **options) as one,
            AsyncAnthropic(base_url=url, **options) as two,
        ):
            answer = await one.chat.completions.create(**chat)
            async with two.messages.stream(**chat) as events:
                return [answer.choices[0].message.content or "", await events.get_final_text()]

    return texts + asyncio.run(concurrently())


def test_sdks_get_the_same_answers_and_are_recorded(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    engine = ScriptedEngine()
    with live_server(engine) as server:
        direct = ask(server.url, engine.model_name)
        with running_proxy(server.url, "--record", str(record)) as proxy:
            assert ask(proxy.url, engine.model_name) == direct
    lines = lines_of(record)
    assert len(lines) == len(direct)
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert KEY not in record.read_text() + "".join(proxy.lines)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    for line, text in zip(lines[:5], direct, strict=False):
        made = make_record(line["request"], line["response"], path=line["path"])
        assert QUESTION in "".join(block.text for block in made.blocks)
        assert "".join(block.text for block in made.answer) == text
        assert made.usage.prompt
        assert line["key"].startswith("key-")
        assert line["status"] == 200
        assert 0 <= line["first_seconds"] <= line["seconds"]


def converse(url: str, turns: list[str]) -> None:
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        body = {"model": "scripted", "messages": messages, "max_tokens": 6, "stream": len(messages) > 2}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": KEY})
        made = make_record(body, answer.text if body["stream"] else answer.json())
        messages.append({"role": "assistant", "content": made.answer[0].text})


def test_redacted_texts_keep_what_they_share(tmp_path: Path) -> None:
    """Turns begin with all of the turn before, streamed answers and tools included, and no word is told."""
    record, plain = tmp_path / "hashes.jsonl", tmp_path / "plain.jsonl"
    turns = ["Where is the pilot today?", "And tomorrow, if the wind turns?", "Thanks, captain."]
    with live_server(ScriptedEngine()) as server:
        with running_proxy(server.url, "--record", str(record), "--redact") as proxy:
            converse(proxy.url, turns)
            call: dict[str, Any] = {
                "model": "scripted",
                "max_tokens": 4,
                "system": "You are the harbour master.",
                "metadata": {"user_id": "captain-ahab"},
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": turns[0]}]},
                    {
                        "role": "assistant",
                        "content": [
                            {
                                "type": "tool_use",
                                "id": "call_1",
                                "name": "find_ship",
                                "input": {"mast": "three"},
                            }
                        ],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "Pequod"}],
                    },
                ],
                "tools": [
                    {
                        "name": "find_ship",
                        "description": "Finds ships.",
                        "input_schema": {"type": "object", "properties": {"mast": {"type": "string"}}},
                    }
                ],
            }
            httpx.post(f"{proxy.url}/v1/messages", json=call, headers={"x-api-key": KEY})
        with running_proxy(server.url, "--record", str(plain)) as proxy:
            converse(proxy.url, turns)
    text = record.read_text()
    for word in (
        "pilot",
        "tomorrow",
        "captain",
        "harbour",
        "mast",
        "three",
        "Pequod",
        "find_ship",
        "ahab",
        KEY,
    ):
        assert word not in text, word
    hashed = [make_record(line["request"], line["response"]) for line in lines_of(record)]
    told = [make_record(line["request"], line["response"]) for line in lines_of(plain)]
    for one, other in zip(hashed, told, strict=False):
        assert [len(block.text) for block in one.blocks] == [len(block.text) for block in other.blocks]
        assert one.usage == other.usage
    for before, after in pairwise(hashed[:3]):
        shared = [*before.blocks, *before.answer]
        assert [(block.role, block.text) for block in shared] == [
            (block.role, block.text) for block in after.blocks[: len(shared)]
        ]
    assert [block.kind for block in hashed[3].blocks] == ["tool", "text", "text", "call", "text"]
    assert hashed[3].blocks[3].name == hashed[3].blocks[0].name, "equal names stay equal"


def test_keys_are_not_recorded_wherever_they_stand(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    body = {
        "model": "scripted",
        "api_key": "another-secret",
        "messages": [{"role": "user", "content": f"my key is {KEY}"}],
        "tools": [{"type": "mcp", "authorization": "mcp-secret", "server_url": "https://e.org"}],
    }
    with live_server(ScriptedEngine()) as server, running_proxy(server.url, "--record", str(record)) as proxy:
        for headers in (
            {"Authorization": f"Bearer {KEY}"},
            {"x-api-key": KEY},
            {"Cookie": f"a=b; session={KEY}"},
        ):
            httpx.post(f"{proxy.url}/v1/chat/completions?api_key={KEY}", json=body, headers=headers)
    text = record.read_text() + "".join(proxy.lines)
    assert len(lines_of(record)) == 3
    for secret in (KEY, "another-secret", "mcp-secret"):
        assert secret not in text


def test_keys_are_not_shown_wherever_they_stand(tmp_path: Path) -> None:
    """Nor where a model says them again, piece by piece: not in the record, the console's data or the log."""
    record, (console,) = tmp_path / "record.jsonl", free_ports(1)
    said = f"Your key is {KEY}, keep it safe. "
    content = [{"type": "text", "text": f"cd /home/{KEY}/harbour; {json.dumps(KEY)}"}]
    default = {"default": {"authorization_token": "mcp-secret"}}
    tool = {"name": "find", "parameters": {"type": "object", "properties": {"server": default}}}
    tools = [{"type": "function", "function": tool}]
    body = {"model": "scripted", "stream": True, "tools": tools, "max_tokens": 200}
    body["messages"] = [{"role": "user", "content": content}]
    options = ("--record", str(record), "--console-port", str(console))
    with (
        live_server(ScriptedEngine(script=lambda prompt: said)) as server,
        running_proxy(server.url, *options) as proxy,
        httpx.Client(
            base_url=f"http://127.0.0.1:{console}", timeout=30, transport=httpx.HTTPTransport(retries=10)
        ) as page,
    ):
        for packs in (False, True):
            data = json.dumps(body).encode()
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            if packs:
                data, headers = gzip.compress(data), headers | {"Content-Encoding": "gzip"}
            answer = httpx.post(f"{proxy.url}/v1/chat/completions", content=data, headers=headers)
            assert packs or KEY in "".join(re.findall(r'"content":"([^"]*)', answer.text))
            assert packs or KEY not in answer.text, "in pieces"
        # The packed one is refused: whether its body came whole before that is a matter of chance.
        until(lambda: bool(page.get("/v1/cache/requests").json()["data"]))
        names = [one["id"] for one in page.get("/v1/cache/requests").json()["data"]]
        paths = ["", "/requests", "/tree", "/advice", "/tree?search=harbour"]
        paths += [f"/requests/{name}" for name in names]
        shown = "".join(page.get(f"/v1/cache{path}").text for path in paths)
        found = page.get("/v1/cache/tree", params={"search": KEY}).json()
    assert "harbour" in shown
    assert "(key removed)" in shown
    text = record.read_text()
    spelled = "".join(re.findall(r'"content\\?": ?\\?"([^"\\]*)', text))
    for where in (shown, text, spelled, "".join(proxy.lines)):
        assert KEY not in where
        assert "mcp-secret" not in where
    assert not found["nodes"]


def escaped(text: str, upper: bool = False) -> str:
    """Each character as JSON may spell it."""
    return "".join(f"\\u{ord(char):04{'X' if upper else 'x'}}" for char in text)


@pytest.mark.parametrize("key", [KEY, 'sk/with+odd"signs=='])
def test_keys_are_found_however_they_are_spelled(key: str) -> None:
    inner = json.dumps({"k": key}, ensure_ascii=True).replace("/", "\\/")
    arguments = json.dumps(f'{{"k": "{escaped(key)}", "again": {inner}}}')
    body = (
        f'{{"model": "m", "messages": [{{"role": "user", "content": "{escaped(key)} {escaped(key[0])}"}},'
        f'{{"role": "user", "content": {json.dumps(key)}}},'
        '{"role": "assistant", "tool_calls": [{"function": '
        f'{{"name": "f", "arguments": {arguments}}}}}]}}]}}'
    )
    said = f'data: {{"choices": [{{"delta": {{"content": "it is {escaped(key, True)}"}}}}]}}\n\n'
    seen = Exchange("/v1/chat/completions", body.encode(), said.encode())
    cleaned, record = record_without_keys(seen, (key,), BodyLimits())
    texts = [block.text for block in (*record.blocks, *record.answer)]
    assert texts[0] == f"(key removed) {key[0]}"
    assert texts[-1] == "it is (key removed)"
    plain = cleaned.request.decode()
    for _ in range(3):
        assert key not in plain
        plain = re.sub(
            r"\\+(?:u00(..)|(.))", lambda found: chr(int(found[1], 16)) if found[1] else found[2], plain
        )
    assert escaped(key, True) not in cleaned.response.decode()


def _told(*events: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


PIECES = (KEY[:4], KEY[4:9], KEY[9:])
COMPLETED = {"type": "response.completed", "response": {"object": "response", "output": [{"content": KEY}]}}
TOLD_IN_PIECES = {
    "/v1/responses": _told(
        *({"type": "response.output_text.delta", "delta": part} for part in PIECES), COMPLETED
    ),
    "/v1/chat/completions": _told(
        {"choices": [{"index": 0, "delta": {"content": "Aye."}}]},
        *({"choices": [{"index": 1, "delta": {"content": part}}]} for part in PIECES),
    ),
    "/v1/chat/completions?": _told(*({"choices": [{"delta": {"refusal": part}}]} for part in PIECES)),
}


@pytest.mark.parametrize("path", TOLD_IN_PIECES)
def test_keys_told_in_pieces_are_found_wherever_a_stream_tells_them(path: str) -> None:
    body = {"model": "m", "input": "Aye?", "messages": [{"role": "user", "content": "Aye?"}]}
    seen = Exchange(path, json.dumps(body).encode(), TOLD_IN_PIECES[path].encode())
    cleaned, record = record_without_keys(seen, (KEY,), BodyLimits())
    for piece in PIECES:
        assert piece not in cleaned.response.decode()
        assert piece not in repr(record.other_answers)


def test_keys_are_found_where_only_some_characters_are_percent_encoded() -> None:
    content = "".join(f"%{ord(char):02x}" if at % 3 else char for at, char in enumerate(KEY))
    body = {"model": "m", "messages": [{"role": "user", "content": f"50%2b {content}"}]}
    seen = Exchange("/v1/chat/completions", json.dumps(body).encode())
    cleaned, _ = record_without_keys(seen, (KEY,), BodyLimits())
    assert json.loads(cleaned.request)["messages"][0]["content"] == "50%2b (key removed)"


def test_fields_and_urls_that_hold_keys_are_emptied_and_texts_stay() -> None:
    schema = {"password": {"type": "string", "description": "of the ship"}, "token": {"type": "string"}}
    tools = [
        {"type": "mcp", "server_url": "https://me:pa55word@e.org:8443/mcp?a=b&api_key=url-s3cret&c=d#e"},
        {
            "type": "mcp",
            "headers": {"X-Api-Key": ["list-s3cret", {"apiKey": "deep-s3cret"}], "Cookie": "a=co0kie"},
        },
        {"type": "mcp", "authorization": {"token": "t0ken", "value": "val-s3cret"}, "access_token": 12345678},
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": schema}},
        },
    ]
    messages = [
        {"role": "user", "content": "see https://e.org/?token=in-a-t3xt, user: password at 12:30@home"}
    ]
    body = {"model": "m", "messages": messages, "tools": tools, "token": "t0p", "prompt_cache_key": "kept"}
    logprob = {
        "token": "Hello",
        "logprob": -0.1,
        "bytes": [72],
        "top_logprobs": [{"token": "Hi", "logprob": -2}],
    }
    answer = {"choices": [{"message": {"content": "hi"}, "logprobs": {"content": [logprob]}}]}
    seen = Exchange("/v1/chat/completions", json.dumps(body).encode(), json.dumps(answer).encode())
    cleaned, _ = record_without_keys(seen, (), BodyLimits())
    text = cleaned.request.decode()
    secrets = ("pa55word", "s3cret", "co0kie", "t0ken", "12345678", "t3xt", "t0p")
    assert not [secret for secret in secrets if secret in text]
    kept = json.loads(text)
    assert (
        kept["tools"][0]["server_url"]
        == "https://me:(key removed)@e.org:8443/mcp?a=b&api_key=(key removed)&c=d#e"
    )
    assert kept["tools"][3] == tools[3]
    assert kept["prompt_cache_key"] == "kept"
    assert kept["messages"][0]["content"].endswith("user: password at 12:30@home")
    assert json.loads(cleaned.response) == answer


@pytest.mark.parametrize(
    "tool",
    [
        {"api_keys": ["s3cret"]},
        {"OPENAI_API_KEY": "s3cret"},
        {"api_key": {"type": "bearer", "value": "s3cret"}},
        {"env": {"GITHUB_TOKEN": [["s3cret"]]}},
        {"headers": [{"name": "Authorization", "value": "s3cret"}]},
        {"server_url": "https://e.org", "headers": {"X-Mine": "s3cret"}},
        {"server_url": "https://me:a@s3cret@e.org/mcp"},
        {"server_url": "https://ghp_0123456789s3cret0123@e.org/mcp"},
        {"server_url": "https://e.org/mcp?client_secret=s3cret&X-Amz-Signature=s3cret#access_token=s3cret"},
        {"arguments": '{"u": "https:\\/\\/me:s3cret@e.org\\/"}'},
        {"parameters": {"properties": {"password": {"type": "string", "default": "s3cret"}}}},
        {"token": {"type": {}, "a": "s3cret"}},
        {"headers": [["Authorization", "Bearer s3cret"]]},
        {"headers": [{"key": "X-Mine", "value": "s3cret"}]},
        {"http_headers": "X-Mine: s3cret"},
        {"env": ["MINE=s3cret"]},
        {"params": {"env": {"MINE": "s3cret"}}},
        {"pairs": [["x-api-key", "s3cret"]]},
        {"args": ["-y", "--verbose", "--api-key", "s3cret"]},
        {"args": ["--header", "Authorization: Bearer s3cret"]},
        {"command": "run --verbose --token s3cret --port 80"},
        {"command": "MODE=1 API_KEY='s3cret' run"},
        {"description": "call it with Bearer 0123456789s3cret"},
        {"query_params": {"key": "s3cret"}},
        {"server_url": "https://s3cret-of-mine@e.org/mcp"},
    ],
)
def test_keys_of_tool_definitions_are_removed(tool: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "mcp", **tool}]}
    seen = Exchange("/v1/chat/completions", json.dumps(body).encode(), b'{"choices": []}')
    cleaned, _ = record_without_keys(seen, (), BodyLimits())
    assert "s3cret" not in cleaned.request.decode()
    assert "(key removed)" in cleaned.request.decode()


def test_answers_lose_what_they_repeat_of_definitions() -> None:
    tool = {"type": "mcp", "headers": {"X-Mine": "s3cret"}, "authorization": "s3cret"}
    event = json.dumps({"type": "response.created", "response": {"id": "r", "tools": [tool]}})
    seen = Exchange("/v1/responses", b'{"model": "m", "input": "hi"}', f"data: {event}\n\n".encode())
    cleaned, record = record_without_keys(seen, (), BodyLimits())
    assert b"s3cret" not in cleaned.response
    assert record.blocks[-1].text == "hi"


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
@pytest.mark.parametrize("user", ["", "a", "ab"])
def test_keys_are_found_in_basic_authentication(encode: Callable[[bytes], bytes], user: str) -> None:
    header = encode(f"{user}:{KEY}".encode()).decode()
    passage = Passage("/v1/messages", {"authorization": f"Basic {header}"}, "u", 1 << 20)
    content = f"{KEY} {header} {header.rstrip('=')} ok"
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]})
    for secrets in (passage.secrets, (KEY,)):
        seen = Exchange("/v1/messages", body.encode(), b"{}")
        text = record_without_keys(seen, secrets, BodyLimits())[0].request.decode()
        assert KEY not in text
        assert header[4:-4] not in text
        assert " ok" in text


def test_names_and_texts_like_those_of_keys_stay() -> None:
    tool = {
        "max_tokens": 5,
        "tokens": ["a", "b"],
        "prompt_cache_key": "kept",
        "cache_key": "kept",
        "properties": {"token": {"description": "of a page"}, "secret": True, "pass": {"type": "string"}},
        "parameters": {"properties": {"env": {"type": "string"}}, "required": ["api_key", "city"]},
        "description": "password: the user's; token = of a page; bearer of news",
        "args": ["--port", "80", "--verbose"],
        "url": "https://e.org/@me/a?q=token#top, mail me@e.org; git@e.org:a/b.git ssh://git@e.org/a",
    }
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "mcp", **tool}]}
    data = json.dumps(body).encode()
    seen = Exchange("/v1/chat/completions", data, b'{"choices": []}')
    assert record_without_keys(seen, (), BodyLimits())[0].request == data


@pytest.mark.nightly
def test_records_rotate(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    options = ("--record", str(record), "--record-size", "20000", "--record-files", "3")
    with live_server(ScriptedEngine()) as server, running_proxy(server.url, *options) as proxy:
        for number in range(40):
            body = {"model": "scripted", "messages": [{"role": "user", "content": f"{number} " + "x" * 2000}]}
            httpx.post(f"{proxy.url}/v1/chat/completions", json=body)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["record.jsonl", "record.jsonl.1", "record.jsonl.2"]
    for name in files:
        assert (tmp_path / name).stat().st_size <= 20_000
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    newest = lines_of(record)[-1]["request"]["messages"][0]["content"]
    assert newest.startswith("39 ")


def observer_of(proxy: RunningProxy) -> int:
    """The process that the proxy has started."""
    return child_of(proxy.process.pid)


def child_of(process: int) -> int:
    """The observer that it has started."""

    def children() -> list[str]:
        started = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return [one for one in started if b"proxy.observer" in Path(f"/proc/{one}/cmdline").read_bytes()]

    until(lambda: len(children()) == 1)
    return int(children()[0])


def url_of(upstream: ScriptedUpstream) -> str:
    return f"http://127.0.0.1:{upstream.port}"


def test_streams_go_on_while_the_observer_stops_and_dies_and_another_one_takes_over(tmp_path: Path) -> None:
    record, count = tmp_path / "record.jsonl", 64
    begun, goes_on = threading.Barrier(count + 1), threading.Event()
    with scripted_upstream() as upstream, running_proxy(url_of(upstream), "--record", str(record)) as proxy:

        def stream(number: int) -> bytes:
            with connect(proxy.port) as client:
                body = json.dumps({"model": "m", "messages": MESSAGES, "user": str(number)}).encode()
                client.sendall(request_of("two_parts", body=body))
                answer = client.recv(65536)
                begun.wait(60)
                assert goes_on.wait(60)
                client.sendall(b"GET / HTTP/1.1\r\nHost: e\r\n\r\n")
                while not answer.endswith(b"0\r\n\r\n"):
                    answer += client.recv(65536)
                return answer

        with ThreadPoolExecutor(count) as pool:
            answers = [pool.submit(stream, number) for number in range(count)]
            begun.wait(60)
            first = observer_of(proxy)
            os.kill(first, signal.SIGSTOP)
            goes_on.set()
            assert len({answer.result(60) for answer in answers}) == 1
        os.kill(first, signal.SIGKILL)

        def is_recorded_again() -> bool:
            exchange(proxy.port, request_of("last_closed", body=b'{"model": "later", "prompt": "x"}'))
            return record.exists() and '"later"' in record.read_text()

        until(is_recorded_again)
        assert observer_of(proxy) != first
    assert any("traffic goes on" in line for line in proxy.lines)


async def test_what_waits_for_the_observer_is_bounded_and_counted(tmp_path: Path) -> None:
    settings = ObserverSettings(
        tmp_path / "record.jsonl", False, 1 << 30, 1, bytes(32), "radixkv", "127.0.0.1", None, 1 << 26
    )
    feed = Feed(settings, 1_000_000)
    running = asyncio.create_task(feed.run())

    def put(size: int) -> None:
        passage = Passage.of(b"/v1/completions", [], "http://e", 1 << 25)
        passage.add_request(b'{"model": "m", "prompt": "%b"}' % (b"x" * size))
        passage.answered(200, [])
        passage.end()
        feed.put(passage)

    try:
        put(10)  # before there is an observer
        while not (tmp_path / "record.jsonl").exists() or not (tmp_path / "record.jsonl").stat().st_size:
            await asyncio.sleep(0.01)
        os.kill(child_of(os.getpid()), signal.SIGSTOP)
        for _ in range(100):
            put(100_000)
            await asyncio.sleep(0)
        assert 80 < feed.num_dropped < 100, "about ten fit, and what the kernel holds"
        os.kill(child_of(os.getpid()), signal.SIGCONT)
        dropped = feed.num_dropped
        while len(lines_of(tmp_path / "record.jsonl")) != 101 - dropped:
            await asyncio.sleep(0.02)
        assert Passage.open_bytes == 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_observer_that_can_not_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A moment without descriptors or processes must not end the record for good."""
    tries: list[int] = []
    third = asyncio.Event()

    async def fail(*command: object, **settings: object) -> None:
        tries.append(1)
        if len(tries) == 3:
            third.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("radixkv_server.proxy.feed.asyncio.create_subprocess_exec", fail)
    monkeypatch.setattr("radixkv_server.proxy.feed._RESTART_S", 0.01)
    feed = Feed(None, 1000)
    running = asyncio.create_task(feed.run())
    await asyncio.wait_for(third.wait(), 10)
    running.cancel()
    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], asyncio.CancelledError)
    assert "can't be started" in caplog.text
    assert "Too many open files" in caplog.text


def test_a_long_body_is_passed_on_without_a_copy(tmp_path: Path) -> None:
    """Copies take the event loop's time, and all streams wait meanwhile."""
    feed, body = Feed(None, 1 << 30), bytearray(64 << 20)
    passage = Passage.of(b"/v1/completions", [], "http://e", 1 << 30)
    before = time.thread_time()
    passage.keep_request(body)
    feed.begin(passage)
    passage.end()
    feed.put(passage)
    assert time.thread_time() - before < 0.01
    assert not feed.num_dropped
    assert Passage.open_bytes == 0


def test_bodies_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv_server.proxy.passage._MAX_OPEN_BYTES", 1000)
    passages = [Passage.of(b"/v1/completions", [], "http://e", 600) for _ in range(3)]
    for one in passages:
        one.add_request(b"x" * 400)
    assert Passage.open_bytes == 800, "the third is handed on, and not kept"
    passages[0].add_answer(b"y" * 700)  # longer than what is kept of one
    assert [one.request is None for one in passages] == [False, False, True]
    assert passages[0].answer is None
    passages[1].add_request(b"x" * 300)
    assert passages[1].request is None
    for one in passages:
        one.end()
    assert Passage.open_bytes == 0


@pytest.mark.nightly
def test_the_observer_is_told_no_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "aws_secret_access_key", "HF_TOKEN", "DB_PASSWORD", "PLAIN_SETTING"):
        monkeypatch.setenv(name, "told-by-the-environment")
    with (
        scripted_upstream() as upstream,
        running_proxy(url_of(upstream), "--record", str(tmp_path / "record.jsonl")) as proxy,
    ):
        told = Path(f"/proc/{observer_of(proxy)}/environ").read_bytes().split(b"\0")
    assert [line for line in told if b"told-by-the-environment" in line] == [
        b"PLAIN_SETTING=told-by-the-environment"
    ]


@pytest.mark.nightly
def test_traffic_goes_on_without_the_observer(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    body = {"model": "scripted", "messages": MESSAGES, "max_tokens": 4}
    with live_server(ScriptedEngine()) as server, running_proxy(server.url, "--record", str(record)) as proxy:

        def post() -> int:
            return httpx.post(f"{proxy.url}/v1/chat/completions", json=body).status_code

        assert post() == 200
        os.kill(observer_of(proxy), signal.SIGSTOP)
        assert [post() for _ in range(5)] == [200] * 5, "while it stalls"
        os.kill(observer_of(proxy), signal.SIGKILL)
        assert [post() for _ in range(5)] == [200] * 5, "without it"
    assert any("traffic goes on" in line for line in proxy.lines)


def test_hashes_of_responses_keep_their_form_and_numbers_of_texts_are_hashed() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"age": 4711}'}
    body = {
        "model": "m",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Where is Ishmael, aged 4711?"}]},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": "ishmael@pequod.example"},
        ],
        "tools": [
            {"type": "function", "name": "find", "parameters": {"properties": {"age": {"minimum": 4711}}}}
        ],
        "logit_bias": {"4711": 1},
    }
    redaction = Redaction()
    hashed = redaction.value(body)
    told, made = make_record(body, path="/v1/responses"), make_record(hashed, path="/v1/responses")
    assert [block[1:4] for block in made.blocks] == [block[1:4] for block in told.blocks]
    assert made.blocks[1].text == redaction.text(told.blocks[1].text)
    tokens = {"model": "m", "prompt": [4711, 815, 4711], "messages": []}
    choice = {"logprobs": {"content": [{"token": "Ahab", "bytes": [65, 104]}]}, "arguments": {"age": 4711}}
    hashes = redaction.value(tokens)["prompt"]
    assert hashes[0] == hashes[2] != hashes[1]
    text = json.dumps([hashed, hashes, redaction.value(choice)])
    for word in ("Ishmael", "pequod", "Ahab", "[65, ", " 104]"):
        assert word not in text, word
    # A hash may have the same digits somewhere in it.
    assert not {"4711", "815"} & set(re.findall(r"\d+", text))


@pytest.mark.nightly
def test_a_record_that_cant_be_written_is_told_once_and_traffic_goes_on() -> None:
    body = {"model": "scripted", "messages": MESSAGES, "max_tokens": 2}
    with (
        live_server(ScriptedEngine()) as server,
        running_proxy(server.url, "--record", "/dev/full") as proxy,
    ):
        answers = [httpx.post(f"{proxy.url}/v1/chat/completions", json=body) for _ in range(5)]
        assert [one.status_code for one in answers] == [200] * 5
    assert len([line for line in proxy.lines if "--record" in line]) == 1, proxy.lines
