# SPDX-License-Identifier: Apache-2.0
"""The parts of one answer, in order: content, thoughts and calls, and the white space between them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Further content of the assistant.

    Attributes:
        start: where it stands in the sample's text, in characters.
    """

    text: str
    start: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Further reasoning of the assistant, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A tool call begins; `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments: pieces of JSON text, in the model's own writing."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call's arguments are complete or, `cut`, end before they are."""

    index: int
    cut: bool = False


AnswerEvent = ContentDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments | ToolCallEnd


class AnswerParser(Protocol):
    """Reads one sample's text as it comes. Never raises: malformed text comes back as content."""

    def push(self, text: str) -> list[AnswerEvent]:
        """Return the events of further text; text that could still become markup is held back."""

    def finish(self, *, cut: bool = False) -> list[AnswerEvent]:
        """Return the events of the text held back, once the sample has ended.

        Args:
            cut: it did not end by itself. What there is of a call that has clearly begun is no content: it is
                a call as far as it goes, if its name and the beginning of its arguments are there.
        """


class PlainParser:
    """All text is content: the parser of models without a known format."""

    def __init__(self) -> None:
        self._end = 0

    def push(self, text: str) -> list[AnswerEvent]:
        self._end += len(text)
        return [ContentDelta(text, self._end - len(text))] if text else []

    def finish(self, *, cut: bool = False) -> list[AnswerEvent]:
        return []


@dataclass(slots=True)
class ToolCall:
    """Call of a tool; `arguments` is JSON text in the model's own writing."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """A whole answer, put together from its events; `calls_are_cut`: the last call is not whole."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    calls_are_cut: bool = False

    @classmethod
    def of(cls, events: Iterable[AnswerEvent]) -> Answer:
        """Return the answer that a parser's events make."""
        answer = cls()
        answer.add(events)
        return answer

    def add(self, events: Iterable[AnswerEvent]) -> None:
        """Add a parser's events. O(their text, and the text of the parts that grow)."""
        content, reasoning = [self.content], [self.reasoning]
        arguments: dict[int, list[str]] = {}
        for event in events:
            if isinstance(event, ContentDelta):
                content.append(event.text)
            elif isinstance(event, ReasoningDelta):
                reasoning.append(event.text)
            elif isinstance(event, ToolCallBegin):
                self.tool_calls.append(ToolCall(event.id, event.name))
            elif isinstance(event, ToolCallArguments):
                arguments.setdefault(event.index, []).append(event.text)
            else:
                self.calls_are_cut = event.cut
        self.content, self.reasoning = "".join(content), "".join(reasoning)
        for index, pieces in arguments.items():
            call = self.tool_calls[index]
            call.arguments = "".join([call.arguments, *pieces])


def new_call_id() -> str:
    """Return a fresh id of a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class AnswerWriter:
    """The events of one answer.

    White space that only parts of other kinds surround (between reasoning and a call, say) is dropped.
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
        self._has_said = False  # content that is more than white space
        self._skips_breaks = False  # before the next content
        self._skips_break = False  # before the next thought
        self._break = ""  # at the end of the last thought

    @property
    def has_spoken(self) -> bool:
        """True if the last part is content."""
        return self._speaking

    @property
    def has_called(self) -> bool:
        """True if a call has begun."""
        return self._num_calls > 0

    def take(self) -> list[AnswerEvent]:
        """Return the events since the last call of this method."""
        events, self._events = self._events, []
        return events

    def say(self, text: str, start: int) -> None:
        """Add content, and where it stands in the sample's text."""
        if not self.speaks:
            return
        if start < 0:  # the prompt's
            text, start = text[-start:], max(0, start + min(len(text), -start))
        if self._skips_breaks:
            start += len(text)
            text = text.lstrip("\n")
            start -= len(text)
            self._skips_breaks = not text
        said = text.rstrip()
        if said:
            self._speaking = self._has_said = True
            self._say_blanks()
            self._add_content(said, start)
        if len(said) < len(text):
            self._blanks.append((text[len(said) :], start + len(said)))

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

    def begin_reasoning(self) -> None:
        """Begin thoughts; a line break at their beginning is dropped."""
        self.begin_part()
        self._skips_break = True

    def think(self, text: str) -> None:
        """Add thoughts; a line break at their end is held back."""
        if self._skips_break:
            text = text.removeprefix("\n")
            self._skips_break = False
        text = self._break + text
        self._break = "\n" if text.endswith("\n") else ""
        text = text[: len(text) - len(self._break)]
        if text:
            self._events.append(ReasoningDelta(text))

    def end_reasoning(self) -> None:
        """End thoughts; line breaks around their end are dropped."""
        self._break = ""
        self._skips_breaks = True

    def begin_spoken(self) -> None:
        """Take a mark before content; line breaks after it are dropped."""
        self._skips_breaks = True

    def end_spoken(self) -> None:
        """Take a mark after content; white space before it is dropped."""
        self._blanks = []
        self._speaking = False
        self._has_parts = True

    def drop_mark(self) -> None:
        """Take a mark that says nothing: white space before it counts where more content follows."""
        self._speaking = False
        self._has_parts = True

    def begin_part(self) -> None:
        """Take the beginning of something other than content."""
        self._has_parts = True
        self._blanks = []
        self._speaking = False

    def begin_call(self, name: str, call_id: str) -> None:
        """Begin a call; one without an id gets a fresh one."""
        self.begin_part()
        self._skips_breaks = not self._has_said
        self._num_calls += 1
        self._call_event(ToolCallBegin(self._num_calls - 1, call_id or self._new_id(), name))

    def add_arguments(self, text: str) -> None:
        """Add JSON text to the arguments of the last call."""
        if text:
            self._call_event(ToolCallArguments(self._num_calls - 1, text))

    def end_call(self, *, cut: bool = False) -> None:
        """End the last call.

        Args:
            cut: its arguments end before they are complete.
        """
        self._call_event(ToolCallEnd(self._num_calls - 1, cut))

    def finish(self) -> None:
        """End the answer: add the white space that was held back and belongs to a part."""
        if self._break:
            self._events.append(ReasoningDelta(self._break))
        if self._speaking or not self._has_parts:
            self._say_blanks()

    def _call_event(self, event: AnswerEvent) -> None:
        if self._parallel or self._num_calls == 1:
            self._events.append(event)
