# SPDX-License-Identifier: Apache-2.0
"""Tools before the system prompt (`--tools-first`): what two folders share, and the advice that names it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from live_server import live_server
from scripted_engine import ScriptedEngine
from writing_engine import tokenizer_with

TURNS = (
    "{% for m in messages %}{% if not (tools and loop.first and m.role == 'system') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
)
TOOLS_SHOWN = "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
FIRST_TEXT = "{{ messages[0].content + '\n' if messages[0].role == 'system' }}"
#: By where they show the tools.
TEMPLATES = {
    "after the system prompt": "{% if tools %}<|im_start|>system\n"
    + f"{FIRST_TEXT}{TOOLS_SHOWN}<|im_end|>\n{{% endif %}}{TURNS}",
    "not at all": TURNS,
    "before it": "{% if tools %}" + TOOLS_SHOWN + "{% endif %}" + TURNS.replace("tools and", "false and"),
    "after all of the system's messages": "{% for m in messages if m.role == 'system' %}<|im_start|>system\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if tools %}" + TOOLS_SHOWN + "{% endif %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n",
}
TOOL = {"name": "count_ships", "description": "Count the ships in a harbour. " * 20}
PARAMETERS = {"type": "object", "properties": {"harbour": {"type": "string"}}}
RULES = "You are an agent of the harbour office.\n"


def body(folder: str) -> dict[str, Any]:
    system = f"{RULES}Working directory: {folder}\nBe brief."
    return {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "How many?"}],
        "tools": [{"type": "function", "function": {**TOOL, "parameters": PARAMETERS}}],
        "max_tokens": 2,
    }


def asked(name: str, *, tools_first: bool, caplog: Any = None) -> tuple[int, list[str], dict[str, Any]]:
    """Tokens found of the second of two folders, both prompts, and the advice on them."""
    tokenizer = tokenizer_with(chat_template=TEMPLATES[name])
    engine = ScriptedEngine(tokenizer=tokenizer, max_model_len=8192, num_blocks=2000, caches=True)
    with live_server(engine, tools_first=tools_first) as running, running.http() as client:
        for folder in ("/home/anna/red", "/home/anna/blue"):
            client.post("/v1/chat/completions", json=body(folder)).raise_for_status()
        latest = client.get("/v1/cache/requests").json()["data"][0]
        (point,) = client.get("/v1/cache/advice").json()["data"] or [{}]
        texts = [tokenizer.decode(one.prompt, skip_special_tokens=False) for one in engine.requests[-2:]]
        other = {key: body("/home/anna/grey")[key] for key in ("messages", "tools")}
        told = client.post("/v1/cache/explain", json=other).json()
        assert told["tools_first_tokens"] == (point["tools_first_tokens"] or None)
    return latest["cached_tokens"], texts, point


@pytest.mark.parametrize("name", ["after the system prompt", "not at all"])
def test_two_folders_share_the_tools_and_the_advice_says_how_much_that_is(name: str) -> None:
    found, texts, point = asked(name, tools_first=False)
    better, moved, after = asked(name, tools_first=True)
    for text in (*texts, *moved):
        assert text.count(TOOL["description"]) == text.count(RULES) == text.count("/home/anna/") == 1
    assert texts[0].index(RULES) < texts[0].index("count_ships")
    assert moved[0].index("count_ships") < moved[0].index(RULES)
    assert better - found > len(TOOL["description"])
    assert better - found == pytest.approx(point["tools_first_tokens"], abs=40), (
        "line breaks, and a message's frame"
    )
    assert "--tools-first" in point["advice"]
    assert f"{point['tools_first_tokens']:,} tokens" in point["advice"]
    assert after["tools_first_tokens"] is None
    assert "--tools-first" not in after["advice"]


@pytest.mark.parametrize("name", ["before it", "after all of the system's messages"])
def test_a_template_that_does_not_let_it_be_is_left_alone_and_the_log_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, texts, point = asked(name, tools_first=False)
    with caplog.at_level(logging.WARNING, "radixkv.server"):
        _, moved, _ = asked(name, tools_first=True)
    assert moved == texts
    assert point["tools_first_tokens"] is None
    (told,) = [record.message for record in caplog.records if "--tools-first" in record.message]
    assert ("shows tools before the system prompt" in told) is (name == "before it")
