# SPDX-License-Identifier: Apache-2.0
"""What ties our source files together, read from their syntax trees: imports, cycles, private attributes."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "radixkv": ROOT / "radixkv",
    "radixkv_kernels": ROOT / "kernels" / "radixkv_kernels",
    "radixkv_server": ROOT / "server" / "radixkv_server",
}


def _parsed(text: str) -> ast.Module:
    """A file's syntax tree. Its nodes are many: garbage collection would take half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if enabled:
            gc.enable()


class _SyntaxTrees(Mapping[str, ast.Module]):
    """Files are read when they are asked for: their names alone are what tests are collected from."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        for package, folder in PACKAGES.items():
            for path in sorted(folder.rglob("*.py")):
                parts = [package, *path.relative_to(folder).with_suffix("").parts]
                self._paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._trees: dict[str, ast.Module] = {}

    def __getitem__(self, name: str) -> ast.Module:
        if name not in self._trees:
            self._trees[name] = _parsed(self.source(name))
        return self._trees[name]

    def source(self, name: str) -> str:
        return self._paths[name].read_text(encoding="utf-8")

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


@functools.cache
def modules() -> _SyntaxTrees:
    """Module name -> syntax tree, of all three packages."""
    return _SyntaxTrees()


@dataclass
class FileFacts:
    """What one walk over a file's syntax tree finds."""

    imports: set[str] = field(default_factory=set)
    classes: list[str] = field(default_factory=list)
    #: Names that the file defines: attributes it reads or sets on self or cls, functions, classes.
    owned: set[str] = field(default_factory=set)
    #: Each `other._name`.
    private: list[ast.Attribute] = field(default_factory=list)


def _facts(tree: ast.Module, module: str) -> FileFacts:
    found = FileFacts()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.owned.add(node.attr)
            elif re.match(r"_[a-z]", node.attr):
                found.private.append(node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.owned.add(node.name)
            if isinstance(node, ast.ClassDef):
                found.classes.append(node.name)
        elif isinstance(node, ast.Import):
            found.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{module} uses a relative import"
            assert node.level == 0, f"{module} uses a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.imports.add(submodule if submodule in modules() else node.module)
    found.imports.discard(module)
    return found


@functools.cache
def facts_of(module: str) -> FileFacts:
    return _facts(modules()[module], module)


def facts() -> dict[str, FileFacts]:
    """Module name -> what its file holds, of all three packages."""
    return {name: facts_of(name) for name in modules()}


def imports_of(module: str) -> set[str]:
    """Every module that a file names in an import: at its top, for type checking, or inside a function."""
    return facts_of(module).imports


def cycles() -> list[list[str]]:
    """Groups of files that import each other in a circle (strongly connected, by Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(imports_of(name) & modules().keys()):
            if target not in index:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in modules():
        if name not in index:
            visit(name)
    return found


def foreign_private_attributes() -> Iterator[tuple[str, int, str]]:
    """(module, line, expression) of each `other._name` that only other files of ours define."""
    owned = set().union(*(each.owned for each in facts().values()))
    for module, each in facts().items():
        for node in each.private:
            if node.attr in owned - each.owned:
                yield module, node.lineno, ast.unparse(node)


def private_attributes_in_tests() -> Iterator[str]:
    """file:line expression of each `thing._name` in tests that our sources define, and the file does not."""
    ours = set().union(*(each.owned for each in facts().values()))
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ours.isdisjoint(re.findall(r"\.\s*(_[a-z]\w*)", text)):
            continue  # a syntax tree would take a hundred times as long
        found = _facts(_parsed(text), path.stem)
        for node in found.private:
            if node.attr in ours - found.owned:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
