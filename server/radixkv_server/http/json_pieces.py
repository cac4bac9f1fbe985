# SPDX-License-Identifier: Apache-2.0
"""Parser of long JSON texts that lets other threads run between pieces.

The standard parser holds Python's interpreter lock from the first byte to the last, and so do the faster
ones; a worker process does not help, since copying its result costs as much again. Here numpy finds the
commas first, a window at a time (`outline`), and the standard parser gets runs of elements between them
(`parse_pieces`):

    {"model": "m", "messages": [{...}, {...}, ... , {...}], "seed": 1}      a body of megabytes
    |           |  |                                      | |       |
    `- a run ---'  `- one long member: its value is cut --' `- run -'       at commas of its own depth
                               [{...}, {...}]
                               [{...}, ...  ]                               runs of at most two windows

The result joins only runs that the standard parser accepted, with nothing dropped between them: even a wrong
outline can't let anything but JSON pass.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW = 64 * 1024

Loads = Callable[[str], Any]

# Turns brackets into braces, and no other character into a brace.
_FOLD = np.uint8(0x20)
_SPACE = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


@dataclass(slots=True)
class Outline:
    """Structure of a JSON text, found without parsing it.

    Attributes:
        depth: deepest nesting of arrays and objects.
        num_parts: arrays, objects and members of objects.
        window: bytes of one pass.
        commas: depth -> ascending positions of each window's first and last comma there. Less than a window,
            or a single element, lies between two of them.
    """

    depth: int = 0
    num_parts: int = 0
    window: int = WINDOW
    commas: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


def outline(body: bytes, *, max_depth: int, max_parts: int, window: int = WINDOW) -> Outline:
    """Return the outline of a JSON text; stops early beyond one of the limits. O(bytes).

    Text that is not JSON gets some outline, too.
    """
    found = Outline(window=window)
    depth, in_string, escaped = 0, False, False
    for start in range(0, len(body), window):
        codes = np.frombuffer(body, np.uint8, min(window, len(body) - start), start)
        # Only these few characters are looked at any further.
        folded = codes | _FOLD
        marks = (codes == ord('"')) | (codes == ord(",")) | (codes == ord(":"))
        marks |= (folded == ord("{")) | (folded == ord("}"))
        places = np.flatnonzero(marks)
        kinds = codes[places]
        quotes = kinds == ord('"')
        backslashes = np.flatnonzero(codes == ord("\\"))
        if escaped or len(backslashes):
            taken = _escaped(backslashes, np.append(places, len(codes)), escaped)
            escaped = bool(taken[-1])
            quotes &= ~taken[:-1]
        if not len(places):
            continue
        inside = (np.cumsum(quotes) + in_string) % 2 == 1
        in_string = bool(inside[-1])
        folded = kinds | _FOLD
        opening, closing = (folded == ord("{")) & ~inside, (folded == ord("}")) & ~inside
        depths = depth + np.cumsum(opening.view(np.int8) - closing.view(np.int8), dtype=np.int64)
        depth = int(depths[-1])
        found.depth = max(found.depth, int(depths.max()))
        colons = (kinds == ord(":")) & ~inside
        found.num_parts += int(np.count_nonzero(opening)) + int(np.count_nonzero(colons))
        if found.depth > max_depth or found.num_parts > max_parts:
            break
        commas = (kinds == ord(",")) & ~inside
        _note_commas(found, start + places[commas], depths[commas])
    return found


def _escaped(
    backslashes: npt.NDArray[np.int64], places: npt.NDArray[np.int64], carried: bool
) -> npt.NDArray[np.bool_]:
    """Mark places after an odd number of backslashes; `carried`: one is before the window. O(n log n)."""
    if carried:
        backslashes = np.append(-1, backslashes)
    if not len(backslashes):
        return np.zeros(len(places), np.bool_)
    begins = np.diff(backslashes, prepend=-3) != 1
    starts = np.maximum.accumulate(np.where(begins, backslashes, -1))  # of the run that each is in
    before = np.minimum(np.searchsorted(backslashes, places - 1), len(backslashes) - 1)
    follows = backslashes[before] == places - 1
    return np.asarray(follows & ((places - starts[before]) % 2 == 1))


def _note_commas(found: Outline, places: npt.NDArray[np.int64], depths: npt.NDArray[np.int64]) -> None:
    for depth in np.unique(depths).tolist():
        here = places[depths == depth]
        found.commas[depth] += [int(here[0]), int(here[-1])] if len(here) > 1 else [int(here[0])]


def parse_pieces(body: bytes, shape: Outline, loads: Loads) -> Any:
    """Return the value of a JSON text.

    Args:
        shape: the text's outline.
        loads: the parser of a piece.

    Raises:
        json.JSONDecodeError: not JSON; its position is one in `body`, in bytes.
        UnicodeDecodeError: not UTF-8; likewise.
        ValueError: further errors of `loads`.
    """
    return _Pieces(body, shape, loads).value(0, len(body), 0)


class _Pieces:
    """A text that is being parsed."""

    def __init__(self, body: bytes, shape: Outline, loads: Loads) -> None:
        self._body = body
        self._commas = shape.commas
        self._window = shape.window
        self._loads = loads

    def value(self, start: int, end: int, depth: int) -> Any:
        """Return the value of `body[start:end]`, which has `depth` containers around it."""
        start = self._after_whitespace(start, end)
        while end > start and self._body[end - 1] in b" \t\n\r":
            end -= 1
        first, last = self._body[start : start + 1], self._body[end - 1 : end]
        if end - start <= self._window or first not in (b"[", b"{"):
            return self._parse(start, end, "", "")
        closing = b"]" if first == b"[" else b"}"
        if last != closing:
            raise self._error("Expecting ',' delimiter", end - 1)
        return self._array(start, end, depth + 1) if first == b"[" else self._object(start, end, depth + 1)

    def _array(self, start: int, end: int, depth: int) -> list[Any]:
        items: list[Any] = []
        for left, right in self._runs(start, end, depth):
            if right - left <= 2 * self._window:
                items += self._parse(left, right, "[", "]")
            else:
                items.append(self.value(left, right, depth))
        return items

    def _object(self, start: int, end: int, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for left, right in self._runs(start, end, depth):
            if right - left <= 2 * self._window:
                members.update(self._parse(left, right, "{", "}"))
            else:
                key, after = self._key(left, right)
                members[key] = self.value(after, right, depth)
        return members

    def _runs(self, start: int, end: int, depth: int) -> Iterator[tuple[int, int]]:
        """Iterate over the elements of the container `body[start:end]` in runs, none of them blank."""
        commas = self._commas.get(depth, [])
        cuts = commas[bisect_right(commas, start) : bisect_left(commas, end)]
        left = start + 1
        for right in (*cuts, end - 1):
            if self._after_whitespace(left, right) < right:
                yield left, right
            elif cuts:
                raise self._error("Expecting value", right)
            left = right + 1

    def _key(self, start: int, end: int) -> tuple[str, int]:
        """Return the key of a member, and the position of its value."""
        start = self._after_whitespace(start, end)
        found = _STRING.match(self._body, start, min(end, start + WINDOW))
        if found is None:
            raise self._error(f"Expecting property name of at most {WINDOW} bytes in double quotes", start)
        colon = self._after_whitespace(found.end(), end)
        if self._body[colon : colon + 1] != b":":
            raise self._error("Expecting ':' delimiter", colon)
        return self._parse(start, found.end(), "", ""), colon + 1

    def _parse(self, start: int, end: int, before: str, after: str) -> Any:
        text = self._decode(start, end)
        try:
            return self._loads(before + text + after)
        except json.JSONDecodeError as error:
            place = start + len(text[: max(0, error.pos - len(before))].encode("utf-8"))
            raise self._error(error.msg, min(place, end)) from None

    def _decode(self, start: int, end: int) -> str:
        try:
            return self._body[start:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnicodeDecodeError(
                "utf-8", b"", start + error.start, start + error.end, error.reason
            ) from None

    def _after_whitespace(self, start: int, end: int) -> int:
        found = _SPACE.match(self._body, start, end)
        assert found is not None
        return found.end()

    def _error(self, message: str, place: int) -> json.JSONDecodeError:
        error = json.JSONDecodeError(message, "", 0)
        error.pos = place
        error.lineno = self._body.count(b"\n", 0, place) + 1
        line = self._body[self._body.rfind(b"\n", 0, place) + 1 : place]
        error.colno = len(line.decode("utf-8", "replace")) + 1
        return error
