# SPDX-License-Identifier: Apache-2.0
"""ResponseRenderer: answers of POST /v1/responses, whole and as typed events."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from radixkv.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.text.chat_formats.answer import ContentDelta, ReasoningDelta
from radixkv_server.apis.common.cache_diagnosis import CacheDiagnosis
from radixkv_server.apis.common.fields import plain_choice
from radixkv_server.apis.common.logprobs import LogprobsFormat
from radixkv_server.apis.common.usage_json import usage_details
from radixkv_server.apis.responses.errors import ErrorForm, ResponsesDialect, error_json, frame
from radixkv_server.apis.responses.items import item_id
from radixkv_server.apis.responses.output import CompactedItems, OutputItems
from radixkv_server.apis.responses.schemas import ResponseRequest
from radixkv_server.apis.responses.stored import UNFINISHED
from radixkv_server.apis.responses.tools import Toolbox, tools_in_response
from radixkv_server.chats.call_memory import Remember
from radixkv_server.chats.chat import AnswerReaders
from radixkv_server.dialect import Dialect, Json
from radixkv_server.errors import ApiError
from radixkv_server.generation.generation import Renderer
from radixkv_server.generation.progress import Usage
from radixkv_server.response_store import StoreError

logger = logging.getLogger("radixkv.server")


def usage_json(usage: Usage, reasoning_tokens: int) -> Json:
    """Return the Responses API's `usage`, with `prompt_tokens_details` as `input_tokens_details`."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": usage_details(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def base_response(response_id: str, model: str, body: ResponseRequest, params: SamplingParams) -> Json:
    """Return the fields of a response that are known before its answer begins."""
    reasoning = body.reasoning
    text_format = body.text.format if body.text is not None else None
    options = body.prompt_cache_options
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "conversation": body.conversation_id and {"id": body.conversation_id},
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "prompt_cache_diagnostics": None,
        "prompt_cache_options": options and options.echoed(),
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": text_format.plain() if text_format else {"type": "text"}, "verbosity": "medium"},
        "tool_choice": plain_choice(body.tool_choice) or "auto",
        "tools": tools_in_response(body.tools or ()),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


