# SPDX-License-Identifier: Apache-2.0
"""Take the documentation's pictures of the console: a server with the embedded model, traffic, a browser.

    python docs/pictures/take_screenshots.py

Write console_*.png beside itself. Needs the packages of the tests, and chromium.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
SIZE = {"width": 1280, "height": 860}
HARBOUR = (
    "You are the assistant of the harbour office. Answer in one short sentence. Ships are announced by "
    "name, flag, length and draught. Berths one to four are for ferries, five to nine for cargo, ten for "
    "the pilot. Nobody enters after ten in the evening without a pilot. Fees are due on leaving, in the "
    "currency of the port. "
)
LIBRARY = (
    "You are the assistant of the city library. Answer in one short sentence. Books may be kept for four "
    "weeks and renewed twice. Films may be kept for one week. The reading room is open from nine to nine, "
    "the archive by appointment. Lost cards are replaced at the desk. "
)
QUESTIONS = (
    "Which berth does a ferry take?",
    "May a cargo ship enter at eleven in the evening?",
    "When are fees due?",
    "Which berth is the pilot's?",
    "How are ships announced?",
)
LOANS = ("How long may I keep a film?", "When is the reading room open?", "How often may I renew a book?")


def chats() -> Iterator[list[dict[str, str]]]:
    """Two families that share their system prompts, one that a time in front breaks, and a long chat."""

    def chat(system: str, *turns: str) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        said = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
        return [{"role": "system", "content": system}, *said]

    for question in QUESTIONS:
        yield chat(HARBOUR, question)
    for question in LOANS:
        yield chat(LIBRARY, question)
    for minute in range(10, 16):
        yield chat(f"It is 2026-11-21 08:{minute}. {HARBOUR}", QUESTIONS[minute % len(QUESTIONS)])
    turns = [
        QUESTIONS[0],
        "Berths one to four.",
        QUESTIONS[3],
        "Berth ten.",
        QUESTIONS[2],
        "On leaving.",
        "Thank you.",
    ]
    for count in (1, 3, 5, 7):
        yield chat(HARBOUR, *turns[:count])


def send(url: str, messages: list[dict[str, str]]) -> None:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server of the embedded model on a free port; its address, once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "radixkv.cli.main", "serve", "--port", str(port), "--no-access-log"]
    running = subprocess.Popen([*command, "--kv-cache-memory", "64MiB"])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert running.poll() is None, "the server has ended"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health/ready").status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        running.terminate()
        running.wait()


def send_all(url: str) -> None:
    """Send the prompts in turn, over a minute: the pictures show an engine that is not pressed."""
    for messages in chats():
        send(url, messages)
        time.sleep(3)


def take(page: Page, url: str) -> None:
    """Take a picture of each view, of the same traffic."""

    def shot(name: str, **clip: int) -> None:
        page.mouse.move(0, 0)
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=HERE / f"console_{name}.png", clip={"x": 0, "y": 0, **SIZE, **clip})

    page.goto(url)
    page.get_by_role("heading", name="Overview").wait_for()
    with ThreadPoolExecutor(1) as client:
        sent = client.submit(send_all, url)
        while not sent.done():
            page.wait_for_timeout(200)
        sent.result()
    page.get_by_role("region", name="What breaks most prompts").get_by_text("A timestamp").wait_for()
    page.wait_for_timeout(5000)  # two readings
    shot("overview")

    page.goto(f"{url}/#/requests")
    broken = page.get_by_role("row").filter(has_text="08:1").filter(has_text="Diverged").first
    broken.wait_for()
    shot("requests")
    broken.get_by_role("link").click()
    page.get_by_role("heading", name="Diverged").wait_for()
    shot("request", height=670)

    page.goto(f"{url}/#/playground")
    page.locator("#system").fill(f"It is 2026-11-21 08:41. {HARBOUR}")
    page.locator("#max_tokens").fill("24")
    page.locator("#temperature").fill("0")
    page.wait_for_timeout(3000)  # the browser and the model share the machine's cores
    for number, question in enumerate(("Which berth is the pilot's?", "And the ferries'?")):
        page.locator("#draft").fill(question)
        page.locator("#draft").press("Enter")
        page.locator(".said.assistant .facts-line a").nth(number).wait_for()  # it comes last
    page.locator("#system").fill(f"It is 2026-11-21 09:05. {HARBOUR}")
    page.get_by_role("button", name="See what breaks").click()
    page.locator(".breakage").wait_for()
    shot("playground")


def take_tree(page: Page, url: str) -> None:
    """The tree, with a node that is selected and pinned."""
    page.goto(f"{url}/#/tree")
    page.get_by_role("tree", name="Prefix tree").focus()
    for key in ("ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
        page.wait_for_timeout(300)
    page.get_by_role("button", name="Pin up to here").click()
    page.get_by_role("button", name="Unpin").wait_for()
    send(url, [{"role": "system", "content": HARBOUR}, {"role": "user", "content": QUESTIONS[2]}])
    page.wait_for_timeout(1000)  # a snapshot
    page.mouse.move(0, 0)
    page.screenshot(path=HERE / "console_tree.png")


def take_audit(page: Page) -> None:
    """The page of an audit of the example log."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        command = [sys.executable, "-m", "radixkv", "audit", "--example", "--prefill-rate", "500"]
        subprocess.run([*command, "--html", str(report)], check=True, stdout=subprocess.DEVNULL)
        page.goto(report.as_uri())
        page.get_by_role("heading", name="Radix tree").wait_for()
        page.wait_for_timeout(1000)  # the chart has its width
        page.screenshot(path=HERE / "audit.png")


def main() -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "the pictures need chromium"
    with server() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for scheme, pictures in (("light", take), ("dark", take_tree)):
            options: dict[str, Any] = {"viewport": SIZE, "color_scheme": scheme, "reduced_motion": "reduce"}
            page = browser.new_context(**options).new_page()
            page.set_default_timeout(120_000)
            pictures(page, url)
        take_audit(browser.new_context(viewport=SIZE, color_scheme="light").new_page())
        browser.close()


if __name__ == "__main__":
    main()
