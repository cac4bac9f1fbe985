# SPDX-License-Identifier: Apache-2.0
"""Grammars in EBNF (`root ::= "a" | [b-z]+`), as xgrammar, SGLang and llama.cpp's GBNF write them, as Lark.

A grammar without recursion is a regular language and becomes one terminal. In any other each part without
recursion becomes one, as long as it can be: terminals are matched greedily, each to its longest.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from radixkv.errors import InvalidRequestError

MAX_EBNF_BYTES = 32 * 1024
MAX_NESTING = 64
MAX_BOUND = 100_000
MAX_REPEATED = 4

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\n]*)
    |(?P<name>[A-Za-z0-9_]+(?:[.-]+[A-Za-z0-9_]+)*)
    |(?P<define>::=)
    |(?P<string>"(?:\\.|[^"\\\n])*")
    |(?P<class>\[(?:\\.|[^\]\\\n])*\])
    |(?P<bound>\{\s*(?P<low>\d{0,9})\s*(?P<comma>,)?\s*(?P<high>\d{0,9})\s*\})
    |(?P<mark>[|()*+?.,])""",
    re.VERBOSE,
)
_IS_EBNF = re.compile(r"^[ \t]*[A-Za-z0-9_][A-Za-z0-9_.-]*[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_CHARACTERS = {
    **dict(zip("abefnrtv", "\a\b\x1b\f\n\r\t\v", strict=True)),
    **{character: character for character in "\\\"'[]-^/?."},
    "0": "\0",
}
_MACROS = frozenset({"TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch"})


@dataclass(frozen=True, slots=True)
class _Literal:
    text: str


@dataclass(frozen=True, slots=True)
class _Class:
    """Write one character as a regular expression."""

    regex: str


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    at: int


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeated:
    part: _Node
    bounds: str


_Node = _Literal | _Class | _Rule | _Sequence | _Choice | _Repeated


def is_ebnf(grammar: str) -> bool:
    """Return True if a grammar has rules in EBNF; Lark's have a single colon."""
    return _IS_EBNF.search(grammar) is not None


def lark_of_ebnf(grammar: str) -> str:
    """The same language as a grammar in llguidance's Lark. O(length).

    Raises:
        InvalidRequestError: it is no EBNF, or has untranslatable parts: lookahead, macros, tokens by name
            or id. Names line and column.
    """
    size = len(grammar.encode("utf-8", "surrogatepass"))
    if size > MAX_EBNF_BYTES:
        raise _error(f"it has {size} bytes, but at most {MAX_EBNF_BYTES} are allowed")
    rules = _Parser(grammar).rules()
    order = _reachable(rules, grammar)
    return _Writer(rules, order).lark()


