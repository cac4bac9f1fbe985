"""The answers of the OpenAI routes: usage, choices and chunks.

Plain dictionaries: they are built once per token in a stream, and their shape is checked by tests with
the real client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import radixkv
from radixkv.chat.answer import (
    Answer,
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from radixkv.request import CompletionOutput, OutputDelta, RequestOutput, TokenLogprobs
from radixkv_server.apis.openai.logprobs import LogprobsFormat, TextOffsets
from radixkv_server.apis.openai.schemas import ChatCompletionRequest, CommonFields, CompletionRequest
from radixkv_server.chat.chat import AnswerReaders
from radixkv_server.dialect import Json, dump
from radixkv_server.generation.usage import Usage

if TYPE_CHECKING:
    from radixkv.cache.insight.explain import MissReport

FINGERPRINT = f"radixkv-{radixkv.__version__}"

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of an answer have in common."""

    id: str
    object: str
    created: int
    model: str

    def wrap(self, choices: list[Json], **more: Any) -> Json:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **more,
        }


def usage_json(usage: Usage) -> Json:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": usage_details(usage),
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def usage_details(usage: Usage) -> Json:
    """What the cache did for the prompts: tokens found, written and pinned, and why others were not found.

    `cache_miss` is one object per prompt, in order (a single one not in a list). It says nothing of what
    other requests' prompts contain.
    """
    misses = [_miss(*report) for report in zip(usage.cache_reports, usage.cache_hints, strict=True)]
    details: Json = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens}
    if misses:
        details["cache_miss"] = misses[0] if len(misses) == 1 else misses
    if usage.pinned_tokens is not None:
        details["pinned_tokens"] = usage.pinned_tokens
    return details


def _miss(report: MissReport, hint: str | None) -> Json:
    """The reason, the position of the first token that was not found, and what is known of its cause."""
    miss: Json = {"reason": report.reason}
    if report.reason != "hit":
        miss["position"] = report.num_hit_tokens
    if report.age_s is not None:
        miss["age_s"] = round(report.age_s, 3)
        miss["evicted_by"] = report.evicted_by
    if report.skipped is not None:
        miss["skipped"] = report.skipped
    if hint is not None:
        miss["hint"] = hint
    return miss


class _ChunkWriter:
    """Chunks of one stream as events, and its end: with usage where the body's `stream_options` say so."""

    def __init__(self, body: CommonFields, envelope: Envelope) -> None:
        self._envelope = envelope
        self._at_the_end = body.wants_stream_usage
        self._with_chunks = body.wants_usage_with_chunks

    def event(self, choice: Json, usage: Usage) -> bytes:
        """A choice, and what has been used so far, all choices together."""
        more: Json = {"usage": None} if self._at_the_end else {}
        return self._event([choice], {"usage": usage_json(usage)} if self._with_chunks else more)

    def ending(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and `[DONE]`."""
        return self._event([], {"usage": usage_json(usage)}) + _DONE if self._at_the_end else _DONE

    def _event(self, choices: list[Json], more: Json) -> bytes:
        return b"data: " + dump(self._envelope.wrap(choices, **more)) + b"\n\n"


class ChatRenderer:
    """Answers of POST /v1/chat/completions: per choice a role, what it says and a finish reason."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        envelope: Envelope,
        logprobs: LogprobsFormat,
        readers: AnswerReaders,
    ) -> None:
        self._readers = readers
        self._envelope = envelope
        self._logprobs = logprobs
        self._chunks = _ChunkWriter(body, envelope)
        self._begun: set[int] = set()

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        choices = [self._choice(*numbered) for numbered in enumerate(outputs[0].outputs)]
        return self._envelope.wrap(choices, usage=usage_json(usage))

    def chunk(self, job: int, delta: OutputDelta, usage: Usage) -> bytes:
        return b"".join(self._chunks.event(choice, usage) for choice in self._choices(delta))

    def ending(self, usage: Usage) -> bytes:
        return self._chunks.ending(usage)

    def _choice(self, index: int, sample: CompletionOutput) -> Json:
        answer = self._readers.answer(sample)
        return {
            "index": index,
            "message": {"role": "assistant", **_message(answer), "refusal": None},
            "logprobs": self._logprobs.chat(sample.logprobs),
            "finish_reason": _finish_reason(sample.finish_reason, bool(answer.tool_calls)),
            "stop_reason": sample.stop_reason,
        }

    def _choices(self, delta: OutputDelta) -> list[Json]:
        def choice(content: Json, **more: Any) -> Json:
            fields = {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}
            return {**fields, **more}

        choices = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            choices.append(choice({"role": "assistant", "content": "", "refusal": None}))
        told = [_delta(event) for event in self._readers.read(delta)]
        said = [content for content in told if content is not None] or [{"content": ""}] * bool(
            delta.logprobs
        )
        for number, content in enumerate(said):
            logprobs = None if number else self._logprobs.chat(delta.logprobs)
            choices.append(choice(content, logprobs=logprobs))
        if delta.finish_reason is not None:
            reason = _finish_reason(delta.finish_reason, self._readers.has_called(delta.index))
            choices.append(choice({}, finish_reason=reason, stop_reason=delta.stop_reason))
        return choices


