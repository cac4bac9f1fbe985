# SPDX-License-Identifier: Apache-2.0
"""Differences of two texts: where they part, which words differ, and what share they have in common."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

WINDOW = 160  # characters on each side of a difference that are looked at
_MAX_WORDS = 600  # of each text that are compared at once
_MAX_LINES = 3000
#: Numbers, words, white space, single characters; each of a script without blanks, too.
_WORDS = re.compile(r"\d+|[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|\s+|[\s\S]")
#: The same, without white space.
_SEEN_WORDS = re.compile(r"\d+|[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|\S")


@dataclass(frozen=True, slots=True)
class TextDifference:
    """A place where two texts differ.

    Args:
        old_text, new_text: all of the earlier text, and of the later one.
        old, new: where the place is in each: begin and end; nothing may be there in one of them.
    """

    old_text: str
    new_text: str
    old: tuple[int, int]
    new: tuple[int, int]

    @property
    def old_part(self) -> str:
        """The differing part of the earlier text."""
        return self.old_text[slice(*self.old)]

    @property
    def new_part(self) -> str:
        """The differing part of the later text."""
        return self.new_text[slice(*self.new)]

    def sides(self) -> Iterator[tuple[str, int, int]]:
        """Each text around the place, and where the place begins and ends in that."""
        for text, (start, stop) in ((self.old_text, self.old), (self.new_text, self.new)):
            first = max(0, start - WINDOW)
            yield text[first : stop + WINDOW], start - first, stop - first

    def lines_before(self, count: int) -> str:
        """The text before the place, from `count` lines above it on."""
        at = self.new[0]
        for _ in range(count):
            at = self.new_text.rfind("\n", 0, max(0, at))
            if at < 0:
                return self.new_text[: self.new[0]]
        return self.new_text[at : self.new[0]]

    @property
    def label(self) -> str:
        """The text before the place in its line."""
        return self.new_text[max(0, self.new[0] - WINDOW) : self.new[0]].rpartition("\n")[2]


def common_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts. O(n), at the speed of comparing memory."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    step = 1024
    while low < high and one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(high, low + step)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def differences(old: str, new: str) -> list[TextDifference]:
    """Return the places where two texts differ, in order; neighbouring places are joined.

    Of long texts only the first such places are told apart. O(n) and a comparison of some hundred words.
    """
    return [TextDifference(old, new, *place) for place in _joined(old, new, list(_places(old, new)))]


def _places(old: str, new: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
    for a, b in _changed(*(some[:_MAX_LINES] for some in lines)):
        starts = sum(map(len, lines[0][: a[0]])), sum(map(len, lines[1][: b[0]]))
        texts = "".join(lines[0][slice(*a)]), "".join(lines[1][slice(*b)])
        yield from _words_changed(texts, starts)


def _words_changed(
    texts: tuple[str, str], starts: tuple[int, int]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    words = [[match[0] for match in _WORDS.finditer(text)] for text in texts]
    ends = [[0], [0]]
    for side in (0, 1):
        for word in words[side]:
            ends[side].append(ends[side][-1] + len(word))
    for a, b in _changed(*words):
        yield (
            (starts[0] + ends[0][a[0]], starts[0] + ends[0][a[1]]),
            (starts[1] + ends[1][b[0]], starts[1] + ends[1][b[1]]),
        )


def _changed(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the ranges of two lists that differ; equal beginnings and ends are not compared further."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    a, b = old[head : len(old) - tail], new[head : len(new) - tail]
    if not a and not b:
        return
    if not a or not b or max(len(a), len(b)) > _MAX_WORDS:
        small = SequenceMatcher(None, a[:_MAX_WORDS], b[:_MAX_WORDS], autojunk=True)
    else:
        small = SequenceMatcher(None, a, b, autojunk=False)
    for tag, a0, a1, b0, b1 in small.get_opcodes():
        if tag != "equal":
            yield (head + a0, head + a1), (head + b0, head + b1)


def _joined(
    old: str, new: str, places: list[tuple[tuple[int, int], tuple[int, int]]]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Join places that almost touch, as the groups of digits of an id."""
    joined: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for a, b in places:
        if joined:
            (a0, a1), (b0, b1) = joined[-1]
            between = new[b1 : b[0]]
            is_near = len(between) <= 2 or (len(between) <= 16 and not re.search(r"\s", between))
            if is_near and "\n" not in between and old[a1 : a[0]] == between:
                joined[-1] = ((a0, a[1]), (b0, b[1]))
                continue
        joined.append((a, b))
    return joined


def share_in_common(old: str, new: str) -> float:
    """Return the share of the shorter text's words that are in the other one, at any place: 0 to 1. O(n)."""
    head = _end_of_word(old, common_length(old, new))
    one, other = old[head:], new[head:]
    tail = _end_of_word(one[::-1], common_length(one[::-1], other[::-1]))
    both = len(_SEEN_WORDS.findall(old[:head])) + len(_SEEN_WORDS.findall(one[len(one) - tail :]))
    counts = [Counter(_SEEN_WORDS.findall(text[: len(text) - tail])) for text in (one, other)]
    shorter = both + min(count.total() for count in counts)
    return (both + (counts[0] & counts[1]).total()) / max(1, shorter)


def _end_of_word(text: str, length: int) -> int:
    """Return the length of the beginning of a text, at most `length`, that ends with white space; 0: none."""
    while length and not text[length - 1].isspace():
        length -= 1
    return length