@dataclass(eq=False)
class ResponseRenderer(Renderer, ResponsesDialect):
    """Renderer of a response, and dialect of its stream, whose errors continue its events.

    Args:
        response: the response object so far; see `base_response`.
        first_item: number of the answer's first item among the response's, for its id.
        params: sampling parameters of the request.
        tools, remember, hides_reasoning: see `OutputItems`.
        store: keeps the response where the request says so.
        with_logprobs: show them with the text.
        compacts: the answer becomes a `compaction` item.
        error_form: makes the `error` event.
        extra: further fields of each event.

    Attributes:
        has_ended: the last event has been made.
    """

    response: Json
    first_item: InitVar[int]
    logprobs: LogprobsFormat
    readers: AnswerReaders
    params: SamplingParams
    tools: InitVar[Toolbox]
    remember: InitVar[Remember]
    store: Callable[[Json], Awaitable[None]]
    diagnosis: CacheDiagnosis
    with_logprobs: bool
    hides_reasoning: InitVar[bool]
    compacts: InitVar[bool] = False
    error_form: ErrorForm = error_json
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(
        self, first_item: int, tools: Toolbox, remember: Remember, hides_reasoning: bool, compacts: bool
    ) -> None:
        self._tokens = self.logprobs.content_tokens()
        self._items = (CompactedItems if compacts else OutputItems)(
            lambda kind, number: item_id(self.response["id"], kind, first_item + number),
            tools,
            remember,
            hides_reasoning=hides_reasoning,
        )
        self._num_events = 0
        self._has_begun = False
        self.has_ended = False
        self._num_tokens = 0
        self._reasoning_tokens = 0
        self._finish_reason: str | None = None

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        sample = outputs[0].outputs[0]
        whole = OutputDelta(
            "", 0, sample.text, sample.token_ids, sample.logprobs, sample.finish_reason, sample.stop_reason
        )
        for _ in self._events_of(whole):
            pass
        if self._reasoning_tokens:
            self._reasoning_tokens = self._count_reasoning_tokens(sample)
        self.conclude(usage)
        return self.response

    def chunk(self, prompt_index: int, delta: OutputDelta, usage: Usage) -> bytes:
        begin: list[Json] = []
        if not self._has_begun:
            self._has_begun = True
            self.response |= {**self.diagnosis.fields(usage), "status": "in_progress"}
            begin = self._states(*(() if self._num_events else ("created",)), "in_progress")
        return self._frames([*begin, *self._events_of(delta)])

    def begun(self) -> bytes:
        """Make the events of a background response that waits for its turn."""
        self.response["status"] = "queued"
        return self._frames(self._states("created", "queued"))

    def so_far(self) -> Json:
        """Return the present state of the response, with its complete items."""
        return {**self.response, "output": list(self._items.items)}

    def ending(self, usage: Usage) -> bytes:
        self.conclude(usage)
        self.has_ended = True
        return self._frames(self._states(self.response["status"]))

    async def failed(self, error: ApiError) -> bytes:
        """Make the response a failed one, and store it; returns the last events."""
        frames = self.error_event(error, None)
        await self._keep()
        return frames

    async def cancelled(self, usage: Usage) -> bytes:
        """Make the response a cancelled one, and store it; a complete one stays. Returns the last events."""
        events: list[Json] = []
        if self.response["status"] in UNFINISHED:
            events = list(self._items.end("incomplete"))
            used = usage_json(usage, self._reasoning_tokens) if self._has_begun else None
            self.response |= {"status": "cancelled", "output": self._items.items, "usage": used}
        await self._keep()
        return b"" if self.has_ended else self._frames([*events, *self._states(self.response["status"])])

    def _states(self, *names: str) -> list[Json]:
        return [{"type": f"response.{name}", "response": {**self.response}} for name in names]

    async def keep(self, usage: Usage) -> None:
        """Store the response, if the client wants that; where that fails, its `store` says so."""
        self.conclude(usage)
        await self._keep()

    async def _keep(self) -> None:
        try:
            await self.store(self.response)
        except (StoreError, ApiError) as error:
            logger.error("%s was answered and is not stored: %s", self.response["id"], error)
            self.response["store"] = False

    def stream_dialect(self, dialect: Dialect) -> Dialect:
        return self

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        """End a stream that can't go on: an `error` event, then the response as failed."""
        events = list(self._items.end("incomplete"))
        failure = {"code": "server_error", "message": error.message, "param": error.param}
        self.response |= {"status": "failed", "output": self._items.items, "error": failure}
        return self._frames([*events, self.error_form(error), *self._states("failed")])

    def _events_of(self, delta: OutputDelta) -> Iterable[Json]:
        self._num_tokens += len(delta.token_ids)
        if self.with_logprobs:
            self._tokens.add(delta.logprobs)
        for event in self.readers.read(delta):
            logprobs = []
            if isinstance(event, ReasoningDelta):
                self._reasoning_tokens = self._num_tokens
            elif isinstance(event, ContentDelta) and self.with_logprobs:
                logprobs = self.logprobs.tokens(self._tokens.take(event))
            yield from self._items.add(event, logprobs)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            if self.params.samples_nothing:
                return  # without a request for an answer there is no item, not even an empty one
            yield from self._items.finish("incomplete" if delta.finish_reason == "length" else "completed")

    def _count_reasoning_tokens(self, sample: CompletionOutput) -> int:
        """Count the tokens of an answer up to the end of its reasoning. O(tokens)."""
        thoughts = [item["content"] for item in self._items.items if item["type"] == "reasoning"]
        last = "".join(part["text"] for part in thoughts[-1]) if thoughts else ""
        missing = sample.text.rfind(last) + len(last)
        params = self.params
        decoder = self.logprobs.tokenizer.stream(params.skip_special_tokens, kept=params.kept_special_tokens)
        for number, token_id in enumerate(sample.token_ids):
            if missing <= 0:
                return number
            missing -= len(decoder.push([token_id]))
        return len(sample.token_ids)

    def conclude(self, usage: Usage) -> None:
        """Complete `response` at the end of its answer. May be called again."""
        if self.response["usage"] is not None:
            return
        is_cut = self._finish_reason == "length" and not self.params.samples_nothing
        self.response |= {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.items,
            "usage": usage_json(usage, self._reasoning_tokens),
            **self.diagnosis.fields(usage),
        }

    def _frames(self, events: Iterable[Json]) -> bytes:
        frames = b""
        for event in events:
            event |= {"sequence_number": self._num_events, **self.extra}
            self._num_events += 1
            frames += frame(event)
        return frames
