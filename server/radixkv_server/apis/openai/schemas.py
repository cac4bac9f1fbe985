# SPDX-License-Identifier: Apache-2.0
"""Bodies of POST /v1/chat/completions and /v1/completions: pydantic models, checked strictly.

How a field is declared to work, to change nothing, or to be refused: see `radixkv_server.http.fields`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from radixkv_server.apis.common.answer_fields import GrammarFields, ReasoningFields
from radixkv_server.apis.common.chat_messages import ChatMessage, breakpoints_in
from radixkv_server.apis.common.custom_tools import CustomFormat, custom_function
from radixkv_server.apis.common.fields import (
    MAX_TOOLS,
    AnyToolChoice,
    ByType,
    ChatTemplateFields,
    ForOpenAI,
    IncludeObfuscation,
    PrewarmFields,
    SamplingFields,
    ServiceTier,
    ToolName,
    Verbosity,
    check_logprobs,
    check_stream_options,
)
from radixkv_server.apis.common.media import TEXT_ONLY
from radixkv_server.apis.common.token_details import TokenDetailFields
from radixkv_server.chats.breakpoints import Breakpoint, CacheControl, check_breakpoints
from radixkv_server.generation.request import new_id
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel, as_data
from radixkv_server.http.fields import Refused, WithoutEffect


class ChatStreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: IncludeObfuscation = None


class CommonFields(GrammarFields, TokenDetailFields, SamplingFields):
    """Fields shared by chat and text completions."""

    stream_options: ChatStreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    cache_prompt: bool | None = None

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
        if self.n is not None:
            options["n"] = self.n
        if (found := self.wanted_grammar) is not None:
            options["structured"] = found[0]
        return options

    def request_options(self) -> dict[str, Any]:
        options = super().request_options()
        if self.is_uncached:
            # A part of the cache of its own: no other request has its salt.
            options |= {"salt": new_id("uncached-"), "cache_key_hint": "", "keep_tokens": 0}
        return options

    @property
    def is_uncached(self) -> bool:
        """True if the request neither finds nor leaves anything in the cache."""
        return self.cache_prompt is False

    @property
    def grammar_param(self) -> str:
        """Name of the field that constrains the answer's format."""
        found = self.wanted_grammar
        return "structured_outputs" if found is None else found[1]


class ChatFunction(StrictModel):
    """Function definition; templates print undeclared fields unchanged."""

    model_config = ConfigDict(extra="allow")
    PASSED_ON: ClassVar = frozenset({"description", "parameters", "strict", "return"})

    name: ToolName
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _known_extras(self) -> ChatFunction:
        extra = self.model_extra or {}
        if not isinstance(extra.get("parameters"), dict | None):
            raise ParamError("the parameters of a function must be a JSON Schema, an object.")
        if not isinstance(extra.get("strict"), bool | None):
            raise ParamError("strict must be true, false or null.")
        return self


class ChatTool(StrictModel):
    type: Literal["function"]
    function: ChatFunction
    cache_control: CacheControl | None = None

    @property
    def name(self) -> str:
        return self.function.name

    def for_template(self) -> dict[str, Any]:
        """Return the tool as templates expect it, without its breakpoint."""
        function = {name: as_data(value) for name, value in self.function if name != "cache_control"}
        return {"type": self.type, "function": function}


class _Grammar(StrictModel):
    syntax: Literal["lark", "regex"]
    definition: str


class ChatCustomFormat(StrictModel):
    type: Literal["text", "grammar"]
    grammar: _Grammar | None = None

    @functools.cached_property
    def plain(self) -> CustomFormat:
        """Return the format in the form of Responses, checked."""
        grammar = self.grammar
        if grammar is None:
            return CustomFormat(type=self.type)
        return CustomFormat(type=self.type, syntax=grammar.syntax, definition=grammar.definition)

    @model_validator(mode="after")
    def _sound(self) -> ChatCustomFormat:
        try:
            assert self.plain
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise (first.get("ctx") or {}).get("error") or ParamError(first["msg"]) from None
        return self


class CustomDefinition(StrictModel):
    name: ToolName
    description: str | None = None
    format: ChatCustomFormat | None = None


class ChatCustomTool(StrictModel):
    """A tool that takes text."""

    type: Literal["custom"]
    custom: CustomDefinition
    cache_control: CacheControl | None = None

    @property
    def name(self) -> str:
        return self.custom.name

    @property
    def lark(self) -> str | None:
        """Grammar of the input in Lark; None: it has none."""
        return None if self.custom.format is None else self.custom.format.plain.lark

    def for_template(self) -> dict[str, Any]:
        """Return the tool as a function for templates."""
        wanted = None if self.custom.format is None else self.custom.format.plain
        function = {"name": self.name, **custom_function(self.custom.description, wanted)}
        return {"type": "function", "function": function}


AnyChatTool = Annotated[
    ChatTool | ChatCustomTool,
    ByType(
        "a tool",
        lambda kind, known: (
            f"tools of type {kind!r} are not supported (only {known}): this server runs no tools itself; "
            "give functions or custom tools, which your program runs."
        ),
        code="unsupported_parameter",
    ),
]


class ChatFields(ChatTemplateFields):
    """Fields that determine how messages are rendered."""

    tools: Annotated[list[AnyChatTool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check_ending(self, messages: Sequence[ChatMessage]) -> None:
        """Raise ParamError if the last message is to be continued and can't be."""
        param = "continue_final_message"
        if self.continue_final_message and self.add_generation_prompt:
            raise ParamError(f"add_generation_prompt and {param} exclude each other.", param)
        if self.continue_final_message and messages[-1].role != "assistant":
            raise ParamError(f"{param} needs a last message of the assistant's.", param)


class MessageFields(ChatFields):
    """The fields that decide a chat's prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FAIL_FAST, TEXT_ONLY]

    @property
    def breakpoints(self) -> list[tuple[CacheControl, Breakpoint]]:
        """All `cache_control` marks and their places, in the order of tools and messages."""
        placed = []
        for index, tool in enumerate(self.tools or ()):
            function = tool.function if isinstance(tool, ChatTool) else tool
            if (control := tool.cache_control or function.cache_control) is not None:
                placed.append((control, Breakpoint(control.seconds, tool=index)))
        return placed + breakpoints_in(self.messages)

    @model_validator(mode="after")
    def _sound(self) -> MessageFields:
        controls = [control for control, _ in self.breakpoints]
        if controls:
            check_breakpoints(controls)
        self.check_ending(self.messages)
        return self


class PredictionPart(StrictModel):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Annotated[Any, WithoutEffect("a prediction is no part of the prompt")] = None


class Prediction(StrictModel):
    """Text that the answer may repeat; it affects speed alone."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatCompletionRequest(MessageFields, ReasoningFields, PrewarmFields, CommonFields):
    """Body of POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: AnyToolChoice | None = None
    cache_control: CacheControl | None = None
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
            if self.top_logprobs and not self.logprobs:
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
        if self.prompt_only and self.num_samples > 1:
            raise ParamError("n and best_of must be 1 where max_tokens is 0: all would be the same.", "n")
        samples = self.best_of
        if self.stream and samples is not None and samples > (self.n or 1):
            raise ParamError("a best_of above n can't be streamed.", "best_of")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def prompt_only(self) -> bool:
        """True if only the prompt is computed: for the cache, or with `echo` for its logprobs."""
        return self.max_tokens == 0

    @property
    def num_samples(self) -> int:
        return max(self.n or 1, self.best_of or 1)


def _all_ints(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)
