# SPDX-License-Identifier: Apache-2.0
"""Tools in one order, whatever order a client lists them and their keys in."""

from __future__ import annotations

import json
import random
from typing import Any

from radixkv.text.chat_formats.canonical_tools import canonical_tools

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {
                    "when": {"type": "string", "enum": ["now", "later", "at noon"]},
                    "ships": {"type": "array", "items": {"type": "object", "properties": {"b": {}, "a": {}}}},
                    "how": {"anyOf": [{"type": "string", "title": "x"}, {"type": "null"}]},
                },
                "required": ["when", "how"],
            },
        },
    }
    for name in ("sail", "anchor", "load", "unload")
]


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same with its keys in another order."""
    if isinstance(value, dict):
        items = [(name, shuffled(item, rng)) for name, item in value.items()]
        return dict(rng.sample(items, len(items)))
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


def test_any_order_becomes_one_and_says_the_same() -> None:
    rng = random.Random(0)
    wanted = json.dumps([tool["function"]["parameters"] for tool in canonical_tools(TOOLS)])
    for _ in range(50):
        given = [
            {
                **tool,
                "function": {**tool["function"], "parameters": shuffled(tool["function"]["parameters"], rng)},
            }
            for tool in rng.sample(TOOLS, len(TOOLS))
        ]
        before = json.dumps(given)
        found = canonical_tools(given)
        assert [tool["function"]["name"] for tool in found] == ["anchor", "load", "sail", "unload"]
        assert json.dumps([tool["function"]["parameters"] for tool in found]) == wanted
        assert sorted(found, key=str) == sorted(canonical_tools(TOOLS), key=str)
        assert json.dumps(given) == before, "what was given is not changed"
    assert canonical_tools(found) == found


def test_lists_and_tools_of_the_same_name_stay_in_their_order() -> None:
    first, second = (
        {"type": "function", "function": {"name": "a", "parameters": {"required": order}}}
        for order in (["z", "b"], ["b", "z"])
    )
    assert canonical_tools([first, second]) == [first, second]
    assert canonical_tools([second, first]) == [second, first]
    bare = {"type": "function", "function": {"name": "b"}}
    assert canonical_tools([bare, first]) == [first, bare]
