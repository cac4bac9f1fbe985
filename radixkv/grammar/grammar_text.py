# SPDX-License-Identifier: Apache-2.0
r"""Text of a grammar as llguidance compiles it, and JSON Schemas as parts of other grammars.

Generated JSON has one spelling for each character, since llguidance compares keys as they are written: if "a"
might be spelled \u0061 as well, a key could escape both `properties` and `patternProperties`.
"""

from __future__ import annotations

import json
import re

import llguidance

from radixkv.grammar.exact_patterns import exact_patterns
from radixkv.grammar.limits import json_parts_of_lark
from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.closed_objects import close_objects

_SHORT = '"\\bfnrt'
#: A control character that has no short escape, in the text of a schema.
_CONTROL = re.compile(r"\\u00(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])")


def grammar_text(spec: StructuredOutputs) -> str:
    """Return the grammar text that llguidance compiles.

    Raises:
        ValueError: the JSON Schema can't be used.
    """
    if spec.regex is not None:
        return str(llguidance.LLMatcher.grammar_from_regex(spec.regex))
    if spec.grammar is not None:
        return _lark(exact_schemas(spec.grammar))
    if spec.choice is not None:  # as one terminal: a rule has a place in the parser for each of them
        return _lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, spec.choice))}")
    schema = exact_patterns(schema_text(spec))
    if schema.strip() == "true":
        schema = "{}"
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": not spec.disable_any_whitespace,
            "whitespace_pattern": spec.whitespace_pattern,
            "json_allowed_escapes": allowed_escapes(schema),
        },
    )
    return str(grammar)


def _lark(grammar: str) -> str:
    """Return a Lark grammar marked as such: bare, it might be taken for llguidance's own JSON."""
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


def allowed_escapes(schema: str) -> str:
    r"""Return the characters that may follow a backslash in answers of a schema, given as text.

    \u is left out, and with it the control characters that have no other escape; but for schemas whose
    constants may have them and whose keys no pattern tells apart.
    """
    needs_long = _CONTROL.search(schema) is not None and '"patternProperties"' not in schema
    return _SHORT + "u" * needs_long


def exact_schemas(grammar: str) -> str:
    """Return a Lark grammar whose schemas have exact patterns and, unless they name some, allowed escapes.

    Lines keep their numbers.
    """
    written, done = [], 0
    for begin, end in json_parts_of_lark(grammar):
        given = grammar[begin:end]
        schema = exact_patterns(given)
        schema = schema[:-1] + "\n" * (given.count("\n") - schema.count("\n")) + "}"
        if '"x-guidance"' not in schema:
            inside = schema[1:].lstrip()
            option = json.dumps({"x-guidance": {"json_allowed_escapes": allowed_escapes(schema)}})
            schema = option[:-1] + ("" if inside.startswith("}") else ",") + inside
        written += [grammar[done:begin], schema]
        done = end
    return "".join([*written, grammar[done:]])


def json_schema(spec: StructuredOutputs) -> str | None:
    """Return the JSON Schema with llguidance's options in it, for a grammar that it is a part of.

    None: there is no schema, or it is not an object.
    """
    if spec.kind not in ("json", "json_object"):
        return None
    try:
        schema = json.loads(schema_text(spec))
    except (ValueError, RecursionError):
        return None
    if not isinstance(schema, dict):
        return None
    options = {
        "json_allowed_escapes": _SHORT,
        "whitespace_flexible": not spec.disable_any_whitespace,
        "whitespace_pattern": spec.whitespace_pattern,
    }
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def schema_text(spec: StructuredOutputs) -> str:
    """Return the enforced JSON Schema of `json` or `json_object`, on request with closed objects.

    Text other than a schema stays unchanged.
    """
    if spec.json is None:
        return '{"type":"object"}'
    text = str(spec.json)
    if not spec.disable_additional_properties:
        return text
    try:
        schema = json.loads(text)
        return json.dumps(close_objects(schema), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text