class _Parser:
    """Recursive descent over one grammar's tokens."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match for match in _tokens(text) if match.lastgroup != "blank"]
        self._next = 0
        self._depth = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._next < len(self._tokens):
            if not self._begins_rule():
                self._fail("expected a rule, as in: name ::= ...")
            name = self._tokens[self._next]
            if name[0] in rules:
                self._fail(f"the rule {name[0]!r:.60} is there twice")
            self._next += 2
            rules[name[0]] = self._choice()
        if "root" not in rules:
            raise _error("there is no rule 'root', where a grammar begins")
        return rules

    def _choice(self) -> _Node:
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._fail(f"nested deeper than {MAX_NESTING} levels")
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._next < len(self._tokens) and not self._begins_rule():
            token = self._tokens[self._next]
            if token[0] in ("|", ")"):
                break
            parts.append(self._repeated(self._item(token)))
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _item(self, token: re.Match[str]) -> _Node:
        kind = token.lastgroup
        if kind == "string":
            self._next += 1
            return _Literal("".join(self._characters(token)))
        if kind == "class":
            self._next += 1
            return _Class(self._class(token))
        if kind == "name":
            self._next += 1
            if token[0] in _MACROS and self._is_next("("):
                self._fail(f"{token[0]}(...) is not supported", token)
            return _Rule(token[0], token.start())
        if token[0] == ",":
            self._fail("',' is not understood")
        if self._take("."):
            return _Class("(?s:.)")
        if self._take("("):
            inner = self._choice()
            if not self._take(")"):
                self._fail("expected )")
            return inner
        self._fail("there is nothing to repeat" if kind != "define" else "expected a rule's name before ::=")

    def _repeated(self, node: _Node) -> _Node:
        for count in itertools.count():
            if self._next == len(self._tokens):
                break
            token = self._tokens[self._next]
            bounds = token[0]
            if token.lastgroup == "bound":
                bounds = self._bounds(token)
            elif bounds not in ("*", "+", "?"):
                break
            if count == MAX_REPEATED:
                self._fail(f"more than {MAX_REPEATED} repetitions of the same thing")
            self._next += 1
            node = _Repeated(node, bounds)
        return node

    def _bounds(self, token: re.Match[str]) -> str:
        low, high = token["low"], token["high"]
        if not token["comma"]:
            high = low = low + high
        if not low and not high:
            self._fail("a bound is {m}, {m,}, {,n} or {m,n}", token)
        least = int(low or 0)
        most = int(high) if high else None
        if most is not None and most < least:
            self._fail("the upper bound is below the lower one", token)
        if max(least, most or 0) > MAX_BOUND:
            self._fail(f"at most {MAX_BOUND} repetitions are allowed", token)
        return f"{{{least},{'' if most is None else most}}}"

    def _class(self, token: re.Match[str]) -> str:
        """The regular expression of `[a-z]`: a bare `-` between two characters is a range."""
        raw = token[0][1:-1]
        negated = raw.startswith("^")
        characters = self._characters(token, 2 if negated else 1)
        # An escaped hyphen is no range.
        bare = self._bare_hyphens(raw[negated:])
        if not characters:
            if negated:
                return "(?s:.)"
            self._fail("a class needs a character", token)
        parts, at = [], 0
        while at < len(characters):
            first = last = characters[at]
            if at + 2 < len(characters) and bare[at + 1]:
                last = characters[at + 2]
                at += 2
            if last < first:
                self._fail(f"the range {first}-{last} has no characters", token)
            parts.append(_escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}")
            at += 1
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    @staticmethod
    def _bare_hyphens(raw: str) -> list[bool]:
        return [match[0] == "-" for match in re.finditer(rf"{_ESCAPE.pattern}|.", raw, re.DOTALL)]

    def _characters(self, token: re.Match[str], start: int = 1) -> list[str]:
        """The characters of a string or class, without what frames it."""
        found = []
        for match in re.finditer(rf"{_ESCAPE.pattern}|.", token[0][start:-1], re.DOTALL):
            escape = match[1]
            if escape is None:
                found.append(match[0])
            elif len(escape) > 1:
                code = int(escape[1:], 16)
                if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                    self._fail(f"\\{escape} is no character", token)
                found.append(chr(code))
            elif escape in _CHARACTERS:
                found.append(_CHARACTERS[escape])
            else:
                self._fail(f"the escape \\{escape} is not known", token)
        return found

    def _begins_rule(self) -> bool:
        following = self._tokens[self._next : self._next + 2]
        return [token.lastgroup for token in following] == ["name", "define"]

    def _is_next(self, mark: str) -> bool:
        return self._next < len(self._tokens) and self._tokens[self._next][0] == mark

    def _take(self, mark: str) -> bool:
        taken = self._is_next(mark)
        self._next += taken
        return taken

    def _fail(self, message: str, token: re.Match[str] | None = None) -> NoReturn:
        if token is None and self._next < len(self._tokens):
            token = self._tokens[self._next]
        raise _error(message, self._text, len(self._text) if token is None else token.start())


def _tokens(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            reason = {
                "=": "lookahead (= ...) is not supported" if text[:at].rstrip().endswith("(") else None,
                "<": "tokens by their name or id (<...>) are not supported",
                "!": "tokens by their name or id (!<...>) are not supported",
                '"': "a string does not end in its line",
                "[": "a class does not end in its line",
                "{": "a bound is {m}, {m,}, {,n} or {m,n}",
            }.get(text[at])
            raise _error(reason or f"{text[at]!r} is not understood", text, at)
        yield match
        at = match.end()


def _error(message: str, text: str = "", at: int | None = None) -> InvalidRequestError:
    if at is not None:
        line = text.count("\n", 0, at) + 1
        message = f"line {line}, column {at - text.rfind(chr(10), 0, at)}: {message}"
    return InvalidRequestError(f"the EBNF grammar: {message}", param="structured", code="invalid_grammar")


def _references(node: _Node) -> Iterator[_Rule]:
    stack = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, _Rule):
            yield one
        elif isinstance(one, _Repeated):
            stack.append(one.part)
        elif isinstance(one, _Sequence | _Choice):
            stack.extend(reversed(one.parts))


def _reachable(rules: Mapping[str, _Node], text: str) -> list[str]:
    """The rules that root needs, root first."""
    found, waiting = {"root": None}, deque(["root"])
    while waiting:
        for reference in _references(rules[waiting.popleft()]):
            if reference.name not in rules:
                raise _error(f"there is no rule {reference.name!r:.60}", text, reference.at)
            if reference.name not in found:
                found[reference.name] = None
                waiting.append(reference.name)
    return list(found)


def _without_recursion(rules: Mapping[str, _Node], order: list[str]) -> set[str]:
    """The rules that need neither themselves nor a rule that does: each can follow the rules it needs."""
    needed = {name: {reference.name for reference in _references(rules[name])} for name in order}
    users: dict[str, list[str]] = {name: [] for name in order}
    for name, others in needed.items():
        for other in others:
            users[other].append(name)
    ready = deque(name for name in order if not needed[name])
    found = set(ready)
    while ready:
        done = ready.popleft()
        for user in users[done]:
            needed[user].discard(done)
            if not needed[user]:
                found.add(user)
                ready.append(user)
    return found


class _Writer:
    """Writes rules in Lark: terminals without recursion by upper-case names.

    Args:
        order: the rules to write, root first.
    """

    def __init__(self, rules: Mapping[str, _Node], order: list[str]) -> None:
        self._rules = rules
        self._order = order
        self._regular = _without_recursion(rules, order)
        self._names = {name: f"{'R' if name in self._regular else 'r'}{i}" for i, name in enumerate(order)}
        self._terminals: dict[str, str] = {}  # text -> name, of parts of rules

    def lark(self) -> str:
        lines = [f"start: {self._names['root']}"]
        for name in self._order:
            write = self._terminal if name in self._regular else self._rule
            lines.append(f"{self._names[name]}: {write(self._rules[name])}")
        lines += [f"{name}: {text}" for text, name in self._terminals.items()]
        return "\n".join(lines)

    def _is_regular(self, node: _Node) -> bool:
        return all(reference.name in self._regular for reference in _references(node))

    def _rule(self, node: _Node) -> str:
        """An expression of a rule; its parts without recursion are terminals, joined where they can be."""
        if self._is_regular(node):
            return self._name(node)
        if isinstance(node, _Repeated):
            return f"({self._rule(node.part)}){node.bounds}"
        if isinstance(node, _Choice):
            regular = tuple(part for part in node.parts if self._is_regular(part))
            parts = [self._rule(part) for part in node.parts if not self._is_regular(part)]
            return f"({' | '.join([*parts, *([self._name(_Choice(regular))] if regular else ())])})"
        if isinstance(node, _Sequence):
            written: list[str] = []
            for is_regular, group in itertools.groupby(node.parts, self._is_regular):
                run = tuple(group)
                written += [self._name(_Sequence(run))] if is_regular else map(self._rule, run)
            return f"({' '.join(written)})"
        assert isinstance(node, _Rule)
        return self._names[node.name]

    def _name(self, node: _Node) -> str:
        """The terminal that an expression is."""
        text = self._terminal(node)
        if text == '""':
            return text
        return self._terminals.setdefault(text, f"T{len(self._terminals)}")

    def _terminal(self, node: _Node) -> str:
        """An expression of a terminal."""
        if isinstance(node, _Literal):
            return json.dumps(node.text, ensure_ascii=False)
        if isinstance(node, _Class):
            return f"/{node.regex}/"
        if isinstance(node, _Rule):
            return self._names[node.name]
        if isinstance(node, _Repeated):
            return f"({self._terminal(node.part)}){node.bounds}"
        parts = [self._terminal(part) for part in node.parts]
        if len(parts) < 2:
            return parts[0] if parts else '""'
        return f"({(' | ' if isinstance(node, _Choice) else ' ').join(parts)})"


def _escaped(character: str) -> str:
    """A character in a class of a regular expression."""
    plain = character.isascii() and character.isalnum()
    return character if plain else f"\\u{{{ord(character):x}}}"
