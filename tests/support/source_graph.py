# SPDX-License-Identifier: Apache-2.0
"""What ties our source files together, read from their syntax trees: imports, cycles, private attributes."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "radixkv": ROOT / "radixkv",
    "radixkv_kernels": ROOT / "kernels" / "radixkv_kernels",
    "radixkv_server": ROOT / "server" / "radixkv_server",
}


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
            self._trees[name] = ast.parse(self._paths[name].read_text(encoding="utf-8"))
        return self._trees[name]

    def num_lines(self, name: str) -> int:
        return self._paths[name].read_text(encoding="utf-8").count("\n")

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


@functools.cache
def modules() -> Mapping[str, ast.Module]:
    """Module name -> syntax tree, of all three packages."""
    return _SyntaxTrees()


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Every module that a file names in an import: at its top, for type checking, or inside a function."""
    names = set()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{module} uses a relative import"
            assert node.level == 0, f"{module} uses a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in modules() else node.module)
    return frozenset(names - {module})


def _run_when_imported(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            yield from _run_when_imported(
                node.orelse if "TYPE_CHECKING" in ast.dump(node.test) else node.body
            )
        elif isinstance(node, ast.Try):
            yield from _run_when_imported(node.body)
        else:
            yield node


def lines_loaded_by(module: str) -> int:
    """Lines of all files of ours that importing a module loads, its own included."""
    seen, ahead = set[str](), [module]
    while ahead:
        name = ahead.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in _run_when_imported(modules()[name].body):
            if isinstance(node, ast.ImportFrom):
                found = {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
                ahead += found & modules().keys()
            elif isinstance(node, ast.Import):
                ahead += {alias.name for alias in node.names} & modules().keys()
    trees = modules()
    assert isinstance(trees, _SyntaxTrees)
    return sum(trees.num_lines(name) for name in seen)


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


def _owned(tree: ast.Module) -> set[str]:
    """Names that a file defines: attributes it reads or sets on self or cls, functions, classes."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_own(node)} | {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def foreign_private_attributes() -> Iterator[tuple[str, int, str]]:
    """(module, line, expression) of each `other._name` that only other files of ours define."""
    owned = {name: _owned(tree) for name, tree in modules().items()}
    for module, tree in modules().items():
        elsewhere = set().union(*(names for other, names in owned.items() if other != module))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or _is_own(node) or not re.match(r"_[a-z]", node.attr):
                continue
            if node.attr in elsewhere - owned[module]:
                yield module, node.lineno, ast.unparse(node)


def private_attributes_in_tests() -> Iterator[str]:
    """file:line expression of each `thing._name` in tests that our sources define, and the file does not."""
    ours = set().union(*map(_owned, modules().values()))
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = _owned(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or _is_own(node) or not re.match(r"_[a-z]", node.attr):
                continue
            if node.attr in ours - own:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
