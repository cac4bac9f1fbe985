# SPDX-License-Identifier: Apache-2.0
"""Answers of POST /v1/messages: content blocks, a stop reason and usage, whole or as typed events.

message_start                      with the usage that is known
content_block_start                0, of type text, thinking or tool_use
ping
content_block_delta ...            text_delta, thinking_delta, input_json_delta
content_block_delta                a thinking block's signature_delta
content_block_stop                 0
...                                further blocks, one after the other
message_delta                      stop reason and usage
message_stop
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.scheduling.request import PrefixPin
from radixkv.text.chat_formats.answer import (
    Answer,
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from radixkv_server.apis.anthropic.errors import AnthropicDialect, event
from radixkv_server.apis.anthropic.messages import signature_of
from radixkv_server.apis.common.cache_diagnosis import CacheDiagnosis
from radixkv_server.apis.common.usage_json import tier_details
from radixkv_server.chats.call_memory import Remember
from radixkv_server.chats.chat import AnswerReaders
from radixkv_server.dialect import Json
from radixkv_server.generation.generation import Renderer
from radixkv_server.generation.progress import Usage

#: Keeps an answer, given as blocks, if it is one of a thread.
KeepThread = Callable[[Sequence[Json]], Awaitable[None]]

_HOUR = 3600.0


def usage_json(usage: Usage, pins: Sequence[PrefixPin]) -> Json:
    """Return Anthropic's `usage`: tokens read, tokens written up to the last breakpoint, and the rest.

    |  read  |  cache_creation, by the breakpoint that ends it  |  input  |
    0      cached                                     last breakpoint   prompt
    """
    start = usage.cached_tokens
    end = start + usage.cache_write_tokens
    created = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    for prefix in pins:
        stop = min(prefix.num_tokens, end)
        if stop > start:
            life = "5m" if prefix.ttl is not None and prefix.ttl < _HOUR else "1h"
            created[f"ephemeral_{life}_input_tokens"] += stop - start
            start = stop
    written = sum(created.values())
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": created,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
        **tier_details(usage),
    }


def stop_json(finish_reason: str | None, stop_reason: int | str | None, has_calls: bool) -> Json:
    """Return the stop reason of an answer."""
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


@dataclass(eq=False)
class MessageRenderer(Renderer):
    """Renderer of a single answer.

    Args:
        pins: prefixes of the prompt that breakpoints keep.
        remember: called with the id and the arguments of each tool call.
        keep_thread: called with the blocks of the complete answer.
        hides_thinking: give thinking blocks no text, only a signature that restores it.
        more: further fields of the answer.
    """

    id: str
    model: str
    pins: Sequence[PrefixPin]
    readers: AnswerReaders
    remember: Remember
    keep_thread: KeepThread
    diagnosis: CacheDiagnosis
    hides_thinking: bool
    more: Json

    def __post_init__(self) -> None:
        self._answered: list[Json] = []
        self._stop: Json = {}
        self._blocks: _BlockEvents | None = None

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        (sample,) = outputs[0].outputs
        answer = self.readers.answer(sample)
        for call in answer.tool_calls:
            self.remember(call.id, call.arguments)
        stop = stop_json(sample.finish_reason, sample.stop_reason, bool(answer.tool_calls))
        self._answered = self._content(answer)
        return self._message(self._answered, stop, usage)

    def chunk(self, prompt_index: int, delta: OutputDelta, usage: Usage) -> bytes:
        frames = []
        if self._blocks is None:
            self._blocks = _BlockEvents(self.remember, self.hides_thinking)
            stop = {"stop_reason": None, "stop_sequence": None}
            frames.append(event("message_start", message=self._message([], stop, usage)))
        frames += [frame for said in self.readers.read(delta) for frame in self._blocks.take(said)]
        if delta.finish_reason is not None:
            frames += self._blocks.close()
            self._answered = self._blocks.content
            self._stop = stop_json(delta.finish_reason, delta.stop_reason, self._blocks.has_calls)
        return b"".join(frames)

    def ending(self, usage: Usage) -> bytes:
        counts = self._usage(usage)
        return event("message_delta", delta=self._stop, usage=counts, **self.more) + event("message_stop")

    async def keep(self, usage: Usage) -> None:
        await self.keep_thread(self._answered)

    def _message(self, content: list[Json], stop: Json, usage: Usage) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stop,
            "usage": self._usage(usage),
            **self.diagnosis.fields(usage),
            **self.more,
        }

    def _usage(self, usage: Usage) -> Json:
        return usage_json(usage, self.pins)

    def _content(self, answer: Answer) -> list[Json]:
        blocks: list[Json] = []
        if answer.reasoning:
            hidden = self.hides_thinking
            text = "" if hidden else answer.reasoning
            signature = signature_of(answer.reasoning, hidden=hidden)
            blocks.append({"type": "thinking", "thinking": text, "signature": signature})
        if answer.content:
            blocks.append({"type": "text", "text": answer.content})
        for call in answer.tool_calls:
            made = parsed_input(call.arguments)
            blocks += [{"type": "tool_use", "id": call.id, "name": call.name, "input": made}]
        return blocks


def parsed_input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; truncated arguments keep their complete fields."""
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _BlockEvents:
    """Events of a stream's content blocks; one block is open at a time.

    Attributes:
        has_calls: whether a tool has been called.
        content: the blocks that were closed, as a whole answer has them.
    """

    def __init__(self, remember: Remember, hides_thinking: bool) -> None:
        self.has_calls = False
        self._remember = remember
        self._hides_thinking = hides_thinking
        self.content: list[Json] = []
        self._open: Json | None = None
        self._text: list[str] = []  # of the open block

    def take(self, said: AnswerEvent) -> list[bytes]:
        """Return events for a part of the answer."""
        if isinstance(said, ContentDelta):
            opening = self._begin("text", {"text": ""})
            self._text.append(said.text)
            return [*opening, self._delta("text_delta", text=said.text)]
        if isinstance(said, ReasoningDelta):
            opening = self._begin("thinking", {"thinking": "", "signature": ""})
            self._text.append(said.text)
            if self._hides_thinking:
                return opening
            return [*opening, self._delta("thinking_delta", thinking=said.text)]
        if isinstance(said, ToolCallBegin):
            closing = self.close()
            self.has_calls = True
            return [*closing, *self._begin("tool_use", {"id": said.id, "name": said.name, "input": {}})]
        if isinstance(said, ToolCallArguments):
            self._text.append(said.text)
            return [self._delta("input_json_delta", partial_json=said.text)]
        assert isinstance(said, ToolCallEnd)
        return self.close()

    def close(self) -> list[bytes]:
        """End the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return []
        text, self._text = "".join(self._text), []
        last = []
        if block["type"] == "thinking":
            signature = signature_of(text, hidden=self._hides_thinking)
            last.append(self._delta("signature_delta", signature=signature))
            block = {**block, "thinking": "" if self._hides_thinking else text, "signature": signature}
        elif block["type"] == "tool_use":
            self._remember(block["id"], text)
            block = {**block, "input": parsed_input(text)}
        else:
            block = {**block, "text": text}
        last.append(event("content_block_stop", index=self._index))
        self.content.append(block)
        return last

    @property
    def _index(self) -> int:
        """Index of the open block."""
        return len(self.content)

    def _begin(self, kind: str, fields: Json) -> list[bytes]:
        """Open a block of a kind, unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        closing = self.close()
        self._open = {"type": kind, **fields}
        start = event("content_block_start", index=self._index, content_block=self._open)
        return [*closing, start] if self._index else [*closing, start, AnthropicDialect.ping]

    def _delta(self, kind: str, **fields: str) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, **fields})
