# SPDX-License-Identifier: Apache-2.0
r"""Regular expressions, in the syntax of Rust's crate `regex`, of texts written inside of JSON strings.

Each character and class is rewritten so that it matches the escapes of its characters; all else stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_MAX_NESTING = 64
_CONTROLS = frozenset(map(chr, range(0x20)))
_MARKS = frozenset('"\\')
_SPACES = frozenset("\t\n\v\f\r")
#: The characters that are escaped.
ESCAPED = _CONTROLS | _MARKS
UNESCAPED = r'[^"\\\x00-\x1f]'


def escape_char(char: str) -> str:
    if char not in ESCAPED:
        return char
    return "\\" + _SHORT[char] if char in _SHORT else f"\\u{ord(char):04x}"


def escaped_range(first: str, last: str) -> str:
    source = f"[\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}]"
    return escaped_class(source, frozenset(c for c in ESCAPED if first <= c <= last))


class Atom(NamedTuple):
    """A character, a class, or something that matches no text (`members` None), and where it ends.

    Args:
        members: the matched characters among the escaped ones.
        char: the only matched character.
    """

    end: int
    members: frozenset[str] | None
    char: str | None = None


_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<on>[a-zA-Z]*)(?:-(?P<off>[a-zA-Z]+))?(?P<close>[:)])))?")
_COUNT = re.compile(r"\{[\d, ]*\}")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]+)\})")
_PROPERTY = re.compile(r"\\([pP])(?:\{(\^?)([^}]{0,64})\}|(\w))")
_POSIX = re.compile(r"\[:(\^?)(\w+):\]")
_CHARS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_PERL: dict[str, frozenset[str]] = {"d": frozenset(), "s": _SPACES, "w": frozenset()}
_POSIX_CLASSES = {
    "ascii": ESCAPED,
    "blank": frozenset("\t"),
    "cntrl": _CONTROLS,
    "graph": _MARKS,
    "print": _MARKS,
    "punct": _MARKS,
    "space": _SPACES,
}
#: Properties of Unicode that some of the escaped characters have, without blanks and underscores.
_PROPERTIES = {
    **dict.fromkeys(("c", "other", "cc", "control", "cntrl"), _CONTROLS),
    **dict.fromkeys(("p", "punctuation", "punct", "po", "otherpunctuation"), _MARKS),
    **dict.fromkeys(("graphemebase", "grbase", "patternsyntax", "patsyn"), _MARKS),
    **dict.fromkeys(("whitespace", "wspace", "space", "patternwhitespace", "patws"), _SPACES),
    **dict.fromkeys(("quotationmark", "qmark"), frozenset('"')),
    **dict.fromkeys(("any", "ascii", "assigned", "common", "zyyy"), ESCAPED),
}
_PROPERTY_KINDS = ("gc", "generalcategory", "sc", "script")


def escape_regex(pattern: str, flags: str) -> str:
    """A pattern in the syntax of Rust's crate `regex`, over escaped text."""
    return rewrite_atoms(pattern, flags, _write)


def rewrite_atoms(pattern: str, flags: str, write: Callable[[str, Atom], str]) -> str:
    """Rewrite each character and class of a pattern; all else stays. O(length).

    Args:
        write: makes the new text of one from its source and what it matches.

    Raises:
        ValueError: a flag or a class that is not understood.
    """
    _check_flags(flags, "")
    dots = ["s" in flags]
    written: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "(":
            group = _GROUP.match(pattern, at)
            assert group is not None
            on, off = group["on"] or "", group["off"] or ""
            _check_flags(on, off)
            has_dots = "s" in on or (dots[-1] and "s" not in off)
            if group["close"] == ")":
                dots[-1] = has_dots
            else:
                dots.append(has_dots)
            written.append(group[0])
            at = group.end()
        elif char == ")":
            if len(dots) > 1:
                dots.pop()
            written.append(char)
            at += 1
        elif char == "{" and (count := _COUNT.match(pattern, at)) is not None:
            written.append(count[0])
            at = count.end()
        elif char in "*+?|^${":
            written.append(char)
            at += 1
        elif char == ".":
            written.append(write(char, Atom(at + 1, any_char(includes_newline=dots[-1])[1])))
            at += 1
        else:
            atom = atom_at(pattern, at)
            written.append(write(pattern[at : atom.end], atom))
            at = atom.end
    return "".join(written)


def _check_flags(on: str, off: str) -> None:
    for flag in "xR":
        if flag in on:
            raise ValueError(f"the flag {flag} of a regular expression can't be used here")
    if "u" in off:
        raise ValueError("regular expressions are of characters, not of bytes: leave (?-u) out")


def any_char(*, includes_newline: bool) -> tuple[str, frozenset[str]]:
    """The characters that a dot matches, as a class, and its escaped members."""
    return (r"[\x{0}-\x{10ffff}]", ESCAPED) if includes_newline else (r"[^\n]", ESCAPED - {"\n"})


def _write(source: str, atom: Atom) -> str:
    if not atom.members:
        return source
    if atom.char is not None:
        return escaped_literal(atom.char, source)
    if source == ".":
        return escaped_class(*any_char(includes_newline="\n" in atom.members))
    return escaped_class(source if source.startswith("[") else f"[{source}]", atom.members)


