# SPDX-License-Identifier: Apache-2.0
"""Images of prompts in the console: their thumbnails stand behind the words for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser_page import axe_findings, console, expect
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine
from scripted_images import ScriptedImageProcessor, data_url, picture


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Two prompts that differ in their image have come."""
    engine = ScriptedEngine(caches=True, image_processor=ScriptedImageProcessor(), num_blocks=500)
    with live_server(engine) as running, running.http() as http:
        for seed in (1, 2):
            shown = {"type": "image_url", "image_url": {"url": data_url(picture(seed, (320, 200)))}}
            said = [
                {"role": "user", "content": [{"type": "text", "text": "What is this?"}, shown]},
                {"role": "assistant", "content": "a harbour"},
                {"role": "user", "content": "And now?"},
            ]
            answer = http.post("/v1/chat/completions", json={"messages": said, "max_tokens": 2})
            assert answer.status_code == 200, answer.text
        yield running


def loaded(page: Any, image: Any) -> bool:
    return bool(image.evaluate("image => image.complete && image.naturalWidth > 0"))


def test_a_request_shows_its_image_and_the_one_that_it_missed(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url, "requests") as page:
        page.get_by_role("row").nth(1).get_by_role("link").click()
        images = page.locator("img.thumbnail:visible")
        expect(images).to_have_count(3)  # its beginning, and both sides of the break
        expect(page.locator("p.note").get_by_text("Another image in the 1st user message")).to_be_visible()
        expect(images.first).to_have_attribute(
            "alt", "image " + images.first.get_attribute("title").split()[1] + ", 320 x 200 pixels"
        )
        assert all(loaded(page, images.nth(at)) for at in range(3))
        sources = {images.nth(at).get_attribute("src") for at in range(3)}
        assert len(sources) == 2, "this prompt's image, and the cached one"
        assert not axe_findings(page)


def test_the_tree_shows_the_image_of_a_node(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url, "requests") as page:
        page.get_by_role("row").nth(1).get_by_role("link").click()
        page.get_by_role("link", name="Show its path in the tree").click()
        panel = page.get_by_role("region", name="Selected node")
        expect(panel.locator("img.thumbnail:visible")).to_have_count(1)
