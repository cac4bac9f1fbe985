# SPDX-License-Identifier: Apache-2.0
"""Size of a regular expression, found by reading its text once: atoms and repetitions."""

from __future__ import annotations

import re

#: A bound `{m}`, `{m,}` or `{m,n}` of a regular expression; blanks are allowed in it.
_BOUND = re.compile(r"\{\s*(\d{1,9})\s*(?:,\s*(\d{0,9})\s*)?\}")


def num_atoms(pattern: str) -> int:
    """Count the different characters and classes of a regular expression. O(length).

    >>> num_atoms("a.{3}b[0-9]+a"), num_atoms("")
    (4, 0)
    """
    atoms = set()
    at = 0
    while at < len(pattern):
        bound = _BOUND.match(pattern, at) if pattern[at] == "{" else None
        if bound is not None:
            at = bound.end()
            continue
        end = _end_of_class(pattern, at) if pattern[at] == "[" else at + (2 if pattern[at] == "\\" else 1)
        if pattern[at] not in "*+?()|^$":
            atoms.add(pattern[at:end])
        at = end
    return len(atoms)


def max_repetitions(pattern: str) -> int:
    """Return how often the innermost part of a regular expression is repeated by its bounds. O(length).

    >>> max_repetitions("((a{1,100}){2,10}b){3}"), max_repetitions("[{9}]{2}a{4,}"), max_repetitions("a+b?")
    (3000, 4, 1)
    """
    groups = [1]  # the most repeated part of each open group
    last = 1  # of the part that a bound would repeat
    at = 0
    while at < len(pattern):
        character = pattern[at]
        bound = _BOUND.match(pattern, at) if character == "{" else None
        if bound is not None:
            last *= max(1, int(bound[2] or bound[1]))
            groups[-1] = max(groups[-1], last)
            at = bound.end()
            continue
        if character == "(":
            groups.append(1)
        elif character == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif character not in "*+?":
            last = 1
        at = _end_of_class(pattern, at) if character == "[" else at + (2 if character == "\\" else 1)
    return groups[0] if len(groups) == 1 else max(groups)


def _end_of_class(pattern: str, at: int) -> int:
    """After the `]` of the class that begins here; classes may hold classes."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
        elif pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return at
