"""How a family of models writes tool calls, and the reading of what it wrote.

A call is a head with the function's name, its arguments (a JSON object), and a tail. What is read keeps the
text of the arguments as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

#: Stands for the function's name in a head.
NAME = "NAME"

_BLANKS = re.compile(r"[ \t\n\r]*")
_ANY_NAME = r'[^"\\]+'
_JSON_HEAD = (
    rf'[\s\[]*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>{_ANY_NAME})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class WrittenCall(NamedTuple):
    """A call as it was written; `id` is None where the model wrote none."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written, and how their writing is read.

    Args:
        head, tail: around the arguments of one call; `NAME` stands for the function's name.
        begin, between, end: around all calls of an answer, and from one to the next.
        head_pattern: what is read as a head, up to the arguments' brace, with groups `name` and perhaps `id`;
            None: calls are JSON objects with `name` and `arguments` or `parameters`, one, several, or a list.
        between_pattern: what is read between calls and after them, and may close what a head has opened.
    """

    head: str
    tail: str
    begin: str = ""
    between: str = "\n"
    end: str = ""
    head_pattern: str | None = None
    between_pattern: str = r"[\s,;}\]]*"

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Calls, each a name with the JSON text of its arguments, as the family writes them."""
        written = [self.head.replace(NAME, name) + arguments + self.tail for name, arguments in calls]
        return self.begin + self.between.join(written) + self.end

    def match_head(self, text: str, at: int = 0) -> re.Match[str] | None:
        """The head of a call whose arguments begin where the match ends."""
        return re.compile(self.head_pattern or _JSON_HEAD).match(text, at)

    def begins(self, text: str, names: Collection[str] | None = None) -> bool:
        """Whether a text begins with the head of a call, or is the beginning of one. O(length).

        Args:
            names: the only names that count; None: any.
        """
        pattern = self.head_pattern or _JSON_HEAD
        if names is not None:
            pattern = pattern.replace(_ANY_NAME, "|".join(map(re.escape, names)) or "(?!)")
        return regex.match(pattern, text, partial=True) is not None

    def read(self, text: str) -> list[WrittenCall] | None:
        """The calls that make up a text; None: it is no such text. O(length)."""
        try:
            calls = _read_json(text) if self.head_pattern is None else self.read_on(text)
        except (ValueError, RecursionError):
            return None
        return calls or None

    def read_on(self, text: str) -> list[WrittenCall]:
        """The calls in what follows the arguments of one, from its tail on.

        Raises:
            ValueError, RecursionError: there is something else.
        """
        calls = []
        at = self.skip_between(text, 0)
        while at < len(text):
            head = self.match_head(text, at)
            if head is None:
                raise ValueError("not the head of a call")
            _, end = _DECODER.raw_decode(text, head.end())
            calls.append(WrittenCall(head["name"], text[head.end() : end], head.groupdict().get("id")))
            at = self.skip_between(text, end)
        return calls

    def skip_between(self, text: str, at: int) -> int:
        """Where what stands between calls has ended."""
        found = re.compile(self.between_pattern).match(text, at)
        return at if found is None else found.end()


class ObjectScanner:
    """Finds where a JSON object ends in a text that comes in pieces. O(text)."""

    _OUTSIDE = re.compile(r'["{}\[\]]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, text: str) -> tuple[int, bool]:
        """How many characters belong to the object, and whether it ends with them."""
        at = 0
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
            elif mark == "\\":
                self._escaped = True
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    return at, True
        return len(text), False


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _read_json(text: str) -> list[WrittenCall]:
    """Calls as JSON: objects one after the other, or a list of them."""
    calls = []
    at = _blanks(text, 0)
    closing = "]" if text[at : at + 1] == "[" else ""
    at = _blanks(text, at + len(closing))
    while at < len(text) and text[at] != closing:
        members, at = _members(text, at)
        calls.append(_call(members))
        at = _blanks(text, at)
        if text[at : at + 1] == ("," if closing else ";"):
            at = _blanks(text, at + 1)
    if text[at:].rstrip() != closing:
        raise ValueError("more than calls")
    return calls


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The members of the object at `at`, each as value and text, and where it ends."""
    if text[at : at + 1] != "{":
        raise ValueError("not an object")
    members: dict[str, tuple[Any, str]] = {}
    at = _blanks(text, at + 1)
    while True:
        key, at = _DECODER.raw_decode(text, at)
        at = _blanks(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError("not a member of an object")
        start = _blanks(text, at + 1)
        value, end = _DECODER.raw_decode(text, start)
        members[key] = value, text[start:end]
        at = _blanks(text, end)
        mark = text[at : at + 1]
        if mark == "}":
            return members, at + 1
        if mark != ",":
            raise ValueError("not the end of a member")
        at = _blanks(text, at + 1)


def _blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found is not None else at


def _call(members: dict[str, tuple[Any, str]]) -> WrittenCall:
    name, _ = members.get("name", (None, ""))
    call_id, _ = members.get("id", (None, ""))
    found = members.get("arguments") or members.get("parameters")
    if found is None and members.keys() - {"name", "id", "type"}:
        raise ValueError("no arguments")
    arguments, written = found or ({}, "{}")
    if isinstance(arguments, str):  # some write their JSON as a string
        arguments, written = _DECODER.decode(arguments), arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return WrittenCall(name, written, call_id if isinstance(call_id, str) else None)
