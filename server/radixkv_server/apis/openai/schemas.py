"""The bodies of the OpenAI routes: pydantic models of the requests, checked strictly.

How a field is declared to work, to change nothing, or to be refused: see `radixkv_server.http.fields`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from radixkv_server.apis.openai.fields import (
    AnyToolChoice,
    CacheFields,
    ChatTemplateFields,
    ForOpenAI,
    IncludeObfuscation,
    SamplingFields,
    ServiceTier,
    ToolName,
    Verbosity,
    check_logprobs,
    check_stream_options,
)
from radixkv_server.apis.openai.grammars import GrammarFields
from radixkv_server.apis.openai.messages import CacheBreakpoint, ChatMessage, breakpoints_in
from radixkv_server.apis.openai.token_details import TokenDetailFields
from radixkv_server.chat.breakpoints import Breakpoint, CacheControl, check_breakpoints
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel, as_data
from radixkv_server.http.fields import Refused, WithoutEffect

MAX_TOOLS = 1024


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: IncludeObfuscation = None


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


class FunctionTool(StrictModel):
    """A function; what is not declared here but passed on is printed by templates as it came."""

    model_config = ConfigDict(extra="allow")
    PASSED_ON: ClassVar = frozenset({"description", "parameters", "strict", "return"})

    name: ToolName

    @model_validator(mode="after")
    def _known_extras(self) -> FunctionTool:
        extra = self.model_extra or {}
        if not isinstance(extra.get("parameters"), dict | None):
            raise ParamError("the parameters of a function must be a JSON Schema, an object.")
        if not isinstance(extra.get("strict"), bool | None):
            raise ParamError("strict must be true, false or null.")
        return self


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionTool
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        """The tool as templates expect it, without what is meant for the cache."""
        return {"type": self.type, "function": as_data(self.function)}


class TemplateFields(ChatTemplateFields):
    """The fields that decide how a chat becomes a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FAIL_FAST]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def breakpoints(self) -> list[tuple[CacheControl, Breakpoint]]:
        """What has `cache_control`, and where it stands, in the order of tools and messages."""
        tools = enumerate(self.tools or ())
        controls = [(tool.cache_control, index) for index, tool in tools if tool.cache_control is not None]
        placed = [(control, Breakpoint(control.seconds, tool=index)) for control, index in controls]
        return placed + breakpoints_in(self.messages)

    @model_validator(mode="after")
    def _sound_breakpoints(self) -> TemplateFields:
        check_breakpoints([control for control, _ in self.breakpoints])
        return self

    @model_validator(mode="after")
    def _one_ending(self) -> TemplateFields:
        check_ending(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self


def check_ending(messages: Sequence[ChatMessage], adds_prompt: bool | None, continues: bool | None) -> None:
    """Raise ParamError where a chat's last message is to be continued and can't be."""
    param = "continue_final_message"
    if continues and adds_prompt:
        raise ParamError(f"add_generation_prompt and {param} exclude each other.", param)
    if continues and messages[-1].role != "assistant":
        raise ParamError(f"{param} needs a last message of the assistant's.", param)


class PredictionPart(StrictModel):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint = None


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
    tool_choice: AnyToolChoice | None = None
    reasoning_effort: str | None = None
    modalities: Annotated[Any, Refused("anything but ['text']", usual=(["text"],))] = None
    verbosity: Verbosity = None
    functions: Annotated[Any, Refused("the older form of tools (use tools)")] = None
    function_call: Annotated[
        Any, Refused("the older form of tool_choice (use tool_choice)", usual=("auto", "none"))
    ] = None
    audio: Annotated[Any, Refused("an answer as sound")] = None
    web_search_options: Annotated[Any, Refused("searching the web")] = None
    moderation: Annotated[Any, Refused("moderation")] = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    safety_identifier: ForOpenAI = None
    service_tier: ServiceTier = None
    store: Annotated[Any, WithoutEffect("chats are not kept; responses are")] = None
    metadata: Annotated[Any, WithoutEffect("chats are not kept; responses are")] = None

    @model_validator(mode="after")
    def _only_what_works(self) -> ChatCompletionRequest:
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
    suffix: Annotated[Any, Refused("text insertion", usual=("",))] = None

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
