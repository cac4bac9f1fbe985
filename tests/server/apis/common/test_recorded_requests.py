# SPDX-License-Identifier: Apache-2.0
"""What real clients sent, recorded with long texts cut, is taken as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import live_server
from scripted_engine import ScriptedEngine

FILES = sorted((Path(__file__).parent / "recorded_requests").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_real_requests_are_taken(file: Path) -> None:
    recorded: list[dict[str, Any]] = json.loads(file.read_text())["requests"]
    models = sorted({request["body"]["model"] for request in recorded})
    engine = ScriptedEngine(max_model_len=200_000)
    with live_server(engine, served_model_names=tuple(models)) as server, server.http() as client:
        for request in recorded:
            answer = client.post(request["path"], json=request["body"])
            assert answer.status_code == 200, answer.text
            assert "(unknown)" not in answer.headers.get("warning", "")


def test_codex_is_told_what_it_offers_in_vain() -> None:
    [file] = [file for file in FILES if file.stem == "codex"]
    request = json.loads(file.read_text())["requests"][0]
    engine = ScriptedEngine(max_model_len=200_000)
    with live_server(engine, served_model_names=("m",)) as server, server.http() as client:
        answer: httpx.Response = client.post(request["path"], json=request["body"])
    expected = '299 radixkv "without effect: client_metadata, tools of type web_search; '
    assert answer.headers["warning"].startswith(expected)
    prompt = bytes(token for token in engine.requests[-1].prompt if token < 256).decode()
    assert "spawn_agent" in prompt
    assert "web_search" not in prompt
