# SPDX-License-Identifier: Apache-2.0
"""Answers of Ollama's routes: an object, or a line of JSON for each piece and a last one with the usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.scheduling.request import RequestTimes
from radixkv.text.chat_formats.answer import (
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from radixkv.text.json_text import read_json_text
from radixkv_server.apis.common.logprobs import LogprobsFormat
from radixkv_server.apis.ollama.schemas import call_key
from radixkv_server.chats.call_memory import Remember
from radixkv_server.chats.chat import AnswerReaders
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError
from radixkv_server.generation.generation import Renderer
from radixkv_server.generation.progress import Usage
from radixkv_server.tenants.registry import LimitState


class OllamaDialect:
    """Ollama's dialect: `{"error": "..."}`; a ping is white space before the next line."""

    ping = b" "

    def error_body(self, error: ApiError, request_id: str | None) -> Json:
        return {"error": error.message}

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        return line(self.error_body(error, request_id))

    def limit_headers(self, limits: Sequence[LimitState]) -> dict[str, str]:
        return {}


OLLAMA = OllamaDialect()


def line(value: Json) -> bytes:
    """Return a line of a stream."""
    return dump(value) + b"\n"


def timestamp() -> str:
    """Return the time now in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(eq=False)
class OllamaRenderer(Renderer):
    """Renderer of a single answer.

    Args:
        is_chat: True for /api/chat, False for /api/generate.
        remember: called with the key and the arguments of each call.
    """

    model: str
    is_chat: bool
    readers: AnswerReaders
    logprobs: LogprobsFormat
    remember: Remember

    def __post_init__(self) -> None:
        self._tokens = self.logprobs.content_tokens()
        self._call: tuple[ToolCallBegin, list[str]] | None = None
        self._reason: str | None = None
        self._times = RequestTimes()

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        sample = outputs[0].outputs[0]
        self._times = outputs[0].times or self._times
        self._reason = sample.finish_reason
        self._tokens.add(sample.logprobs)
        whole: Json = {"content": ""}
        tokens: list[Json] = []
        for event in self.readers.read_whole(sample):
            said, entries = self._fields(event)
            tokens += entries
            for name, value in said.items():
                whole[name] = whole[name] + value if name in whole else value
        return {**self._piece(whole, tokens), **self._figures(usage)}

    def chunk(self, prompt_index: int, delta: OutputDelta, usage: Usage) -> bytes:
        self._times = delta.times or self._times
        self._reason = delta.finish_reason or self._reason
        self._tokens.add(delta.logprobs)
        pieces = map(self._fields, self.readers.read(delta))
        return b"".join(
            line({**self._piece({"content": "", **said}, tokens), "done": False})
            for said, tokens in pieces
            if said
        )

    def ending(self, usage: Usage) -> bytes:
        return line({**self._piece({"content": ""}, []), **self._figures(usage)})

    def _fields(self, event: AnswerEvent) -> tuple[Json, list[Json]]:
        """Return the fields of a message that an event adds to, and the logprobs of its tokens."""
        if isinstance(event, ContentDelta):
            wanted = self.logprobs.are_wanted
            return {"content": event.text}, self.logprobs.tokens(self._tokens.take(event)) if wanted else []
        if isinstance(event, ReasoningDelta):
            return {"thinking": event.text}, []
        if isinstance(event, ToolCallBegin):
            self._call = event, []
            return {}, []
        assert self._call is not None
        begin, texts = self._call
        if isinstance(event, ToolCallArguments):
            texts.append(event.text)
            return {}, []
        written = "".join(texts)
        try:
            arguments = dict(read_json_text(written or "{}", may_be_cut=True))
        except (ValueError, TypeError, RecursionError):
            arguments = {}
        self.remember(call_key(begin.name, arguments), written)
        function = {"index": begin.index, "name": begin.name, "arguments": arguments}
        return {"tool_calls": [{"id": begin.id, "function": function}]}, []

    def _piece(self, said: Json, tokens: list[Json]) -> Json:
        fields: Json = {"model": self.model, "created_at": timestamp()}
        if self.is_chat:
            fields["message"] = {"role": "assistant", **said}
        else:
            fields |= {"response": said.pop("content"), **said}
        return {**fields, "logprobs": tokens} if tokens else fields

    def _figures(self, usage: Usage) -> Json:
        times = self._times
        begun, first, end = times.first_scheduled or 0.0, times.first_token or 0.0, times.finished or 0.0
        return {
            "done": True,
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": int(end * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(max(0.0, first - begun) * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(max(0.0, end - first) * 1e9),
        }
