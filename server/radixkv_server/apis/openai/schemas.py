# SPDX-License-Identifier: Apache-2.0
"""Bodies of POST /v1/chat/completions and /v1/completions: pydantic models, checked strictly.

How a field is declared to work, to change nothing, or to be refused: see `radixkv_server.http.fields`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from radixkv.sampling.structured import StructuredOutputs
from radixkv.text.chat_formats.thinking import Thinking
from radixkv_server.apis.common.answer_formats import SchemaFields, format_grammar, grammar_of
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
from radixkv_server.apis.common.media import TEXT_ONLY, WithImages
from radixkv_server.chats.breakpoints import Breakpoint, CacheControl, check_breakpoints
from radixkv_server.chats.chat import ReasoningPlace
from radixkv_server.errors import bad_request
from radixkv_server.generation.request import new_id
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel, as_data
from radixkv_server.http.fields import EmptyCounts, Refused, WithoutEffect, asks_for_nothing

# --------------------------------------------------------------------- reasoning
#
# `reasoning_effort` is OpenAI's, `reasoning` and `include_reasoning` OpenRouter's (vLLM takes these, too),
# `thinking` Anthropic's, DeepSeek's and LiteLLM's, `enable_thinking` and `thinking_budget` Qwen's,
# `separate_reasoning` SGLang's.

Budget = Annotated[int, Field(ge=0)]


class ThinkingSetting(StrictModel):
    """Anthropic's form: on, off, or the template's default."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None


class ReasoningSetting(StrictModel):
    """OpenRouter's form."""

    effort: str | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None
    enabled: bool | None = None
    summary: Annotated[Any, WithoutEffect("reasoning is given in full", usual=("auto",))] = None


class ReasoningFields(StrictModel):
    """Fields of reasoning: effort, budget, and the place of its text."""

    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: (
        Annotated[
            Annotated[bool, Tag("[switch]")] | Annotated[ThinkingSetting, Tag("[setting]")],
            Discriminator(lambda value: "[switch]" if isinstance(value, bool) else "[setting]"),
        ]
        | None
    ) = None
    thinking_budget: Budget | None = None
    reasoning: Annotated[ReasoningSetting, EmptyCounts] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    @model_validator(mode="after")
    def _one_wish(self) -> ReasoningFields:
        effort = self._effort
        effort_of_reasoning = None if self.reasoning is None else self.reasoning.effort
        for name, values in (
            ("enable_thinking", {value for _, value in self._switches}),
            ("reasoning_effort", {self.reasoning_effort, effort_of_reasoning} - {None}),
        ):
            if len(values) > 1:
                raise ParamError(f"{name}: the fields about thinking contradict each other.", name)
        if effort is not None and any(value is (effort == "none") for _, value in self._switches):
            raise ParamError(
                f"reasoning_effort {effort[:40]!r} and {self._switches[0][0]} contradict each other.",
                "reasoning_effort",
            )
        if self.separate_reasoning is False and self.reasoning_place == "hidden":
            raise ParamError(
                "separate_reasoning false keeps the reasoning in the content, and include_reasoning false "
                "leaves it out: give one of them.",
                "separate_reasoning",
            )
        return self

    @property
    def _effort(self) -> str | None:
        return self.reasoning_effort or (None if self.reasoning is None else self.reasoning.effort)

    @property
    def _switches(self) -> list[tuple[str, bool]]:
        """Fields that turn thinking on or off, and their values."""
        setting = self.thinking
        if isinstance(setting, ThinkingSetting):
            setting = {"enabled": True, "disabled": False}.get(setting.type)
        given = {
            "enable_thinking": self.enable_thinking,
            "thinking": setting,
            "reasoning": None if self.reasoning is None else self.reasoning.enabled,
        }
        return [(name, value) for name, value in given.items() if value is not None]

    @property
    def wanted_thinking(self) -> Thinking:
        """Settings of thinking, independent of APIs."""
        setting, budget = self.thinking, self.thinking_budget
        if budget is None and isinstance(setting, ThinkingSetting):
            budget = setting.budget_tokens
        if budget is None and self.reasoning is not None:
            budget = self.reasoning.max_tokens
        enabled = self._switches[0][1] if self._switches else None
        return Thinking(enabled, self._effort, budget)

    @property
    def reasoning_place(self) -> ReasoningPlace:
        """Place of the reasoning in the answer."""
        if self.include_reasoning is False or (self.reasoning is not None and self.reasoning.exclude):
            return "hidden"
        return "in_content" if self.separate_reasoning is False else "apart"


# --------------------------------------------------------------------- grammars
#
# `response_format` is OpenAI's, `structured_outputs` vLLM's, the `guided_` fields are vLLM's older names;
# `regex`, `ebnf` and `json_schema` are SGLang's, `json_schema` and `grammar` llama.cpp's.

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_PLAIN = {"regex": "regex", "json_schema": "json", "ebnf": "ebnf", "grammar": "ebnf"}


class ResponseFormat(StrictModel):
    type: str
    json_schema: SchemaFields | None = None

    def grammar(self) -> StructuredOutputs | None:
        schema = None if self.json_schema is None else self.json_schema.given()
        return format_grammar({"type": self.type}, schema, "response_format")


class GrammarFields(StrictModel):
    """Fields of grammars: a client may give one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Annotated[Any, WithoutEffect("there is one")] = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar_: Annotated[str | None, Field(alias="grammar")] = None

    @functools.cached_property
    def wanted_grammar(self) -> tuple[StructuredOutputs, str] | None:
        """Return the constraint on the answer and the name of its field, or None without one.

        Raises:
            ApiError: a bad grammar, or several.
        """
        found: list[tuple[StructuredOutputs, str]] = []
        if self.response_format is not None and (wanted := self.response_format.grammar()) is not None:
            found.append((wanted, "response_format"))
        if not asks_for_nothing(self.structured_outputs):
            assert self.structured_outputs is not None
            found.append((grammar_of(self.structured_outputs, "structured_outputs"), "structured_outputs"))
        more = {"whitespace_pattern": self.guided_whitespace_pattern}
        for name, kind in _GUIDED.items():
            if getattr(self, name) is not None:
                found.append((grammar_of({kind: getattr(self, name), **more}, name), name))
        plain = {"regex": self.regex, "json_schema": self.json_schema, "ebnf": self.ebnf}
        # llama.cpp's own page sends an empty grammar where it wants none.
        for name, value in {**plain, "grammar": self.grammar_ or None}.items():
            if value is not None:
                found.append((grammar_of({_PLAIN[name]: value}, name), name))
        if len(found) > 1:
            names = " and ".join(name for _, name in found)
            raise bad_request(f"{names} exclude each other: an answer has one grammar.", param=found[1][1])
        return found[0] if found else None


# --------------------------------------------------------------------- bodies


class TokenDetailFields(StrictModel):
    """vLLM's fields of chat and text completions."""

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None

    @model_validator(mode="after")
    def _few_prompt_logprobs(self) -> TokenDetailFields:
        check_logprobs(self.prompt_logprobs, "prompt_logprobs")
        return self


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


class ChatFields(WithImages, ChatTemplateFields):
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
