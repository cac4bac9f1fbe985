# SPDX-License-Identifier: Apache-2.0
"""The generated reference is what the code says now."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from radixkv.cli.main import command_tree

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import generate_reference  # noqa: E402


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    return generate_reference.pages()


def test_the_pages_are_up_to_date(pages: dict[Path, str]) -> None:
    found = {path: path.read_text(encoding="utf-8") if path.exists() else None for path in pages}
    stale = [path.name for path, text in pages.items() if found[path] != text]
    assert not stale, f"run `{generate_reference.COMMAND}`"


def test_the_help_of_each_command_knows_every_flag_of_its_page(pages: dict[Path, str]) -> None:
    page = pages[DOCS / "reference" / "cli.md"]
    commands = re.findall(r"^## radixkv (\S+)\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    assert len(commands) >= 7
    engine = page.split("## Engine options")[1]
    for name, section in commands:
        told = section + (engine if "#engine-options" in section else "")
        flags = set(re.findall(r"^\| .*?`(--[\w-]+)`", told, re.MULTILINE))
        result = CliRunner().invoke(
            command_tree(),
            [name, "--help-all" if "#engine-options" in section else "--help"],
            env={"COLUMNS": "300"},
        )
        assert flags <= set(re.findall(r"--[\w-]+", result.output)), name
