# SPDX-License-Identifier: Apache-2.0
"""An assistant's answer: its parts as they come from a parser, and the whole put together from them.

Every API says an answer in these terms. The text between a model and an API goes through one `AnswerParser`
per sample, made by the chat format of the model's family.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
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
    """A fresh id of a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"
