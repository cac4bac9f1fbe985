# SPDX-License-Identifier: Apache-2.0
"""Rules of a Lark grammar for arguments in any notation, by the schema of a tool."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import regex

from radixkv.errors import InvalidRequestError
from radixkv.text.chat_formats.argument_types import JSON_WORDS, Alternative, ArgumentSchema
from radixkv.text.chat_formats.arguments import MAX_DEPTH, JsonArguments
from radixkv.text.chat_formats.literals import LiteralArguments
from radixkv.text.chat_formats.tagged_arguments import KEY, KIND, ElementArguments, TaggedArguments
from radixkv.text.chat_formats.text_patterns import (
    ANY,
    CantEnforce,
    listed_texts,
    literal,
    searched,
    string_pattern,
    without,
)

#: Rules of one tool; llguidance would refuse many more by its own limits.
_MAX_RULES = 10_000
_MAX_ITEMS = 1_000
#: Keywords that rules of our own do not know, by the type of the value that they restrict; JSON within a rule
#: is llguidance's, which refuses them itself.
_UNKNOWN = ("not", "if", "$ref", "$dynamicRef", "$recursiveRef", "$id")
_UNKNOWN_OF = {
    "string": _UNKNOWN,
    "array": (*_UNKNOWN, "uniqueItems", "contains", "prefixItems", "unevaluatedItems", "additionalItems"),
    "object": (
        *(*_UNKNOWN, "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        "unevaluatedProperties",
    ),
}
#: Between the tokens of JSON: none is needed, one is what most models are used to.
_WHITESPACE = " ?"
#: What may follow a backslash: one spelling for each character, so that no key can be hidden as another.
_ESCAPES = '"\\bfnrt'
#: Any text; what follows it ends it.
TEXT = r"TEXT: /(.|\n)*/"
#: Text that needs no CDATA, and text that needs no escapes.
_NO_MARKUP, _NO_ESCAPES = r"/[^<&\n]*/", r"/[^\\\n]*/"


class GrammarRules:
    """Rules that have been written so far, under names of their own.

    Args:
        pieces: divides a text at special tokens; each piece with the token it is, or None.
        prefix: of the rules' names.
        strict: the name of a tool whose schema is enforced in full; None: as far as possible.
    """

    def __init__(
        self,
        pieces: Callable[[str], Sequence[tuple[str, int | None]]],
        prefix: str,
        *,
        strict: str | None = None,
    ) -> None:
        self.rules: list[str] = []
        self.strict = strict
        self._pieces = pieces
        self._prefix = prefix
        self._known: dict[str, str] = {}
        self._fields: list[str] = []

    def add(self, body: str, attribute: str = "") -> str:
        """Add a rule, and return its name."""
        return self.once(attribute + body, lambda: body, attribute)

    def once(self, key: str, write: Callable[[], str], attribute: str = "") -> str:
        """Return the name of the rule of a key, which is written the first time; it may need itself."""
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = f"{self._prefix}_{len(self._known)}"
            if len(self._known) > _MAX_RULES:
                raise self._refusal("it has too many alternatives", "grammar_too_complex")
            self.rules.append(f"{name}{attribute}: {write()}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, and return its name."""
        if body not in self._known:
            name = self._known[body] = f"{self._prefix}_{len(self._known)}".upper()
            self.rules.append(f"{name}: {body}")
        return self._known[body]

    @contextlib.contextmanager
    def field(self, name: str) -> Iterator[None]:
        """Name a member in refusals of rules that are written within."""
        self._fields.append(name)
        try:
            yield
        finally:
            self._fields.pop()

    @property
    def depth(self) -> int:
        """Number of members and lists around the rule that is written."""
        return len(self._fields)

    def refuse(self, why: str) -> None:
        """Refuse a part of a strict schema; of another one, nothing happens.

        Raises:
            InvalidRequestError: it is strict.
        """
        if self.strict is not None:
            raise self._refusal(why)

    def _refusal(self, why: str, code: str = "invalid_grammar") -> InvalidRequestError:
        place = f"argument {'.'.join(self._fields)!r:.200}" if self._fields else "its arguments"
        return InvalidRequestError(
            f"tools: the tool {self.strict or self._prefix!r:.80}, {place}: {why}. This model writes "
            "arguments as text, which can't be held to that. Change the schema, or leave out strict.",
            param="tools",
            code=code,
        )

    def check(self, way: Alternative, kind: str) -> None:
        """Refuse the keywords of a strict schema that rules of a type do not enforce."""
        for keyword in _UNKNOWN_OF[kind]:
            if any(value is not False for value in way.gather(keyword)):
                self.refuse(f"{keyword} can't be enforced")

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

    def text(self, way: Alternative, end: str, excluded: str, also: str = "") -> str:
        """Return a rule of the strings of an alternative, with a mark after each.

        Args:
            excluded: a text that none has in it, so that readers find the mark.
            also: an expression that all match, too.
        """
        self.check(way, "string")
        try:
            pattern = string_pattern(way, is_strict=self.strict is not None)
        except CantEnforce as error:
            self.refuse(str(error))
            pattern = ANY
        lead, _, rest = next(self._divided(end))
        terms = " & ".join(filter(None, (pattern, also, without(excluded))))
        body = f"({terms}) {json.dumps(lead, ensure_ascii=False)}" if lead else terms
        return f"{self.terminal(body)} {rest}"

    def _divided(self, end: str) -> Iterator[tuple[str, None, str]]:
        """Yield a mark's text up to the first special token, and the rest in Lark."""
        lead = next(iter(self._pieces(end)))
        text = lead[0] if lead[1] is None else ""
        yield text, None, self.literal(end[len(text) :]) if end[len(text) :] else ""

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a rule of the JSON of a schema."""
        options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": _ESCAPES}
        if self.strict is None:
            options |= {"lenient": True, "coerce_one_of": True}
        return self.add(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def members(
        self,
        schema: ArgumentSchema,
        member: Callable[[str, ArgumentSchema], str],
        other: Callable[[str, ArgumentSchema], str] | None,
        names: str,
        separator: str = "",
        *,
        ordered: bool = True,
        tells: bool = False,
    ) -> str:
        """Return a rule of the members of an object, with what separates them: those listed, then others.

        Args:
            member: the rule of one of them, by its name and schema.
            other: the rule of one that is not listed, by a terminal of its name; None: none can be written.
            names: an expression of the names that can be written.
            ordered: False: in the order of their names.
            tells: a value's text tells whether it is a string.
        """
        ways = [way for way in schema.alternatives if "object" in way.types]
        if len(ways) > 1 and self.strict is not None and not tells:
            self._check_texts(ways, schema)
        return self.once(
            f"members {json.dumps(schema.schema, sort_keys=True)}",
            lambda: (
                " | ".join(
                    self._members(way, schema, member, other, names, separator, ordered=ordered)
                    for way in ways
                )
                or '""'
            ),
        )

    def _check_texts(self, ways: Iterable[Alternative], schema: ArgumentSchema) -> None:
        """Refuse members of a strict schema that are text in one alternative and not in another."""
        kinds: dict[str, frozenset[str]] = {}
        for way in ways:
            for name in way.names():
                types = schema.of({"allOf": way.member(name)}).types()
                if kinds.setdefault(name, types) != types and "string" in kinds[name] | types:
                    self.refuse(f"{name!r:.80} is text in one alternative and something else in another")

    def _members(
        self,
        way: Alternative,
        schema: ArgumentSchema,
        member: Callable[[str, ArgumentSchema], str],
        other: Callable[[str, ArgumentSchema], str] | None,
        names: str,
        separator: str,
        *,
        ordered: bool,
    ) -> str:
        self.check(way, "object")
        required = {str(name) for needed in way.gather("required") for name in needed}
        listed = dict.fromkeys([*way.names(), *sorted(required)])
        between = f"{self.literal(separator)} " if separator else ""
        others = self._others(way, schema, other, names, listed)
        if max([0, *way.gather("minProperties")]) > len(required):
            self.refuse("minProperties can't be enforced beyond the number of required members")
        if min([len(listed), *way.gather("maxProperties")]) < len(listed) or (
            others and way.gather("maxProperties")
        ):
            self.refuse("maxProperties can't be enforced")
        after = {False: '""', True: '""'}
        if others:
            after = {
                False: self.add(f"({others} ({between}{others})*)?"),
                True: self.add(f"({between}{others})*"),
            }
        for name in reversed(listed if ordered else sorted(listed)):
            parts = way.member(name)
            if False in parts:
                if name in required:
                    self.refuse(f"the required member {name!r:.80} is not allowed")
                continue
            with self.field(name):
                if not regex.fullmatch(names, name):
                    self.refuse("its name can't be written as text")
                    continue
                inner = schema.of(parts[0] if len(parts) == 1 else {"allOf": parts} if parts else {})
                written = member(name, inner)
            bodies = {}
            for some in (False, True):
                body = f"{between if some else ''}{written} {after[True]}"
                bodies[some] = body if name in required else f"{body} | {after[some]}"
            after = {some: self.add(body) for some, body in bodies.items()}
        return after[False]

    def _others(
        self,
        way: Alternative,
        schema: ArgumentSchema,
        other: Callable[[str, ArgumentSchema], str] | None,
        names: str,
        listed: Iterable[str],
    ) -> str:
        """Return a rule of a member that is not listed; empty: the schema says nothing of such."""
        patterns = [found for found in way.gather("patternProperties") if found]
        rest = way.gather("additionalProperties")
        if not patterns and (not rest or False in rest):
            return ""
        if other is None:
            self.refuse("members that are not listed can't be written")
            return ""
        if len(way.gather("patternProperties")) > 1 or (patterns and len(way.parts) > 1) or len(rest) > 1:
            self.refuse("patternProperties and additionalProperties can't be enforced within allOf")
            return ""
        unlisted = "".join(f" & ~/{literal(name)}/" for name in listed)
        given: dict[str, Any] = dict(patterns[0]) if patterns else {}
        written = []
        try:
            expressions = {pattern: f"/{searched(pattern)}/" for pattern in given}
        except CantEnforce as error:
            self.refuse(f"patternProperties: {error}")
            return ""
        for pattern, value in given.items():
            apart = "".join(f" & ~{expressions[one]}" for one in given if one != pattern)
            if value is not False:
                written.append((f"/{names}/ & {expressions[pattern]}{apart}{unlisted}", value))
        if False not in rest and rest:
            apart = "".join(f" & ~{one}" for one in expressions.values())
            written.append((f"/{names}/{apart}{unlisted}", rest[0]))
        found = []
        for name, value in written:
            with self.field("*"):
                found.append(other(self.terminal(name), schema.of(value)))
        return self.add(" | ".join(found)) if found else ""

    def words(self, texts: Iterable[str]) -> str:
        """Return alternatives of texts."""
        return "(" + " | ".join(map(self.literal, texts)) + ")"


def arguments_rule(notation: object, schema: ArgumentSchema, rules: GrammarRules) -> str:
    """Return a rule of arguments in a notation.

    Raises:
        InvalidRequestError: the schema is strict, and something of it can't be enforced.
    """
    if isinstance(notation, TaggedArguments):
        return _Tagged(notation, rules).members(schema)
    if isinstance(notation, ElementArguments):
        return _Elements(notation, rules).members(schema)
    if isinstance(notation, LiteralArguments):
        inner = _Literals(notation, rules).members(schema)
        return rules.add(f"{rules.literal(notation.opens)} {inner} {rules.literal(notation.closes)}")
    assert isinstance(notation, JsonArguments)
    return rules.json(schema.schema)


class _Notation:
    """Rules of values in a notation: for each alternative of a schema, and in it for each type.

    Attributes:
        words: how true, false and null are written.
        tells: a value's text tells a string from other values; False: its schema does.
        nests: lists and objects are written in the notation; False: as JSON.
    """

    words: tuple[str, str, str] = JSON_WORDS
    tells = False
    nests = False

    def __init__(self, rules: GrammarRules) -> None:
        self.rules = rules

    def members(self, schema: ArgumentSchema) -> str:
        """Return a rule of the members of an object."""
        raise NotImplementedError

    def strings(self, way: Alternative, schema: ArgumentSchema, name: str) -> Iterator[str]:
        """Yield rules of an alternative's strings."""
        raise NotImplementedError

    def plain(self, written: str, kind: str, name: str) -> str:
        """Return a rule of other values of a type, with what stands around them."""
        return written

    def nested(self, schema: ArgumentSchema) -> str:
        """Return a rule of an object among the values, where objects are written in the notation."""
        return self.members(schema)

    def listing(self, item: ArgumentSchema, bounds: tuple[int, int | None]) -> str:
        """Return a rule of a list, where lists are written in the notation."""
        raise NotImplementedError

    def value(self, schema: ArgumentSchema, name: str = "") -> str:
        """Return a rule of the values of a schema.

        Args:
            name: the name of the member, where its values show it.
        """
        if self.rules.depth > MAX_DEPTH:
            self.rules.refuse(f"it is nested deeper than {MAX_DEPTH} levels")
            return self.plain('"null"', "null", name)
        key = f"value {name} {json.dumps(schema.schema, sort_keys=True)}"
        return self.rules.once(key, lambda: " | ".join(self._alternatives(schema, name)))

    def _alternatives(self, schema: ArgumentSchema, name: str) -> list[str]:
        if schema.is_ambiguous:
            self.rules.refuse("there are too many alternatives, or some of a oneOf don't exclude each other")
        found = [written for way in schema.alternatives for written in self._written(way, schema, name)]
        if self.nests and any(self._is_nested(way) for way in schema.alternatives):
            found.append(self.plain(self.nested(schema), "object", name))
        if not found:
            self.rules.refuse("nothing matches it")
        return list(dict.fromkeys(found)) or ['""']

    def _written(self, way: Alternative, schema: ArgumentSchema, name: str) -> Iterator[str]:
        kinds = set(way.types)
        if "string" in kinds:
            yield from self.strings(way, schema, name)
            if not (self.tells or self.rules.strict or way.values is not None) and "object" in kinds:
                return  # any text
        for kind, values in (("boolean", (True, False)), ("null", (None,))):
            allowed = [one for one in values if way.values is None or any(one is two for two in way.values)]
            if kind in kinds and allowed:
                words = (self.words[(True, False, None).index(one)] for one in allowed)
                yield self.plain(self.rules.words(words), kind, name)
        if self.nests and "array" in kinds and way.values is None:
            yield self.plain(self._list(way, schema), "array", name)
            kinds.discard("array")
        if self._is_nested(way):
            kinds.discard("object")
        for group in ({"integer", "number"}, {"object"}, {"array"}):
            if group & kinds:
                yield self.plain(self._json(way, group & kinds, schema), max(group), name)

    def _json(self, way: Alternative, kinds: Iterable[str], schema: ArgumentSchema) -> str:
        """Return a rule of the JSON of an alternative's values of some types."""
        together = way.parts[0] if len(way.parts) == 1 else {"allOf": list(way.parts)} if way.parts else {}
        return self.rules.json(schema.standalone({**together, "type": sorted(kinds)}))

    def _is_nested(self, way: Alternative) -> bool:
        """Return whether an alternative's objects are written in the notation: their members are listed."""
        return self.nests and "object" in way.types and way.values is None and bool(way.names())

    def _list(self, way: Alternative, schema: ArgumentSchema) -> str:
        self.rules.check(way, "array")
        least = int(max([0, *way.gather("minItems")]))
        most = min(map(int, way.gather("maxItems")), default=None)
        if max(least, most or 0) > _MAX_ITEMS or (most is not None and most < least):
            self.rules.refuse(f"minItems and maxItems can be enforced up to {_MAX_ITEMS}")
            least, most = 0, None
        items = way.gather("items")
        if False in items:
            most, items = 0, []
        item = schema.of(items[0] if len(items) == 1 else {"allOf": items} if items else {})
        with self.rules.field("[]"):
            return self.listing(item, (least, most))


