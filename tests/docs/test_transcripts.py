# SPDX-License-Identifier: Apache-2.0
"""The transcripts of the documentation are true: real curl, a real socket, a scripted model.

A transcript is a fenced block whose lines `$ curl ...` are followed by the answer. The transcripts of a page
are one session, in order. Answers must have the shown status (an error is shown as one), and every key and
every event that is shown; values are examples, but a shown id, or list of tokens, stands for what was got.
At night the embedded model answers curl.md, and what is shown of the prompts' tokens must be true.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

from radixkv import EngineConfig
from radixkv.engine.config import EMBEDDED_MODEL
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv_server.app import APIS

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```[a-z]*\n(\$ curl .*?)^```", re.MULTILINE | re.DOTALL)
CANDIDATES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in CANDIDATES if BLOCK.search(page.read_text(encoding="utf-8"))]
KEY, ADMIN_KEY = "a-key-of-ada", "a-key-of-the-operator"


@dataclass(frozen=True)
class Transcript:
    command: str
    shown: str

    @property
    def is_stream(self) -> bool:
        return self.command.startswith("curl -sN")

    @property
    def is_error(self) -> bool:
        return self.shown.startswith(('{"error"', '{"type": "error"'))

    @property
    def route(self) -> tuple[str, str]:
        """Method and path."""
        given = re.search(r"-X (\w+)", self.command)
        method = given[1] if given else ("POST" if " -d " in self.command else "GET")
        path = re.search(r"\$URL(/[^\s\"?]*)", self.command)
        assert path, self.command
        return method, path[1]


def transcripts(page: Path) -> list[Transcript]:
    found = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for session in re.split(r"^\$ (?=curl )", block, flags=re.MULTILINE)[1:]:
            # A command ends where the answer begins: with JSON, an event, or a comment of metrics.
            command, _, shown = re.split(r'\n(?=()[{\w#"])', session, maxsplit=1)
            found.append(Transcript(command, shown.strip()))
    return found


def shown_keys(shown: str) -> set[str]:
    return set(re.findall(r'(?<!\\)"([^"\\\n]+)":', shown))


def keys_of(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    return set(value).union(*map(keys_of, value.values())) if isinstance(value, dict) else set()


def shown_events(text: str) -> set[str]:
    return set(re.findall(r"^event: (\S+)$", text, re.MULTILINE))


def data_of(text: str) -> list[Any]:
    """The JSON of an answer, or of the data of its events."""
    lines = re.findall(r"^data: (.*)$", text, re.MULTILINE) or [text]
    return [json.loads(line) for line in lines if line.startswith(("{", "[")) and line != "[DONE]"]


@contextmanager
def prepared_server() -> Iterator[LiveServer]:
    """A server that others have used already: what the pages' examples say is cached, is."""
    engine = ScriptedEngine(caches=True)
    with live_server(engine, api_keys=(f"ada={KEY}",), admin_keys=(f"operator={ADMIN_KEY}",)) as server:
        with server.http(headers={"x-api-key": KEY}) as client:
            for minute in range(10, 16):
                text = f"Today is 2026-11-21 08:{minute}. Count the ships every evening and write them down."
                client.post("/v1/completions", json={"prompt": text}).raise_for_status()
            system = {"role": "system", "content": "You are ..."}
            messages = [system, {"role": "user", "content": "Hi."}]
            client.post("/v1/chat/completions", json={"messages": messages}).raise_for_status()
        yield server


