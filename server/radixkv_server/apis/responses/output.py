# SPDX-License-Identifier: Apache-2.0
"""OutputItems: the items of a response, and the events of their growth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from radixkv.text.chat_formats.answer import (
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from radixkv_server.apis.common.custom_tools import CustomInput
from radixkv_server.apis.common.returned_text import hide
from radixkv_server.apis.responses.items import (
    HIDDEN,
    compaction,
    custom_call,
    function_call,
    message,
    output_text,
    reasoning,
)
from radixkv_server.apis.responses.tools import Called, Toolbox
from radixkv_server.chats.call_memory import Remember
from radixkv_server.dialect import Json

Events = Iterator[Json]


class _OpenItem:
    """An item that grows, from `output_item.added` to `output_item.done`."""

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

    def __init__(self, item_id: str, index: int, *, hides: bool) -> None:
        super().__init__(item_id, index)
        self._hides = hides

    def part(self, text: str) -> Json:
        return {"type": "reasoning_text", "text": text}

    def item(self, status: str) -> Json:
        text = "" if status == "in_progress" else self.text
        item = reasoning(self.id, text, status)
        return {**item, "encrypted_content": hide(text, HIDDEN)} if self._hides and text else item


class _Call(_OpenItem):
    def __init__(self, item_id: str, index: int, begun: ToolCallBegin, called: Called) -> None:
        super().__init__(item_id, index)
        self._id = begun.id
        self._called = called

    def item(self, status: str) -> Json:
        text = "" if status == "in_progress" else self.text
        return function_call(self.id, self._id, self._called, text, status)

    def add(self, text: str) -> Events:
        self.text += text
        yield self.event("function_call_arguments.delta", delta=text)

    def end(self, status: str) -> Events:
        yield self.event("function_call_arguments.done", name=self._called.name, arguments=self.text)
        yield from super().end(status)


class _CustomCall(_Call):
    """A call of a custom tool: the model writes JSON, and the client gets its member `input`.

    The input streams if it is the first member; otherwise it comes at the end.
    """

    def __init__(
        self, item_id: str, index: int, begun: ToolCallBegin, called: Called, remember: Remember
    ) -> None:
        super().__init__(item_id, index, begun, called)
        self._remember = remember
        self._input = CustomInput()

    def item(self, status: str) -> Json:
        text = "" if status == "in_progress" else self.text
        return custom_call(self.id, self._id, self._called, text, status)

    def add(self, text: str) -> Events:
        yield from self._delta(self._input.push(text))

    def _delta(self, text: str) -> Events:
        self.text += text
        if text:
            yield self.event("custom_tool_call_input.delta", delta=text)

    def end(self, status: str) -> Events:
        self._remember(self._id, self._input.arguments)
        yield from self._delta(self._input.finish())
        yield self.event("custom_tool_call_input.done", input=self.text)
        yield from _OpenItem.end(self, status)


class OutputItems:
    """Builds the items of an answer from its events.

    Args:
        new_id: makes an id from an item's kind and its number in the answer.
        tools: maps functions of the prompt to the client's tools.
        remember: keeps the model's text of a custom tool call, by the call's id.
        hides_reasoning: add reasoning as `encrypted_content`, too.

    Attributes:
        items: the complete items, in order.
    """

    def __init__(
        self,
        new_id: Callable[[str, int], str],
        tools: Toolbox,
        remember: Remember,
        *,
        hides_reasoning: bool = False,
    ) -> None:
        self.items: list[Json] = []
        self._new_id = new_id
        self._tools = tools
        self._remember = remember
        self._hides_reasoning = hides_reasoning
        self._open: _Message | _Reasoning | _Call | None = None

    def add(self, event: AnswerEvent, logprobs: list[Json]) -> Events:
        """Translate an event of the answer; `logprobs` belong to the tokens of its content."""
        if isinstance(event, ContentDelta):
            if not isinstance(self._open, _Message):
                yield from self._begin(_Message(*self._place("message")))
            assert isinstance(self._open, _Message)
            yield from self._open.add(event.text, logprobs)
        elif isinstance(event, ReasoningDelta):
            if not isinstance(self._open, _Reasoning):
                hides = self._hides_reasoning
                yield from self._begin(_Reasoning(*self._place("reasoning"), hides=hides))
            assert isinstance(self._open, _Reasoning)
            yield from self._open.add(event.text, [])
        elif isinstance(event, ToolCallBegin):
            called = self._tools.called(event.name)
            if called.is_custom:
                place = self._place("custom_tool_call")
                yield from self._begin(_CustomCall(*place, event, called, self._remember))
            else:
                yield from self._begin(_Call(*self._place("function_call"), event, called))
        elif isinstance(event, ToolCallArguments):
            assert isinstance(self._open, _Call)
            yield from self._open.add(event.text)
        elif isinstance(event, ToolCallEnd):
            yield from self.end("incomplete" if event.cut else "completed")

    def finish(self, status: str) -> Events:
        """End the answer; an empty one gets an empty message."""
        if self._open is None and not self.items:
            yield from self._begin(_Message(*self._place("message")))
        yield from self.end(status)

    def end(self, status: str) -> Events:
        """Complete the open item with this status."""
        if self._open is not None:
            ended, self._open = self._open, None
            self.items.append(ended.item(status))
            yield from ended.end(status)

    def _place(self, kind: str) -> tuple[str, int]:
        """Return id and index of the next item."""
        number = len(self.items) + (self._open is not None)
        return self._new_id(kind, number), number

    def _begin(self, item: _Message | _Reasoning | _Call) -> Events:
        yield from self.end("completed")
        self._open = item
        yield from item.begin()


class CompactedItems(OutputItems):
    """Builds the one `compaction` item of an answer that sums the conversation up; see `OutputItems`.

    Nothing is told before its end: a client can't read a part of it.
    """

    _text = _thoughts = ""

    def add(self, event: AnswerEvent, logprobs: list[Json]) -> Events:
        """Collect the model's text; tool calls do not belong to a summary."""
        if isinstance(event, ContentDelta):
            self._text += event.text
        elif isinstance(event, ReasoningDelta):
            self._thoughts += event.text
        yield from ()

    def finish(self, status: str) -> Events:
        """End the answer; where the model only thought, its thoughts are the summary."""
        item_id, index = self._place("compaction")
        item = compaction(item_id, self._text or self._thoughts)
        self.items.append(item)
        for kind, shown in (("added", {**item, "encrypted_content": ""}), ("done", item)):
            yield {"type": f"response.output_item.{kind}", "output_index": index, "item": shown}