class _Tagged(_Notation):
    def __init__(self, notation: TaggedArguments, rules: GrammarRules) -> None:
        super().__init__(rules)
        self._notation = notation
        self.words = notation.constants
        self.tells = bool(notation.kinds)

    def members(self, schema: ArgumentSchema) -> str:
        return self.rules.members(
            schema,
            self._member,
            lambda name, inner: self._member(f"{KEY}{name}", inner),
            r"[^<>\"\s](?:[^<>\"\n]{0,98}[^<>\"\s])?",
            self._notation.between,
            tells=self.tells,
        )

    def _member(self, name: str, schema: ArgumentSchema) -> str:
        if self._notation.kinds:
            return self.value(schema, name)
        return self.rules.add(f"{self._key('', name)} {self.value(schema)}")

    def _key(self, kind: str, name: str) -> str:
        """Return the mark before a value; a name that begins with `KEY` is the name of a terminal."""
        key = self._notation.key.replace(KIND, self._notation.kinds.get(kind, ""))
        if not name.startswith(KEY):
            return self.rules.literal(key.replace(KEY, name))
        before, _, after = key.partition(KEY)
        return f"{self.rules.literal(before)} {name.removeprefix(KEY)} {self.rules.literal(after)}"

    def plain(self, written: str, kind: str, name: str) -> str:
        key = f"{self._key(kind, name)} " if self._notation.kinds else ""
        return self.rules.add(f"{key}{written} {self.rules.literal(self._notation.end)}")

    def strings(self, way: Alternative, schema: ArgumentSchema, name: str) -> Iterator[str]:
        key = f"{self._key('string', name)} " if self._notation.kinds else ""
        end, mark = self._notation.end, self._notation.end.strip()
        texts = listed_texts(way)
        if texts is not None:
            words = [self._notation.write_text(text) for text in texts if mark not in text]
            if words:
                yield f"{key}{self.rules.words(words)} {self.rules.literal(end)}"
        elif self._notation.is_cdata:
            yield f"{key}{self.rules.text(way, end, mark, _NO_MARKUP)}"
            yield f'{key}"<![CDATA[" {self.rules.text(way, "]]>" + end, "]]>")}'
        else:
            yield f"{key}{self.rules.text(way, end, mark)}"


