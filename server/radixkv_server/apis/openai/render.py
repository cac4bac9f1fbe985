# SPDX-License-Identifier: Apache-2.0
"""Answers of the OpenAI routes: usage, choices and chunks.

Plain dictionaries: they are built once per token in a stream, and their shape is checked by tests with
the real client.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import radixkv
from radixkv.cache.keys import EncodedTokens
from radixkv.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
from radixkv.sampling.logprobs import Logprob, TokenLogprobs
from radixkv.text.chat_formats.answer import (
    Answer,
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallBegin,
    ToolCallEnd,
)
from radixkv_server.apis.common.cache_diagnosis import CacheDiagnosis
from radixkv_server.apis.common.custom_tools import CustomInput, input_of
from radixkv_server.apis.common.logprobs import ContentTokens, LogprobsFormat, TextOffsets, finite
from radixkv_server.apis.common.usage_json import usage_details
from radixkv_server.apis.openai.schemas import CommonFields, CompletionRequest
from radixkv_server.chats.call_memory import Remember
from radixkv_server.chats.chat import AnswerReaders
from radixkv_server.dialect import Json, dump, dump_in_pieces
from radixkv_server.generation.generation import Renderer
from radixkv_server.generation.progress import Usage

FINGERPRINT = f"radixkv-{radixkv.__version__}"

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields around the choices of an answer, and the framing of a stream's chunks as events.

    Args:
        body: says which further fields the client wants: usage, token ids, logprobs of the prompt.
    """

    body: CommonFields
    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

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

    def chunk(self, choice: Json, usage: Usage, **more: Any) -> bytes:
        """Frame a chunk with a choice, the usage of all choices so far, and further fields."""
        if self.body.wants_usage_with_chunks:
            more["usage"] = usage_json(usage)
        elif self.body.wants_stream_usage:
            more["usage"] = None
        return self._event([choice], more)

    def ending(self, usage: Usage, **more: Any) -> bytes:
        """Frame the usage, if requested, with final fields, and `[DONE]`."""
        if not self.body.wants_stream_usage:
            return _DONE
        return self._event([], {"usage": usage_json(usage), **more}) + _DONE

    def prompt_details(self, prompt: EncodedTokens, logprobs: Sequence[TokenLogprobs | None] | None) -> Json:
        """`prompt_token_ids`, and `prompt_logprobs`: for each token `{id: {logprob, rank, decoded_token}}`.

        Nothing precedes the first token: null. The others have the token itself, then the likeliest.
        """
        num_top = self.body.prompt_logprobs
        details: Json = {"prompt_token_ids": prompt.token_ids.tolist()} if self.body.return_token_ids else {}
        if num_top is not None and logprobs is not None:
            details["prompt_logprobs"] = [
                None if entry is None else _by_id((entry.chosen, *entry.top[:num_top])) for entry in logprobs
            ]
        return details

    def answer_details(self, ids: Sequence[int]) -> Json:
        """Return `token_ids`, including the tokens that end the answer."""
        return {"token_ids": ids} if self.body.return_token_ids else {}

    def _event(self, choices: list[Json], more: Json) -> bytes:
        value = self.wrap(choices, **more)
        # Most tell of a token or two; one with a prompt's logprobs is written in a thread, beside others.
        is_long = "prompt_logprobs" in more or any("prompt_logprobs" in choice for choice in choices)
        return b"data: " + (dump_in_pieces(value) if is_long else dump(value)) + b"\n\n"


def _by_id(items: Iterable[Logprob]) -> Json:
    return {
        str(item.token_id): {
            "logprob": finite(item.logprob),
            "rank": item.rank,
            "decoded_token": item.text,
        }
        for item in items
    }


def usage_json(usage: Usage) -> Json:
    """Return OpenAI's `usage`."""
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