def _finish_reason(reason: str | None, has_called: bool) -> str | None:
    """An answer that ends by itself, with calls, ends for these to be made."""
    return "tool_calls" if reason == "stop" and has_called else reason


def _message(answer: Answer) -> Json:
    """What a whole answer says. Content is null where there are only calls."""
    message: Json = {"content": answer.content or (None if answer.tool_calls else "")}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message


def _delta(event: AnswerEvent) -> Json | None:
    """What one event adds to a choice; None: nothing."""
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCallBegin):
        function = {"name": event.name, "arguments": ""}
        return {
            "tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]
        }
    if isinstance(event, ToolCallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


class TextRenderer:
    """Answers of POST /v1/completions: choices numbered by prompt, then by sample.

    Args:
        echoes: what each prompt's choices begin with; empty strings without `echo`.
    """

    def __init__(
        self, body: CompletionRequest, envelope: Envelope, logprobs: LogprobsFormat, echoes: Sequence[str]
    ) -> None:
        self._body = body
        self._envelope = envelope
        self._logprobs = logprobs
        self._echoes = echoes
        self._chunks = _ChunkWriter(body, envelope)
        self._offsets: dict[int, TextOffsets] = {}

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        if self._body.scores_only:
            usage.completion_tokens = 0
        choices: list[Json] = []
        for output, echo in zip(outputs, self._echoes, strict=True):
            for sample in output.outputs:
                choices.append(self._choice(len(choices), output, sample, echo))
        return self._envelope.wrap(choices, usage=usage_json(usage))

    def chunk(self, job: int, delta: OutputDelta, usage: Usage) -> bytes:
        index = job * (self._body.n or 1) + delta.index
        text = delta.text
        if index not in self._offsets:
            self._offsets[index] = self._sample_offsets("")
            text = self._echoes[job] + text
        logprobs = None
        if delta.logprobs and self._body.logprobs is not None:
            offsets = map(self._offsets[index].take, delta.token_ids)
            logprobs = self._logprobs.text(delta.logprobs, delta.token_ids, offsets, self._body.logprobs)
        if not text and not logprobs and delta.finish_reason is None:
            return b""
        return self._chunks.event(
            {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            },
            usage,
        )

    def ending(self, usage: Usage) -> bytes:
        return self._chunks.ending(usage)

    def _choice(self, index: int, output: RequestOutput, sample: CompletionOutput, echo: str) -> Json:
        scores_only = self._body.scores_only
        return {
            "index": index,
            "text": echo if scores_only else echo + sample.text,
            "logprobs": self._choice_logprobs(output, sample, echo),
            "finish_reason": "length" if scores_only else sample.finish_reason,
            "stop_reason": None if scores_only else sample.stop_reason,
        }

    def _choice_logprobs(self, output: RequestOutput, sample: CompletionOutput, echo: str) -> Json | None:
        body = self._body
        if body.logprobs is None or sample.logprobs is None:
            return None
        entries: list[TokenLogprobs | None] = []
        ids: list[int] = []
        offsets: list[int] = []
        if body.echo:
            entries += output.prompt_logprobs or []
            ids += output.prompt_token_ids
            take = self._logprobs.offsets(0, skip_special_tokens=False).take
            offsets += map(take, output.prompt_token_ids)
        if not body.scores_only:
            entries += sample.logprobs
            ids += sample.token_ids
            offsets += map(self._sample_offsets(echo).take, sample.token_ids)
        return self._logprobs.text(entries, ids, offsets, body.logprobs)

    def _sample_offsets(self, echo: str) -> TextOffsets:
        skip = self._body.skip_special_tokens is not False
        return self._logprobs.offsets(len(echo), skip_special_tokens=skip)
