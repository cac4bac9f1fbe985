"""The bodies of the OpenAI routes: pydantic models of the requests, checked strictly.

Three kinds of fields: those that work; documented OpenAI fields that change nothing here and are
accepted (NO-OP below); and those that would change the meaning of the answer if they were ignored, which
are refused with a 400 unless they hold a value that asks for what happens anyway. Fields that are none of
these are refused as unknown, as OpenAI does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from radixkv.errors import InvalidRequestError
from radixkv.request import MAX_STOP_STRINGS
from radixkv_server.apis.openai.grammars import GrammarFields
from radixkv_server.apis.openai.messages import ChatMessage, breakpoints_in
from radixkv_server.breakpoints import CacheControl, Place, check_breakpoints
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel, as_data

MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TOOLS = 1024
MAX_LOGPROBS = 20
MAX_CACHE_KEY = 1024
PRIORITY_LIMIT = 2**31

# Arguments of the template call itself: a client that sets one would change what the server gets back.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "conversation",
        "continue_final_message",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "template",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_KEPT_S = {"30m": 1800.0, "12h": 43200.0, "24h": 86400.0}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

NoOp = Any


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: NoOp = None


class SamplingFields(StrictModel):
    """What every route that generates takes: from which model, and how its tokens are chosen."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    user: NoOp = None
    # Beyond OpenAI.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS), FAIL_FAST] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _few_stops(cls, value: Any) -> Any:
        # Checked here so that the message is about the count and not about every branch of the union.
        if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, not {len(value)}.")
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ValueError("stop must be a string or a list of strings.")
        return value

    @field_validator("priority")
    @classmethod
    def _small_priority(cls, value: int | None) -> int | None:
        if value is not None and not -PRIORITY_LIMIT <= value < PRIORITY_LIMIT:
            raise ValueError("priority must be a 32-bit signed integer.")
        return value

    def sampling_options(self) -> dict[str, Any]:
        """The fields that go to SamplingParams as they are, where the client gave them."""
        names = (
            "temperature",
            "top_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "top_k",
            "min_p",
            "min_tokens",
            "repetition_penalty",
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
        )
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.stop is not None:
            options["stop"] = self.stop if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            options["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias:
            options["logit_bias"] = parse_logit_bias(self.logit_bias)
        return options


class PromptCacheOptions(StrictModel):
    """`mode` and breakpoints change nothing: every prefix is found, wherever it ends."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None

    @model_validator(mode="after")
    def _only_what_works(self) -> PromptCacheOptions:
        if self.prewarm:
            raise unsupported("prompt_cache_options.prewarm", "a request without an answer (max 1 token)")
        if self.comparison_response_id is not None:
            name = "prompt_cache_options.comparison_response_id"
            raise unsupported(name, "comparing (usage says as cache_miss why tokens were not cached)")
        return self


class CacheFields(StrictModel):
    """How long a prompt is to stay in the prefix cache, and which prompts belong together."""

    prompt_cache_key: Annotated[str, Field(max_length=MAX_CACHE_KEY)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def kept_s(self) -> float | None:
        """Seconds for which the prompt is to be pinned, after each use; None: not at all."""
        options = self.prompt_cache_options
        names = (self.prompt_cache_retention, options.ttl if options is not None else None)
        return max((_KEPT_S[name] for name in names if name in _KEPT_S), default=None)


class CommonFields(GrammarFields, SamplingFields):
    """What chat and text completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> CommonFields:
        if self.stream_options is not None and not self.stream:
            raise ParamError("stream_options is only allowed when stream is true.", "stream_options")
        return self

    @property
    def wants_stream_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_options(self) -> dict[str, Any]:
        options = super().sampling_options()
        return options if self.n is None else {**options, "n": self.n}


def parse_logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """JSON's string keys as token ids.

    Raises:
        InvalidRequestError: a key is not a token id.
    """
    parsed = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 18:
            message = f"logit_bias maps token ids to numbers; {key[:40]!r} is not a token id"
            raise InvalidRequestError(message, param="logit_bias")
        parsed[int(key)] = value
    return parsed


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


class TemplateFields(StrictModel):
    """The fields that decide how a chat becomes a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FAIL_FAST]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

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

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_kwargs(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        check_template_kwargs(value or {})
        return value

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
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise ParamError(f"top_logprobs must be from 0 to {MAX_LOGPROBS}.", "top_logprobs")
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
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ParamError(f"logprobs must be from 0 to {MAX_LOGPROBS}.", "logprobs")
        samples = self.best_of
        if self.stream and samples is not None and samples > (self.n or 1):
            raise ParamError("a best_of above n can't be streamed.", "best_of")
        if self.stream and self.echo and self.logprobs is not None:
            raise ParamError("echo with logprobs can't be streamed.", "stream")
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


def check_template_kwargs(names: Iterable[str]) -> None:
    """Raise ValueError for a name that is no template's variable, but an argument of the call around it."""
    for name in names:
        if name in RESERVED_TEMPLATE_KWARGS or not _IDENTIFIER.fullmatch(name):
            raise ValueError(f"{name[:100]!r} can't be set through chat_template_kwargs.")


def unsupported(param: str, what: str) -> ParamError:
    """A field that can't be ignored without changing what the answer means."""
    return ParamError(f"{param}: {what} is not supported by this server.", param, "unsupported_parameter")


def _all_ints(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)
