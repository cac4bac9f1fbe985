"""Grammars without an engine: what is accepted, what is refused and why, what a compile may cost."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from scripted_engine import ByteTokenizer
from tiny_models import byte_fallback_tokenizer, byte_level_tokenizer

from radixkv.errors import EngineOverloadedError, InvalidRequestError
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.sampling.grammar.grammar import Grammar
from radixkv.sampling.grammar.limits import MAX_TEXT_BYTES, TooComplex, check_lark
from radixkv.sampling.grammar.masks import GrammarMask
from radixkv.sampling.grammar.tenants import Tenants
from radixkv.sampling.grammar.vocabulary import PlainTokens, Vocabulary, VocabularyRecipe
from radixkv.structured import StructuredOutputs
from radixkv.text.tokenizer import Tokenizer

END = 257
SUITE = Path(__file__).parents[1] / "data" / "json-schema-test-suite" / "draft2020-12.json"


def make_compiler(**limits: Any) -> GrammarCompiler:
    return GrammarCompiler(lambda: Vocabulary(ByteTokenizer(), {END}), tenants=Tenants(**limits))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


def start(compiler: GrammarCompiler, **spec: Any) -> GrammarMask:
    return compiler.compile(StructuredOutputs(**spec)).start()


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the text, and then the end, can be chosen token by token."""
    mask, tokens = grammar.start(), list(text.encode())
    if mask.num_allowed(tokens) < len(tokens):
        return False
    for token in tokens:
        mask.accept(token)
    return mask.is_complete or END in allowed(mask)


def allowed(mask: GrammarMask) -> set[int]:
    logits = torch.zeros(1, ByteTokenizer.vocab_size)
    type(mask).apply(logits, [0], [mask])
    return set(torch.isfinite(logits[0]).nonzero()[:, 0].tolist())


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


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def reference_chain(count: int) -> dict[str, Any]:
    """Followed by recursion, thousands of these end the process."""
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def joined_by_references(count: int, by: str = "#/$defs/") -> dict[str, Any]:
    """A string that must match all patterns; twenty of them would be computed for minutes."""
    parts = {
        f"d{i}": {"$anchor": f"d{i}", "pattern": f"a.{{{i}}}b", "$ref": f"{by}d{i + 1}"} for i in range(count)
    }
    parts[f"d{count}"] = {"$anchor": f"d{count}", "type": "string"}
    return {"$defs": parts, "properties": {"a": {"$ref": "#/$defs/d0"}}}


BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "multiple of a prime": ({"json": {"type": "integer", "multipleOf": 1000003}}, "multipleOf"),
    "multiples that multiply": (
        {"json": {"allOf": [{"multipleOf": p} for p in (101, 103, 107)]}},
        "multipleOf",
    ),
    "many multiples": (
        {"json": {"properties": {f"p{i}": {"multipleOf": 9000 + i} for i in range(900)}}},
        "multipleOf",
    ),
    "multiple with decimals": ({"json": {"multipleOf": 1000.0003}}, "multipleOf"),
    "optional properties": ({"json": properties(5000)}, "properties"),
    "properties in a Lark grammar": (
        {"grammar": f"start: %json {json.dumps(properties(5000))}"},
        "properties",
    ),
    "megabyte of enum": ({"json": {"enum": [f"{i:0100}" for i in range(10_000)]}}, str(MAX_TEXT_BYTES)),
    "values of an enum": ({"json": {"enum": list(range(10_001))}}, "enum"),
    "keys of a const": ({"json": {"const": {f"k{i}": i for i in range(5_000)}}}, "properties"),
    "patterns of properties": (
        {"json": {"patternProperties": {f"^p{i}[a-z]*$": {} for i in range(300)}}},
        "patternProperties",
    ),
    "nested repetition": ({"regex": "((a{1,100}){1,100}){1,100}"}, "repetition"),
    "nested repetition in a pattern": (
        {"json": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}},
        "repetition",
    ),
    "nested repetition in a Lark grammar": ({"grammar": 'start: "/" /(a{999}){999}/'}, "repetition"),
    "joined in Lark": (
        {"grammar": "start: X\nX: " + " & ".join(f"/(.*a.{{{i}}}b.*)/" for i in range(25))},
        "& and ~",
    ),
    "joined by names": (
        {
            "grammar": "start: T0\n"
            + "\n".join(f"T{i}: /.*a.{{{i}}}b.*/ & (T{i + 1} | ~T{i + 1})" for i in range(24))
            + "\nT24: /.*c/"
        },
        "& and ~",
    ),
    "nested repetition with blanks": ({"regex": "((a{1, 1000}){ 1 , 1000 }){1,1000 }"}, "repetition"),
    "megabytes at least": (
        {"json": {"type": "array", "items": {"const": "x" * 1000}, "minItems": 10**6, "maxItems": 2 * 10**6}},
        "minItems",
    ),
    "many alternatives": (
        {
            "grammar": "start: "
            + " | ".join(f"r{i}" for i in range(3000))
            + "".join(f'\nr{i}: "a" r{i * 7 % 3000} | "b"' for i in range(3000))
        },
        "big",
    ),
    "llguidance's own JSON": ({"grammar": '{"grammars": [{"json_schema": {}}]}'}, "llguidance"),
    "patterns in allOf": (
        {"json": {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(24)]}},
        "pattern",
    ),
    "patterns joined by references": ({"json": joined_by_references(24)}, "pattern"),
    "patterns joined by anchors": ({"json": joined_by_references(24, by="#")}, "pattern"),
    "depth": ({"json": nested(100)}, "nested deeper"),
    "depth of text": ({"json": '{"items":' * 20_000 + "{}" + "}" * 20_000}, "nested deeper"),
    "chain of references": ({"json": reference_chain(4000)}, "$ref"),
    "remote reference": ({"json": {"$ref": "http://127.0.0.1:9/schema.json"}}, "$ref"),
    "file reference": ({"json": {"$ref": "file:///etc/passwd"}}, "$ref"),
    "long choice": ({"choice": ["x" * MAX_TEXT_BYTES, "y"]}, str(MAX_TEXT_BYTES)),
}


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


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"": {}}, "patternProperties": {r"\p{L}": {}}},
        {"properties": {"": {"type": "integer"}}, "patternProperties": {r"^\p{L}+$": {"type": "integer"}}},
        {"patternProperties": {"^$": {"type": "integer"}, r"\p{L}": {"type": "string"}}},
        {"patternProperties": {r"\p{Lu}|\p{Greek}": {"type": "integer"}}, "minProperties": 1},
        {"patternProperties": {r"^(\w.{9}){3}": {}, r"^\W.{200}\w$": {"type": "integer"}}},
        {"items": {"pattern": r"^(.*\p{L}.{20}\d){2}$"}},
        {"pattern": r"^.*(\w.{60}){4}$", "maxLength": 4000},
    ],
)
def test_what_compiles_can_be_followed(large_vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    """Or it is refused: nothing compiles and then fails in every answer."""
    compiler = GrammarCompiler(lambda: large_vocabulary)
    try:
        grammar = compiler.compile(StructuredOutputs(json={"type": ["object", "array", "string"], **schema}))
    except InvalidRequestError:
        return
    failures = 0
    for seed in range(30):
        mask, draws = grammar.start(), random.Random(seed)
        for _ in range(40):
            logits = torch.zeros(1, large_vocabulary.size)
            type(mask).apply(logits, [0], [mask])
            tokens = torch.isfinite(logits[0]).nonzero()[:, 0].tolist()
            if mask.failure is not None or mask.is_complete or tokens == [256]:
                break
            mask.accept(draws.choice([token for token in tokens if token != 256]))
        failures += mask.failure is not None
    assert failures <= 3


def test_constants_with_control_characters(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputs(json={"const": {"a": "\x01\n"}}))
    assert accepts(grammar, r'{"a":"\u0001\n"}')


def test_roll_back_restores_the_masks(compiler: GrammarCompiler) -> None:
    """Also over the end token, which no matcher may get."""
    mask = start(compiler, regex="(ab)*c?")
    seen = [allowed(mask)]
    tokens = [*b"ababc", END]
    for token in tokens:
        mask.accept(token)
        seen.append(allowed(mask))
    for count in (1, 2, 3):
        mask.roll_back(count)
        assert allowed(mask) == seen[len(tokens) - count]
        assert mask.is_complete == (count == 1)  # nothing can follow the c
        for token in tokens[-count:]:
            mask.accept(token)
        assert mask.is_complete


def test_a_grammar_that_has_become_too_complex_stays_so_when_tokens_are_taken_back(
    compiler: GrammarCompiler,
) -> None:
    mask = start(compiler, regex="x{60}" + "(a?){1000}" * 99 + "a")
    for _ in range(60):
        mask.accept(ord("x"))
    num_taken = 0
    while allowed(mask):
        mask.accept(ord("a"))
        num_taken += 1
    assert num_taken > 0
    mask.roll_back(1)
    assert "too many" in str(mask.failure)
    assert allowed(mask) == set()


def test_a_fork_has_a_future_of_its_own(compiler: GrammarCompiler) -> None:
    mask = start(compiler, choice=["ax", "by"])
    other = mask.fork()
    mask.accept(ord("a"))
    other.accept(ord("b"))
    assert (allowed(mask), allowed(other)) == ({ord("x")}, {ord("y")})


def test_forced_and_allowed_tokens(compiler: GrammarCompiler) -> None:
    mask = start(compiler, json={"const": {"name": 1}})
    forced = mask.forced_tokens()
    assert bytes(forced).startswith(b'{"na')
    assert mask.num_allowed(forced) == len(forced)
    assert mask.num_allowed(list(b'{"nobody')) == 3
    assert mask.num_allowed([*b'{"name":1}', END, END]) == 10
    assert allowed(mask) == {ord("{")}


def test_known_grammars_are_bounded_and_compiled_once() -> None:
    compiler = make_compiler(max_known=8)
    for i in range(40):
        compiler.compile(StructuredOutputs(choice=[str(i)]))
    assert len(compiler) == 8
    first = compiler.submit(StructuredOutputs(choice=["39"]))
    assert first.done()
    assert first is compiler.submit(StructuredOutputs(choice=["39"]))


def test_who_keeps_most_gives_way() -> None:
    compiler = make_compiler(max_known=8)
    quiet = compiler.compile(StructuredOutputs(choice=["a"]), "quiet")
    for i in range(20):
        compiler.compile(StructuredOutputs(choice=[str(i)]), "loud")
    assert len(compiler) == 8
    assert compiler.submit(StructuredOutputs(choice=["a"]), "quiet").result() is quiet


def test_what_is_known_in_one_namespace_does_not_show_in_another() -> None:
    """Neither a grammar nor what it was refused for."""
    compiler = make_compiler()
    good, bad = StructuredOutputs(regex="a+b"), StructuredOutputs(**BOMBS["joined in Lark"][0])
    namespaces: list[str | tuple[str, ...]] = ["a", "b", ("a", "salt")]
    grammars = [compiler.compile(good, namespace) for namespace in namespaces]
    assert len({id(grammar) for grammar in grammars}) == 3
    assert [compiler.submit(good, namespace).result() for namespace in namespaces] == grammars
    for namespace in namespaces:
        before = len(compiler)
        with pytest.raises(InvalidRequestError):
            compiler.compile(bad, namespace)
        assert len(compiler) == before + 1
        with pytest.raises(InvalidRequestError):
            compiler.submit(bad, namespace).result(timeout=0)


#: Passes every check of its text; its one derivative takes all of the time and memory there is.
ENDLESS: dict[str, Any] = {"grammar": "start: X\nX: " + " & ".join(f"/(.*a.{{{i}}}b.*)/" for i in range(25))}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused by its text is tried out nevertheless, by compilers made from now on."""
    monkeypatch.setattr("radixkv.sampling.grammar.trial_process.SERVER", "unchecked_trials")


def descendants(pid: int) -> set[int]:
    """Processes that are under a process."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


@pytest.mark.usefixtures("unchecked")
def test_a_trial_that_does_not_end_is_killed_and_nothing_of_it_stays() -> None:
    compiler = make_compiler()
    compiler.compile(StructuredOutputs(regex="a"))
    server = compiler.trial_process_id
    assert server is not None
    size = psutil.Process(server).memory_info().rss
    with pytest.raises(InvalidRequestError, match=r"takes (longer|more)") as caught:
        compiler.compile(StructuredOutputs(**ENDLESS))
    assert caught.value.code == "grammar_too_complex"
    assert not descendants(server)
    assert psutil.Process(server).memory_info().rss < size + 2**24
    with pytest.raises(InvalidRequestError, match=r"takes (longer|more)"):  # at once: it is remembered
        compiler.submit(StructuredOutputs(**ENDLESS)).result(timeout=0)
    assert accepts(compiler.compile(StructuredOutputs(regex="b")), "b")


@pytest.mark.usefixtures("unchecked")
def test_a_tenant_does_not_wait_for_anothers_grammars() -> None:
    compiler = make_compiler()
    compiler.compile(StructuredOutputs(regex="a"))
    stuck = [
        compiler.submit(StructuredOutputs(grammar=f"{ENDLESS['grammar']}\n// {i}"), f"loud {i % 2}")
        for i in range(4)
    ]
    compiler.compile(StructuredOutputs(regex="b"), "quiet")
    assert not stuck[-1].done()
    for future in stuck:
        with pytest.raises(InvalidRequestError, match="takes"):
            future.result(timeout=60)


@pytest.mark.usefixtures("unchecked")
def test_who_has_used_up_the_time_for_compiling_waits() -> None:
    compiler = make_compiler(compiling=(0.1, 0.001))
    with pytest.raises(InvalidRequestError, match="takes"):
        compiler.compile(StructuredOutputs(**ENDLESS), "loud")
    with pytest.raises(EngineOverloadedError, match="CPU time to compile") as caught:
        compiler.compile(StructuredOutputs(regex="a"), "loud")
    assert 0 < caught.value.retry_after_s < 1000
    assert compiler.compile(StructuredOutputs(regex="a"), "quiet").start().failure is None


def test_a_tenants_queue_is_bounded() -> None:
    begun, made = threading.Event(), threading.Event()

    def make() -> Vocabulary:
        begun.set()
        assert made.wait(60)
        return Vocabulary(ByteTokenizer(), {END})

    compiler = GrammarCompiler(make, tenants=Tenants(max_waiting=3))
    futures = [compiler.submit(StructuredOutputs(regex="b"), "loud")]
    assert begun.wait(60)  # from here on it is under way, and does not wait
    futures += [compiler.submit(StructuredOutputs(regex=f"a{i}"), "loud") for i in range(3)]
    with pytest.raises(EngineOverloadedError, match="wait to be compiled"):
        compiler.submit(StructuredOutputs(regex="c"), "loud")
    futures.append(compiler.submit(StructuredOutputs(regex="a"), "quiet"))
    made.set()
    for future in futures:
        assert future.result(timeout=60).start().failure is None


def test_a_lost_process_fails_whom_it_served_and_is_replaced() -> None:
    compiler = make_compiler()
    compiler.compile(StructuredOutputs(regex="a"))
    server = compiler.trial_process_id
    assert server is not None
    os.kill(server, signal.SIGKILL)
    psutil.Process(server).wait(60)
    for i in range(100):  # until it is noticed
        with contextlib.suppress(EngineOverloadedError):
            assert accepts(compiler.compile(StructuredOutputs(regex=f"b{i}")), f"b{i}")
            break
    assert compiler.trial_process_id not in (None, server)


def test_no_process_is_left_when_the_compiler_is() -> None:
    compiler = GrammarCompiler(lambda: Vocabulary(ByteTokenizer(), {END, 256}))  # as no other test's
    compiler.compile(StructuredOutputs(regex="a"))
    assert compiler.trial_process_id is not None
    process = psutil.Process(compiler.trial_process_id)
    del compiler
    gc.collect()
    process.wait(60)


SPELLED = "<|im_start|>"


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_the_spelling_of_a_special_token_is_a_text_like_any_other(make: Callable[[], Any]) -> None:
    """Where nothing else can follow, too: no special token stands for it, and the answer is complete."""
    tokenizer = Tokenizer(make())
    special = {token for token in range(tokenizer.vocab_size) if tokenizer.is_added_token(token)}
    ends = tokenizer.encode("</s>", add_special_tokens=False)[:1] if make is not byte_level_tokenizer else [2]
    compiler = GrammarCompiler(lambda: Vocabulary(tokenizer, set(ends)))
    for spelled in [tokenizer.token_bytes(token).decode() for token in sorted(special)]:
        for spec in (
            {"json": {"const": spelled}},
            {"json": {"const": f"a{spelled}b"}},
            {"regex": re.escape(spelled)},
            {"choice": (spelled,)},
            {"grammar": f"start: {json.dumps(spelled)}"},
        ):
            mask, said = compiler.compile(StructuredOutputs(**spec)).start(), []
            while not mask.is_complete and len(said) < 60:
                forced = mask.forced_tokens()
                assert mask.num_allowed(forced) == len(forced)
                logits = torch.zeros(1, tokenizer.vocab_size)
                type(mask).apply(logits, [0], [mask])
                said.append(int(logits[0].argmax()) if not forced else forced[0])
                mask.accept(said[-1])
            assert mask.is_complete
            assert not special & set(said) - set(ends)
            assert spelled in tokenizer.decode(said)


def test_tokens_by_name_are_still_known() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    compiler = GrammarCompiler(lambda: Vocabulary(tokenizer, {2}))
    mask = compiler.compile(StructuredOutputs(grammar='start: "<|im_start|>" <|im_start|> "b"')).start()
    [special] = tokenizer.encode(SPELLED, add_special_tokens=False)
    tokens = [*tokenizer.encode(SPELLED, add_special_tokens=False, allow_special=False), special]
    assert mask.num_allowed(tokens) == len(tokens)
    with pytest.raises(InvalidRequestError, match=r'unknown special token: "<nope>".*<\|endoftext\|>'):
        compiler.compile(StructuredOutputs(grammar="start: <nope>"))


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
