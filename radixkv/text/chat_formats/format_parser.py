# SPDX-License-Identifier: Apache-2.0
"""FormatParser: a model's text to the events of an answer, for one chat format.

Outside of calls the text is searched for the marks of the format's sections and calls. A call is emitted once
it is known to be one: when the marks around it end, or, where these hold more than `HELD` characters, when
the first of them begin as a call does; from there on the arguments are emitted as they come. What turns out
to be no call is emitted as text. None of this depends on how the text is cut into pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from radixkv.text.chat_formats.answer import AnswerEvent, AnswerWriter
from radixkv.text.chat_formats.call_region import CallRegion
from radixkv.text.chat_formats.calls import CallForm
from radixkv.text.chat_formats.cursor import Cursor, NotACall, RanOut

#: Characters of a call that are held back until it is certain to be one.
HELD = 256
#: Characters held back of a call whose arguments are written before its name.
HELD_ARGUMENTS = 1 << 16
#: Characters of a mark that show its beginning where an answer is cut off inside of it; after a call, where
#: others follow, one is enough.
TELLING = 3
#: Characters looked at in one go.
_PIECE = 512
REASONING, SPOKEN, CALLS, DROPPED = "reasoning", "spoken", "calls", "dropped"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of an answer between marks.

    Args:
        opens: texts that begin it, each by itself.
        closes: texts that end it; none: it goes on to the end of the answer.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()


class _Marks:
    """Finds marks in a growing text."""

    def __init__(self, kinds: tuple[tuple[str, str], ...]) -> None:
        self._kinds = dict(kinds)
        marks = sorted(filter(None, self._kinds), key=len, reverse=True)
        self._pattern = regex.compile("|".join(map(regex.escape, marks)) or "(?!)")
        self._starts = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
        self._longest = len(marks[0]) if marks else 0

    def begun(self, text: str, at: int) -> int:
        """Return the length of the longest end of a text, from a place on, that begins a mark."""
        sizes = range(min(self._longest - 1, len(text) - at), 0, -1)
        return next((size for size in sizes if text[-size:] in self._starts), 0)

    def find(self, text: str, at: int, *, ended: bool) -> tuple[int, str, str]:
        """Return up to where a text has no mark, and the mark there with its kind; empty: none yet."""
        found = self._pattern.search(text, at)
        certain = len(text) - (0 if ended else self.begun(text, at))
        if found is None or found.start() >= certain:
            return certain, "", ""
        return found.start(), found[0], self._kinds[found[0]]


@functools.lru_cache(maxsize=512)
def marks_of(kinds: tuple[tuple[str, str], ...]) -> _Marks:
    """Return a finder of marks, each with its kind."""
    return _Marks(kinds)


class FormatParser:
    """An AnswerParser for one answer of a format.

    Args:
        reasoning, spoken: sections of thoughts, and of content inside of marks.
        forms: of calls, in the order in which they are tried.
        dropped: marks that say nothing.
        calls_end_reasoning: a call may begin inside of reasoning, which it ends.
        parallel: False: only the first call is emitted.
        new_id: gives a fresh id of a call from its name.
        prefix: the end of the prompt, where that opens a section or a call which the answer goes on with.
        forced: the answer is calls, reasoning aside: it is read as one that is cut off, however it ends, and
            nothing is ever emitted as content.
        tools: schema of the arguments by the name of each function that may be called.
    """

    def __init__(
        self,
        reasoning: Section | None,
        spoken: Section | None,
        forms: tuple[CallForm, ...],
        *,
        parallel: bool,
        new_id: Callable[[], str],
        dropped: tuple[str, ...] = (),
        calls_end_reasoning: bool = False,
        prefix: str = "",
        forced: bool = False,
        tools: Mapping[str, Any] | None = None,
    ) -> None:
        self._answer = AnswerWriter(parallel, new_id, speaks=not forced)
        self._forms = forms
        self._tools = tools or {}
        self._cursor = Cursor()
        self._input = ""
        self._base = -len(prefix)  # of the cursor's text in the sample's
        self._mode = ""
        self._cut = False
        self._region: CallRegion | None = None
        self._sets = _mark_sets(reasoning, spoken, forms, dropped, calls_end_reasoning)
        self.push(prefix)
        self._answer.take()

    def push(self, text: str) -> list[AnswerEvent]:
        for at in range(0, len(text), _PIECE):
            self._input = text[at : at + _PIECE]
            while self._input:
                self._feed()
                self._advance()
        return self._answer.take()

    def finish(self, *, cut: bool = False) -> list[AnswerEvent]:
        self._cut = cut
        self._cursor.ended = True
        self._advance()
        while self._input:  # what a region that did not fit had left
            self._cursor.ended = False
            self._feed()
            self._cursor.ended = not self._input
            self._advance()
        self._answer.finish()
        return self._answer.take()

    # ------------------------------------------------------------------ text

    def _feed(self) -> None:
        """Give the cursor as much text as may be decided on at once."""
        region, cursor = self._region, self._cursor
        room, keep = len(self._input), cursor.at
        if region is not None and not region.is_emitted:
            held = HELD_ARGUMENTS if region.is_delayed else HELD
            room, keep = held - (len(cursor.text) - region.start), region.start
        forgotten = cursor.feed(self._input[:room], keep)
        self._base += forgotten
        if region is not None:
            region.start -= forgotten
        self._input = self._input[room:]

    def _advance(self) -> None:
        """Read what there is."""
        while self._scan() if self._region is None else self._read_calls(self._region):
            pass

    def _scan(self) -> bool:
        """Read up to a mark, and take it; False: there is none yet."""
        cursor, bare = self._cursor, not self._answer.has_spoken
        marks = marks_of(self._sets[self._mode, bare])
        end, mark, kind = marks.find(cursor.text, cursor.at, ended=cursor.ended)
        if cursor.ended and self._cut and kind != CALLS:
            size = self._cut_mark()
            begun = len(cursor.text) - size
            if size and begun <= end:  # a mark may begin a longer one
                end, mark, kind = begun, "", ""
        if end > cursor.at:
            text, start = cursor.text[cursor.at : end], self._base + cursor.at
            cursor.at = end
            if self._mode == REASONING:
                self._answer.think(text)
            else:
                self._answer.say(text, start)
                if kind == CALLS and self._answer.has_spoken and not self._is_marked(mark):
                    return True
        if not mark:
            cursor.at = len(cursor.text) if cursor.ended else cursor.at
            return False
        if kind == CALLS:
            self._open_region(mark)
            return True
        cursor.at += len(mark)
        self._take_mark(kind)
        return True

    def _is_marked(self, mark: str) -> bool:
        """Return whether a mark opens calls after content, too."""
        return any(mark in form.opens for form in self._forms)

    def _cut_mark(self) -> int:
        """Return the length of the beginning of a mark that an answer was cut off in."""
        follows = self._answer.has_called and not self._mode
        closes = tuple((mark, CALLS) for form in self._forms for mark in (*form.closes, *form.tail_marks))
        marks = marks_of((*self._sets[self._mode, False], *(closes if follows else ())))
        size = marks.begun(self._cursor.text, self._cursor.at)
        return size if size >= (1 if follows else TELLING) else 0

    def _take_mark(self, kind: str) -> None:
        if kind == DROPPED:
            self._answer.drop_mark()
            return
        is_closed = self._mode == kind
        if self._mode == REASONING:
            self._answer.end_reasoning()
        elif self._mode == SPOKEN:
            self._answer.end_spoken()
        self._mode = "" if is_closed else kind
        if not is_closed:
            self._answer.begin_reasoning() if kind == REASONING else self._answer.begin_spoken()

    # ------------------------------------------------------------------ calls

    def _open_region(self, mark: str) -> None:
        cursor = self._cursor
        if self._mode == REASONING:
            self._answer.end_reasoning()
            self._mode = ""
        self._base += cursor.feed("")
        forms = tuple(form for form in self._forms if mark in (*form.opens, *form.bare))
        self._region = CallRegion(forms, mark, cursor, self._answer, self._tools)
        self._give_back(cursor.at + HELD)

    def _give_back(self, end: int) -> None:
        """Leave text after a place for later."""
        cursor = self._cursor
        if end < len(cursor.text):
            self._input = cursor.text[end:] + self._input
            cursor.text = cursor.text[:end]
            cursor.ended = False

    def _read_calls(self, region: CallRegion) -> bool:
        """Go on with calls; False: that takes more text."""
        cursor = self._cursor
        try:
            while region.step():
                self._give_back(max(cursor.at, region.start + HELD))
        except StopIteration:
            region.emit()
            self._region = None
            return True
        except (NotACall, ValueError, RecursionError) as error:
            is_cut = isinstance(error, RanOut) and (self._cut or not self._answer.speaks)
            self._give_up(region, is_cut=is_cut)
            return True
        held = HELD_ARGUMENTS if region.is_delayed else HELD
        if region.is_emitted or len(cursor.text) - region.start < held:
            return False
        if not region.emit():
            self._give_up(region, is_cut=False)
        return True

    def _give_up(self, region: CallRegion, *, is_cut: bool) -> None:
        """Take the text read so far for text, or for a call that is cut off."""
        cursor = self._cursor
        keeps = is_cut or (region.has_whole and not self._answer.speaks)
        if not region.is_emitted and not keeps and region.try_next():
            self._give_back(region.start + HELD)
            return
        self._region = None
        if region.is_emitted or is_cut or not self._answer.speaks:
            region.cut()
        if is_cut:
            cursor.at = len(cursor.text)
        elif not region.is_emitted:
            end = max(cursor.at, region.start + (len(region.mark) if region.is_first else 0))
            text, start = cursor.text[region.start : end], self._base + region.start
            cursor.at = end
            self._answer.say(text, start)


def _mark_sets(
    reasoning: Section | None,
    spoken: Section | None,
    forms: tuple[CallForm, ...],
    dropped: tuple[str, ...],
    inside: bool,
) -> dict[tuple[str, bool], tuple[tuple[str, str], ...]]:
    """Return the marks that count, by the section that the text is in and whether nothing has been said."""
    found: dict[tuple[str, bool], tuple[tuple[str, str], ...]] = {}
    marked = {mark: CALLS for form in forms for mark in form.opens}
    calls = {**{mark: CALLS for form in forms for mark in form.bare}, **marked}
    thinks = dict.fromkeys(reasoning.opens if reasoning else (), REASONING)
    speaks = dict.fromkeys(spoken.opens if spoken else (), SPOKEN)
    drops = dict.fromkeys(dropped, DROPPED)
    for bare in (False, True):
        counted = calls if bare else marked
        found["", bare] = tuple({**drops, **counted, **speaks, **thinks}.items())
        closes = dict.fromkeys(reasoning.closes if reasoning else (), REASONING)
        found[REASONING, bare] = tuple({**(marked if inside else {}), **speaks, **closes}.items())
        closes = dict.fromkeys(spoken.closes if spoken else (), SPOKEN)
        found[SPOKEN, bare] = tuple({**marked, **closes}.items())
    return found
