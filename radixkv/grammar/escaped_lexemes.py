# SPDX-License-Identifier: Apache-2.0
r"""Ends of a regular expression's lexemes once it is escaped; see `escaped_lark`."""

from __future__ import annotations

import re

from radixkv.grammar.escaped_regex import UNESCAPED, any_char, atom_at, escape_patterns, escape_regex

_QUANTIFIER = re.compile(r"(?P<kind>[*+?]|\{(?P<least>\d+)(?P<comma>,?)(?P<most>\d*)\})\??")
_GROUP_HEAD = re.compile(r"\((?:\?(?:P?<\w+>|(?P<flags>s?):))?(?!\?)")
_MAX_COUNTED = 200
_MAX_GROUPS = 4


def split_lexemes(pattern: str, flags: str, *, is_ignored: bool = False) -> str | None:
    """A pattern that ends by repeating a class, as lexemes of one escape or of characters without any.

    A lexer sees one byte ahead. Where what may follow begins with an escape, too, it could not tell at the
    backslash whether the repetition goes on. None: the pattern does not end so, or is not simple before.

    Args:
        is_ignored: it is repeated anyway, and has to be one lexeme.
    """
    if flags.strip("is"):
        return None
    if pattern.startswith("(?s)"):
        pattern, flags = pattern[4:], flags + "s"
    for _ in range(_MAX_GROUPS):
        outer = _GROUP_HEAD.match(pattern)
        if outer is None or _group_end(pattern, 0) != len(pattern):
            break
        if outer["flags"] and "s" not in flags:
            flags += "s"
        pattern = pattern[outer.end() : -1]
    pieces = _pieces(pattern)
    if not pieces or any(quantifier or atom.startswith("(") for atom, quantifier in pieces[:-1]):
        return None
    atom, quantifier = pieces[-1]
    one = _one_char(atom, "s" in flags) if quantifier is not None else None
    if one is None or quantifier is None or not one[1]:
        return None
    source, members = one
    suffix = "i" * ("i" in flags)
    escapes = [f"/{way}/{suffix}" for way in escape_patterns(members)]
    head = "".join(f"{atom}" for atom, _ in pieces[:-1])
    before = f"/{escape_regex(head, flags)}/{flags} " if head else ""
    plain = "" if len(source) == 1 else f"[{source}&&{UNESCAPED}]"
    once = " | ".join([f"/{plain}/{suffix}", *escapes] if plain else escapes)
    often = " | ".join([f"/{plain}+/{suffix}", *escapes] if plain else escapes)
    kind = quantifier["kind"]
    if is_ignored:
        if head or kind not in "*+":
            return None
        ways = "|".join([f"{plain}+", *escape_patterns(members)] if plain else escape_patterns(members))
        return f"/{ways}/{suffix}"
    if kind in "*+":
        return f"({before}({often}){kind})"
    if kind == "?":
        return f"({before}({once})?)"
    least, most = int(quantifier["least"]), quantifier["most"]
    if max(least, int(most or 0)) > _MAX_COUNTED:
        return None
    if not quantifier["comma"]:
        return f"({before}({once}){{{least}}})"
    if most:
        return f"({before}({once}){{{least},{most}}})"
    return f"({before}({once}){{{least}}} ({often})*)" if least else f"({before}({often})*)"


def _group_end(pattern: str, at: int) -> int:
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        if char in "()":
            depth += 1 if char == "(" else -1
            at += 1
            if depth == 0:
                return at
        else:
            at = atom_at(pattern, at).end
    raise ValueError("a group of a regular expression is not closed")


def _pieces(pattern: str) -> list[tuple[str, re.Match[str] | None]] | None:
    """Characters, classes and groups in sequence, each with how often it comes; None: there is more to it."""
    pieces = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char in "|)*+?{^$":
            return None
        if char == "(":
            end = _group_end(pattern, at)
        else:
            end = atom_at(pattern, at).end
        quantifier = _QUANTIFIER.match(pattern, end)
        pieces.append((pattern[at:end], quantifier))
        at = end if quantifier is None else quantifier.end()
    return pieces


def _one_char(atom: str, has_dots: bool, depth: int = 0) -> tuple[str, frozenset[str]] | None:
    """The part matching just one character, as a class or an escaped character, and its escaped members."""
    if atom.startswith("("):
        head = _GROUP_HEAD.match(atom)
        if head is None or depth == _MAX_GROUPS:
            return None
        found = []
        for way in _ways(atom[head.end() : -1]):
            pieces = _pieces(way)
            if pieces is None or len(pieces) != 1 or pieces[0][1] is not None:
                return None
            found.append(_one_char(pieces[0][0], has_dots or bool(head["flags"]), depth + 1))
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        sources = (source if len(source) > 1 else f"\\x{{{ord(source):x}}}" for source, _ in known)
        return f"[{''.join(sources)}]", frozenset().union(*(members for _, members in known))
    if atom == ".":
        return any_char(includes_newline=has_dots)
    one = atom_at(atom, 0)
    if one.members is None:
        return None
    if atom.startswith("["):
        return atom, one.members
    return (one.char, one.members) if one.char is not None else (f"[{atom}]", one.members)


def _ways(pattern: str) -> list[str]:
    """The alternatives of a pattern."""
    ways, start, at = [], 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "|":
            ways.append(pattern[start:at])
            start = at = at + 1
        elif char == "(":
            at = _group_end(pattern, at)
        else:
            at = atom_at(pattern, at).end
    return [*ways, pattern[start:]]
