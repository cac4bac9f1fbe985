# SPDX-License-Identifier: Apache-2.0
"""Objects that have what their schema lists: closed where nothing is said, kept where something is."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import jsonschema
import pytest
from scripted_engine import ByteTokenizer

from radixkv.errors import InvalidRequestError
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.closed_objects import close_objects

END = 257
INTEGER = {"type": "integer"}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": INTEGER}, "required": ["name"]}


def one(name: str, schema: Any = INTEGER, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name], **more}


#: schema, what it accepts when it is closed, what of an open one it no longer does.
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "plain": (PERSON, [{"name": "a"}, {"name": "a", "age": 3}], [{"name": "a", "x": 1}]),
    "no type": ({"properties": {"a": INTEGER}}, [{"a": 1}, {}], [{"b": 1}]),
    "nothing listed": ({"type": "object"}, [{}, {"a": 1}], []),
    "an empty list": ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    "open by its own word": ({**PERSON, "additionalProperties": True}, [{"name": "a", "x": 1}], []),
    "with a schema": (
        {**PERSON, "additionalProperties": INTEGER},
        [{"name": "a", "x": 1}],
        [],
    ),
    "patterns": ({**one("a"), "patternProperties": {"^x": INTEGER}}, [{"a": 1, "x1": 2}], []),
    "nested": (
        one("a", {"type": "array", "items": PERSON}),
        [{"a": [{"name": "a"}]}],
        [{"a": [{"name": "a", "x": 1}]}, {"a": [], "x": 1}],
    ),
    "references": (
        {"$defs": {"p": PERSON}, **one("a", {"$ref": "#/$defs/p"})},
        [{"a": {"name": "a"}}],
        [{"a": {"name": "a", "x": 1}}],
    ),
    "a reference with a description": (
        {"$defs": {"p": PERSON}, "description": "who", "$ref": "#/$defs/p"},
        [{"name": "a"}],
        [{"name": "a", "x": 1}],
    ),
    "recursion": (
        {
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                }
            },
            "$ref": "#/$defs/n",
        },
        [{"kids": [{"kids": []}, {}]}],
        [{"kids": [{"x": 1}]}],
    ),
    "recursion of the whole": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        [{"next": {"next": {}}}],
        [{"next": {"x": 1}}],
    ),
    "a base class": (
        {"$defs": {"base": one("a")}, "allOf": [{"$ref": "#/$defs/base"}, one("b")]},
        [{"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "c": 3}],
    ),
    "beside a reference": (
        {"$defs": {"base": one("a")}, "$ref": "#/$defs/base", "properties": {"b": INTEGER}},
        [{"a": 1, "b": 2}, {"a": 1}],
        [{"a": 1, "c": 3}],
    ),
    "a base class that is a value, too": (
        {
            "$defs": {"base": one("a"), "more": {"allOf": [{"$ref": "#/$defs/base"}, one("b")]}},
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/base"}, "y": {"$ref": "#/$defs/more"}},
        },
        [{"x": {"a": 1}, "y": {"a": 1, "b": 2}}],
        [{"x": {"a": 1, "b": 2}}, {"y": {"a": 1, "b": 2, "c": 3}}],
    ),
    "one of several": ({"anyOf": [one("a"), one("b")]}, [{"a": 1}, {"b": 1}], [{"a": 1, "c": 1}]),
    "one of several, and more": (
        {"properties": {"id": INTEGER}, "type": "object", "anyOf": [one("a"), one("b")]},
        [{"id": 1, "a": 1}, {"b": 1}],
        [{"id": 1, "a": 1, "c": 1}],
    ),
    "one of several required": (
        {
            "type": "object",
            "properties": {"a": INTEGER, "b": INTEGER},
            "anyOf": [{"required": [n]} for n in "ab"],
        },
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "c": 1}],
    ),
    "a base that is open by its own word": (
        {"allOf": [one("a", additionalProperties=True), one("b")]},
        [{"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}],
        [],
    ),
    "kinds": (
        {
            "oneOf": [
                one("k", {"const": "a"}),
                {**one("k", {"const": "b"}), "properties": {"k": {"const": "b"}, "v": INTEGER}},
            ]
        },
        [{"k": "a"}, {"k": "b", "v": 1}],
        [{"k": "a", "v": 1}],
    ),
    "required, but not listed": (
        {"type": "object", "properties": {"a": INTEGER}, "required": ["b"]},
        [{"b": 1}, {"a": 1, "b": 1}],
        [],
    ),
    "or nothing": ({"anyOf": [PERSON, {"type": "null"}]}, [{"name": "a"}, None], [{"name": "a", "x": 1}]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_closed(name: str) -> None:
    schema, accepted, refused = CASES[name]
    before = copy.deepcopy(schema)
    closed = jsonschema.Draft202012Validator(close_objects(schema))
    original = jsonschema.Draft202012Validator(schema)
    assert schema == before
    for value in accepted:
        assert original.is_valid(value)
        assert closed.is_valid(value), (value, closed.schema)
    for value in refused:
        assert original.is_valid(value)
        assert not closed.is_valid(value), (value, closed.schema)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: Vocabulary(ByteTokenizer(), {END}))


def written(value: Any) -> list[bytes]:
    """With the outermost properties in any order: that of the combined schemas is not the point."""
    orders = itertools.permutations(value.items()) if isinstance(value, dict) else [value]
    values = map(dict, orders) if isinstance(value, dict) else orders
    return [json.dumps(one, separators=(",", ":")).encode() for one in values]


@pytest.mark.parametrize("name", CASES)
def test_what_is_written(compiler: GrammarCompiler, name: str) -> None:
    """The compiler has them as the validator does."""
    schema, accepted, refused = CASES[name]
    grammar = compiler.compile(StructuredOutputs(json=schema, disable_additional_properties=True))
    for value in [*accepted, *refused]:
        found = [grammar.start().num_allowed(list(text)) == len(text) for text in written(value)]
        assert any(found) == (value in accepted), value


def test_alternatives_never_begin_to_exclude_each_other(compiler: GrammarCompiler) -> None:
    """Open, {"a": 1} matches both of them, so that it is no answer."""
    schema: dict[str, Any] = {"oneOf": [{"properties": {n: INTEGER}, "type": "object"} for n in "ab"]}
    assert close_objects(schema) == schema
    with pytest.raises(InvalidRequestError, match="oneOf"):
        compiler.compile(StructuredOutputs(json=schema, disable_additional_properties=True))
    named: dict[str, Any] = {"$defs": {n: schema["oneOf"][i] for i, n in enumerate("ab")}}
    named |= {"oneOf": [{"$ref": f"#/$defs/{n}"} for n in "ab"]}
    assert close_objects(named) == named


def test_what_is_combined_without_end_stays_as_it_is() -> None:
    endless = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, one("x")]}}, "$ref": "#/$defs/a"}
    wide = {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}}
    wide["$defs"]["d40"] = one("x")
    for schema in (endless, {**wide, **one("y", {"allOf": [{"$ref": "#/$defs/d0"}, one("z")]})}):
        assert isinstance(close_objects(schema), dict)


def test_arguments_of_a_tool_without_properties() -> None:
    for schema in ({"type": "object"}, {"type": "object", "properties": {}}, {}):
        closed = close_objects(schema, is_closed=True)
        assert closed["additionalProperties"] is False
    is_open = {"type": "object", "additionalProperties": True}
    assert close_objects(is_open, is_closed=True) == is_open
