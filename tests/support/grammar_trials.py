# SPDX-License-Identifier: Apache-2.0
"""Grammars over a vocabulary of bytes: what they accept, and some that would take too much work."""

from __future__ import annotations

import json
from typing import Any

import torch
from scripted_engine import ByteTokenizer

from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.limits import MAX_TEXT_BYTES
from radixkv.grammar.masks import Grammar, GrammarMask
from radixkv.grammar.tenants import Tenants
from radixkv.grammar.vocabulary import Vocabulary
from radixkv.sampling.structured import StructuredOutputs

END = 257


def make_compiler(**limits: Any) -> GrammarCompiler:
    return GrammarCompiler(lambda: Vocabulary(ByteTokenizer(), {END}), tenants=Tenants(**limits))


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
    "joined where no trial comes": (
        {"grammar": "start: X\nX: /x{40}/ Y?\nY: " + " & ".join(f"/(.*a.{{{i}}}b.*)/" for i in range(25))},
        "& and ~",
    ),
    "patterns in allOf where no trial comes": (
        {"json": {"allOf": [{"pattern": f"^([a-z]{{0,39}}|z{{40}}.*a.{{{i}}}b.*)$"} for i in range(25)]}},
        "pattern",
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
