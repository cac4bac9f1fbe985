# SPDX-License-Identifier: Apache-2.0
"""Texts that no display takes, wherever they stand in a request or an answer, are shown and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from pydantic_core import from_json
from typer.testing import CliRunner

from radixkv.cli.main import command_tree
from radixkv.observe.audit.body_limits import BodyLimits
from radixkv.observe.audit.exchange import Exchange
from radixkv.observe.audit.rule_sets import rule_set
from radixkv_server.proxy.console import make_app
from radixkv_server.proxy.feed import Seen
from radixkv_server.proxy.key_removal import record_without_keys
from radixkv_server.proxy.record_file import RecordFile
from radixkv_server.proxy.redaction import Redaction
from radixkv_server.proxy.watched import Watched

TEXTS = {
    "a lone surrogate": r"\ud800",
    "halves the wrong way round": r"\ude00\ud83d and \udfff",
    "nested in JSON": r"{\"time\": \"\\ud800\", \"more\": [\"\\udc00\"]}",
    "NUL and escapes of a terminal": r"\u0000\u001b[2J\u009b31m\u0007",
    "marks of direction": r"\u202e\u2066\u200f\u2028",
    "huge": "x" * 20_000,
}


def exchanges(text: str) -> list[Exchange]:
    """Requests in all dialects whose every word is the text, of which some are told again in other words."""
    messages = f'"messages": [{{"role": "user", "content": "{text} %d"}}]'
    call = f'{{"type": "function", "id": "{text}", "function": {{"name": "{text}", "arguments": "{text}"}}}}'
    tool = f'{{"type": "function", "function": {{"name": "{text}", "parameters": {{"{text}": "{text}%d"}}}}}}'
    said = f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\ndata: [DONE]\n\n'
    bodies = [
        (
            "/v1/chat/completions",
            f'{{"model": "{text}", {messages}, "tools": [{tool}], "cache_salt": "{text}"}}',
        ),
        ("/v1/chat/completions", f'{{{messages[:-1]}, {{"role": "{text}", "tool_calls": [{call}]}}]}}'),
        ("/v1/messages", f'{{"system": "{text}%d", {messages}, "metadata": {{"session_id": "{text}"}}}}'),
        ("/v1/responses", f'{{"input": "{text} %d", "conversation": "{text}"}}'),
        ("/v1/completions", f'{{"prompt": "{text} %d"}}'),
    ]
    return [
        Exchange(path, body.replace("%d", str(turn)).encode(), answer.encode(), time=float(turn))
        for path, body in bodies
        for turn in range(2)
        for answer in (said, f'{{"choices": [{{"message": {{"content": "{text}"}}}}], "model": "{text}"}}')
    ]


@pytest.mark.parametrize("name", TEXTS)
async def test_everything_that_shows_a_record_still_answers(name: str, tmp_path: Path) -> None:
    watched = Watched(rule_set("radixkv"), 1 << 26)
    files = [RecordFile(tmp_path / "log.jsonl", 1 << 30, 1, None)]
    files.append(RecordFile(tmp_path / "redacted.jsonl", 1 << 30, 1, Redaction()))
    for number, exchange in enumerate(exchanges(TEXTS[name])):
        cleaned, record = record_without_keys(exchange, (), BodyLimits())
        seen = Seen(number, cleaned, True, "http://e", "", (), True, 0)
        watched.take(seen, record)
        for file in files:
            file.write(seen, record)
    app = httpx.ASGITransport(make_app(watched, None, "127.0.0.1"))
    async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as client:
        paths = ["", "/requests", "/tree", "/advice", "/tree?search=x", "/tree?search=%ED%A0%80"]
        listed = from_json((await client.get("/v1/cache/requests")).content)["data"]
        paths += [f"/requests/{one['id']}" for one in listed]
        assert len(listed) == 20
        for path in paths:
            answer = await client.get(f"/v1/cache{path}")
            assert answer.status_code == 200, path
            from_json(answer.content)  # which takes no lone surrogate
            assert len(answer.content) < 100_000, path

    for log in ("log.jsonl", "redacted.jsonl"):
        for line in (tmp_path / log).read_bytes().splitlines():
            from_json(line)
        page, report = tmp_path / "page.html", tmp_path / "report.json"
        arguments = ["audit", str(tmp_path / log), "--html", str(page), "--json", str(report)]
        done = CliRunner(env={"COLUMNS": "160"}).invoke(command_tree(), arguments)
        assert done.exit_code == 0, done.output
        assert from_json(report.read_bytes())["summary"]["requests"] == 20
        assert "</html>" in page.read_bytes().decode()
        assert not [char for char in done.output if not char.isprintable() and char != "\n"]


def test_explain_shows_them_too(tmp_path: Path) -> None:
    """Of prompts in files, which a server does not refuse before."""
    from radixkv.cli.explain_command import lines_of

    around = {"position": 3, "before": "\x9b31m\u202e", "prompt": "\x00", "cached": "x", "with": None}
    report = {
        "cached_tokens": 3,
        "prompt_tokens": 4,
        "reason": "diverged",
        "around": around,
        "advice": "\x1b[2J",
    }
    text = "\n".join(lines_of(tmp_path / "a\udcff.json", report))
    assert all(char.isprintable() for char in text.replace("\n", ""))
    json.dumps(text, ensure_ascii=False).encode()
