# SPDX-License-Identifier: Apache-2.0
"""The console in a real browser: its views, keys, a server that goes away, and who can use it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser_page import axe_findings, console, expect, overflows
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

from radixkv.cache.reporting.reasons import Reason

KEYS = {"api_keys": ("ada=ada-key",), "admin_keys": ("operator=operator-key",)}
SYSTEM = "It is 2026-11-21 08:{minute}. You are the helpful assistant of a lighthouse. Count the ships."
VIEWS = {
    "overview": "Missed tokens by reason",
    "requests": "Diverged",
    "explain": "Paste texts",
    "keys": "everybody who reaches it is its admin",
}


def chat(server: LiveServer, minute: str, key: str = "none") -> None:
    messages = [{"role": "system", "content": SYSTEM.format(minute=minute)}]
    messages.append({"role": "user", "content": "say:three ships"})
    with server.http(headers={"x-api-key": key}) as client:
        answer = client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200, answer.text


def scripted() -> ScriptedEngine:
    return ScriptedEngine(caches=True)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """Open to all; three prompts that differ in the time have come."""
    with live_server(scripted()) as running:
        for minute in ("01", "02", "13"):
            chat(running, minute)
        yield running


@pytest.fixture(scope="module")
def closed_server() -> Iterator[LiveServer]:
    """With keys."""
    with live_server(scripted(), **KEYS) as running:
        yield running


# ---------------------------------------------------------------------- the views


def test_the_overview_says_how_much_is_found_and_why_not_more(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url) as page:
        page.get_by_role("link", name="Overview").and_(page.locator("[aria-current=page]")).wait_for()

        def card(name: str) -> Any:
            return page.get_by_role("region", name=name, exact=True)

        with server.http() as client:
            rate = client.get("/v1/cache").json()["windows"]["5m"]["token_hit_rate"]
        card("Hit rate").get_by_text(f"{rate:.0%}").first.wait_for()
        card("Missed tokens by reason").get_by_text("Diverged").wait_for()
        card("What breaks most prompts").get_by_text("say it in the latest user message").first.wait_for()
        card("Time to first token").get_by_text("p95").wait_for()
        card("Running and waiting").get_by_text("Waiting", exact=True).wait_for()
        card("Pool").get_by_role("img", name=re.compile("pinned 0, held .* cached .* free")).wait_for()
        card("Evictions").get_by_text("Since start").wait_for()
        page.get_by_role("img", name=re.compile("Tokens found, of each 10 seconds")).wait_for()


def test_requests_come_live_and_tell_where_they_missed(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url, "requests") as page:
        page.get_by_role("row").filter(has_text="08:13").wait_for()
        chat(server, "57")
        newest = page.get_by_role("row").filter(has_text="08:57")
        newest.get_by_role("link").click()
        page.get_by_role("heading", name=re.compile("Diverged, at token")).wait_for()
        page.get_by_text(re.compile("A timestamp at token .*, in the system prompt")).first.wait_for()
        mine, cached = (
            page.get_by_role("region", name="This prompt"),
            page.get_by_role("region", name="cached"),
        )
        expect(mine.locator("mark").first).to_have_text(re.compile("^5"))
        expect(cached.locator("mark").first).to_have_text(re.compile("^[01]"))
        page.get_by_text("none (no keys)").wait_for()
        page.get_by_role("link", name="Show its path in the tree").click()
        page.get_by_role("region", name="Selected node").get_by_text("from token").wait_for()
        page.go_back()
        page.get_by_role("link", name="All requests").click()
        newest.wait_for()


def test_requests_are_listed_by_what_the_user_said(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url, "requests") as page:
        page.get_by_role("row").filter(has_text="08:13").get_by_role(
            "link", name="say:three ships"
        ).wait_for()


def test_an_empty_server_shows_figures_at_the_present_time(browser: Any) -> None:
    with live_server(scripted()) as running, console(browser, running.url) as page:
        page.get_by_role("region", name="Pool").get_by_text("tokens fit").wait_for()
        page.get_by_role("region", name="Hit rate", exact=True).get_by_text(
            "no prompt has come yet"
        ).wait_for()
        assert "null" not in page.locator("main").inner_text()
        help_text = page.get_by_text("What to do:").first
        assert not help_text.is_visible(), "explanations are folded"
        page.get_by_role("region", name="Pool").get_by_text("What this means").click()
        page.get_by_text("nothing free is normal").wait_for()


def test_views_say_that_they_load(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url, "keys") as page:
        page.route("**/v1/cache*", lambda route: None)  # never answered
        page.route("**/v1/cache/**", lambda route: None)
        page.route("**/metrics", lambda route: None)
        for view in ("overview", "requests", "requests/some-id"):
            page.goto(f"{server.url}/#/{view}")
            page.locator("main").get_by_text("Loading …").first.wait_for()


def test_each_reason_has_words(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url) as page:
        worded = page.evaluate("import('/console/reasons.js').then((module) => Object.keys(module.REASONS))")
    assert worded == list(Reason)


def test_two_prompts_are_compared(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url, "explain") as page:
        page.get_by_label("First prompt").fill("It is 7:01. Count the ships every evening.")
        page.get_by_label("Second prompt").fill("It is 7:02. Count the ships every evening.")
        page.get_by_role("button", name="Explain").click()
        page.get_by_role("heading", name="They part at token 9").wait_for()
        for name, mark in (("First", "1"), ("Second", "2")):
            expect(page.get_by_role("region", name=name).locator("mark")).to_have_text([mark])
        page.get_by_text("A time at token 9 (“7:01” instead of “7:02”)").first.wait_for()
        for name, hour in (("First prompt", "7"), ("Second prompt", "8")):
            messages = [{"role": "user", "content": f"It is {hour} o'clock."}]
            page.get_by_role("textbox", name=name).fill(json.dumps(messages))
        page.get_by_role("button", name="Explain").click()
        page.get_by_role("heading", name="They part at token 12").wait_for()


def test_a_prompt_is_explained_against_the_cache_and_mistakes_are_named(
    browser: Any, server: LiveServer
) -> None:
    with console(browser, server.url, "explain") as page:
        page.get_by_label("one prompt with the cache").check()
        page.get_by_role("button", name="Explain").click()
        page.get_by_role("alert").get_by_text("Prompt is empty").wait_for()
        page.get_by_label("Prompt", exact=True).fill('[{"role": "user", "content": }]')
        page.get_by_role("button", name="Explain").click()
        page.get_by_role("alert").get_by_text("looks like JSON").wait_for()
        messages = [
            {"role": "system", "content": SYSTEM.format(minute="42")},
            {"role": "user", "content": "?"},
        ]
        page.get_by_label("Prompt", exact=True).fill(json.dumps({"messages": messages}))
        page.get_by_role("button", name="Explain").click()
        page.get_by_role("heading", name=re.compile("Diverged, at token")).wait_for()
        mark = page.get_by_role("region", name="This prompt").locator("mark").first
        expect(mark).to_have_text(re.compile("^4"))
        page.get_by_role("link", name="Show what was found in the tree").click()
        page.get_by_role("heading", name="Radix tree").wait_for()


# ---------------------------------------------------------------------- keys


def test_a_key_is_asked_for_and_a_wrong_one_refused(browser: Any, closed_server: LiveServer) -> None:
    chat(closed_server, "11", "ada-key")
    with console(browser, closed_server.url, "requests", may_fail=True) as page:
        field = page.get_by_label("API key")
        page.get_by_text("This server asks for an API key.").wait_for()
        field.fill("not-a-key")
        page.get_by_role("button", name="Use this key").click()
        page.get_by_role("alert").get_by_text("Incorrect API key").wait_for()
        field.fill("ada-key")
        page.get_by_role("button", name="Use this key").click()
        page.get_by_role("row").filter(has_text="08:11").wait_for()  # back where it was asked for
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        page.get_by_role("link", name="Keys").click()
        page.get_by_text("a user: you see what is yours").wait_for()
        page.get_by_role("button", name="Forget it").click()
        page.get_by_text("No key is set.").wait_for()


def test_admins_see_tenants_but_not_their_text(browser: Any, closed_server: LiveServer) -> None:
    chat(closed_server, "12", "ada-key")
    with console(browser, closed_server.url, "keys", key="operator-key") as page:
        page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="ada")).wait_for()
        page.get_by_role("link", name="Requests").click()
        page.get_by_role("row").filter(has_text="ada").first.wait_for()
        assert "lighthouse" not in page.content()


# ---------------------------------------------------------------------- the connection


def test_it_goes_on_when_the_server_comes_back(browser: Any) -> None:
    with contextlib.ExitStack() as running:
        before = running.enter_context(contextlib.ExitStack())
        first = before.enter_context(live_server(scripted(), shutdown_grace_s=0, shutdown_delay_s=0))
        page = running.enter_context(console(browser, first.url, "requests", may_fail=True))
        page.get_by_text("No prompt has come yet").wait_for()
        before.close()
        page.get_by_role("status").filter(has_text="cannot be reached").wait_for()
        with live_server(scripted(), port=first.port, shutdown_grace_s=0) as second:
            chat(second, "33")
            page.get_by_role("row").filter(has_text="08:33").wait_for()
            page.get_by_role("status").filter(has_text="cannot be reached").wait_for(state="detached")


# ---------------------------------------------------------------------- everybody


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_axe_finds_nothing(browser: Any, server: LiveServer, scheme: str) -> None:
    with console(browser, server.url, color_scheme=scheme) as page:
        for view, text in VIEWS.items():
            page.goto(f"{server.url}/#/{view}")
            page.locator("main").get_by_text(text).first.wait_for()
            assert axe_findings(page) == [], (view, scheme)
        page.goto(f"{server.url}/#/requests")
        page.get_by_role("row").filter(has_text="08:13").get_by_role("link").click()
        page.get_by_role("heading", name=re.compile("Diverged, at token")).wait_for()
        assert axe_findings(page) == []


@pytest.mark.parametrize("width", [360, 2560])
def test_nothing_needs_sideways_scrolling(browser: Any, server: LiveServer, width: int) -> None:
    with console(browser, server.url, viewport={"width": width, "height": 800}) as page:
        for view, text in VIEWS.items():
            page.goto(f"{server.url}/#/{view}")
            page.locator("main").get_by_text(text).first.wait_for()
            assert not overflows(page), view


def test_the_keyboard_alone_suffices(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url) as page:
        page.get_by_role("heading", name="Overview").wait_for()

        def tab_to(name: str) -> None:
            for _ in range(20):
                page.keyboard.press("Tab")
                focused = page.locator(":focus")
                if name in (focused.inner_text() or focused.get_attribute("id") or ""):
                    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                    assert outline != "none", f"nothing shows that {name} is focused"
                    return
            raise AssertionError(f"the tab key never reaches {name}")

        tab_to("Skip to the view")
        page.keyboard.press("Enter")
        expect(page.locator("#view")).to_be_focused()
        page.reload()
        page.get_by_role("heading", name="Overview").wait_for()
        tab_to("Explain")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Explain").wait_for()
        tab_to("one")
        page.keyboard.type("It is 7:01.")
        tab_to("other")
        page.keyboard.type("It is 7:02.")
        tab_to("Explain")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="They part at token 9").wait_for()
