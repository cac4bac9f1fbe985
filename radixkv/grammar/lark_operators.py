# SPDX-License-Identifier: Apache-2.0
"""Bound the product of `&` and `~` in a Lark grammar.

llguidance follows a conjunction of regular expressions by all combinations of where each of them may be, and
can't be interrupted within one character: 25 terms with two ways each take all memory. A trial misses a
conjunction that begins late: after `/x{40}/` llguidance 1.9 accepts one in 20 ms, and its
41st mask does not end. O(length).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from radixkv.grammar.regex_text import num_atoms

#: A part of a grammar that matters here, outside strings, comments and embedded JSON. A string or
#: regular expression without an end extends to the end of the text, so that no character is read twice.
_PARTS = re.compile(
    r'(?P<string>"(?:\\.|[^"\\\n])*"?i?)|(?P<comment>//[^\n]*|\#[^\n]*)|(?P<regex>/(?:\\.|[^/\\])+/?)'
    r"|(?P<begin>(?m:^)[ \t]*[?!]?(?P<name>[A-Za-z_]\w*)[^\n:|&~\"/]*:(?!:))"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<operator>[&~])"
)


@dataclass(slots=True)
class _Definition:
    """Terms between the `&` of a rule or a terminal: the ways of each, and the definitions that it names."""

    terms: list[tuple[int, list[str]]]


def joined_ways(grammar: str) -> int:
    """Return an upper bound of the combinations after one character, in the definition with most of them.

    >>> joined_ways("start: A & B\\nA: /[a-z]b/\\nB: C & /xyz/\\nC: /u/ | ~/v.w/")
    30
    >>> joined_ways("start: /a/ /b/")
    1
    """
    definitions = _definitions(grammar)
    known: dict[str, int] = {}
    most = 1
    for name, definition in definitions.items():
        ways = _ways(name, definitions, known)
        if len(definition.terms) > 1:
            most = max(most, ways)
    return most


def _definitions(grammar: str) -> dict[str, _Definition]:
    definitions: dict[str, _Definition] = {}
    current = _Definition([(0, [])])
    for part in _PARTS.finditer(grammar):
        if part["name"] is not None:
            current = definitions.setdefault(part["name"], _Definition([(0, [])]))
        elif part["operator"] == "&":
            current.terms.append((0, []))
        else:
            ways, names = current.terms[-1]
            if part["word"] is not None:
                names.append(part["word"])
            current.terms[-1] = (ways + _own_ways(part), names)
    return definitions


def _own_ways(part: re.Match[str]) -> int:
    if part["regex"] is not None:
        return num_atoms(part["regex"][1:-1])
    return int(part["string"] is not None or part["operator"] is not None)


def _ways(name: str, definitions: dict[str, _Definition], known: dict[str, int]) -> int:
    """Return the ways of a definition, without recursion: a chain of names may be as long as the grammar."""
    stack = [name]
    while stack:
        at = stack[-1]
        if known.get(at, -1) > 0:
            stack.pop()
            continue
        missing = (
            [] if at in known else [n for n in _names(definitions[at]) if n in definitions and n not in known]
        )
        known[at] = 0  # where it leads back to itself, it is being counted already
        if missing:
            stack.extend(missing)
            continue
        product = 1
        for ways, names in definitions[at].terms:
            product *= max(1, ways + sum(max(1, known.get(n, 1)) for n in names))
            product = min(product, 10**18)
        known[at] = product
        stack.pop()
    return known[name]


def _names(definition: _Definition) -> Iterator[str]:
    for _, names in definition.terms:
        yield from names
