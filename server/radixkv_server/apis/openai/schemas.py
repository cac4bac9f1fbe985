"""The bodies of the OpenAI routes: pydantic models of the requests, checked strictly.

Three kinds of fields: those that work; documented OpenAI fields that change nothing here and are
accepted (NO-OP below); and those that would change the meaning of the answer if they were ignored, which
are refused with a 400 unless they hold a value that asks for what happens anyway. Fields that are none of
these are refused as unknown, as OpenAI does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from radixkv_server.apis.openai.fields import (
    CacheFields,
    ChatTemplateFields,
    NoOp,
    SamplingFields,
    check_logprobs,
    check_stream_options,
)
from radixkv_server.apis.openai.grammars import GrammarFields
from radixkv_server.apis.openai.messages import ChatMessage, breakpoints_in
from radixkv_server.apis.openai.token_details import TokenDetailFields
from radixkv_server.chat.breakpoints import CacheControl, Place, check_breakpoints
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel, as_data, unsupported

MAX_TOOLS = 1024


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: NoOp = None


class CommonFields(GrammarFields, TokenDetailFields, SamplingFields):
    """What chat and text completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> CommonFields:
        check_stream_options(self, self.stream_options)
        return self

    @property
    def wants_stream_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_with_chunks(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_options(self) -> dict[str, Any]:
        options = super().sampling_options()
        return options if self.n is None else {**options, "n": self.n}


class FunctionTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: Annotated[str, Field(min_length=1, max_length=256)]

    @model_validator(mode="after")
    def _known_extras(self) -> FunctionTool:
        # Not declared as fields: templates print a tool as it came.
        extra = self.model_extra or {}
        if not isinstance(extra.get("parameters"), dict | None):
            raise ParamError("the parameters of a function must be a JSON Schema, an object.")
        if not isinstance(extra.get("strict"), bool | None):
            raise ParamError("strict must be true, false or null.")
        return self


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: FunctionTool
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        """The tool as templates expect it, without what is meant for the cache."""
        return {name: value for name, value in as_data(self).items() if name != "cache_control"}


class TemplateFields(ChatTemplateFields):
    """The fields that decide how a chat becomes a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FAIL_FAST]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def breakpoints(self) -> list[tuple[CacheControl, Place]]:
        """What has `cache_control`, and where it stands, in the order of tools and messages."""
        tools = enumerate(self.tools or ())
        controls = [(tool.cache_control, index) for index, tool in tools if tool.cache_control is not None]
        placed = [(control, Place(control.seconds, tool=index)) for control, index in controls]
        return placed + breakpoints_in(self.messages)

    @model_validator(mode="after")
    def _sound_breakpoints(self) -> TemplateFields:
        check_breakpoints([control for control, _ in self.breakpoints])
        return self

    @model_validator(mode="after")
    def _one_ending(self) -> TemplateFields:
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ParamError(
                    "add_generation_prompt and continue_final_message exclude each other.",
                    "continue_final_message",
                )
            if self.messages[-1].role != "assistant":
                raise ParamError(
                    "continue_final_message needs a last message of the assistant's.",
                    "continue_final_message",
                )
        return self


class PredictionPart(StrictModel):
    type: Literal["text"]
    text: str


class Prediction(StrictModel):
    """What the answer may repeat: where it does, it comes faster; it changes nothing else."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatCompletionRequest(TemplateFields, CacheFields, CommonFields):
    """Body of POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    safety_identifier: NoOp = None
    service_tier: NoOp = None
    store: NoOp = None
    metadata: NoOp = None

    @model_validator(mode="after")
    def _only_what_works(self) -> ChatCompletionRequest:
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities", "anything but ['text']")
        if self.verbosity not in (None, "medium"):
            raise unsupported("verbosity", "anything but 'medium'")
        for name in ("functions", "function_call", "audio", "web_search_options", "moderation"):
            if getattr(self, name) is not None:
                raise unsupported(name, "this field")
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise ParamError("top_logprobs needs logprobs to be true.", "top_logprobs")
            check_logprobs(self.top_logprobs, "top_logprobs")
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise ParamError("max_tokens and max_completion_tokens contradict each other.", "max_tokens")
        return self

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(CommonFields):
    """Body of POST /v1/completions."""

    prompt: Any
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None

    @field_validator("prompt")
    @classmethod
    def _known_shape(cls, value: Any) -> Any:
        # By hand: a union of four list types would report one error per element and branch.
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            if all(isinstance(item, str) for item in value) or _all_ints(value):
                return value
            if all(isinstance(item, list) and _all_ints(item) for item in value):
                return value
        elif value == []:
            raise ValueError("prompt must not be empty.")
        raise ValueError("prompt must be a string, a list of strings, token ids, or a list of such lists.")

    @model_validator(mode="after")
    def _only_what_works(self) -> CompletionRequest:
        if self.suffix not in (None, ""):
            raise unsupported("suffix", "text insertion")
        check_logprobs(self.logprobs, "logprobs")
        samples = self.best_of
        if self.stream and samples is not None and samples > (self.n or 1):
            raise ParamError("a best_of above n can't be streamed.", "best_of")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, one or many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def scores_only(self) -> bool:
        """True for `echo` with `max_tokens` 0: the prompt's logprobs are wanted and nothing else."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def num_samples(self) -> int:
        return max(self.n or 1, self.best_of or 1)


def _all_ints(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)
