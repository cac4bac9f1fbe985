# SPDX-License-Identifier: Apache-2.0
"""The console's playground in a real browser: streaming, what was cached, tools, what breaks, code."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from browser_page import axe_findings, console, expect, overflows
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

from radixkv import PrefixCache
from radixkv.grammar.grammar_text import json_schema

SYSTEM = "It is 8:15. You are the helpful assistant of the harbour office. Count the ships every evening."


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(max_model_len=8192, caches=True)) as running:
        yield running


@pytest.fixture(autouse=True)
def empty_cache(server: LiveServer) -> None:
    server.engine.prefix_cache = PrefixCache(1000, 16)


def say(page: Any, text: str, answers: int) -> Any:
    """Send a message; the last of so many answers, once it is whole."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    page.locator(".said.assistant .facts-line a").nth(answers - 1).wait_for()
    return page.locator(".said.assistant").nth(answers - 1)


def test_a_conversation_shows_what_was_cached_and_what_an_edit_breaks(
    browser: Any, server: LiveServer
) -> None:
    with console(browser, server.url, "playground") as page:
        page.get_by_label("System prompt").fill(SYSTEM)
        page.get_by_label("Seed").fill("7")
        first = say(page, "How many? say:Three ships.", 1)
        expect(first.locator(".words").last).to_have_text("Three ships.")
        asked = server.engine.requests[-1]
        assert asked.params.seed == 7
        prompt = len(asked.prompt)
        expect(first).to_contain_text(f"0 of {prompt} prompt tokens cached (0%)")
        expect(first).to_contain_text("(this one)")
        second = say(page, "And <b>now</b>? say:Four.", 2)
        asked = server.engine.requests[-1]
        assert prompt <= asked.outcome.num_cached_tokens < len(asked.prompt)
        cached = asked.outcome.num_cached_tokens
        expect(second).to_contain_text(f"{cached} of {len(asked.prompt)} prompt tokens cached")
        expect(second).to_contain_text("first token after")
        expect(second).to_contain_text("(estimated)")
        second.get_by_role("button", name="Measure").click()
        second.get_by_text("(measured)").wait_for()
        assert server.engine.requests[-1].salt.startswith("cold-")
        assert server.engine.requests[-1].outcome.num_cached_tokens == 0

        page.get_by_label("System prompt").fill(SYSTEM.replace("8:15", "9:47"))
        page.get_by_role("button", name="See what breaks").click()
        broken = page.locator(".breakage")
        expect(broken).to_contain_text("A time at token 14, in the system prompt (“9:47” instead of “8:15”)")
        expect(broken.get_by_role("region", name="Edited").locator("mark").first).to_have_text("9")
        expect(broken.get_by_role("region", name="As sent before").locator("mark").first).to_have_text("8")
        assert axe_findings(page) == []

        second.get_by_role("link", name="Path in the tree").click()
        page.get_by_label("Text of the node").filter(has_text="It is 8:15").wait_for()
        page.go_back()
        page.get_by_label("Conversation").get_by_text("Three ships.").last.wait_for()
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator(".said")).to_have_count(0)


def test_stopping_and_refusals(browser: Any, server: LiveServer) -> None:
    engine = server.engine
    with console(
        browser, server.url, "playground", color_scheme="dark", viewport={"width": 360, "height": 800}
    ) as page:
        page.get_by_text("JSON schema of the answer").click()
        page.get_by_label("The answer will be JSON").fill("{")
        page.get_by_label("Message").fill("Hello?")
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="this is no JSON").wait_for()
        page.get_by_label("The answer will be JSON").fill("")
        engine.hold_at = 4
        engine.gate.clear()
        try:
            page.get_by_label("Message").fill("Hello? say:Many words")
            page.keyboard.press("Enter")
            page.locator(".said.assistant .words").filter(has_text="Many").wait_for()
            page.get_by_role("button", name="Stop").click()
            page.get_by_text("ended by stopped").wait_for()
            engine.wait_until(lambda: engine.requests[-1].aborted)  # held, it can't end before
        finally:
            engine.gate.set()
        page.get_by_role("button", name="Send").and_(page.locator(":enabled")).wait_for()
        assert not overflows(page)
        assert axe_findings(page) == []


def test_tools_and_reasoning(browser: Any, server: LiveServer) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    with console(browser, server.url, "playground") as page:
        page.get_by_text("Tools (JSON)").click()
        page.get_by_role("button", name="Example of tools").click()
        answer = say(page, f"Weather? say:<think>Ask for it.</think>{call}", 1)
        expect(answer.locator(".thought")).to_contain_text("Ask for it.")
        expect(answer).to_contain_text("Calls get_weather")
        assert json.loads(answer.locator(".call pre").inner_text()) == {"city": "Rome"}
        page.get_by_label("Result of get_weather").fill("say:It rains.")
        page.get_by_role("button", name="Send").click()
        page.locator(".said.assistant").nth(1).locator(".words").last.filter(has_text="It rains.").wait_for()
        assert "say:It rains." in server.engine.requests[-1].text


def test_an_answer_of_a_schema(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url, "playground") as page:
        page.get_by_text("JSON schema of the answer").click()
        page.get_by_role("button", name="Example of a schema").click()
        answer = say(page, 'Is it raining? say:{"answer": "It is", "sure": true}', 1)
        assert set(json.loads(answer.locator(".words").last.inner_text())) == {"answer", "sure"}
        structured = server.engine.requests[-1].params.structured
        assert json.loads(json_schema(structured) or "")["required"] == ["answer", "sure"]
        page.get_by_label("anthropic-python").check()
        expect(page.get_by_label("The request as code")).to_contain_text("output_config")


def run(language: str, code: str) -> str:
    """What it prints."""
    if language == "curl":
        return subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names: dict[str, Any] = {}
        exec(code, names)  # a process of its own would spend seconds on imports
        names["client"].close()
    return printed.getvalue()


@pytest.mark.nightly
def test_the_code_runs(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url, "playground") as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        page.get_by_label("System prompt").fill('It\'s "quoted"\nand has two lines.')
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Most tokens").fill("50")
        page.get_by_text("Tools (JSON)").click()
        page.get_by_role("button", name="Example of tools").click()
        page.get_by_label("Message").fill("Don't say:Aye, it's $HOME")
        code = page.get_by_label("The request as code")
        for language in ("curl", "openai-python", "anthropic-python"):
            page.get_by_label(language).check()
            text = code.inner_text()
            page.get_by_role("button", name="Copy").click()
            printed = run(language, text)
            asked = server.engine.requests[-1]
            assert (asked.params.temperature, asked.params.max_tokens) == (0.5, 50), language
            assert 'It\'s "quoted"\nand has two lines.' in asked.text
            assert "get_weather" in asked.text
            assert asked.text.endswith("Don't say:Aye, it's $HOMEassistant\n")
            if language == "curl":
                assert printed.rstrip().endswith("data: [DONE]")
            else:
                assert "Aye, it's $HOME" in printed
                assert "cache" in printed
            copied = "text => navigator.clipboard.readText().then((found) => found === text)"
            page.wait_for_function(copied, arg=text)
