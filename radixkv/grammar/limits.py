# SPDX-License-Identifier: Apache-2.0
"""Refuse, before compiling, grammars that would take llguidance seconds, or all of the stack.

Its compiler can't be interrupted, and not all of its work counts against its own limits: a `multipleOf`
becomes an automaton with as many states, pairs of `patternProperties` are tested against each other, and a
chain of thousands of references is followed by recursion. Everything here is O(size of the text).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from radixkv.grammar.exactness import check_exactness
from radixkv.grammar.joined_patterns import joined_patterns
from radixkv.grammar.lark_operators import joined_ways
from radixkv.grammar.regex_text import max_repetitions, num_atoms
from radixkv.sampling.structured import StructuredOutputs

MAX_TEXT_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_PROPERTIES = 1_000
MAX_ENUM_VALUES = 10_000
MAX_MULTIPLE = 10_000
MAX_PATTERN_PROPERTIES = 100
MAX_REFERENCES = 500
MAX_JOINED_PATTERNS = 8
MAX_JOINED_WAYS = 5_000
#: Limit of the least bytes of an answer, by one `minItems` or `minLength`; more fit into no context.
MAX_FORCED_BYTES = 2**18
MAX_REPETITIONS = 100_000

#: Ways in a format, as a power of 2: the largest, of URIs, have some dozens of characters and classes.
_FORMAT_BITS = 5.0
#: Parts of a Lark grammar that may hold any character: strings, comments, regular expressions, schemas.
#: Unterminated strings and regular expressions extend to the end: llguidance refuses them.
_LARK_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|\#[^\n]*|(?P<regex>/(?:\\.|[^/\\])+/?)|(?P<json>%json\s*(?=\{))'
)


class TooComplex(ValueError):
    """A grammar is beyond a limit; the message names the part and the limit."""


def check_spec(spec: StructuredOutputs) -> None:
    """Refuse a spec that is beyond the limits, or can't be used.

    Raises:
        TooComplex: names the part and the limit.
        ValueError: names the fault.
    """
    if spec.json is not None:
        check_schema(str(spec.json))
    if spec.regex is not None:
        check_regex(spec.regex)
    if spec.whitespace_pattern is not None:
        check_regex(spec.whitespace_pattern)
    if spec.grammar is not None:
        check_lark(spec.grammar)
    if spec.choice is not None:
        check_text("".join(spec.choice))


def check_text(text: str) -> None:
    """Refuse a text of more than `MAX_TEXT_BYTES`; raises TooComplex."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_TEXT_BYTES:
        raise TooComplex(f"it has {size} bytes, but at most {MAX_TEXT_BYTES} are allowed")


