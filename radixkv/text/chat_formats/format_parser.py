"""From a model's text to the events of an answer, for one chat format.

A call is emitted once it is known to be one: when its region ends, or, where it is longer than `HELD`
characters, when these begin as a call does, up to its arguments; from there on the arguments are emitted as
they come. What turns out to be no call is told as the text that it is. None of this depends on how the text
is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from radixkv.text.chat_formats.answer import (
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from radixkv.text.chat_formats.calls import CallSyntax, ObjectScanner, WrittenCall
from radixkv.text.chat_formats.regions import Region, RegionEvent, RegionReader

#: Characters of a call that are held back until it is certain to be one.
HELD = 512
#: So many characters of a mark tell, where an answer is cut off inside of it, that it had begun; after a
#: call, where others follow, one does.
TELLING = 3

REASONING, SPOKEN, CALLS = "reasoning", "spoken", "calls"


class FormatParser:
    """An AnswerParser for one answer of a format.

    Args:
        regions: named `reasoning`, `spoken` (content inside of marks) or `calls`.
        parallel: False: only the first call is emitted.
        new_id: gives a fresh id of a call.
        prefix: the end of the prompt, where that opens a region which the answer goes on with.
        forced: the answer is calls, reasoning aside: it is read as one that is cut off, however it ends, and
            nothing is ever emitted as content.
        names: of the tools; a call without a mark that is cut off is one if its name is, or could become, one
            of these.
    """

    def __init__(
        self,
        regions: tuple[Region, ...],
        syntax: CallSyntax,
        *,
        parallel: bool,
        new_id: Callable[[], str],
        prefix: str = "",
        forced: bool = False,
        names: Collection[str] = (),
    ) -> None:
        self._reader = RegionReader(regions)
        self._answer = _AnswerWriter(parallel, new_id, speaks=not forced)
        self._syntax = syntax
        self._names = names
        self._calls: _CallsRegion | None = None
        self._at = -len(prefix)  # in the sample's text
        # What is left of these at the end of an answer that was cut off is none of its content.
        opening = (mark for region in regions if region.name != REASONING for mark in region.opens)
        self._marks = [mark for mark in opening if not mark.startswith("{")]
        for event in self._reader.push(prefix):
            self._on(event)

    def push(self, text: str) -> list[AnswerEvent]:
        for event in self._reader.push(text):
            self._on(event)
        return self._answer.take()

    def finish(self, *, cut: bool = False) -> list[AnswerEvent]:
        events = list(self._reader.finish())
        if cut and events:
            events[-1] = self._without_cut_mark(events[-1])
        for event in events:
            self._on(event, cut=cut)
        self._answer.finish()
        return self._answer.take()

    def _without_cut_mark(self, event: RegionEvent) -> RegionEvent:
        """The end of an answer, without a mark that has begun at the end of a text between regions."""
        text = event.text
        longest = max(map(len, self._marks), default=0) - 1 if event.region is None else 0
        least = 1 if self._answer.has_called else TELLING
        for size in range(min(longest, len(text)), least - 1, -1):
            if any(mark.startswith(text[-size:]) for mark in self._marks):
                return RegionEvent(event.kind, event.region, text[:-size])
        return event

    def _on(self, event: RegionEvent, *, cut: bool = False) -> None:
        self._at += len(event.text)
        if event.region == CALLS:
            if event.kind == "open":
                self._calls = _CallsRegion(self._syntax, self._answer, event.text, self._at, self._names)
            elif self._calls is not None and event.kind == "text":
                self._calls.text(event.text)
            elif self._calls is not None:
                self._calls.close(event.text, cut=cut)
        elif event.kind != "text":
            if event.kind == "open" and event.region == REASONING:
                self._answer.begin_part()
        elif event.region == REASONING:
            self._answer.think(event.text)
        else:
            self._answer.say(event.text, self._at - len(event.text))


class _AnswerWriter:
    """The events of one answer.

    White space that nothing but parts of other kinds follows (between reasoning and a call, say) is dropped.
    """

    def __init__(self, parallel: bool, new_id: Callable[[], str], *, speaks: bool) -> None:
        self.speaks = speaks
        self._events: list[AnswerEvent] = []
        self._parallel = parallel
        self._new_id = new_id
        self._num_calls = 0
        self._has_parts = False
        self._blanks: list[tuple[str, int]] = []  # each with where it stands
        self._speaking = False

    @property
    def has_spoken(self) -> bool:
        return self._speaking

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    def take(self) -> list[AnswerEvent]:
        events, self._events = self._events, []
        return events

    def say(self, text: str, start: int) -> None:
        """Content, and where it stands in the sample's text."""
        if not self.speaks:
            return
        if not self._speaking and not text.strip():
            self._blanks.append((text, start))
            return
        self._speaking = True
        self._say_blanks()
        self._add_content(text, start)

    def _say_blanks(self) -> None:
        for text, start in self._blanks:
            self._add_content(text, start)
        self._blanks = []

    def _add_content(self, text: str, start: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, ContentDelta) and last.start + len(last.text) == start:
            self._events[-1] = ContentDelta(last.text + text, last.start)
        elif text:
            self._events.append(ContentDelta(text, start))

    def think(self, text: str) -> None:
        self._events.append(ReasoningDelta(text))

    def begin_part(self) -> None:
        """Something other than content begins."""
        self._has_parts = True
        self._blanks = []
        self._speaking = False

    def begin_call(self, name: str, call_id: str | None) -> None:
        self.begin_part()
        self._num_calls += 1
        self._call_event(ToolCallBegin(self._num_calls - 1, call_id or self._new_id(), name))

    def add_arguments(self, text: str) -> None:
        if text:
            self._call_event(ToolCallArguments(self._num_calls - 1, text))

    def end_call(self, *, cut: bool = False) -> None:
        self._call_event(ToolCallEnd(self._num_calls - 1, cut))

    def finish(self) -> None:
        if not self._has_parts:
            self._say_blanks()

    def _call_event(self, event: AnswerEvent) -> None:
        if self._parallel or self._num_calls == 1:
            self._events.append(event)


