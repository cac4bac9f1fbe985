# SPDX-License-Identifier: Apache-2.0
"""What docstrings list under `Args:` and `Attributes:` exists: a renamed parameter takes its text along."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from source_graph import modules

Function = ast.FunctionDef | ast.AsyncFunctionDef


def listed(docstring: str, section: str) -> set[str]:
    """The names that a section of a docstring explains."""
    names: set[str] = set()
    inside, indent = False, 0
    for line in docstring.splitlines():
        depth = len(line) - len(line.lstrip())
        if line.strip() == f"{section}:":
            inside, indent = True, depth + 4
        elif line.strip() and depth < indent:
            inside = False
        elif inside and depth == indent and (found := re.match(r"\s*([\w*]+(?:, [\w*]+)*):( |$)", line)):
            names |= {name.strip(" *") for name in found[1].split(",")}
    return names


def parameters(function: Function) -> set[str]:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {argument.arg for argument in named if argument is not None}


def fields(owner: ast.ClassDef | Function) -> set[str]:
    targets = (node.target for node in owner.body if isinstance(node, ast.AnnAssign))
    return {target.id for target in targets if isinstance(target, ast.Name)}


def attributes(owner: ast.ClassDef) -> set[str]:
    """Fields, properties, and what its methods set."""
    names = fields(owner) | {node.name for node in owner.body if isinstance(node, Function)}
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names


def unknown_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, Function | ast.ClassDef):
            continue
        docstring = ast.get_docstring(node) or ""
        unknown = set[str]()
        if arguments := listed(docstring, "Args"):
            makers = [one for one in node.body if isinstance(one, Function) and one.name == "__init__"]
            maker = node if isinstance(node, Function) else makers[0] if makers else None
            unknown |= arguments - (parameters(maker) if maker else fields(node))
        if isinstance(node, ast.ClassDef) and (shown := listed(docstring, "Attributes")):
            unknown |= shown - attributes(node)
        yield from (f"{node.name}: {name}" for name in sorted(unknown))


@pytest.mark.nightly
def test_what_docstrings_list_exists() -> None:
    found = {module: list(unknown_names(tree)) for module, tree in modules().items()}
    assert not {module: names for module, names in found.items() if names}


def test_a_name_that_does_not_exist_is_found() -> None:
    text = '''
def f(a, *rest):
    """Do.

    Args:
        a: one.
            b: more of it.
        c, rest: two.
    """
'''
    assert list(unknown_names(ast.parse(text))) == ["f: c"]
