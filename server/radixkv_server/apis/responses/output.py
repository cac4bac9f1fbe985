"""OutputItems: an answer's parts as items of a response, and the events that tell how they grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from radixkv.chat.answer import (
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from radixkv_server.apis.responses.items import function_call, message, output_text, reasoning
from radixkv_server.dialect import Json

Events = Iterator[Json]


class _OpenItem:
    """One item that grows: begins with `output_item.added`, ends with `output_item.done`."""

    def __init__(self, item_id: str, index: int) -> None:
        self.id = item_id
        self.index = index
        self.text = ""

    def event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}

    def item_event(self, kind: str, status: str) -> Json:
        fields = {"output_index": self.index, "item": self.item(status)}
        return {"type": f"response.output_item.{kind}", **fields}

    def item(self, status: str) -> Json:
        raise NotImplementedError

    def begin(self) -> Events:
        yield self.item_event("added", "in_progress")

    def end(self, status: str) -> Events:
        yield self.item_event("done", status)


class _TextItem(_OpenItem):
    """An item with one part of text."""

    name = ""

    def part(self, text: str) -> Json:
        raise NotImplementedError

    def delta_fields(self, logprobs: list[Json]) -> Json:
        return {}

    def done_fields(self) -> Json:
        return {}

    def begin(self) -> Events:
        yield from super().begin()
        yield self.event("content_part.added", content_index=0, part=self.part(""))

    def add(self, text: str, logprobs: list[Json]) -> Events:
        self.text += text
        yield self.event(f"{self.name}.delta", content_index=0, delta=text, **self.delta_fields(logprobs))

    def end(self, status: str) -> Events:
        yield self.event(f"{self.name}.done", content_index=0, text=self.text, **self.done_fields())
        yield self.event("content_part.done", content_index=0, part=self.part(self.text))
        yield from super().end(status)


class _Message(_TextItem):
    name = "output_text"

    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self.logprobs: list[Json] = []

    def part(self, text: str) -> Json:
        return output_text(text, list(self.logprobs))

    def delta_fields(self, logprobs: list[Json]) -> Json:
        self.logprobs += logprobs
        return {"logprobs": logprobs}

    def done_fields(self) -> Json:
        return {"logprobs": list(self.logprobs)}

    def item(self, status: str) -> Json:
        return message(self.id, [] if status == "in_progress" else [self.part(self.text)], status)


class _Reasoning(_TextItem):
    name = "reasoning_text"

    def part(self, text: str) -> Json:
        return {"type": "reasoning_text", "text": text}

    def item(self, status: str) -> Json:
        return reasoning(self.id, "" if status == "in_progress" else self.text, status)


class _Call(_OpenItem):
    def __init__(self, item_id: str, index: int, begun: ToolCallBegin) -> None:
        super().__init__(item_id, index)
        self._begun = begun

    def item(self, status: str) -> Json:
        text = "" if status == "in_progress" else self.text
        return function_call(self.id, self._begun.id, self._begun.name, text, status)

    def add(self, text: str) -> Events:
        self.text += text
        yield self.event("function_call_arguments.delta", delta=text)

    def end(self, status: str) -> Events:
        yield self.event("function_call_arguments.done", name=self._begun.name, arguments=self.text)
        yield from super().end(status)


class OutputItems:
    """Builds the items of one answer out of its events.

    Args:
        new_id: kind of item, number of it among the answer's -> its id.

    Attributes:
        items: those that are complete, in order.
    """

    def __init__(self, new_id: Callable[[str, int], str]) -> None:
        self.items: list[Json] = []
        self._new_id = new_id
        self._open: _Message | _Reasoning | _Call | None = None
        self._logprobs: list[Json] = []  # of tokens whose text has not come yet

    def add(self, event: AnswerEvent) -> Events:
        """The response's events for one of the answer's."""
        if isinstance(event, ContentDelta):
            if not isinstance(self._open, _Message):
                yield from self._begin(_Message(*self._place("message")))
            assert isinstance(self._open, _Message)
            logprobs, self._logprobs = self._logprobs, []
            yield from self._open.add(event.text, logprobs)
        elif isinstance(event, ReasoningDelta):
            if not isinstance(self._open, _Reasoning):
                yield from self._begin(_Reasoning(*self._place("reasoning")))
            assert isinstance(self._open, _Reasoning)
            self._logprobs = []
            yield from self._open.add(event.text, [])
        elif isinstance(event, ToolCallBegin):
            yield from self._begin(_Call(*self._place("function_call"), event))
        elif isinstance(event, ToolCallArguments):
            assert isinstance(self._open, _Call)
            yield from self._open.add(event.text)
        elif isinstance(event, ToolCallEnd):
            yield from self.end("completed")

    def add_logprobs(self, logprobs: list[Json]) -> None:
        """Those of tokens whose text comes with the next events, if it is content."""
        self._logprobs += logprobs

    def finish(self, status: str) -> Events:
        """The answer has ended; one that said nothing at all has an empty message."""
        if self._open is None and not self.items:
            yield from self._begin(_Message(*self._place("message")))
        if isinstance(self._open, _Message):
            self._open.logprobs += self._logprobs  # of the end token
        yield from self.end(status)

    def end(self, status: str) -> Events:
        """What is open is complete, with this status."""
        if self._open is not None:
            ended, self._open = self._open, None
            self.items.append(ended.item(status))
            yield from ended.end(status)

    def _place(self, kind: str) -> tuple[str, int]:
        """Id and index of the next item."""
        number = len(self.items) + (self._open is not None)
        return self._new_id(kind, number), number

    def _begin(self, item: _Message | _Reasoning | _Call) -> Events:
        yield from self.end("completed")
        self._open = item
        yield from item.begin()