@dataclass(eq=False)
class ChatRenderer(Renderer):
    """Renderer of POST /v1/chat/completions: per choice a role, its content and a finish reason.

    Args:
        custom_tools: names of the tools that take text.
        remember: called with the id and the arguments of each call of a custom tool.
    """

    envelope: Envelope
    prompt: EncodedTokens
    logprobs: LogprobsFormat
    custom_tools: Collection[str]
    readers: AnswerReaders
    diagnosis: CacheDiagnosis
    remember: Remember

    def __post_init__(self) -> None:
        # By choice and call: the call's id and its input.
        self._custom_calls: dict[tuple[int, int], tuple[str, CustomInput]] = {}
        self._tokens: dict[int, ContentTokens] = {}
        self._begun: set[int] = set()

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        choices = [self._choice(*numbered) for numbered in enumerate(outputs[0].outputs)]
        details = self.envelope.prompt_details(self.prompt, outputs[0].prompt_logprobs)
        return self.envelope.wrap(choices, usage=usage_json(usage), **details, **self.diagnosis.fields(usage))

    def chunk(self, prompt_index: int, delta: OutputDelta, usage: Usage) -> bytes:
        # Fields about the prompt come once, with the first chunk.
        is_first = not self._begun
        logprobs = None if delta.prompt is None else delta.prompt.logprobs
        details: Json = {}
        if is_first:
            details = self.envelope.prompt_details(self.prompt, logprobs) | self.diagnosis.fields(usage)
        events = []
        for choice in self._choices(delta):
            events.append(self.envelope.chunk(choice, usage, **details))
            details = {}
        return b"".join(events)

    def ending(self, usage: Usage) -> bytes:
        return self.envelope.ending(usage, **self.diagnosis.fields(usage))

    def _choice(self, index: int, sample: CompletionOutput) -> Json:
        events = self.readers.read_whole(sample)
        answer = Answer.of(events)
        tokens = self._tokens_of(index)
        tokens.add(sample.logprobs)
        said = [token for event in events if isinstance(event, ContentDelta) for token in tokens.take(event)]
        return {
            "index": index,
            "message": {"role": "assistant", **self._message(answer), "refusal": None},
            "logprobs": None if sample.logprobs is None else self.logprobs.chat(said),
            "finish_reason": _finish_reason(
                sample.finish_reason, bool(answer.tool_calls) and not answer.calls_are_cut
            ),
            "stop_reason": sample.stop_reason,
            **self.envelope.answer_details(sample.token_ids),
        }

    def _choices(self, delta: OutputDelta) -> list[Json]:
        def choice(content: Json, **more: Any) -> Json:
            fields = {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}
            return {**fields, **more}

        choices = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            begin = None if self.readers.forced else ""
            choices.append(choice({"role": "assistant", "content": begin, "refusal": None}))
        details = self.envelope.answer_details(delta.token_ids) if delta.token_ids else {}
        tokens = self._tokens_of(delta.index)
        tokens.add(delta.logprobs)
        for event in self.readers.read(delta):
            content = self._delta(event, delta.index)
            if content is not None:
                choices.append(choice(content, **details))
                details = {}
                if isinstance(event, ContentDelta) and self.logprobs.are_wanted:
                    choices[-1]["logprobs"] = self.logprobs.chat(tokens.take(event))
        if details:
            choices.append(choice({} if self.readers.forced else {"content": ""}, **details))
        if delta.finish_reason is not None:
            reason = _finish_reason(delta.finish_reason, self.readers.has_called(delta.index))
            choices.append(choice({}, finish_reason=reason, stop_reason=delta.stop_reason))
        return choices

    def _message(self, answer: Answer) -> Json:
        """Return a whole answer. Content is null where there are only calls, or can be nothing else."""
        message: Json = {
            "content": answer.content or (None if answer.tool_calls or self.readers.forced else "")
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [self._call(call) for call in answer.tool_calls]
        return message

    def _call(self, call: ToolCall) -> Json:
        if call.name not in self.custom_tools:
            function = {"name": call.name, "arguments": call.arguments}
            return {"id": call.id, "type": "function", "function": function}
        self.remember(call.id, call.arguments)
        return {
            "id": call.id,
            "type": "custom",
            "custom": {"name": call.name, "input": input_of(call.arguments)},
        }

    def _delta(self, event: AnswerEvent, choice: int) -> Json | None:
        """Return the fields that an event adds to a choice; None: nothing."""
        if isinstance(event, ContentDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            return {"reasoning_content": event.text}
        place = (choice, event.index)
        if isinstance(event, ToolCallBegin):
            is_custom = event.name in self.custom_tools
            kind, argument = ("custom", "input") if is_custom else ("function", "arguments")
            if is_custom:
                self._custom_calls[place] = event.id, CustomInput()
            called = {"id": event.id, "type": kind, kind: {"name": event.name, argument: ""}}
            return {"tool_calls": [{"index": event.index, **called}]}
        call_id, custom = self._custom_calls.get(place, ("", None))
        if custom is None:
            if isinstance(event, ToolCallEnd):
                return None
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        if isinstance(event, ToolCallEnd):
            self.remember(call_id, custom.arguments)
            text = custom.finish()
        else:
            text = custom.push(event.text)
        return {"tool_calls": [{"index": event.index, "custom": {"input": text}}]} if text else None

    def _tokens_of(self, index: int) -> ContentTokens:
        if index not in self._tokens:
            self._tokens[index] = self.logprobs.content_tokens()
        return self._tokens[index]


def _finish_reason(reason: str | None, has_called: bool) -> str | None:
    """Return the finish reason; an answer that ends by itself with calls has `tool_calls`."""
    return "tool_calls" if reason == "stop" and has_called else reason


@dataclass(eq=False)
class TextRenderer(Renderer):
    """Answers of POST /v1/completions: choices numbered by prompt, then by sample.

    Args:
        echoes: what each prompt's choices begin with; empty strings without `echo`.
    """

    body: CompletionRequest
    envelope: Envelope
    logprobs: LogprobsFormat
    echoes: Sequence[str]
    prompts: Sequence[EncodedTokens]

    def __post_init__(self) -> None:
        # By prompt: what its choices share.
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None]] = {}
        self._prompt_details: dict[int, Json] = {}
        self._offsets: dict[int, TextOffsets] = {}

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        choices: list[Json] = []
        for prompt_index, output in enumerate(outputs):
            for sample in output.outputs:
                choices.append(self._choice(len(choices), prompt_index, output.prompt_logprobs, sample))
        return self.envelope.wrap(choices, usage=usage_json(usage))

    def chunk(self, prompt_index: int, delta: OutputDelta, usage: Usage) -> bytes:
        if delta.prompt is not None and delta.prompt.logprobs is not None:
            self._prompt_logprobs[prompt_index] = delta.prompt.logprobs
        index = prompt_index * (self.body.n or 1) + delta.index
        choice = self._choice(index, prompt_index, self._prompt_logprobs.get(prompt_index), delta)
        values = (value for name, value in choice.items() if name != "index")
        return self.envelope.chunk(choice, usage) if any(values) else b""

    def ending(self, usage: Usage) -> bytes:
        return self.envelope.ending(usage)

    def _choice(
        self,
        index: int,
        prompt_index: int,
        prompt_logprobs: Sequence[TokenLogprobs | None] | None,
        part: CompletionOutput | OutputDelta,
    ) -> Json:
        """Return a choice, or its next part; fields about the prompt come with the first part."""
        echo = ""
        details: Json = {}
        is_first = index not in self._offsets
        if is_first:
            echo = self.echoes[prompt_index]
            skip = self.body.skip_special_tokens is not False
            self._offsets[index] = self.logprobs.offsets(len(echo), skip_special_tokens=skip)
            if prompt_index not in self._prompt_details:
                self._prompt_details[prompt_index] = self.envelope.prompt_details(
                    self.prompts[prompt_index], prompt_logprobs
                )
            details = self._prompt_details[prompt_index]
        echoed = (self.prompts[prompt_index], prompt_logprobs or ()) if is_first and self.body.echo else None
        return {
            "index": index,
            "text": echo + part.text,
            "logprobs": self._choice_logprobs(index, part, echoed),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            **details,
            **self.envelope.answer_details(part.token_ids),
        }

    def _choice_logprobs(
        self,
        index: int,
        part: CompletionOutput | OutputDelta,
        echoed: tuple[EncodedTokens, Sequence[TokenLogprobs | None]] | None,
    ) -> Json | None:
        num_top = self.body.logprobs
        if num_top is None:
            return None
        entries: list[TokenLogprobs | None] = []
        ids: list[int] = []
        offsets: list[int] = []
        if echoed is not None:
            ids += echoed[0].token_ids.tolist()
            entries += echoed[1]
            offsets += map(self.logprobs.offsets(0, skip_special_tokens=False).take, ids)
        if part.logprobs is not None:
            ids += part.token_ids
            entries += part.logprobs
            offsets += map(self._offsets[index].take, part.token_ids)
        return self.logprobs.text(entries, ids, offsets, num_top) if ids else None