class _CallsRegion:
    """One region of calls: emitted as calls, or as the text that it is.

    Args:
        mark: what opened it. Where that is the beginning of a call itself (a brace), a call is looked for
            only where nothing has been said before.
        at: where the mark has ended in the sample's text.
        names: of the tools.
    """

    def __init__(
        self, syntax: CallSyntax, answer: _AnswerWriter, mark: str, at: int, names: Collection[str]
    ) -> None:
        self._syntax = syntax
        self._answer = answer
        self._at = at  # in the sample's text, where what has been looked at ends
        self._names = names if mark.startswith("{") else None
        bare = mark.startswith("{")
        self._mark = "" if bare else mark
        self._body = mark if bare else ""
        self._arguments: ObjectScanner | None = None
        self._is_text = False
        self._has_emitted_calls = False
        if bare and answer.has_spoken:
            self._emit_text(mark)

    def text(self, text: str) -> None:
        self._at += len(text)
        while text:
            if self._is_text:
                self._emit_text(text)
                return
            if self._arguments is not None:
                text = self._take_arguments(text)
                continue
            room = HELD - len(self._body)
            self._body += text[:room]
            text = text[room:]
            if len(self._body) == HELD:
                text = self._decide(text)

    def close(self, mark: str, *, cut: bool = False) -> None:
        """The region has ended, with this mark or, `cut`, with an answer that did not end by itself."""
        self._at += len(mark)
        if self._is_text:
            self._emit_text(mark)
        elif self._arguments is not None:
            self._answer.end_call(cut=True)  # what there is of its arguments has been emitted
        else:
            calls = self._read()
            if calls is None and (not self._answer.speaks or (cut and self._has_begun())):
                self._emit_cut_call()
            elif calls is None:
                self._emit_text(self._mark + self._body + mark)
            for call in calls or ():
                self._answer.begin_call(call.name, call.id)
                self._answer.add_arguments(call.arguments)
                self._answer.end_call()

    def _has_begun(self) -> bool:
        """Whether a body that is cut off follows a call, or can be the beginning of one."""
        return self._has_emitted_calls or self._syntax.begins(self._body, self._names)

    def _read(self) -> list[WrittenCall] | None:
        if not self._has_emitted_calls:
            return self._syntax.read(self._body)
        try:
            return self._syntax.read_on(self._body)
        except (ValueError, RecursionError):
            return None

    def _emit_cut_call(self) -> None:
        """The calls of a body that is cut off, the last one as far as it goes."""
        at = self._syntax.skip_between(self._body, 0) if self._has_emitted_calls else 0
        head = self._syntax.match_head(self._body, at)
        while head is not None:
            self._answer.begin_call(head["name"], head.groupdict().get("id"))
            size, ended = ObjectScanner().take(self._body[head.end() :])
            self._answer.add_arguments(self._body[head.end() : head.end() + size])
            self._answer.end_call(cut=not ended)
            at = self._syntax.skip_between(self._body, head.end() + size)
            head = self._syntax.match_head(self._body, at) if ended else None

    def _decide(self, rest: str) -> str:
        """A long body is emitted as it comes from here on; returns what is still to be looked at."""
        start = self._syntax.skip_between(self._body, 0) if self._has_emitted_calls else 0
        head = self._syntax.match_head(self._body, start)
        if head is None:
            self._emit_text(self._mark + self._body + rest)
            return ""
        self._answer.begin_call(head["name"], head.groupdict().get("id"))
        self._arguments = ObjectScanner()
        rest, self._body = self._body[head.end() :] + rest, ""
        return rest

    def _take_arguments(self, text: str) -> str:
        assert self._arguments is not None
        size, ended = self._arguments.take(text)
        self._answer.add_arguments(text[:size])
        if ended:
            self._answer.end_call()
            self._arguments = None
            self._has_emitted_calls = True
            self._mark = ""
        return text[size:]

    def _emit_text(self, text: str) -> None:
        """The last of what has been looked at is text, and what follows it."""
        self._is_text = True
        self._answer.say(text, self._at - len(text))
