# SPDX-License-Identifier: Apache-2.0
"""Cursor: text that comes in pieces, read from its front by generators that stop where they need more.

A reader is written as if it had the whole text: `yield from cursor.match(pattern)` gives the match, however
many pieces it took to come. Each method consumes as much as the text so far decides, so that the places where
readers stop do not depend on the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import regex

T = TypeVar("T")
#: A reader: yields where it needs more text, returns a value.
Steps = Generator[None, None, T]

#: Patterns of texts that follow each other, each with whether it may be missing.
Parts = tuple[tuple[regex.Pattern[str], bool], ...]

#: So much white space between the parts of a call makes it none.
_MAX_BLANKS = 1024
_BLANKS = regex.compile(r"\s*")


class NotACall(Exception):
    """The text does not fit a reader."""


class RanOut(NotACall):
    """The text has ended where a reader expects more; what there is fits."""


class Cursor:
    """A place in a growing text.

    Attributes:
        text: the part of it that is kept.
        at: the place in it.
        ended: no more text comes.
    """

    __slots__ = ("_base", "_held", "at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._base = 0
        self._held: list[int] = []

    def feed(self, text: str, keep: int | None = None) -> int:
        """Add text, and forget the text before `keep`, a place in it; None: before the cursor.

        Returns:
            The number of characters forgotten; text that a reader may go back to is kept.
        """
        keep = min([self.at if keep is None else keep, *(place - self._base for place in self._held)])
        self.text = self.text[keep:] + text
        self.at -= keep
        self._base += keep
        return keep

    @contextmanager
    def hold(self) -> Iterator[Callable[[], None]]:
        """Keep the text from here on, and give a function that goes back to here."""
        place = self._base + self.at
        self._held.append(place)

        def back() -> None:
            self.at = place - self._base

        try:
            yield back
        finally:
            self._held.pop()

    def more(self) -> Steps[None]:
        """Wait for more text.

        Raises:
            RanOut: none comes.
        """
        if self.ended:
            raise RanOut
        yield

    def match(self, pattern: regex.Pattern[str]) -> Steps[regex.Match[str]]:
        """Consume the text that a pattern matches; the pattern must bound its length."""
        while True:
            found: Any = pattern.match(self.text, self.at, partial=True)
            if found is None:
                raise NotACall
            if self.ended:
                found = pattern.match(self.text, self.at)
                if found is None:
                    raise RanOut
            if self.ended or (not found.partial and found.end() < len(self.text)):
                self.at = found.end()
                return found
            yield

    def sequence(self, parts: Parts) -> Steps[dict[str, str]]:
        """Consume parts with any white space between them, and return the groups of their patterns.

        Where the parts do not stand here, nothing is consumed.
        """
        groups: dict[str, str] = {}
        is_cut = False  # the text ends in what may be a part
        with self.hold() as back:
            for pattern, is_optional in parts:
                yield from self.blanks()
                try:
                    found = yield from self.match(pattern)
                except NotACall as error:
                    is_cut = is_cut or (isinstance(error, RanOut) and self.at < len(self.text))
                    if is_optional:
                        continue
                    if is_cut or isinstance(error, RanOut):
                        raise RanOut from None
                    back()
                    raise
                groups |= {name: text for name, text in found.groupdict().items() if text is not None}
        if is_cut and not all(is_optional for _, is_optional in parts):
            raise RanOut
        return groups

    def take(self, texts: tuple[str, ...]) -> Steps[str]:
        """Consume the longest of some texts that stands here, and return it; empty: none does."""
        longest = max(map(len, texts), default=0)
        while True:
            found = max((text for text in texts if self.text.startswith(text, self.at)), key=len, default="")
            rest = self.text[self.at : self.at + longest]
            if self.ended or not any(
                len(text) > max(len(rest), len(found)) and text.startswith(rest) for text in texts
            ):
                self.at += len(found)
                return found
            yield

    def expect(self, text: str) -> Steps[None]:
        """Consume a text.

        Raises:
            NotACall: another one stands here.
        """
        if not (yield from self.take((text,))):
            raise RanOut if text.startswith(self.text[self.at :]) else NotACall

    def blanks(self) -> Steps[None]:
        """Consume white space.

        Raises:
            NotACall: there is too much of it.
        """
        size = 0
        while True:
            found: Any = _BLANKS.match(self.text, self.at)
            size += found.end() - self.at
            if size > _MAX_BLANKS:
                raise NotACall
            self.at = found.end()
            if self.at < len(self.text) or self.ended:
                return
            yield

    def char(self) -> Steps[str]:
        """Return the next character without consuming it."""
        while self.at >= len(self.text):
            yield from self.more()
        return self.text[self.at]

    def until(
        self, mark: str, emit: Callable[[str], object], followed: regex.Pattern[str] | None = None
    ) -> Steps[None]:
        """Emit the text up to a mark, and consume the mark.

        Args:
            followed: the mark counts only where this matches after it, a pattern of bounded length.
        """
        while True:
            place = self.text.find(mark, self.at)
            end = place if place >= 0 else len(self.text) - overlap(self.text, self.at, mark)
            if end > self.at:
                emit(self.text[self.at : end])
                self.at = end
            if place < 0:
                yield from self.more()
                continue
            if followed is None or (yield from self._follows(followed, len(mark))):
                self.at += len(mark)
                return
            emit(self.text[self.at])
            self.at += 1

    def _follows(self, pattern: regex.Pattern[str], skipped: int) -> Steps[bool]:
        """Return whether a pattern matches after the next characters."""
        while True:
            found: Any = pattern.match(self.text, self.at + skipped, partial=True)
            if found is None or self.ended or not found.partial:
                return found is not None
            yield


def overlap(text: str, at: int, mark: str) -> int:
    """Return the length of the longest end of a text, from a place on, that begins a mark."""
    for size in range(min(len(mark) - 1, len(text) - at), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
