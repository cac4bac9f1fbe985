# SPDX-License-Identifier: Apache-2.0
"""Python blocks of the pages run at night, with the embedded model, and print what their comments say.

The blocks of a page are one program. Its address of a server is replaced by that of a real one, and a page is
run twice, since some comments are about the second time. A comment after a `print` begins with what it
prints, and may go on (`# 36 of 37 the second time`); one that begins with "where" only describes it.
"""

from __future__ import annotations

import ast
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, live_server
from test_guides import python_blocks

from radixkv import EngineConfig
from radixkv.engine.config import EMBEDDED_MODEL
from radixkv.entrypoints.async_engine import AsyncEngine

ROOT = Path(__file__).resolve().parents[2]
SHOWN_URL = "http://127.0.0.1:8000"
#: Pages with fragments, which name what only their reader has; other tests run the code that they show.
FRAGMENTS = {"adapters", "eviction", "kernels", "prefix_cache", "tiers"}
#: Has a test of its own.
ELSEWHERE = {"python_api"}
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if page.stem not in FRAGMENTS | ELSEWHERE and python_blocks(page).strip()
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = AsyncEngine.from_config(EngineConfig(EMBEDDED_MODEL, num_blocks=1024, warm_up="off"))
    with live_server(engine) as running:
        yield running
    asyncio.run(engine.close())


def stated(source: str) -> dict[int, str]:
    """First line of each `print` -> the comment behind it."""
    lines = source.splitlines()
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert node.end_lineno is not None
            comment = lines[node.end_lineno - 1][node.end_col_offset :].strip()
            if comment.startswith("# "):
                found[node.lineno] = comment[2:]
    return found


@pytest.mark.nightly
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # clients that pages don't close
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_run_and_print_what_they_say(page: Path, server: LiveServer) -> None:
    source = python_blocks(page).replace(SHOWN_URL, server.url)
    for _ in range(2):
        printed: dict[int, str] = {}

        def note(*values: object, printed: dict[int, str] = printed) -> None:
            printed[sys._getframe(1).f_lineno] = " ".join(map(str, values))

        code = compile(source, str(page), "exec", dont_inherit=True)
        exec(code, {"__name__": page.stem, "print": note})
    for line, comment in stated(source).items():
        assert comment.startswith((printed[line], "where ")), (line, comment, printed[line])
