# SPDX-License-Identifier: Apache-2.0
"""Rules of a Lark grammar for arguments in any notation, by the schema of a tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from radixkv.text.chat_formats.argument_types import ArgumentSchema
from radixkv.text.chat_formats.arguments import JsonArguments
from radixkv.text.chat_formats.literals import LiteralArguments
from radixkv.text.chat_formats.tagged_arguments import KEY, KIND, ElementArguments, TaggedArguments

#: Objects in objects that get rules of their own; deeper ones may be anything.
_MAX_DEPTH = 4
#: Between the tokens of JSON: none is needed, one is what most models are used to.
_WHITESPACE = " ?"
#: What may follow a backslash: one spelling for each character, so that no key can be hidden as another.
_ESCAPES = '"\\bfnrt'
#: Any text; what follows it ends it.
TEXT = r"TEXT: /(.|\n)*/"


class GrammarRules:
    """Rules that have been written so far, under names of their own.

    Args:
        pieces: divides a text at special tokens; each piece with the token it is, or None.
        prefix: of the rules' names.
        is_strict: schemas are enforced in full.
    """

    def __init__(
        self, pieces: Callable[[str], Sequence[tuple[str, int | None]]], prefix: str, *, is_strict: bool
    ) -> None:
        self.rules: list[str] = []
        self._pieces = pieces
        self._prefix = prefix
        self._is_strict = is_strict
        self._known: dict[str, str] = {}

    def add(self, body: str, attribute: str = "") -> str:
        """Add a rule, and return its name."""
        key = attribute + body
        if key not in self._known:
            name = self._known[key] = f"{self._prefix}_{len(self._known)}"
            self.rules.append(f"{name}{attribute}: {body}")
        return self._known[key]

    def literal(self, text: str) -> str:
        """Write a text in Lark, with the special tokens in it as tokens."""
        written = [
            f"<[{token}]>" if token is not None else json.dumps(piece, ensure_ascii=False)
            for piece, token in self._pieces(text)
        ]
        return " ".join(written) or '""'

    def text_until(self, end: str) -> str:
        """Return a rule of any text with a mark after it."""
        pieces = list(self._pieces(end))
        (first, token), rest = pieces[0], self.literal("".join(piece for piece, _ in pieces[1:]))
        rest = rest if len(pieces) > 1 else ""
        if token is not None:
            return self.add(f"TEXT <[{token}]> {rest}")
        if len(pieces) > 1 and not first.strip():
            written = first.replace("\n", "\\n")
            return self.add(f"/(.|\\n)*{written}/ {rest}")
        return f"{self.add(f'TEXT {json.dumps(first, ensure_ascii=False)}', '[lazy]')} {rest}"

    def json(self, schema: ArgumentSchema) -> str:
        """Return a rule of the JSON of a schema."""
        options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": _ESCAPES}
        if not self._is_strict:
            options |= {"lenient": True, "coerce_one_of": True}
        written = dict(schema.schema) if isinstance(schema.schema, Mapping) else {}
        root = schema.root if isinstance(schema.root, Mapping) else {}
        for name in ("$defs", "definitions"):
            if name in root and name not in written:
                written[name] = root[name]
        return self.add(f"%json {json.dumps({**written, 'x-guidance': options})}")

    def members(
        self,
        schema: ArgumentSchema,
        member: Callable[[str, ArgumentSchema], str],
        separator: str = "",
        *,
        ordered: bool = True,
    ) -> str:
        """Return a rule of the properties of an object in their order, with what separates them.

        Args:
            member: the rule of one of them.
            ordered: False: in the order of their names.
        """
        listed = schema.properties()
        needed = schema.resolved().get("required")
        required = set(needed) if isinstance(needed, list) else set()
        names = list(listed) if ordered else sorted(listed)
        after: dict[bool, str] = {False: '""', True: '""'}
        for name in reversed(names):
            written = member(name, schema.of(listed[name]))
            before = f"{self.literal(separator)} " if separator else ""
            bodies = {}
            for some in (False, True):
                body = f"{before if some else ''}{written} {after[True]}"
                bodies[some] = body if name in required else f"{body} | {after[some]}"
            after = {some: self.add(body) for some, body in bodies.items()}
        return after[False]

    def words(self, texts: Iterable[str]) -> str:
        """Return alternatives of texts."""
        return "(" + " | ".join(map(self.literal, texts)) + ")"


def arguments_rule(notation: object, schema: ArgumentSchema, rules: GrammarRules) -> str:
    """Return a rule of arguments in a notation."""
    if isinstance(notation, TaggedArguments):
        return rules.members(
            schema, lambda name, inner: _tagged(notation, name, inner, rules), notation.between
        )
    if isinstance(notation, ElementArguments):
        return rules.members(schema, lambda name, inner: _element(notation, name, inner, rules, 0))
    if isinstance(notation, LiteralArguments):
        inner = _literal_members(notation, schema, rules, 0)
        return rules.add(f"{rules.literal(notation.opens)} {inner} {rules.literal(notation.closes)}")
    assert isinstance(notation, JsonArguments)
    return rules.json(schema)


def _values(schema: ArgumentSchema) -> list[Any] | None:
    """Return the only values that a schema allows; None: it lists none."""
    resolved = schema.resolved()
    values = [resolved["const"]] if "const" in resolved else resolved.get("enum")
    return values if isinstance(values, list) and values else None


def _kind(schema: ArgumentSchema) -> str:
    types = schema.types()
    if "string" in types:
        return "string"
    if types <= {"integer", "number"}:
        return "number"
    return next(iter(sorted(types - {"null", "integer"} or types)))


def _tagged(notation: TaggedArguments, name: str, schema: ArgumentSchema, rules: GrammarRules) -> str:
    if not notation.kinds:
        key = rules.literal(notation.key.replace(KEY, name))
        return rules.add(f"{key} {_tagged_value(notation, _kind(schema), schema, rules)}")
    words: dict[str, list[str]] = {}
    for kind in sorted(schema.types()):
        words.setdefault(notation.kinds["number" if kind == "integer" else kind], []).append(kind)
    written = []
    for word, kinds in words.items():
        key = rules.literal(notation.key.replace(KIND, word).replace(KEY, name))
        inner = schema.of({**schema.resolved(), "type": kinds})
        written.append(f"{key} {_tagged_value(notation, _kind(inner), inner, rules)}")
    return rules.add(" | ".join(written))


def _tagged_value(notation: TaggedArguments, kind: str, schema: ArgumentSchema, rules: GrammarRules) -> str:
    end = rules.literal(notation.end)
    if kind == "string":
        values = _values(schema)
        if values is not None and all(isinstance(value, str) for value in values):
            return f"{rules.words(map(notation.write_text, values))} {end}"
        if notation.is_cdata:
            cdata = f'"<![CDATA[" {rules.text_until("]]>" + notation.end)}'
            return rules.add(f"/[^<&\\n]*/ {end} | {cdata}")
        return rules.text_until(notation.end)
    if kind == "boolean":
        return f"{rules.words(notation.constants[:2])} {end}"
    return f"{rules.json(schema)} {end}"


def _element(
    notation: ElementArguments, name: str, schema: ArgumentSchema, rules: GrammarRules, depth: int
) -> str:
    before, end = rules.literal(f"{notation.mark}<{name}>"), f"{notation.mark}</{name}>"
    kind = _kind(schema)
    if kind == "object" and schema.properties() and depth < _MAX_DEPTH:
        inner = rules.members(schema, lambda key, part: _element(notation, key, part, rules, depth + 1))
        return rules.add(f"{before} {inner} {rules.literal(end)}")
    if kind == "array" and depth < _MAX_DEPTH:
        item = _element(notation, "item", schema.items(), rules, depth + 1)
        return rules.add(f"{before} {item}* {rules.literal(end)}")
    if kind in ("string", "object", "array"):
        values = _values(schema)
        if values is not None and all(isinstance(value, str) for value in values):
            return rules.add(f"{before} {rules.words(values)} {rules.literal(end)}")
        return rules.add(f"{before} {rules.text_until(end)}")
    return rules.add(f"{before} {rules.json(schema)} {rules.literal(end)}")


def _literal_members(
    notation: LiteralArguments, schema: ArgumentSchema, rules: GrammarRules, depth: int
) -> str:
    def member(name: str, inner: ArgumentSchema) -> str:
        key = rules.literal(name + notation.assigns)
        return rules.add(f"{key} {_literal_value(notation, inner, rules, depth + 1)}")

    return rules.members(schema, member, notation.separator, ordered=not notation.mark)


def _literal_value(
    notation: LiteralArguments, schema: ArgumentSchema, rules: GrammarRules, depth: int
) -> str:
    values = _values(schema)
    if values is not None and all(not isinstance(value, dict | list) for value in values):
        return rules.words(map(notation.write_value, values))
    kind = _kind(schema)
    if kind == "string" and notation.mark:
        return f"{rules.literal(notation.mark)} {rules.text_until(notation.mark)}"
    if kind == "string" and notation.quote == "'":
        return rules.add('"\'" /[^\'\\\\\\n]*/ "\'"')
    if kind == "string":
        return rules.json(schema.of({"type": "string"} if "type" not in schema.resolved() else schema.schema))
    if kind == "boolean":
        return rules.words(notation.constants[:2])
    if notation.mark and kind == "array" and depth < _MAX_DEPTH:
        item = _literal_value(notation, schema.items(), rules, depth + 1)
        return rules.add(f'"[" ({item} ({rules.literal(notation.separator)} {item})*)? "]"')
    if notation.mark and kind == "object" and depth < _MAX_DEPTH:
        return rules.add(f'"{{" {_literal_members(notation, schema, rules, depth)} "}}"')
    if notation.mark and kind in ("array", "object"):
        return '"{}"' if kind == "object" else '"[]"'
    return rules.json(schema)
