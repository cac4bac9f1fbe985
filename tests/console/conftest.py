# SPDX-License-Identifier: Apache-2.0
"""A real browser for the console's tests, one for each file: starting it takes most of a test's time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's chromium, driven by Playwright; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on this machine, which the console's browser tests need")
    with playwright.sync_playwright() as driver:
        playwright.expect.set_options(timeout=60_000)  # the machine may be busy
        running = driver.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield running
        finally:
            running.close()
