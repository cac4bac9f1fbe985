# SPDX-License-Identifier: Apache-2.0
"""The proxy's page in a real browser: requests, their tree, and the upstreams, without a key anywhere."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from browser_page import axe_findings, console, overflows
from free_ports import free_ports
from live_server import live_server
from nightly import by_day
from running_proxy import FleetHere, fleet_here
from scripted_engine import ScriptedEngine

KEY = "sk-secret-0123456789abcdef"
LEAD = "You are the helpful assistant of a lighthouse. Count the ships. "
VIEWS = {"overview": "Upstreams", "tree": "helpful assistant of a lighthouse", "requests": "Diverged"}


@dataclass
class Watched:
    """A proxy before two servers and one that is not there, and the address of its page."""

    proxy: FleetHere
    url: str

    def ask(self, minute: str, told: str = "") -> None:
        text = f"{LEAD * 8}It is 2026-11-21 08:{minute}. {LEAD * 2}"
        asked = f"At 08:{minute} say:three {told}"
        messages = [{"role": "system", "content": text}, {"role": "user", "content": asked}]
        body = {"model": "scripted", "messages": messages, "metadata": {"note": KEY}}
        headers = {"Authorization": f"Bearer {KEY}"}
        path = f"/v1/chat/completions?key={KEY}"
        answer = httpx.post(self.proxy.url + path, json=body, headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    port, nobody = free_ports(2)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(live_server(ScriptedEngine(caches=True))).url for _ in range(2)]
        proxy = stack.enter_context(fleet_here([*urls, f"http://127.0.0.1:{nobody}"], port))
        page = Watched(proxy, f"http://127.0.0.1:{port}")
        transport = httpx.HTTPTransport(retries=10)
        with httpx.Client(base_url=page.url, transport=transport, timeout=60) as client:
            assert client.get("/v1/cache").status_code == 200
        for minute in ("01", "02", "13"):
            page.ask(minute, KEY)
        yield page


def test_upstreams_and_choices_are_shown(browser: Any, watched: Watched) -> None:
    with console(browser, watched.url) as page:
        rows = page.get_by_role("row")
        rows.filter(has_text="failed").wait_for()
        assert rows.filter(has_text="healthy").count() == 2
        page.get_by_role("link", name="Requests").click()
        page.get_by_role("row").filter(has_text="08:13").get_by_role("link").click()
        page.get_by_role("heading", name=re.compile("Diverged, at token")).wait_for()
        page.get_by_text(re.compile("its prefix is there|it has least to do there")).first.wait_for()


def test_requests_come_live(browser: Any, watched: Watched) -> None:
    with console(browser, watched.url, "requests") as page:
        page.get_by_role("row").filter(has_text="08:13").wait_for()
        watched.ask("57")
        page.get_by_role("row").filter(has_text="08:57").wait_for()


@pytest.mark.parametrize("scheme", by_day(["light", "dark"], "light"))
def test_axe_finds_nothing_and_no_key_is_shown(browser: Any, watched: Watched, scheme: str) -> None:
    with console(browser, watched.url, color_scheme=scheme) as page:
        for view, text in VIEWS.items():
            page.goto(f"{watched.url}/#/{view}")
            page.locator("main").get_by_text(text).first.wait_for()
            assert axe_findings(page) == [], (view, scheme)
            assert KEY not in page.content(), view
        page.goto(f"{watched.url}/#/requests")
        page.get_by_role("row").filter(has_text="08:13").get_by_role("link").click()
        page.get_by_role("heading", name=re.compile("Diverged, at token")).wait_for()
        assert axe_findings(page) == []
        assert KEY not in page.content()
        assert "(key removed)" in page.content()


@pytest.mark.parametrize("width", by_day([360, 2560], 360))
def test_nothing_needs_sideways_scrolling(browser: Any, watched: Watched, width: int) -> None:
    with console(browser, watched.url, viewport={"width": width, "height": 800}) as page:
        for view, text in VIEWS.items():
            page.goto(f"{watched.url}/#/{view}")
            page.locator("main").get_by_text(text).first.wait_for()
            assert not overflows(page), view