def check_schema(text: str) -> None:
    """Refuse a JSON Schema that is beyond the limits, or could not be enforced exactly.

    Raises:
        TooComplex: it is beyond a limit.
        ValueError: it is no schema, or could be enforced only nearly.
    """
    check_text(text)
    try:
        schema = json.loads(text, parse_float=_exact)
    except RecursionError:
        raise TooComplex(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ValueError("x-guidance: how a schema is compiled is not up to the schema")
    _check_schema(schema)


def _exact(text: str) -> Fraction | float:
    """Return a decimal number as an exact fraction, unless its exponent is huge."""
    return Fraction(text) if len(text) < 40 and "e" not in text.lower() else float(text)


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON Schema is an object, true or false")
    if schema is False:
        raise ValueError("nothing matches the schema false")
    counts = _Counts()
    stack: list[tuple[Any, int]] = [(schema, 1)]
    while stack:
        value, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise TooComplex(f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            counts.array(value)
            for name, item in value.items():
                counts.keyword(name, item)
                stack.append((item, depth + 1))
        elif isinstance(value, list):
            stack.extend((item, depth + 1) for item in value)
    counts.check()
    _check_joined_patterns(schema)
    if isinstance(schema, dict) and not _is_lenient(schema):
        check_exactness(schema)


def _check_joined_patterns(schema: Any) -> None:
    try:
        joined = joined_patterns(schema, lambda name, value: 1.0)
        ways = 2 ** min(joined_patterns(schema, _bits), 60)
    except RecursionError:
        raise TooComplex("$ref: one leads to another too often") from None
    if joined > MAX_JOINED_PATTERNS:
        raise TooComplex(
            f"pattern and format: {joined:.0f} of them are joined by allOf or $ref, but at most "
            f"{MAX_JOINED_PATTERNS} can be"
        )
    if ways > MAX_JOINED_WAYS:
        raise TooComplex(
            f"pattern and format: the characters and classes of those that are joined by allOf or $ref "
            f"multiply to {ways:.0f}, but at most {MAX_JOINED_WAYS} are allowed"
        )


def _bits(keyword: str, value: str) -> float:
    """Return the number of ways in a pattern or a format, as a power of 2."""
    return math.log2(max(2, num_atoms(value))) if keyword == "pattern" else _FORMAT_BITS


def _is_lenient(schema: dict[str, Any]) -> bool:
    """Return True for an embedded schema whose keywords may be dropped if they can't be enforced."""
    options = schema.get("x-guidance")
    return isinstance(options, dict) and bool(options.get("lenient"))


@dataclass(slots=True)
class _Counts:
    """Counts of a schema's limited parts; properties that are named like keywords count, too."""

    properties: int = 0
    enum_values: int = 0
    pattern_properties: int = 0
    min_bytes: int = 0
    references: set[str] = field(default_factory=set)
    multiples: set[Fraction] = field(default_factory=set)

    def keyword(self, name: str, value: Any) -> None:
        if name in ("properties", "required") and isinstance(value, dict | list):
            self.properties += len(value) if name == "properties" else 0
        elif name in ("enum", "const"):
            values, keys = _size(value)
            self.enum_values += values
            self.properties += keys
        elif name == "patternProperties" and isinstance(value, dict):
            self.pattern_properties += len(value)
            for pattern in value:
                check_regex(pattern)
        elif name == "pattern" and isinstance(value, str):
            check_regex(value)
        elif name in ("minItems", "minLength") and isinstance(value, int):
            self.min_bytes = max(self.min_bytes, value)
        elif name == "multipleOf" and isinstance(value, int | Fraction) and value > 0:
            self.multiples.add(Fraction(value))
        elif name in ("$ref", "$dynamicRef") and isinstance(value, str):
            self.references.add(value)

    def array(self, schema: dict[str, Any]) -> None:
        """Add the minimum length of an array of constants."""
        least, items = schema.get("minItems"), schema.get("items")
        if isinstance(least, int) and isinstance(items, dict) and "const" in items:
            self.min_bytes = max(self.min_bytes, least * (len(json.dumps(items["const"], default=str)) + 1))

    def check(self) -> None:
        for name, count, most in (
            ("properties", self.properties, MAX_PROPERTIES),
            ("enum and const", self.enum_values, MAX_ENUM_VALUES),
            ("patternProperties", self.pattern_properties, MAX_PATTERN_PROPERTIES),
            ("$ref", len(self.references), MAX_REFERENCES),
        ):
            if count > most:
                raise TooComplex(f"{name}: {count} of them, but at most {most} are allowed")
        if self.min_bytes > MAX_FORCED_BYTES:
            raise TooComplex(
                f"minItems and minLength: an answer would have {self.min_bytes} bytes at least, but at "
                f"most {MAX_FORCED_BYTES} can be asked for"
            )
        if self.multiples:
            # As allOf may combine them: their common multiple, counted in units of their common denominator.
            unit = math.lcm(*(multiple.denominator for multiple in self.multiples))
            common = math.lcm(*(int(multiple * unit) for multiple in self.multiples))
            if common > MAX_MULTIPLE:
                raise TooComplex(
                    f"multipleOf: the least common multiple of all of them has the numerator {common}, but "
                    f"at most {MAX_MULTIPLE} is allowed"
                )


def _size(value: Any) -> tuple[int, int]:
    """Return the number of values and of keys in JSON data."""
    values = keys = 0
    stack = [value]
    while stack:
        item = stack.pop()
        values += 1
        if isinstance(item, dict):
            keys += len(item)
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return values, keys


def check_regex(pattern: str) -> None:
    """Refuse nested bounds of repetition whose product is beyond the limit; raises TooComplex."""
    check_text(pattern)
    most = max_repetitions(pattern)
    if most > MAX_REPETITIONS:
        raise TooComplex(
            f"nested repetition: the bounds in {pattern[:60]!r} multiply to {most}, but at most "
            f"{MAX_REPETITIONS} is allowed"
        )


def check_lark(grammar: str) -> None:
    """Refuse a Lark grammar whose schemas or regular expressions are beyond the limits.

    Raises:
        TooComplex: names the part and the limit.
        ValueError: it is a grammar in llguidance's own JSON, or a schema in it can't be used.
    """
    check_text(grammar)
    if grammar.lstrip().startswith(("{", "[")):
        raise ValueError(
            "it begins with { or [, but a Lark grammar begins with a rule; llguidance's own JSON is not "
            "accepted: give a JSON Schema as json"
        )
    ways = joined_ways(grammar)
    if ways > MAX_JOINED_WAYS:
        raise TooComplex(
            f"& and ~: the characters and classes of the terms that they join multiply to {ways}, but at "
            f"most {MAX_JOINED_WAYS} are allowed"
        )
    for regex, schema, _, _ in _parts_of_lark(grammar):
        if regex is not None:
            check_regex(regex)
        else:
            _check_schema(schema)


def json_parts_of_lark(grammar: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each schema in a Lark grammar; raises ValueError where one is no JSON."""
    for _, _, begin, end in _parts_of_lark(grammar):
        if begin < end:
            yield begin, end


def _parts_of_lark(grammar: str) -> Iterator[tuple[str | None, Any, int, int]]:
    """Yield each regular expression or embedded schema of a Lark grammar, a schema with its begin and end."""
    decoder = json.JSONDecoder(parse_float=_exact)
    at = 0
    while (part := _LARK_PARTS.search(grammar, at)) is not None:
        at = begin = part.end()
        if part["regex"] is not None:
            yield part["regex"][1:-1], None, 0, 0
        elif part["json"] is not None:
            try:
                schema, at = decoder.raw_decode(grammar, begin)
            except RecursionError:
                raise TooComplex(f"%json is nested deeper than {MAX_DEPTH} levels") from None
            except ValueError as error:
                raise ValueError(f"%json: what follows is no JSON: {error}") from None
            yield None, schema, begin, at
