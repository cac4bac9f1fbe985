# SPDX-License-Identifier: Apache-2.0
"""What Claude Code really sends, recorded of two versions: all is answered, and the cache finds it again.

The recordings in tests/data/claude_code have the shape of the requests as they were; what long texts said,
most of the tools and who asked were left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount, BetaRawMessageStreamEvent
from live_server import LiveServer, live_server
from pydantic import TypeAdapter
from scripted_engine import ScriptedEngine

RECORDED = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parents[3] / "data" / "claude_code").glob("*.json"))
}
EVENT: TypeAdapter[Any] = TypeAdapter(BetaRawMessageStreamEvent)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    models = sorted({request["body"]["model"] for request in RECORDED.values()})
    with live_server(
        ScriptedEngine(max_model_len=16384, num_blocks=1024), served_model_names=tuple(models)
    ) as running:
        yield running


def send(server: LiveServer, name: str, *, path: str | None = None, **changes: Any) -> httpx.Response:
    request = RECORDED[name]
    with server.http(headers=request["headers"]) as http:
        answer = http.post(path or request["path"], json={**request["body"], **changes})
    assert answer.status_code == 200, answer.text
    return answer


def prompt(server: LiveServer, name: str) -> str:
    """The prompt that a recorded request makes."""
    send(server, name)
    return server.engine.requests[-1].text


def test_there_are_recordings() -> None:
    assert len(RECORDED) >= 8
    assert {name.rsplit("-")[0] for name in RECORDED} == {"2.1.197", "2.1.330"}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_request(server: LiveServer, name: str) -> None:
    answer = send(server, name)
    events = [event.partition("data: ")[2] for event in answer.text.strip().split("\n\n")]
    read = [EVENT.validate_json(event) for event in events if '"ping"' not in event[:20]]
    assert (read[0].type, read[-1].type) == ("message_start", "message_stop")
    text = "".join(event.delta.text for event in read if event.type == "content_block_delta")
    whole = BetaMessage.model_validate_json(send(server, name, stream=False).content)
    assert text == whole.content[0].text == "ok"
    if RECORDED[name]["body"].get("context_management"):
        assert whole.context_management is not None
        assert whole.context_management.applied_edits == [], "all thinking is kept"
        assert read[-2].context_management == whole.context_management
    asked = server.engine.requests[-1]
    counted = {
        key: value
        for key, value in RECORDED[name]["body"].items()
        if key not in ("max_tokens", "stream", "metadata")
    }
    with server.http() as http:
        tokens = http.post("/v1/messages/count_tokens?beta=true", json=counted)
    assert BetaMessageTokensCount.model_validate_json(tokens.content).input_tokens == len(asked.prompt)
    usage = whole.usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == len(
        asked.prompt
    )


def test_its_first_request_only_asks_whether_a_server_is_there(server: LiveServer) -> None:
    with server.http() as http:
        assert http.head("/").status_code == 200


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("2.1.197-first-turn", "2.1.197-second-turn"),
        ("2.1.330-first-turn", "2.1.330-tools-found"),
    ],
)
def test_a_turn_begins_with_the_one_before(server: LiveServer, earlier: str, later: str) -> None:
    before, after = prompt(server, earlier), prompt(server, later)
    options = before.rpartition("options:")[0]
    assert len(options) > 250
    assert after.startswith(options)


def test_tools_are_shown_where_they_were_found(server: LiveServer) -> None:
    """The list of tools stays what it was, so the cache holds; what was found can be called."""
    text = prompt(server, "2.1.330-tools-found")
    assert text.startswith("tools:['Agent', 'Bash', 'Edit', 'Read', 'ToolSearch']\n")
    found = text.index("From now on this function can be called:")
    assert found > text.index("call ToolSearch(")
    for name in ("WebSearch", "TaskCreate"):
        assert text.index(f'"name": "{name}"') > found
    assert "DeferredToolPlaceholder" not in text
    send(server, "2.1.330-tools-found", tool_choice={"type": "tool", "name": "TaskCreate"}, max_tokens=20)
    assert server.engine.requests[-1].params.structured is not None


def test_a_search_that_a_server_would_make_is_left_out(server: LiveServer) -> None:
    answer = send(server, "2.1.330-web-search")
    assert "tools:" not in server.engine.requests[-1].text
    assert "tools: web_search_20250305" in answer.headers["warning"]


def test_the_effort_of_a_turn(server: LiveServer) -> None:
    messages = RECORDED["2.1.330-first-turn"]["body"]["messages"]
    assert messages[-1]["output_config"] == {"effort": "medium"}
    send(server, "2.1.330-first-turn", output_config={"effort": "max"})
    assert "'reasoning_effort', 'medium'" in server.engine.requests[-1].text
    send(server, "2.1.330-web-search", output_config={"effort": "max"})
    assert "'reasoning_effort', 'high'" in server.engine.requests[-1].text


def test_what_has_no_effect_is_named(server: LiveServer) -> None:
    warning = send(server, "2.1.330-first-turn").headers["warning"]
    # A note on the format comes once.
    assert re.fullmatch(r'299 radixkv "without effect: metadata(; .*)?"', warning)


def test_an_hour(server: LiveServer) -> None:
    usage = json.loads(send(server, "2.1.330-one-hour", stream=False).content)["usage"]
    creation = usage["cache_creation"]
    assert creation["ephemeral_5m_input_tokens"] == 0
    assert usage["cache_read_input_tokens"] + creation["ephemeral_1h_input_tokens"] > 0
