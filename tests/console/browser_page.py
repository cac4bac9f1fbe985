# SPDX-License-Identifier: Apache-2.0
"""Pages of the console that tell their errors, and what axe-core has to say of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")
#: What a browser itself says of answers that a test provokes; its page has to cope with them.
PROVOKED = "Failed to load resource"


@contextlib.contextmanager
def console(
    browser: Any, url: str, view: str = "overview", *, key: str = "", may_fail: bool = False, **options: Any
) -> Iterator[Any]:
    """A page at a view of the console at `url`; it has reported no error when the block ends.

    Args:
        key: the API key in its session storage.
        may_fail: requests may be refused, or reach nobody.
        options: of the browser's context, as color_scheme or viewport.
    """
    errors: list[str] = []

    def note(message: Any) -> None:
        if message.type in ("error", "warning") and not (may_fail and PROVOKED in message.text):
            errors.append(message.text)

    context = browser.new_context(**{"reduced_motion": "reduce", **options})
    try:
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", note)
        page.on("pageerror", lambda error: errors.append(str(error)))
        if key:
            page.add_init_script(f"sessionStorage.setItem('radixkv.key', '{key}')")
        page.goto(f"{url}/#/{view}")
        yield page
    finally:
        context.close()
    assert not errors, errors


def expect(target: Any) -> Any:
    """Playwright's assertions, which wait: what a page shows changes when its requests are answered."""
    return pytest.importorskip("playwright.sync_api").expect(target)


def axe_findings(page: Any) -> list[str]:
    """What axe-core finds against the page as it is, by rule."""
    page.evaluate(AXE)  # by the debugger, which the page's policy does not concern
    found = page.evaluate("axe.run()")["violations"]
    return [f"{one['id']}: {[node['html'][:120] for node in one['nodes']]}" for one in found]


def overflows(page: Any) -> bool:
    """Whether the page scrolls sideways."""
    root = "document.documentElement"
    return bool(page.evaluate(f"{root}.scrollWidth > {root}.clientWidth"))
