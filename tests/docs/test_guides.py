# SPDX-License-Identifier: Apache-2.0
"""The worked examples run: each page's Python blocks, in order, as one program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDES = sorted((DOCS / "guide").glob("*.md"))
#: `print(...)`, and the text that it prints, beside it or below; the beginning of it, where it ends in `...`.
STATED = re.compile(r"^ *print\(.*?\)(?:  |\n)# (.*)$", re.MULTILINE)


def python_blocks(page: Path) -> str:
    """The page's Python, each line where it stands on the page, so that tracebacks point there."""
    inside, lines = False, []
    for line in page.read_text(encoding="utf-8").splitlines():
        if re.match(r"```", line):
            inside = not inside and line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's call
@pytest.mark.parametrize(
    "page",
    [
        # Training imports what nothing else needs.
        pytest.param(page, marks=pytest.mark.nightly if page.stem == "train_an_adapter" else ())
        for page in GUIDES
    ],
    ids=lambda page: page.stem,
)
def test_the_example_works(page: Path) -> None:
    if "from peft import" in page.read_text(encoding="utf-8"):
        pytest.importorskip("peft", reason="the page trains with PEFT")
    source = python_blocks(page)
    assert source.strip(), "no Python on this page"
    exec(compile(source, str(page), "exec", dont_inherit=True), {"__name__": page.stem})


@pytest.mark.nightly  # it loads the embedded model twice
def test_the_page_of_the_python_api_prints_its_comments(capsys: pytest.CaptureFixture[str]) -> None:
    page = DOCS / "python_api.md"
    source = python_blocks(page)
    stated = STATED.findall(source)
    assert len(stated) == source.count("print("), "each print has its comment"
    exec(compile(source, str(page), "exec", dont_inherit=True), {"__name__": "python_api"})
    printed = capsys.readouterr().out.splitlines()
    for text, line in zip(stated, printed, strict=True):
        assert line.startswith(text.removesuffix("...")) if text.endswith("...") else line == text
