# SPDX-License-Identifier: Apache-2.0
"""Grammars without an engine: what is accepted, what is refused and why, what a compile may cost."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar_trials import (
    BOMBS,
    accepts,
    properties,
    reference_chain,
    start,
)
from nightly import by_day

from radixkv.errors import InvalidRequestError
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.limits import MAX_TEXT_BYTES, TooComplex, check_lark
from radixkv.grammar.vocabulary import PlainTokens, Vocabulary, VocabularyRecipe
from radixkv.sampling.structured import StructuredOutputs

SUITE = Path(__file__).parents[1] / "data" / "json-schema-test-suite" / "draft2020-12.json"


def test_json_schema_test_suite(compiler: GrammarCompiler) -> None:
    """Nothing invalid can be written; what is refused is refused by the name of its keyword."""
    counts: Counter[str] = Counter()
    unnamed = []
    for groups in json.loads(SUITE.read_text()).values():
        for group in groups:
            schema = group["schema"]
            try:
                grammar = compiler.compile(StructuredOutputs(json=schema))
            except InvalidRequestError as error:
                counts["refused"] += len(group["tests"])
                # A draft's own schema is known, with keywords that are not.
                known = all_keywords(schema) | {"$dynamicAnchor"}
                keywords = [name for name in known if name in str(error)]
                if not keywords:
                    unnamed.append((schema, str(error)))
                continue
            for case in group["tests"]:
                text = json.dumps(case["data"], separators=(",", ":"), ensure_ascii=False)
                accepted = accepts(grammar, text)
                assert case["valid"] or not accepted, (group["description"], case)
                counts["right" if accepted == case["valid"] else "too strict"] += 1
    assert not unnamed
    assert counts["right"] >= 560
    assert counts["too strict"] <= 25
    assert counts["refused"] <= 700


def all_keywords(schema: Any) -> set[str]:
    if isinstance(schema, bool):
        return {str(schema).lower()}
    if isinstance(schema, list):
        return set().union(*map(all_keywords, schema))
    if isinstance(schema, dict):
        return set(schema).union(*map(all_keywords, schema.values()))
    return set()


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_by_name(compiler: GrammarCompiler, name: str) -> None:
    """By their text: a compile that was begun would take seconds, or the process with it."""
    spec, word = BOMBS[name]
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputs(**spec))
    assert word in str(caught.value)
    assert caught.value.param == "structured"


@pytest.mark.parametrize(
    "spec",
    [
        {"json": {**properties(1000), "required": [f"p{i}" for i in range(1000)]}},
        {"json": properties(450)},
        {"json": {"enum": list(range(9_000))}},
        {"choice": [f"the choice {i}" for i in range(9_000)]},
        {"json": {"type": "number", "multipleOf": 0.01}},
        {"json": {"type": "object", "properties": {"a": {"multipleOf": 5}, "b": {"multipleOf": 0.25}}}},
        {"json": reference_chain(400)},
        {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}}},
        {"json": {"properties": {f"p{i}": {"pattern": f"^a{i}$", "format": "uri"} for i in range(30)}}},
        {"json": {"allOf": [{"properties": {f"p{i}": {"pattern": f"^a{i}$"}}} for i in range(8)]}},
        {"regex": "(a+)+b"},
        {"regex": "x{1,99999}"},
        {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9000)) + '\nr9000: "a"'},
    ],
    ids=lambda spec: str(spec)[:40],
)
def test_what_is_within_the_limits_compiles(compiler: GrammarCompiler, spec: dict[str, Any]) -> None:
    assert start(compiler, **spec).failure is None


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"json": False}, "false"),
        ({"json": "{"}, "JSON"),
        ({"json": "[]"}, "object"),
        ({"json": {"type": "foo"}}, "type"),
        ({"json": {"type": "string", "format": "banana"}}, "format"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "pattern"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "minimum"),
        ({"json": {"type": "integer", "minimum": 10**300}}, "minimum"),
        ({"json": {"$ref": "#"}}, "$ref"),
        ({"json": {"enum": []}}, "enum"),
        ({"json": {"multipleOf": 0}}, "multipleOf"),
        ({"json": {"multipleOf": -2}}, "multipleOf"),
        ({"json": {"properties": {"a": 5}}}, "properties"),
        ({"json": {"anyOf": [5]}}, "anyOf"),
        ({"grammar": 'start: %json {"$ref": "http://127.0.0.1:9/"}'}, "$ref"),
        ({"json": {"$ref": "data:application/json,{}"}}, "$ref"),
        ({"json": {"allOf": [{"format": "uri"}, {"format": "email"}, {"pattern": "a.{50}b"}]}}, "pattern"),
        ({"regex": "("}, "unclosed"),
        ({"grammar": "no grammar"}, "Lark"),
        ({"grammar": "start: %json {"}, "%json"),
    ],
)
def test_what_is_refused_names_what_is_wrong(
    compiler: GrammarCompiler, spec: dict[str, Any], word: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputs(**spec))
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum"),  # 2**53 as a float
        ({"maximum": "BIG"}, "maximum"),
        ({"items": {"enum": [{"a": [2**53 + 1]}]}}, "enum"),
        ({"properties": {"default": {"const": 2**53 + 1}}}, "const"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
        ({"anyOf": [{"exclusiveMaximum": 2, "minimum": 1.5}]}, "exclusiveMaximum"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "string", "not": {"const": "a"}, "x-guidance": {"lenient": True}}, "x-guidance"),
    ],
)
def test_what_would_be_enforced_only_nearly_is_refused(
    compiler: GrammarCompiler, schema: dict[str, Any], word: str
) -> None:
    """The compiler itself takes these, and lets invalid answers through."""
    text = json.dumps(schema).replace('"BIG"', "0.1000000000000000000001")
    with pytest.raises(InvalidRequestError, match=word):
        compiler.compile(StructuredOutputs(json=text))


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer", "maximum": 2**63 - 1, "default": 2**53 + 1}, "5", str(2**63)),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.5", "0"),
        ({"type": "number", "exclusiveMinimum": 0.25, "maximum": 0.5}, "0.3", "0.25"),
        ({"minProperties": 2, "required": ["a"]}, '{"a":1,"b":1}', '{"a":1}'),
    ],
)
def test_what_is_enforced_in_full_is_not_refused(
    compiler: GrammarCompiler, schema: dict[str, Any], valid: str, invalid: str
) -> None:
    grammar = compiler.compile(StructuredOutputs(json=schema))
    assert accepts(grammar, valid)
    assert not accepts(grammar, invalid)


def test_tools_that_are_not_strict_are_enforced_as_far_as_possible(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "minProperties": 3, "x-guidance": {"lenient": True}}
    assert start(compiler, grammar=f"start: %json {json.dumps(schema)}").failure is None


def test_exactly_one_kind_of_the_right_type() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {},
        {"json": {}, "regex": "a"},
        {"regex": ""},
        {"regex": 3},
        {"choice": "abc"},
        {"choice": []},
        {"choice": ["a", ""]},
        {"json": 3},
        {"json": {"a": float("nan")}},
        {"json_object": False},
    )
    for spec in wrong:
        with pytest.raises(InvalidRequestError):
            StructuredOutputs(**spec)
    with pytest.raises(InvalidRequestError, match="structural_tag"):
        StructuredOutputs.of({"structural_tag": "x"})
    assert StructuredOutputs(json={"a": 1}) == StructuredOutputs(json='{"a":1}')
    assert len({StructuredOutputs(choice=["a"]), StructuredOutputs(choice=("a",))}) == 1


def test_whitespace(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for options, accepted in (
        ({}, {'{"a":1}'}),
        ({"disable_any_whitespace": False}, {'{"a":1}', '{ "a":\n  1 }'}),
        ({"whitespace_pattern": " ?"}, {'{"a":1}', '{"a": 1}'}),
    ):
        grammar = compiler.compile(StructuredOutputs(json=schema, **options))
        found = {text for text in ('{"a":1}', '{"a": 1}', '{ "a":\n  1 }') if accepts(grammar, text)}
        assert found >= accepted
        assert options or found == accepted


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        ({"patternProperties": {"^a": {"type": "integer"}}}, r"\u0061"),
        ({"patternProperties": {"^a": {"type": "integer"}}}, r"\u0061b"),
        ({"patternProperties": {"é$": {"type": "integer"}}}, r"x\u00e9"),
        ({"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False}, r"\u0061"),
        ({"properties": {"a": {"type": "integer"}}}, r"\u0061"),
        ({"properties": {"a/b": {"type": "integer"}}}, r"a\/b"),
        ({"properties": {"a\n": {"type": "integer"}}}, r"a\u000a"),
        ({"properties": {"a\n": {"type": "integer"}}}, r"a\u000A"),
    ],
)
def test_a_key_has_one_spelling(compiler: GrammarCompiler, schema: dict[str, Any], key: str) -> None:
    for spec in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        grammar = compiler.compile(StructuredOutputs(**spec))
        assert not accepts(grammar, f'{{"{key}":"x"}}')


@pytest.fixture(scope="module")
def large_vocabulary() -> Vocabulary:
    """Pieces of words in several scripts, as the vocabularies of models have them."""
    draws = random.Random(0)
    letters = [
        *map(chr, [*range(97, 123), *range(0xE0, 0x180), *range(0x400, 0x460), *range(0x4E00, 0x5200)])
    ]
    words = {"".join(draws.choices(letters, k=draws.randint(1, 5))).encode() for _ in range(20_000)}
    tokens = [*(bytes([i]) for i in range(256)), b"<end>", *sorted(words)]
    return VocabularyRecipe(PlainTokens(tokens, [256], 256, None), (256,)).make()


#: Patterns and names that may grow beyond bounds.
GROWING: list[dict[str, Any]] = [
    {"properties": {"": {}}, "patternProperties": {r"\p{L}": {}}},
    {"patternProperties": {r"^(\w.{9}){3}": {}, r"^\W.{200}\w$": {"type": "integer"}}},
    {"properties": {"": {"type": "integer"}}, "patternProperties": {r"^\p{L}+$": {"type": "integer"}}},
    {"patternProperties": {"^$": {"type": "integer"}, r"\p{L}": {"type": "string"}}},
    {"patternProperties": {r"\p{Lu}|\p{Greek}": {"type": "integer"}}, "minProperties": 1},
    {"items": {"pattern": r"^(.*\p{L}.{20}\d){2}$"}},
    {"pattern": r"^.*(\w.{60}){4}$", "maxLength": 4000},
]


@pytest.mark.parametrize("schema", by_day(GROWING, *GROWING[:2]))
def test_what_compiles_can_be_followed(large_vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    """Or it is refused: nothing compiles and then fails in every answer."""
    compiler = GrammarCompiler(lambda: large_vocabulary)
    try:
        grammar = compiler.compile(StructuredOutputs(json={"type": ["object", "array", "string"], **schema}))
    except InvalidRequestError:
        return
    failures = 0
    for seed in range(15):
        mask, draws = grammar.start(), random.Random(seed)
        for _ in range(40):
            logits = torch.zeros(1, large_vocabulary.size)
            type(mask).apply(logits, [0], [mask])
            tokens = torch.isfinite(logits[0]).nonzero()[:, 0].tolist()
            if mask.failure is not None or mask.is_complete or tokens == [256]:
                break
            mask.accept(draws.choice([token for token in tokens if token != 256]))
        failures += mask.failure is not None
    assert failures <= 1


def test_constants_with_control_characters(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputs(json={"const": {"a": "\x01\n"}}))
    assert accepts(grammar, r'{"a":"\u0001\n"}')


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("begin", "unit"),
    [('start: "', '\\"'), ("start: /", r"\/"), ('start[stop="', '\\"'), ('start: "a', '" "')],
)
def test_what_does_not_end_is_read_once(begin: str, unit: str) -> None:
    """Where every character began a search of the rest, this would take many minutes."""
    check_lark(begin + unit * ((MAX_TEXT_BYTES - len(begin)) // len(unit)))


def test_bounds_in_a_regular_expression_of_several_lines_are_counted() -> None:
    with pytest.raises(TooComplex, match="nested repetition"):
        check_lark("start: /a\n((b{1,1000}){1,1000}){2}/")


#: A class that excludes a mark, and a text with the mark that it must not match.
EXCLUDING = [
    ('^[^"]+$', 'a"', "a,"),
    (r"^[^\\]+$", "a\\", 'a"'),
    (r'^[^,"\\]{2,6}$', 'f2"', "f2"),
    (r"^[^\\\n]$", "\\", "é"),
    (r"^[\x00-\x1f]$", '"', "\r"),
    (r'^(x[^"\r]|x\r)*$', 'x"', "x\r"),
    (r"^[\x00-\x0a]*[\x0b-\x1f]*$|^\P{Po}$", "\\", "\t\n"),
    ("^[[:^punct:]]$", '"', "\n"),
    (r'^(?s:[^"]|[\n])$', '"', "\n"),
]


def places_of(pattern: str) -> list[tuple[dict[str, Any], Any]]:
    """Specs that have a pattern wherever one can stand, each with what makes an answer of a text."""
    text = {"type": "string", "pattern": pattern}

    def as_member(value: str) -> dict[str, str]:
        return {"a": value}

    member = {"type": "object", "properties": {"a": text}, "additionalProperties": False}
    named = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
    return [
        ({"json": text}, str),
        ({"json": member}, as_member),
        ({"json": {"type": "array", "items": text}}, lambda value: [value]),
        ({"json": {"type": "array", "prefixItems": [text], "items": False}}, lambda value: [value]),
        ({"json": named}, lambda value: {value: 0}),
        ({"json": {"additionalProperties": text}}, as_member),
        ({"json": {"allOf": [text, {"maxLength": 9}]}}, str),
        ({"json": {"anyOf": [text, {"type": "null"}]}}, str),
        ({"json": {"$defs": {"t": text}, "$ref": "#/$defs/t"}}, str),
        ({"json": {"parts": {"t": text}, "items": {"$ref": "#/parts/t"}}}, lambda value: [value]),
        ({"json": json.dumps(text).replace("pattern", r"p\u0061ttern")}, str),
        ({"grammar": f"start: %json {json.dumps(member, indent=1)}"}, as_member),
        ({"grammar": f"start: inner\ninner: %lark {{\nstart: %json {json.dumps(text)}\n}}"}, str),
    ]


@pytest.mark.parametrize(("pattern", "wrong", "right"), EXCLUDING)
def test_a_class_that_excludes_a_mark_of_json_keeps_it_out(
    compiler: GrammarCompiler, pattern: str, wrong: str, right: str
) -> None:
    for spec, answer_of in places_of(pattern):
        grammar = compiler.compile(StructuredOutputs(**spec))
        for value, is_right in ((wrong, False), (right, True)):
            text = json.dumps(answer_of(value), separators=(",", ":"), ensure_ascii=False)
            assert accepts(grammar, text) == is_right, (spec, text)


def test_patterns_in_data_are_data(compiler: GrammarCompiler) -> None:
    value = {"pattern": '^[^"]$', "enum": [{"patternProperties": {'[^"]': 1}}]}
    for schema in ({"const": value}, {"enum": [value]}, {"default": value, "const": value}):
        grammar = compiler.compile(StructuredOutputs(json=schema))
        assert accepts(grammar, json.dumps(value, separators=(",", ":")))
    with pytest.raises(InvalidRequestError, match=r"\$ref"):
        compiler.compile(StructuredOutputs(json={"enum": [value], "items": {"$ref": "#/enum/0"}}))


def test_errors_keep_their_lines_beside_a_rewritten_pattern(compiler: GrammarCompiler) -> None:
    schema = json.dumps({"type": "string", "pattern": '^[^"]$'}, indent=1)
    with pytest.raises(InvalidRequestError, match=r"\b6\("):
        compiler.compile(StructuredOutputs(grammar=f"start: inner nothing\ninner: %json {schema}\nstart: ("))
