# SPDX-License-Identifier: Apache-2.0
"""Notations of a call's arguments: the reading of each into JSON as it comes, and its writing.

    JsonArguments      {"city": "Paris", "days": 2}
    MemberArguments    {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}
    TaggedArguments    <parameter=city>Paris</parameter><parameter=days>2</parameter>
    ElementArguments   <city>Paris</city><route><leg>1</leg></route>, a tag for each member at every depth
    LiteralArguments   (city='Paris', days=2)

A notation reads a call's arguments from the first to the last; the text around them belongs to the form of
the call. `MemberArguments` alone reads whole calls, as the name may stand behind the arguments there. This
file has the first notation, and the parts that all share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import regex

from radixkv.text.chat_formats.argument_types import ArgumentSchema, refuse_constant
from radixkv.text.chat_formats.cursor import Cursor, NotACall, Steps

Known = TypeVar("Known", bound=Any)
#: Takes pieces of JSON.
Emit = Callable[[str], object]

#: Characters of JSON arguments up to which they are proven to be JSON before their call is emitted.
PROVEN = 512
MAX_DEPTH = 32


class CallSink(Protocol):
    """Takes the calls that a reader finds."""

    @property
    def names(self) -> Collection[str]:
        """Return the names of the functions that are offered; empty: they are not known."""

    def schema(self, name: str) -> ArgumentSchema:
        """Return the schema of a function's arguments; one that is not offered has none."""

    def delay(self) -> None:
        """Wait for a call whose arguments are written before its name."""

    def begin(self, name: str, call_id: str | None) -> None:
        """Take the beginning of a call."""

    def add(self, text: str) -> None:
        """Take more of the text of its arguments, JSON."""

    def end(self, call_id: str | None = None) -> None:
        """Take its end, and the id that was written after the arguments."""


class Arguments(Protocol):
    """A notation of arguments."""

    def read(
        self, cursor: Cursor, emit: Emit, schema: ArgumentSchema, tail: regex.Pattern[str]
    ) -> Steps[None]:
        """Read arguments, and emit them as the text of a JSON object.

        Args:
            tail: matches the text that follows the last argument.
        """

    def literals(self) -> tuple[str, ...]:
        """Return the texts around names and values."""

    def respelled(self, change: Callable[[str], str]) -> Arguments:
        """Return the notation with the texts that it writes around names and values changed."""

    def write(self, arguments: str, schema: ArgumentSchema) -> str:
        """Write arguments that are given as the text of a JSON object."""


def respelled(declared: Known, change: Callable[[str], str], fields: tuple[str, ...]) -> Known:
    """Return a declaration with some of its texts changed."""
    return replace(declared, **{field: change(getattr(declared, field)) for field in fields})


class ObjectScanner:
    """Finds where a JSON object ends in a text that comes in pieces. O(text)."""

    _OUTSIDE = re.compile(r"[^\s\w.+\-,:]")
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_broken = False

    def take(self, text: str, at: int = 0) -> tuple[int, bool]:
        """Return where the object's part of a text ends, from a place on, and whether the object ends there.

        A character that no JSON has outside of strings is where the part ends, too; `is_broken` says so.
        """
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (self._INSIDE if self._in_string else self._OUTSIDE).search(text, at)
            if found is None:
                break
            at = found.end()
            mark = found[0]
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\" and self._in_string:
                self._escaped = True
            elif mark in "{[":
                self._depth += 1
            elif mark not in "}]":
                self.is_broken = True
                return at - 1, False
            else:
                self._depth -= 1
                if self._depth == 0:
                    return at, True
        return len(text), False


@dataclass(frozen=True)
class JsonArguments:
    """A JSON object, kept in the model's own writing."""

    def read(
        self, cursor: Cursor, emit: Emit, schema: ArgumentSchema, tail: regex.Pattern[str]
    ) -> Steps[None]:
        if (yield from cursor.char()) != "{":
            raise NotACall
        scanner = ObjectScanner()
        kept: list[str] = []
        num_kept = 0
        ended = False
        while not ended:
            start = cursor.at
            cursor.at, ended = scanner.take(cursor.text, start)
            piece = cursor.text[start : cursor.at]
            if num_kept <= PROVEN:
                kept.append(piece)
                num_kept += len(piece)
            if piece:
                emit(piece)
            if scanner.is_broken:
                raise NotACall
            if not ended:
                yield from cursor.more()
        if num_kept <= PROVEN and object_of("".join(kept)) is None:
            raise NotACall

    def literals(self) -> tuple[str, ...]:
        return ()

    def respelled(self, change: Callable[[str], str]) -> JsonArguments:
        return self

    def write(self, arguments: str, schema: ArgumentSchema) -> str:
        return arguments


def object_of(text: str) -> dict[str, Any] | None:
    """Return the object that a JSON text is; None: it is none."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def pattern_of(written: str, **groups: str) -> regex.Pattern[str]:
    """Compile a declared text: blanks in it mean any or none, and its capital words what `groups` say."""
    pieces = re.split(rf"({'|'.join(groups)})" if groups else r"(\Z)", written)
    parts = [
        groups[piece] if piece in groups else r"\s{0,64}".join(map(regex.escape, re.split(r"\s+", piece)))
        for piece in pieces
    ]
    return regex.compile("".join(parts))