def escaped_literal(char: str, source: str) -> str:
    return f"(?-i:{_spelled(char)})" if char in ESCAPED else source


def _spelled(char: str) -> str:
    return escape_char(char).replace("\\", "\\\\")


def escaped_class(source: str, members: frozenset[str]) -> str:
    """A class in brackets, with the escapes of its members in place of these."""
    if not members:
        return source
    return f"(?:{'|'.join([f'[{source}&&{UNESCAPED}]', *escape_patterns(members)])})"


def escape_patterns(members: frozenset[str]) -> list[str]:
    """Patterns of the escapes of some characters."""
    ways = []
    short = "".join(_SHORT[c].replace("\\", "\\\\") for c in sorted(members) if c in _SHORT)
    if short:
        ways.append(rf"(?-i:\\[{short}])")
    for tens in "01":
        ones = [f"{ord(c) & 15:x}" for c in sorted(members - _SHORT.keys()) if ord(c) >> 4 == int(tens)]
        if ones:
            ways.append(rf"(?-i:\\u00{tens}[{''.join(ones)}])")
    return ways


def atom_at(pattern: str, at: int, depth: int = 1) -> Atom:
    """The class, the character or the escape at a place."""
    return class_at(pattern, at, depth) if pattern[at] == "[" else character_at(pattern, at)


def character_at(pattern: str, at: int) -> Atom:
    """The character or the escape at a place."""
    char = pattern[at]
    if char != "\\":
        return _one(at + 1, char)
    code = _CODE.match(pattern, at)
    if code is not None:
        number = int(next(filter(None, code.groups())), 16)
        if number > 0x10FFFF:
            raise ValueError(f"{code[0]} is no character")
        return _one(code.end(), chr(number))
    found = _PROPERTY.match(pattern, at)
    if found is not None:
        return Atom(
            found.end(), _complement(_property(found[3] or found[4]), (found[1] == "P") ^ bool(found[2]))
        )
    escaped = pattern[at + 1 : at + 2]
    if escaped in _CHARS:
        return _one(at + 2, _CHARS[escaped])
    if escaped.lower() in _PERL:
        return Atom(at + 2, _complement(_PERL[escaped.lower()], escaped.isupper()))
    if escaped.isalnum() or escaped in "<>":
        return Atom(at + 2, None)  # \b and the like; what is none, the compiler refuses
    return _one(at + 2, escaped)


def _one(end: int, char: str) -> Atom:
    return Atom(end, frozenset(char) & ESCAPED, char)


def _complement(members: frozenset[str], is_negated: bool) -> frozenset[str]:
    return ESCAPED - members if is_negated else members


def _property(name: str) -> frozenset[str]:
    kind, mark, value = name.replace(":", "=").rpartition("=")
    plain = re.sub(r"[\s_-]", "", kind).lower()
    if mark and plain not in _PROPERTY_KINDS:
        raise ValueError(f"the property {name[:40]!r} of a regular expression can't be used here")
    value = re.sub(r"[\s_-]", "", value).lower()
    return _PROPERTIES.get(value.removeprefix("is") if len(value) > 4 else value, frozenset())


_OPERATORS: dict[str, Callable[[frozenset[str], frozenset[str]], frozenset[str]]] = {
    "&&": frozenset.intersection,
    "--": frozenset.difference,
    "~~": frozenset.symmetric_difference,
}


def class_at(pattern: str, at: int, depth: int = 1) -> Atom:
    """The class in brackets at a place."""
    if depth > _MAX_NESTING:
        raise ValueError(f"classes are nested deeper than {_MAX_NESTING} levels")
    start, at = at, at + 1
    is_negated = pattern.startswith("^", at)
    at += is_negated
    first = at
    while pattern.startswith("-", at):
        at += 1
    at += at == first and pattern.startswith("]", at)
    left: frozenset[str] = frozenset()
    join: Callable[[frozenset[str], frozenset[str]], frozenset[str]] = frozenset.__or__
    members: frozenset[str] = frozenset()
    while at < len(pattern):
        if pattern[at] == "]":
            return Atom(at + 1, _complement(join(left, members), is_negated))
        operator = pattern[at : at + 2]
        if operator in _OPERATORS:
            left, members = join(left, members), frozenset()
            join = _OPERATORS[operator]
            at += 2
            continue
        posix = _POSIX.match(pattern, at)
        if posix is not None:
            members |= _complement(_POSIX_CLASSES.get(posix[2], frozenset()), bool(posix[1]))
            at = posix.end()
            continue
        atom = atom_at(pattern, at, depth + 1)
        at = atom.end
        if (
            atom.char is not None
            and pattern[at : at + 1] == "-"
            and pattern[at + 1 : at + 2] not in ("]", "-", "")
        ):
            last = character_at(pattern, at + 1)
            if last.char is not None:
                members |= {c for c in ESCAPED if atom.char <= c <= last.char}
            at = last.end
        else:
            members |= atom.members or frozenset()
    raise ValueError(f"the class {pattern[start : start + 40]} of a regular expression is not closed")
