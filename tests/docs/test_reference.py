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

PAGES = generate_reference.pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_page_is_up_to_date(path: Path) -> None:
    assert path.exists(), f"run `{generate_reference.COMMAND}`"
    assert path.read_text(encoding="utf-8") == PAGES[path], f"run `{generate_reference.COMMAND}`"


def test_the_help_of_each_command_knows_every_flag_of_its_page() -> None:
    page = PAGES[DOCS / "reference" / "cli.md"]
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
