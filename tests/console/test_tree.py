# SPDX-License-Identifier: Apache-2.0
"""The console's tree in a real browser: live traffic, search, pins, keys, other tenants, readers, frames."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from browser_page import axe_findings, console, expect, overflows
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

from radixkv import PrefixCache

SYSTEM = "You are the helpful assistant of the harbour office, and count the ships. "
ADMIN, ADA = "operator-key", "ada-key"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(max_model_len=8192, caches=True)) as running:
        yield running


@pytest.fixture(autouse=True)
def empty_cache(server: LiveServer) -> None:
    server.engine.prefix_cache = PrefixCache(16_000, 16)


def ask(server: LiveServer, text: str, key: str = "none") -> None:
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    with server.openai(key) as client:
        client.chat.completions.create(model="scripted", messages=messages)


def with_a_state(token_ids: list[int]) -> PrefixCache:
    """A cache of these tokens, and the state after 64 of them."""
    cache = PrefixCache(16_000, 16, num_state_slots=4)
    lease = cache.acquire(token_ids)
    lease.commit(len(token_ids))
    assert cache.states is not None
    slot = cache.states.take_slot()
    assert slot is not None
    cache.states.add(lease.node, 64, slot)
    lease.release()
    return cache


def pins(server: LiveServer) -> list[dict[str, Any]]:
    with server.http() as client:
        listed: list[dict[str, Any]] = client.get("/v1/cache/pins").json()["data"]
    return listed


def test_live_traffic_a_walk_by_keys_and_a_pin(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url, "tree") as page:
        page.get_by_text("Nothing is cached yet").wait_for()
        assert axe_findings(page) == []
        ask(server, "Where is the lighthouse?")
        page.get_by_text("in 1 node.").wait_for()
        ask(server, "Who is the harbour master?")
        page.get_by_text("in 3 nodes.").wait_for()
        tree = page.get_by_role("tree", name="Prefix tree")
        tree.focus()
        chosen = page.locator("[role=treeitem][aria-selected=true]")
        page.keyboard.press("ArrowDown")
        chosen.filter(has_text="<|im_start|>system You are").wait_for()
        expect(chosen).to_have_attribute("aria-expanded", "true")
        page.keyboard.press("ArrowDown")
        expect(chosen).to_have_attribute("aria-level", "2")
        first = chosen.get_attribute("id")
        expect(tree).to_have_attribute("aria-activedescendant", first)
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
        expect(chosen).to_have_attribute("id", first)
        panel = page.get_by_role("region", name="Selected node")
        panel.get_by_text("from token").wait_for()
        expect(page).to_have_url(f"{server.url}/#/tree?node={chosen.get_attribute('data-node')}")

        page.keyboard.press("Enter")
        page.get_by_role("navigation", name="Zoomed to").get_by_role("button").nth(2).wait_for()
        page.keyboard.press("Backspace")
        page.keyboard.press("Escape")
        page.get_by_role("navigation", name="Zoomed to").wait_for(state="hidden")

        panel.get_by_label("Pin for").select_option("10 minutes")
        panel.get_by_role("button", name="Pin up to here").press("Enter")
        panel.get_by_role("button", name="Unpin").wait_for()
        (pin,) = pins(server)
        assert (pin["node"], pin["expires_in_s"] <= 600) == (chosen.get_attribute("data-node"), True)
        chosen.filter(has_text="pinned").wait_for()
        assert not page.get_by_text("Resume point").is_visible(), "no state is kept"
        assert axe_findings(page) == []
        panel.get_by_role("button", name="Unpin").press("Enter")
        panel.get_by_role("button", name="Unpin").wait_for(state="detached")
        assert pins(server) == []


def test_a_search_names_the_text_and_an_address_its_node(browser: Any, server: LiveServer) -> None:
    for text in ("Where is the Lighthouse keeper?", "Who is the harbour master?"):
        ask(server, text)
    with console(
        browser, server.url, "tree", color_scheme="dark", viewport={"width": 360, "height": 800}
    ) as page:
        page.get_by_label("Search for a text").fill("lighthouse KEEPER")
        page.keyboard.press("Enter")
        found = page.locator(".result")
        expect(found.locator("mark")).to_have_text(["Lighthouse keeper"])
        page.get_by_text("in 3 nodes.").wait_for()
        assert axe_findings(page) == []
        found.click()
        text = page.get_by_label("Text of the node")
        text.filter(has_text="re is the Lighthouse keeper?").wait_for()
        address, heading = page.url, page.get_by_role("heading", level=2).first.inner_text()
        assert not overflows(page)
        page.goto("about:blank")
        page.goto(address)
        page.get_by_role("heading", name=heading).wait_for()
        page.get_by_label("Search for a text").fill("no such thing")
        page.keyboard.press("Enter")
        page.get_by_text("is in no cached text of yours").wait_for()
        page.goto(server.url + "/#/tree?node=n000000000000")
        page.get_by_text("is not among those shown").first.wait_for()


def test_of_others_the_counts_alone(browser: Any) -> None:
    engine = ScriptedEngine(caches=True)
    with live_server(engine, api_keys=(f"ada={ADA}",), admin_keys=(f"operator={ADMIN}",)) as server:
        ask(server, "the secret of ada", ADA)
        with console(browser, server.url, "tree", key=ADMIN) as page:
            page.get_by_role("tree", name="Prefix tree").focus()
            page.keyboard.press("ArrowDown")
            panel = page.get_by_role("region", name="Selected node")
            panel.get_by_text("tenant ada").wait_for()
            panel.get_by_text("Only its owner can pin it.").wait_for()
            assert "secret" not in page.content()
        with console(browser, server.url, "tree", key=ADA) as page:
            page.get_by_text("<|im_start|>system You are").first.wait_for(state="attached")


def test_two_thousand_nodes_are_drawn_fast_and_asked_for_at_most_four_times_a_second(
    browser: Any, server: LiveServer
) -> None:
    cache = server.engine.prefix_cache
    for index in range(2000):
        head = [index % 40, *range(31)]
        lease = cache.acquire([*head, index // 40, 99, *range(30)], server.engine.cache.namespace())
        lease.commit(64)
        lease.release()
    with console(browser, server.url, "tree") as page:
        page.get_by_text("in 2,040 nodes, of which the heaviest 2,000 are shown.").wait_for()
        page.get_by_role("tree", name="Prefix tree").focus()
        for _ in range(10):
            page.keyboard.press("ArrowDown")
            page.keyboard.press("ArrowRight")
        box = page.locator(".icicle canvas").bounding_box()
        for step in range(60):
            page.mouse.move(box["x"] + 5 + step * 12, box["y"] + 20 + step % 30)
        hover = page.locator(".tree-hover")
        for words in ("tokens", "hit", "ago", "holder"):
            expect(hover).to_contain_text(words)
        frames = sorted(
            page.evaluate("performance.getEntriesByName('icicle-frame').map((one) => one.duration)")
        )
        assert len(frames) > 20
        median, p95 = frames[len(frames) // 2], frames[-(len(frames) // 20)]
        print(f"{len(frames)} frames, ms: median {median}, p95 {p95}")
        assert median < 8, frames
        ask(server, "something, so that it is busy")
        for _ in range(2):
            with page.expect_response(lambda answer: "/v1/cache/tree" in answer.url):
                pass
        starts = page.evaluate(
            "performance.getEntriesByType('resource')"
            ".filter((one) => one.name.includes('/v1/cache/tree')).map((one) => one.startTime)"
        )
        gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
        assert min(gaps) >= 245, gaps


def test_the_path_of_a_request_is_lit_from_its_start_until_it_has_ended(
    browser: Any, server: LiveServer
) -> None:
    ask(server, "Where is the lighthouse?")
    ask(server, "Who is the harbour master?")
    engine = server.engine
    tree = "async () => [await (await fetch('v1/cache/tree')).json(), performance.now()]"
    with console(browser, server.url, "tree") as page:
        page.get_by_text("in 3 nodes.").wait_for()
        page.get_by_text("show as a list").click()
        lease = engine.prefix_cache.acquire(engine.requests[-1].prompt, engine.cache.namespace())
        page.get_by_role("treeitem").filter(has_text="held").wait_for()
        running = page.evaluate(tree)
        lease.release()
        page.get_by_role("treeitem").filter(has_text="held").wait_for(state="detached")
        lit = """async ([[snapshot, then], [later, now]]) => {
            const { TreeModel } = await import(new URL('console/tree_model.js', location.href));
            const model = new TreeModel();
            const lights = (time) => [...model.nodes.values()].map((node) => model.light(node, time));
            model.update(snapshot, then);
            const during = lights(then);
            model.update(later, now);
            return [during, lights(now + 5000)];
        }"""
        during, faded = page.evaluate(lit, [running, page.evaluate(tree)])
    assert sorted(during) == [0, 1, 1], "its own path alone"
    assert faded == [0, 0, 0]


def test_nothing_is_asked_while_nobody_looks(browser: Any, server: LiveServer) -> None:
    with console(browser, server.url, "tree") as page:
        page.get_by_text("Nothing is cached yet").wait_for()
        show = (
            "Object.defineProperty(document, 'visibilityState', {configurable: true, get: () => '%s'});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        page.evaluate(show % "hidden")
        asked: list[str] = []
        page.wait_for_timeout(1100)  # the snapshot that was due
        page.on("request", lambda request: "/v1/cache/tree" in request.url and asked.append(request.url))
        ask(server, "Hello?")
        page.wait_for_timeout(1500)
        assert asked == []
        page.evaluate(show % "visible")
        page.get_by_text("in 1 node.").wait_for()
        server.engine.prefix_cache = with_a_state(list(range(1, 81)))
        page.get_by_text("Resume point").wait_for()  # in the legend, from the first one on
