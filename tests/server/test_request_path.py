# SPDX-License-Identifier: Apache-2.0
"""How many files and forms a streamed chat passes, counted on a trace of one, and how many an option does."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

from request_path import trace_chat
from source_graph import modules

from radixkv import SamplingParams
from radixkv.scheduling.request import Request

MAX_FILES, MAX_FORMS = 55, 12
MAX_FILES_OF_AN_OPTION = 5

#: Options whose words name other things as well: of answers, models, logs, policies, the command line.
COMMON_WORDS = {
    *("checkpoints", "logprobs", "lora", "max_tokens", "n", "namespace", "params", "pins", "priority"),
    *("prompt", "prompt_logprobs", "request_id", "salt", "seed", "skip_special_tokens", "stop", "stream"),
    *("tenant", "text"),
}


def test_a_chat_passes_few_files_in_few_forms(tmp_path: Path) -> None:
    path = trace_chat(tmp_path)
    assert len(path.files) <= MAX_FILES, "\n".join(sorted(path.files))
    assert len(path.forms) <= MAX_FORMS, "\n".join(sorted(path.forms))


def test_an_option_passes_few_files_from_its_schema_to_its_use() -> None:
    options = {field.name for kind in (Request, SamplingParams) for field in fields(kind) if field.init}
    named: dict[str, list[str]] = {name: [] for name in options - COMMON_WORDS}
    for module, tree in modules().items():
        if not _is_aside(module):
            for name in named.keys() & _identifiers(tree):
                named[name].append(module)
    assert len(named) > 15
    many = {name: where for name, where in named.items() if len(where) > MAX_FILES_OF_AN_OPTION}
    assert not many


def _is_aside(module: str) -> bool:
    """Commands' own options, and spellings of one dialect."""
    dialect = module.startswith("radixkv_server.apis.") and ".common." not in module
    return dialect or module.startswith("radixkv.cli.")


def _identifiers(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names
