# SPDX-License-Identifier: Apache-2.0
r"""Regular expressions, in Lark, of the strings that a schema allows, as they are written without quotes.

{"type": "string", "pattern": "^a|b", "maxLength": 9}     (/a(.|\n)*|(.|\n)*b(.|\n)*/ & /(.|\n){0,9}/)
"""

from __future__ import annotations

import json
import re

from radixkv.text.chat_formats.argument_types import Alternative

ANY = r"/(.|\n)*/"
_ANY = r"(?:.|\n)*"
#: A bound of repetition beyond which a length is not enforced where it need not be.
_MAX_LENGTH = 10_000

_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|[12]\d))"
)
_DATE = rf"\d{{4}}-{_DAY}"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_HEX = r"[0-9a-fA-F]"
_GROUP = rf"{_HEX}{{1,4}}"
_CLOCK = r"(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_PCHAR = rf"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
#: Expressions of formats; none allows more than its RFC.
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:T{_CLOCK})?|T{_CLOCK}|\d+W)",
    "email": rf"[a-zA-Z0-9!#$%&'*+/=?^_`{{|}}~-]+(?:\.[a-zA-Z0-9!#$%&'*+/=?^_`{{|}}~-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": "|".join(
        [
            rf"(?:{_GROUP}:){{7}}{_GROUP}",
            *(
                rf"(?:{_GROUP}(?::{_GROUP}){{0,{left}}})?::(?:{_GROUP}(?::{_GROUP}){{0,{5 - left}}})?"
                for left in range(6)
            ),
        ]
    ),
    "uuid": rf"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?://(?:{_HOST}(?::\d{{1,5}})?)?(?:/{_PCHAR}*)*|{_PCHAR}+(?:/{_PCHAR}*)*)"
    rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?",
}
_FORMATS = {name: written.replace(r"\d", "[0-9]") for name, written in _FORMATS.items()}


class CantEnforce(ValueError):
    """A keyword that text can't be held to; the message names it."""


def string_pattern(way: Alternative, *, is_strict: bool) -> str:
    """Return an expression of the strings that an alternative allows, `ANY` where it allows all.

    Args:
        is_strict: False: patterns, formats and keywords that can't be enforced are left out.

    Raises:
        CantEnforce: a keyword can't be enforced.
    """
    terms = []
    if way.values is not None:
        texts = (json.dumps(value, ensure_ascii=False) for value in way.values if isinstance(value, str))
        terms.append(f"({' | '.join(texts)})")
    least, most = max([0, *_bounds(way, "minLength")]), min(_bounds(way, "maxLength"), default=None)
    if most is not None and most < least:
        raise CantEnforce(f"minLength: it is more than maxLength, {most}")
    if (least or most is not None) and (is_strict or max(least, most or 0) <= _MAX_LENGTH):
        terms.append(rf"/(.|\n){{{least},{'' if most is None else most}}}/")
    if is_strict:
        terms += [f"/{searched(pattern)}/" for pattern in way.gather("pattern") if isinstance(pattern, str)]
        for name in way.gather("format"):
            if name not in _FORMATS:
                raise CantEnforce(f"format: {name!r:.40} is none of {', '.join(sorted(_FORMATS))}")
            terms.append(f"/{_slashed(_FORMATS[name])}/")
    return " & ".join(terms) or ANY


def listed_texts(way: Alternative) -> list[str] | None:
    """Return the only strings that an alternative allows; None: it lists none, or restricts them further."""
    if way.values is None or any(
        way.gather(keyword) for keyword in ("pattern", "format", "minLength", "maxLength")
    ):
        return None
    return [value for value in way.values if isinstance(value, str)]


def _bounds(way: Alternative, keyword: str) -> list[int]:
    return [int(bound) for bound in way.gather(keyword) if isinstance(bound, int | float) and bound >= 0]


def without(mark: str) -> str:
    """Return an expression of texts in which a mark does not occur."""
    return rf"~/(.|\n)*{literal(mark)}(.|\n)*/"


def literal(text: str) -> str:
    """Return an expression of one text, between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/#&~-])", r"\\\1", text).replace("\n", r"\n")


def _slashed(pattern: str) -> str:
    return pattern.replace("/", r"\/")


_PIECE = re.compile(r"\\.|\((?:\?<?[=!])?|.", re.DOTALL)


def searched(pattern: str) -> str:
    r"""Return an expression of all texts in which a pattern is found, between slashes. O(length).

    >>> searched("^a|b$"), searched("^(x|/)$"), searched("[[&&]")
    ('(?:a(?:.|\\n)*|(?:.|\\n)*b)', '(?:(x|\\/))', '(?:(?:.|\\n)*[\\[\\&\\&](?:.|\\n)*)')

    Raises:
        CantEnforce: it has an anchor elsewhere than at an end, or looks around.
    """
    branches: list[list[str]] = [[]]
    depth, in_class = 0, False
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        if in_class:
            in_class = piece != "]" or branches[-1][-1] in ("[", "[^")
            if piece == "^" and branches[-1][-1] == "[":
                branches[-1][-1] = "[^"
                continue
            piece = f"\\{piece}" if piece in ("[", "&", "~", "/") else piece
        elif piece in (r"\b", r"\B", r"\A", r"\Z", r"\z", r"\G") or piece[:2] == "(?":
            raise CantEnforce(f"pattern: {piece} in {pattern!r:.60}")
        elif piece == "|" and not depth:
            branches.append([])
            continue
        else:
            in_class = piece == "["
            depth += piece.startswith("(") - (piece == ")")
            piece = r"\/" if piece == "/" else piece
        branches[-1].append(piece.replace("\n", r"\n"))
    return f"(?:{'|'.join(_branch(pieces, pattern) for pieces in branches)})"


def _branch(pieces: list[str], pattern: str) -> str:
    begins, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = pieces[int(begins) : len(pieces) - int(ends)]
    in_class = False
    for piece in inner:
        if piece in ("^", "$") and not in_class:
            raise CantEnforce(f"pattern: {piece} within {pattern!r:.60}")
        in_class = piece in ("[", "[^") or (in_class and piece != "]")
    return f"{'' if begins else _ANY}{''.join(inner)}{'' if ends else _ANY}"
