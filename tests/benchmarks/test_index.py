# SPDX-License-Identifier: Apache-2.0
"""benchmarks/README.md lists every script and every result, once."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
SCRIPTS = sorted(
    path
    for path in FOLDER.glob("*/*.py")
    if path.parent.name != "peers" and '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_listed_once_under_its_folder_and_found_by_its_name(path: Path) -> None:
    assert len(re.findall(rf"`python -m benchmarks\.{path.stem}[ `]", INDEX)) == 1
    section = re.search(rf"^## {path.parent.name}: .*?(?=^## |\Z)", INDEX, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert f"benchmarks.{path.stem}" in section[0]
    spec = importlib.util.find_spec(f"benchmarks.{path.stem}")
    assert spec is not None
    assert spec.origin == str(path)
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_nothing_is_listed_that_is_not_there() -> None:
    named = set(re.findall(r"python -m benchmarks\.([a-z]\w*)", INDEX))
    assert named == {path.stem for path in SCRIPTS}


def test_every_result_has_its_row() -> None:
    linked = set(re.findall(r"\(results/(\w+\.json)\)", INDEX))
    assert linked == {path.name for path in (FOLDER / "results").glob("*.json")}


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda path: path.stem)
def test_a_result_says_what_measured_it_and_when(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", result["date"])
    (row,) = [line for line in INDEX.splitlines() if f"(results/{path.name})" in line]
    assert f"`python -m benchmarks.{result['benchmark']}" in row