def run(transcript: Transcript, server: LiveServer, ids: dict[str, str]) -> tuple[int, str]:
    """Status and body; of a stream as much as there is until all that is shown has come."""
    command = transcript.command
    for shown, real in ids.items():
        command = command.replace(shown, real)
    environment = {
        **os.environ,
        "URL": server.url,
        "KEY": KEY,
        "ADMIN_KEY": ADMIN_KEY,
        "MODEL": server.engine.model_name,
    }
    script = command.replace("curl ", r"curl --max-time 20 -w '\n%{http_code}' ", 1)
    if "/events" in command:
        return 200, _read_events(script, environment, server, shown_events(transcript.shown))
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=30)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def _read_events(script: str, environment: dict[str, str], server: LiveServer, wanted: set[str]) -> str:
    """What an endless stream says until all wanted events have come, while others use the server."""
    stop = threading.Event()

    def others() -> None:
        with server.http(headers={"x-api-key": KEY}) as client:
            for number in range(1000):
                client.post("/v1/completions", json={"prompt": f"{number}, something new for the cache"})
                if stop.wait(0.05):
                    return

    user = threading.Thread(target=others)
    user.start()
    text = ""
    try:
        with subprocess.Popen(
            ["bash", "-c", "exec " + script], env=environment, stdout=subprocess.PIPE, text=True
        ) as curl:
            assert curl.stdout is not None
            for line in curl.stdout:
                text += line
                if line == "\n" and shown_events(text) >= wanted:
                    break
            curl.terminate()
    finally:
        stop.set()
        user.join()
    return text


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl (apt-get install curl)")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_transcripts(page: Path) -> None:
    ids: dict[str, str] = {}
    with prepared_server() as server:
        for transcript in transcripts(page):
            status, body = run(transcript, server, ids)
            assert (status >= 400) == transcript.is_error, (transcript.command, status, body)
            data = data_of(body)
            assert shown_keys(transcript.shown) <= keys_of(data), (transcript.command, body)
            assert shown_events(transcript.shown) <= shown_events(body), (transcript.command, body)
            assert ("data: [DONE]" in transcript.shown) == ("data: [DONE]" in body)
            remember(transcript, body, ids)


def remember(transcript: Transcript, body: str, ids: dict[str, str]) -> None:
    """Note which id, or list of tokens, was got in the place of the shown one."""
    for pattern in (r'"id": ?"([^"]+)"', r'"tokens": ?(\[\d[\d, ]*\])'):
        shown, real = re.search(pattern, transcript.shown), re.search(pattern, body)
        if shown and real:
            ids.setdefault(shown[1], real[1])


#: What is counted of prompts; answers, and their tokens, are examples.
COUNTED = re.compile(
    r'"(prompt_tokens|input_tokens|\w*cached_tokens|cache_write_tokens|pinned_tokens|cache_\w+_input_tokens|'
    r"\w*missed\w*_tokens|\w+_reusable_tokens|shared_tokens|reused_tokens|position|tokens|count|"
    r'prompt_eval_count)": ?(\d+|\[\d[\d, ]*\])'
)


def counted(text: str) -> set[tuple[str, str]]:
    return {(name, value.replace(" ", "")) for name, value in COUNTED.findall(text)}


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl (apt-get install curl)")
def test_shown_tokens_are_those_of_the_embedded_model() -> None:
    engine = AsyncEngine.from_config(EngineConfig(EMBEDDED_MODEL, num_blocks=1024, warm_up="off"))
    ids: dict[str, str] = {}
    compared = 0
    try:
        with live_server(engine, api_keys=(f"ada={KEY}",), admin_keys=(f"operator={ADMIN_KEY}",)) as server:
            for transcript in transcripts(ROOT / "docs" / "curl.md"):
                _, body = run(transcript, server, ids)
                remember(transcript, body, ids)
                assert counted(transcript.shown) <= counted(body), (transcript.command, body)
                compared += len(counted(transcript.shown))
    finally:
        asyncio.run(engine.close())
    assert compared > 30


def test_every_route_has_a_transcript() -> None:
    shown = {transcript.route for page in PAGES for transcript in transcripts(page)}
    missing = []
    for api in APIS:
        for route in api.router.routes:
            pattern = re.sub(r"\{[^}]+\}", r"[^/]+", getattr(route, "path", ""))
            methods = sorted(set(getattr(route, "methods", ())) - {"HEAD"})
            missing += [
                f"{method} {pattern}"
                for method in methods
                if not any(method == used and re.fullmatch(pattern, path) for used, path in shown)
            ]
    assert missing == [], "write one into docs/curl.md"
