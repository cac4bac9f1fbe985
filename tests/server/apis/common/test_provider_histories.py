# SPDX-License-Identifier: Apache-2.0
"""Histories that began at a provider: its items and blocks become calls and results, the same each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

Json = dict[str, Any]
FUNCTION: Json = {"type": "function", "name": "late", "parameters": {"type": "object"}}
IMAGE = "data:image/png;base64,AAAA"

ITEMS: dict[str, tuple[list[Json], list[str]]] = {
    "web_search_call": (
        [{"id": "ws_1", "status": "completed", "action": {"type": "search", "query": "tides"}}],
        ["call web_search(", "tides", "tool\ncompleted"],
    ),
    "file_search_call": (
        [{"id": "fs_1", "status": "completed", "queries": ["tides"], "results": [{"text": "high at 9"}]}],
        ["call file_search(", "tides", "high at 9"],
    ),
    "code_interpreter_call": (
        [{"id": "ci", "code": "1+1", "container_id": "c", "outputs": [{"type": "logs", "logs": "two"}]}],
        ["call code_interpreter(", "1+1", "two"],
    ),
    "image_generation_call": (
        [{"id": "ig_1", "status": "completed", "result": "AAAA", "revised_prompt": "a cat"}],
        ["call image_generation(", "a cat", "[image "],
    ),
    "mcp_call": (
        [{"id": "mcp_1", "server_label": "sea", "name": "tide", "arguments": '{"day": 1}', "output": "high"}],
        ["call sea.tide({'day': 1})", "tool\nhigh"],
    ),
    "mcp_list_tools": (
        [{"id": "mcpl", "server_label": "sea", "tools": [{"name": "tide", "input_schema": {}}]}],
        ["call mcp_list_tools(", "sea", '"name": "tide"'],
    ),
    "mcp_approval_request": (
        [
            {"id": "mcpr_1", "server_label": "sea", "name": "tide", "arguments": "{}"},
            {
                "type": "mcp_approval_response",
                "approval_request_id": "mcpr_1",
                "approve": False,
                "reason": "no",
            },
        ],
        ["call sea.tide({})", "tool\ndenied\nno"],
    ),
    "local_shell_call": (
        [
            {
                "id": "ls",
                "call_id": "c1",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"]},
            },
            {"type": "local_shell_call_output", "id": "c1", "output": "a.py"},
        ],
        ["call local_shell(", "'ls'", "tool\na.py"],
    ),
    "shell_call": (
        [
            {"call_id": "c1", "action": {"commands": ["ls"]}},
            {
                "type": "shell_call_output",
                "call_id": "c1",
                "output": [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
            },
        ],
        ["call shell(", "'ls'", '"stdout": "a.py"'],
    ),
    "apply_patch_call": (
        [
            {"call_id": "c1", "status": "completed", "operation": {"type": "delete_file", "path": "a.py"}},
            {"type": "apply_patch_call_output", "call_id": "c1", "status": "failed"},
        ],
        ["call apply_patch(", "a.py", "tool\nfailed"],
    ),
    "computer_call": (
        [
            {"id": "cu", "call_id": "c1", "action": {"type": "screenshot"}, "pending_safety_checks": []},
            {
                "type": "computer_call_output",
                "call_id": "c1",
                "output": {"type": "computer_screenshot", "image_url": IMAGE},
            },
        ],
        ["call computer(", "screenshot", "tool\n[image "],
    ),
    "tool_search_call": (
        [
            {"call_id": "c1", "execution": "client", "arguments": {"query": "late"}},
            {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": [FUNCTION]},
        ],
        ["call tool_search({'query': 'late'})", '"name": "late"'],
    ),
    "additional_tools": ([{"role": "developer", "tools": [FUNCTION]}], ["system\nFrom now on", '"late"']),
    "program": (
        [
            {"id": "p", "call_id": "c1", "code": "f()", "fingerprint": "x"},
            {"type": "program_output", "id": "q", "call_id": "c1", "result": "5", "status": "completed"},
        ],
        ["call program(", "f()", "tool\n5"],
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(num_blocks=256)) as running:
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


NAMES = ("id", "approval_request_id")


@pytest.mark.parametrize("kind", ITEMS)
def test_items_become_calls_and_results(server: LiveServer, http: httpx.Client, kind: str) -> None:
    items, shown = ITEMS[kind]
    said = {"role": "user", "content": "hello"}
    prompts = []
    for ids in ("a", "b"):
        sent = [
            {"type": kind, **item, **{name: item[name] + ids for name in NAMES if name in item}}
            if at == 0 or "approval_request_id" in item
            else item
            for at, item in enumerate(items)
        ]
        back = [said, *sent]
        answer = http.post("/v1/responses", json={"model": "scripted", "input": back})
        assert answer.status_code == 200, answer.text
        prompts.append(server.engine.requests[-1].text)
    assert prompts[0] == prompts[1], "ids and repetition change nothing"
    for words in shown:
        assert words in prompts[0]
    more = {"model": "scripted", "input": "go on", "previous_response_id": answer.json()["id"]}
    assert http.post("/v1/responses", json=more).status_code == 200
    longer = server.engine.requests[-1].text
    assert longer.startswith(prompts[0]), "a stored conversation renders to the same text"
    if "late" in str(items):
        call = {"name": "late", "arguments": {}}
        asked = [
            *back,
            {"role": "user", "content": f"say:<tool_call>\n{call}\n</tool_call>".replace("'", '"')},
        ]
        (made,) = http.post("/v1/responses", json={"model": "scripted", "input": asked}).json()["output"]
        assert (made["type"], made["name"]) == ("function_call", "late")


def test_items_without_what_they_say_are_refused(http: httpx.Client) -> None:
    for kind in ITEMS:
        if kind not in ("code_interpreter_call", "image_generation_call"):
            answer = http.post("/v1/responses", json={"model": "scripted", "input": [{"type": kind}]})
            assert answer.status_code == 400, kind
            assert answer.json()["error"]["param"] == "input[0]"
    answer = http.post("/v1/responses", json={"model": "scripted", "input": [{"type": "web_crawl_call"}]})
    assert "web_crawl_call" in answer.json()["error"]["message"]
    assert "web_search_call" in answer.json()["error"]["message"], "the message lists the known ones"


def test_an_item_changes_the_effort_and_the_form_of_later_answers(
    server: LiveServer, http: httpx.Client
) -> None:
    def ask(**fields: Any) -> Json:
        answer = http.post("/v1/responses", json={"model": "scripted", **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def update(**fields: Any) -> Json:
        return {"type": "configuration_update", **fields}

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "a", "schema": schema}
    said = {"role": "user", "content": "say:no"}
    changed = [said, update(reasoning={"effort": "high"}), update(text={"format": form})]
    first = ask(input=changed, reasoning={"effort": "low"}, max_output_tokens=16)
    asked = server.engine.requests[-1]
    assert "('reasoning_effort', 'high')" in asked.text
    assert (first["reasoning"]["effort"], first["text"]["format"]["type"]) == ("high", "json_schema")
    assert first["output"][-1]["content"][0]["text"].startswith('{"a"')
    plain = asked.text.partition("options:")[0]
    later = ask(
        previous_response_id=first["id"],
        input=[update(text={"format": {"type": "text"}}), {"role": "user", "content": "say:yes"}],
    )
    asked = server.engine.requests[-1]
    assert "('reasoning_effort', 'high')" in asked.text, "until it is changed"
    assert asked.text.startswith(plain), "it writes nothing into the prompt itself"
    assert later["output"][-1]["content"][0]["text"].startswith("yes"), "the form is free again"
    counted = {"model": "scripted", "input": changed}
    tokens = http.post("/v1/responses/input_tokens", json=counted).json()["input_tokens"]
    assert tokens == first["usage"]["input_tokens"]
    empty = http.post("/v1/responses", json={"model": "scripted", "input": [said, update()]})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "input[1]")


SEARCHED = {"type": "server_tool_use", "id": "st_1", "name": "web_search", "input": {"query": "tides"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "st_1",
    "content": [
        {
            "type": "web_search_result",
            "url": "https://a.example",
            "title": "Tides",
            "encrypted_content": "XYZ",
        }
    ],
}
BLOCKS: dict[str, tuple[list[Json], list[str]]] = {
    "web search": ([SEARCHED, FOUND], ["call web_search({'query': 'tides'})", '"title": "Tides"']),
    "mcp": (
        [
            {"type": "mcp_tool_use", "id": "m", "name": "tide", "server_name": "sea", "input": {"day": 1}},
            {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "high"}]},
        ],
        ["call tide({'day': 1})", "tool\nhigh"],
    ),
    "failed mcp": (
        [
            {"type": "mcp_tool_use", "id": "m", "name": "tide", "server_name": "sea", "input": {}},
            {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": True, "content": "no sea"},
        ],
        ["tool\nError: no sea"],
    ),
    "code": (
        [
            {"type": "server_tool_use", "id": "c", "name": "bash_code_execution", "input": {"command": "ls"}},
            {
                "type": "bash_code_execution_tool_result",
                "tool_use_id": "c",
                "content": {"type": "bash_code_execution_result", "stdout": "a.py", "return_code": 0},
            },
        ],
        ["call bash_code_execution(", '"stdout": "a.py"'],
    ),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_become_calls_and_results(server: LiveServer, http: httpx.Client, kind: str) -> None:
    blocks, shown = BLOCKS[kind]
    text = {"type": "text", "text": "So it is."}
    turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": [*blocks, text]}]
    body = {"model": "scripted", "max_tokens": 4, "messages": [*turn, {"role": "user", "content": "more"}]}
    prompts = []
    for _ in range(2):
        answer = http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        prompts.append(server.engine.requests[-1].text)
    assert prompts[0] == prompts[1]
    for words in [*shown, "assistant\nSo it is."]:
        assert words in prompts[0]
    assert "XYZ" not in prompts[0], "what only the provider can read is left out"


def test_a_paused_turn_goes_on_after_the_result(server: LiveServer, http: httpx.Client) -> None:
    turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": [SEARCHED, FOUND]}]
    body: Json = {"model": "scripted", "max_tokens": 4, "messages": turn}
    assert http.post("/v1/messages", json=body).status_code == 200
    assert server.engine.requests[-1].text.endswith("assistant\n")
    body["messages"] = [turn[0], {"role": "assistant", "content": [SEARCHED]}]
    answer = http.post("/v1/messages", json=body)
    assert (answer.status_code, "followed by its result" in answer.text) == (400, True)
