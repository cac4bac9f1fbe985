# SPDX-License-Identifier: Apache-2.0
"""The playground against the embedded model: a real answer streams in, and its second turn is cached."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from browser_page import console, expect
from live_server import LiveServer, live_server

from radixkv import EngineConfig
from radixkv.entrypoints.async_engine import AsyncEngine

CITIES = ["Madrid", "Lisbon"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = AsyncEngine.from_config(EngineConfig(num_blocks=128, max_model_len=1024, dtype="float32"))
    with live_server(engine) as running:
        yield running
    # In a thread: where a browser runs, this one has an event loop already.
    with ThreadPoolExecutor(1) as closing:
        closing.submit(asyncio.run, engine.close()).result()


def test_two_turns_and_a_schema_with_the_embedded_model(server: LiveServer, browser: Any) -> None:
    with console(browser, server.url, "playground") as page:
        page.get_by_label("System prompt").fill("You are a patient assistant. Answer in one sentence.")
        page.get_by_label("Most tokens").fill("8")
        page.get_by_label("Temperature").fill("0")
        counts = []
        for index, text in enumerate(("What is the capital of France?", "And of Italy?")):
            page.get_by_label("Message").fill(text)
            page.keyboard.press("Enter")
            page.locator(".said.assistant .facts-line a").nth(index).wait_for(timeout=60_000)
            answer = page.locator(".said.assistant").nth(index)
            expect(answer.locator(".words").last).not_to_be_empty()
            found = re.search(r"(\d+) of (\d+) prompt tokens cached", answer.inner_text())
            assert found is not None
            counts.append((int(found[1]), int(found[2])))
        (nothing, first), (cached, second) = counts
        assert nothing == 0
        assert first <= cached < second
        page.get_by_text("JSON schema of the answer").click()
        page.get_by_label("The answer will be JSON").fill(json.dumps(SCHEMA))
        page.get_by_label("Most tokens").fill("40")
        page.get_by_label("Message").fill("And of Spain?")
        page.keyboard.press("Enter")
        page.locator(".said.assistant .facts-line a").nth(2).wait_for(timeout=60_000)
        (city,) = json.loads(page.locator(".said.assistant .words").last.inner_text()).values()
        assert city in CITIES
        page.locator(".facts-line a").last.click()
        page.get_by_label("Text of the node").filter(has_text="Answer in one sentence").wait_for()
