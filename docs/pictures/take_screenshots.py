"""Take the documentation's pictures of the console: a server with the embedded model, traffic, a browser.

    python docs/pictures/take_screenshots.py

Writes console_*.png beside itself. Needs what the tests need, and chromium.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
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
    body = {"messages": messages, "max_tokens": 16, "temperature": 0}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server of the embedded model on a free port; its address, once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "radixkv.tools.cli", "serve", "--port", str(port), "--no-access-log"]
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


def take(page: Page, url: str) -> None:
    """One picture of each view, while prompts come."""

    def shot(name: str) -> None:
        page.screenshot(path=HERE / f"console_{name}.png")

    page.goto(url)
    page.get_by_role("heading", name="Overview").wait_for()
    with ThreadPoolExecutor(2) as clients:
        sent = [clients.submit(send, url, messages) for messages in chats()]
        while not all(one.done() for one in sent):
            page.wait_for_timeout(200)
        for one in sent:
            one.result()
    page.wait_for_timeout(5000)
    shot("overview")
    page.get_by_role("link", name="Tree").click()
    page.get_by_role("heading", name="Radix tree").wait_for()
    page.wait_for_timeout(2500)
    page.locator(".icicle").click(position={"x": 150, "y": 30})
    page.wait_for_timeout(1500)
    shot("tree")
    page.get_by_role("link", name="Requests").click()
    page.get_by_role("row").filter(has_text="08:1").first.wait_for()
    shot("requests")
    page.get_by_role("row").filter(has_text="08:1").first.get_by_role("link").click()
    page.get_by_role("heading", name="Diverged").wait_for()
    shot("request")
    page.get_by_role("link", name="Playground").click()
    page.get_by_role("textbox", name="System prompt").fill(HARBOUR)
    page.locator("#max_tokens").fill("24")
    for question in ("Which berth is the pilot's?", "And the ferries'?"):
        page.get_by_role("textbox", name="Message").fill(question)
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Send").and_(page.locator(":enabled")).wait_for()
    page.wait_for_timeout(1000)
    shot("playground")


def main() -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "the pictures need chromium"
    options: dict[str, Any] = {"viewport": SIZE, "color_scheme": "light", "reduced_motion": "reduce"}
    with server() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(**options).new_page()
        page.set_default_timeout(60_000)
        take(page, url)
        browser.close()


if __name__ == "__main__":
    main()