class _Elements(_Notation):
    nests = True

    def __init__(self, notation: ElementArguments, rules: GrammarRules) -> None:
        super().__init__(rules)
        self._mark = notation.mark

    def members(self, schema: ArgumentSchema) -> str:
        return self.rules.members(schema, self._member, None, r"[^<>/\s\"][^<>\"\n]{0,99}")

    def _member(self, name: str, schema: ArgumentSchema) -> str:
        if "array" in schema.types() and "item" in schema.properties():
            self.rules.refuse("a list, or an object with a member 'item', can't be told apart")
        return self.rules.add(f"{self.rules.literal(f'{self._mark}<{name}>')} {self.value(schema, name)}")

    def plain(self, written: str, kind: str, name: str) -> str:
        return self.rules.add(f"{written} {self.rules.literal(f'{self._mark}</{name}>')}")

    def strings(self, way: Alternative, schema: ArgumentSchema, name: str) -> Iterator[str]:
        end = f"{self._mark}</{name}>"
        texts = listed_texts(way)
        if texts is not None:
            words = [text for text in texts if (self._mark or end) not in text]
            if words:
                yield self.plain(self.rules.words(words), "string", name)
        else:
            yield self.rules.text(way, end, self._mark or end)

    def listing(self, item: ArgumentSchema, bounds: tuple[int, int | None]) -> str:
        least, most = bounds
        if most == 0:
            return '""'
        return f"({self._member('item', item)}){{{least},{'' if most is None else most}}}"


