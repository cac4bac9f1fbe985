# SPDX-License-Identifier: Apache-2.0
"""The pages that explain the code name classes, functions, files and settings that exist."""

from __future__ import annotations

import ast
import functools
import json
import re
import tomllib
from pathlib import Path

import pytest
from source_graph import ROOT, modules

PROMISES = ROOT / "docs" / "promises.md"
PAGES = [ROOT / "docs" / "architecture.md", ROOT / "docs" / "tour.md", PROMISES]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"[A-Za-z_]\w*(\.[a-z_]\w*)?")
#: Roots of our files that a page may name.
FOLDERS = ("radixkv/", "server/", "kernels/", "tests/", "docs/", "benchmarks/")


@functools.cache
def members() -> dict[str, set[str]]:
    """Class or function -> the names that its body defines; module names have none."""
    found: dict[str, set[str]] = {}
    for module, tree in modules().items():
        found.setdefault(module.split(".")[0], set())
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            own = found.setdefault(node.name, set())
            if isinstance(node, ast.ClassDef):
                for item in ast.walk(node):
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                        own.add(item.name)
                    elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        own.add(item.target.id)
    return found


@functools.cache
def sources() -> str:
    return "\n".join(map(modules().source, modules()))


def is_text(text: str) -> bool:
    """Whether the sources hold it as a string of its own."""
    return f'"{text}"' in sources()


@functools.cache
def attributes() -> frozenset[str]:
    return frozenset().union(*members().values())


def is_test(text: str) -> bool:
    """Whether `file::function` names a test."""
    path, _, name = text.partition("::")
    source = (ROOT / path).read_text(encoding="utf-8")
    return re.search(rf"^ *(async )?def {name}\(", source, re.MULTILINE) is not None


def is_known(text: str) -> bool:
    if text.startswith(FOLDERS):
        return is_test(text) if "::" in text else (ROOT / text).exists()
    if re.fullmatch(r"RADIXKV_\w+(=\S+)?", text):
        return is_text(text.partition("=")[0])
    if " " in text or not NAME.fullmatch(text):
        paths = [word for word in text.split() if word.startswith("tests/")]
        return all((ROOT / path.partition("::")[0]).exists() for path in paths)
    owner, _, member = text.partition(".")
    if member:
        return member in members().get(owner, ())
    return owner in members() or owner in attributes() or is_text(owner)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {code for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)) if not code.startswith("make ")}
    assert len(named) > 20
    assert not {code for code in named if not is_known(code)}


def test_names_that_are_gone_are_noticed() -> None:
    assert is_known("PrefixCache.acquire")
    assert not is_known("PrefixCache.acquire_all")
    assert not is_known("radixkv/tools")
    assert not is_known("Sequences")
    assert not is_known("tests/cache/test_matching.py::test_tokens_only_propose")


def test_each_promise_has_its_tests() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Promises")[2].partition("\n## ")[0]
    promised = [text.rstrip(".") for text in re.findall(r"^- \*\*(.+?)\*\*", section, re.MULTILINE)]
    kept = re.split(r"^## ", PROMISES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert promised == [text.partition("\n")[0] for text in kept][: len(promised)]
    for text in kept:
        rows = re.findall(r"^\| ([^-].*) \| (.*) \|$", text, re.MULTILINE)[1:]
        assert rows
        assert not [promise for promise, tests in rows if not re.search(r"`tests/\S+::test_\w+`", tests)]


def test_newcomers_need_no_release() -> None:
    """Commands to install are for the checkout and its wheel, whose name has today's version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for command in re.findall(r"pip install [^\n`]+", text):
            assert re.search(
                r"install (-e |--extra-index-url \S+ )?'?(\.[\[ ]|dist/|brotli|zstandard|xllamacpp)", command
            ), f"{page.name}: {command}"
        assert set(re.findall(r"radixkv-(\d[\d.]+\d)-py3", text)) <= {version}, page.name


def test_the_figures_of_the_readme_are_measured() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    medians = json.loads((ROOT / "benchmarks/results/compare.json").read_text(encoding="utf-8"))["medians"]
    ours, vllm = medians["radixkv float32"], medians["vLLM float32"]
    for setting in (ours, vllm, medians["llama.cpp F32, 8 slots"]):
        assert re.search(rf"\b{setting['workloads']['W1 cold']['wall_s']:.1f}\b", text)
    for setting in (ours, vllm):
        computed = sum(
            setting["workloads"][name]["computed_tokens"] for name in ("W1 cold", "W1 warm", "W2", "W3")
        )
        assert f"{computed:,.0f}" in text
        assert re.search(rf"\b{setting['peak_bytes'] / 1e9:.1f}\b", text)