class _Literals(_Notation):
    tells = True

    def __init__(self, notation: LiteralArguments, rules: GrammarRules) -> None:
        super().__init__(rules)
        self._notation = notation
        self.words = notation.constants
        self.nests = bool(notation.mark)

    def members(self, schema: ArgumentSchema) -> str:
        assigns = self._notation.assigns

        def member(name: str, inner: ArgumentSchema) -> str:
            return self.rules.add(f"{self.rules.literal(name + assigns)} {self.value(inner)}")

        def other(name: str, inner: ArgumentSchema) -> str:
            return self.rules.add(f"{name} {self.rules.literal(assigns)} {self.value(inner)}")

        names = r"[^\s:{}\[\],\"'<>]{1,100}" if self.nests else r"[a-zA-Z_][a-zA-Z0-9_]{0,99}"
        return self.rules.members(
            schema, member, other, names, self._notation.separator, ordered=not self.nests, tells=True
        )

    def nested(self, schema: ArgumentSchema) -> str:
        return self.rules.add(f'"{{" {self.members(schema)} "}}"')

    def strings(self, way: Alternative, schema: ArgumentSchema, name: str) -> Iterator[str]:
        mark, quote, texts = self._notation.mark, self._notation.quote, listed_texts(way)
        if texts is not None and (mark or quote == "'"):
            words = [self._notation.write_value(text) for text in texts if not mark or mark not in text]
            if words:
                yield self.rules.words(words)
        elif mark:
            yield f"{self.rules.literal(mark)} {self.rules.text(way, mark, mark)}"
        elif quote == "'":
            yield f'"{quote}" {self.rules.text(way, quote, quote, _NO_ESCAPES)}'
        else:
            yield self._json(way, {"string"}, schema)

    def listing(self, item: ArgumentSchema, bounds: tuple[int, int | None]) -> str:
        (least, most), value = bounds, self.value(item)
        if most == 0:
            return '"[]"'
        more = ""
        if most != 1:
            bounds_of_more = f"{max(least - 1, 0)},{'' if most is None else most - 1}"
            more = f"({self.rules.literal(self._notation.separator)} {value}){{{bounds_of_more}}}"
        return self.rules.add(f'"[" ({value} {more}){"" if least else "?"} "]"')
