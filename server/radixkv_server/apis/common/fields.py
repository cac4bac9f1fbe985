# SPDX-License-Identifier: Apache-2.0
"""Fields shared by OpenAI's routes (chat and text completions, responses), and their checks.

How a field is declared to work, to change nothing, or to be refused: see `radixkv_server.http.fields`.

Unions are told apart by discriminators: the `type` of objects, and texts or lists of parts. A plain union
would report the errors of the branch that the client did not mean. The tags of branches are in brackets, and
left out of the field names in error messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from radixkv.errors import InvalidRequestError
from radixkv.sampling.sampling_params import MAX_BAD_WORDS, MAX_STOP_STRINGS
from radixkv_server.apis.common.agent_hints import Nvext, SessionId, SessionParams
from radixkv_server.errors import bad_request
from radixkv_server.generation.request import cache_options
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel
from radixkv_server.http.fields import Refused, WithoutEffect


@dataclass(frozen=True, slots=True)
class ByType:
    """Marker of a model or a union of models, each with one or more literal values of `type`.

    Args:
        what: noun for the object in the message about a missing type.
        refusal: makes the message about an unknown type from it and the known types.
        code: error code for an unknown type.
        untyped: finds the type of an object without one; None: the type is required.
    """

    what: str
    refusal: Callable[[str, str], str]
    code: str = "unsupported_content"
    untyped: Callable[[dict[str, Any]], str | None] = lambda value: None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = [source] if isinstance(source, type) else list(get_args(source))
        choices = {
            f"[{kind}]": handler.generate_schema(model) for model in members for kind in kinds_of(model)
        }
        known = ", ".join(tag[1:-1] for tag in choices)

        def check(value: Any) -> Any:
            kind = self._kind(value)
            if not isinstance(kind, str):
                raise ParamError(f"{self.what} must be an object with a type.", code="invalid_type")
            if f"[{kind}]" not in choices:
                raise ParamError(self.refusal(kind[:40], known), code=self.code)
            return value

        union = core_schema.tagged_union_schema(choices, lambda value: f"[{self._kind(value)}]")
        return core_schema.no_info_before_validator_function(check, union)

    def _kind(self, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return self.untyped(value) if kind is None and isinstance(value, dict) else kind


def kinds_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the types of a model's objects: its `KINDS`, or the literals of its `type`."""
    known: tuple[str, ...] | None = getattr(model, "KINDS", None)
    return known or tuple(_literals(model.model_fields["type"].annotation))


def _literals(annotation: Any) -> Iterator[str]:
    for part in get_args(annotation):
        if isinstance(part, str):
            yield part
        else:
            yield from _literals(part)


class _TextOrList:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        (parts,) = (kind for kind in get_args(source) if kind is not str)
        choices = {"[text]": handler.generate_schema(str), "[parts]": handler.generate_schema(parts)}
        return core_schema.tagged_union_schema(
            choices, lambda value: "[text]" if isinstance(value, str) else "[parts]"
        )


#: Marks `str | list[...]`.
TEXT_OR_LIST = _TextOrList()


MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_CACHE_KEY = 1024
PRIORITY_LIMIT = 2**31
MAX_TOOLS = 1024

# Arguments of the template call itself: a client that sets one would change the type of its result.
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
DEFAULT_TTL = "30m"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

# Accepted without effect: the server does not use it to tell clients apart.
ForOpenAI = Annotated[Any, WithoutEffect("only says who asks")]
ServiceTier = Annotated[Any, WithoutEffect("there is one tier", usual=("auto", "default"))]
Verbosity = Annotated[Any, WithoutEffect("a hint that no model served here knows", usual=("medium",))]
Asynchronous = Annotated[Any, Refused("calling in the background"), Field(alias="async")]
Caller = Annotated[Any, WithoutEffect("the model is the only caller", usual=({"type": "direct"},))]
IncludeObfuscation = Annotated[Any, WithoutEffect("a stream's events have no padding")]


class EngineOptions(StrictModel):
    """Options without a field in any API.

    Attributes:
        session_done: this is the last request of its session: what only it has cached is evicted first.
    """

    session_done: bool | None = None


class RequestFields(StrictModel):
    """Fields common to all generation routes."""

    model: str | None = None
    stream: bool | None = None
    # Beyond the dialects.
    priority: int | None = None
    cache_salt: str | None = None
    radixkv: EngineOptions | None = None
    # Other servers' words for it: see `agent_hints`.
    nvext: Nvext | None = None
    session_id: SessionId | None = None
    session_params: SessionParams | None = None

    @field_validator("priority")
    @classmethod
    def _small_priority(cls, value: int | None) -> int | None:
        if value is not None and not -PRIORITY_LIMIT <= value < PRIORITY_LIMIT:
            raise ValueError("priority must be a 32-bit signed integer.")
        return value

    @property
    def ends_session(self) -> bool:
        """True if no later request continues this one."""
        of_nvext = self.nvext and self.nvext.agent_context
        return bool((self.radixkv and self.radixkv.session_done) or (of_nvext and of_nvext.session_final))

    @property
    def session(self) -> str:
        """Name of the session that it belongs to; empty: none."""
        of_nvext = self.nvext and self.nvext.agent_context and self.nvext.agent_context.session_id
        of_sglang = self.session_params and self.session_params.id
        return self.session_id or of_sglang or of_nvext or ""

    @property
    def pin_s(self) -> float | None:
        """Seconds for which `nvext` has the prompt pinned; None: it does not."""
        return None if self.nvext is None else self.nvext.pin_s

    @property
    def cache_key_hint(self) -> str:
        """Key shared by related requests; empty: none."""
        return ""

    @property
    def _engine_priority(self) -> int:
        if self.priority is not None:
            return self.priority
        return (self.nvext and self.nvext.priority) or 0

    def request_options(self) -> dict[str, Any]:
        """Return the arguments of the engine's Request for cache, priority and session.

        Raises:
            ApiError: 400; the salt is malformed.
        """
        return {
            **cache_options(self.cache_salt, self.cache_key_hint),
            "priority": self._engine_priority,
            "session_done": self.ends_session,
        }


class SamplingFields(RequestFields):
    """Fields of sampling."""

    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    user: ForOpenAI = None
    # Beyond OpenAI.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS), FAIL_FAST] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS), FAIL_FAST] | None = None
    allowed_token_ids: Annotated[list[int], FAIL_FAST] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

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

    def sampling_options(self) -> dict[str, Any]:
        """Return the given fields that SamplingParams takes unchanged."""
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
        if self.bad_words:
            options["bad_words"] = tuple(self.bad_words)
        if self.allowed_token_ids is not None:
            options["allowed_token_ids"] = self.allowed_token_ids
        if self.logit_bias:
            options["logit_bias"] = parse_logit_bias(self.logit_bias)
        return options


def _tool_name(name: str) -> str:
    if not _TOOL_NAME.fullmatch(name):
        raise ValueError(f"a function's name must be 1 to 64 letters, digits, _ or -, not {name[:80]!r}.")
    return name


_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

#: OpenAI's rule for the names of functions that are offered.
ToolName = Annotated[str, AfterValidator(_tool_name)]


def parse_logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Convert JSON's string keys to token ids.

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


def check_stream_options(body: SamplingFields, options: object) -> None:
    """Raise ParamError for stream options without a stream."""
    if options is not None and not body.stream:
        raise ParamError("stream_options is only allowed when stream is true.", "stream_options")


def check_logprobs(value: int | None, param: str) -> None:
    """Raise ParamError if the number of alternatives is out of range."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise ParamError(f"{param} must be from 0 to {MAX_LOGPROBS}.", param)


class _Named(StrictModel):
    name: Any = None


class _Choosable(StrictModel):
    type: Any = None
    name: Any = None
    function: _Named | None = None
    custom: _Named | None = None
    server_label: Annotated[Any, Refused("calling MCP servers")] = None


class _Choosables(StrictModel):
    mode: Any = None
    tools: list[_Choosable] | None = None


class ToolChoice(_Choosable, _Choosables):
    """Choice of the tools that an answer may call, in the form of chats or responses."""

    allowed_tools: _Choosables | None = None

    def given(self) -> dict[str, Any]:
        """Return the choice as plain data, in the client's form."""
        return self.model_dump(exclude_unset=True)


AnyToolChoice = Annotated[
    Annotated[str, Tag("[name]")] | Annotated[ToolChoice, Tag("[choice]")],
    Discriminator(lambda value: "[name]" if isinstance(value, str) else "[choice]"),
]


def plain_choice(given: str | ToolChoice | None) -> str | dict[str, Any] | None:
    """Return a body's `tool_choice` as plain data."""
    return given.given() if isinstance(given, ToolChoice) else given


class PromptCacheOptions(StrictModel):
    """Breakpoints that a request writes, and their TTL; see `apis.common.chat_messages`.

    Args:
        prewarm: compute the prompt, for the cache, and generate nothing.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None

    def echoed(self) -> dict[str, Any]:
        """Return the options in the form that a response repeats."""
        return {
            "mode": self.mode or "implicit",
            "ttl": self.ttl or DEFAULT_TTL,
            "comparison_response_id": self.comparison_response_id,
        }


def kept_s(name: str | None) -> float | None:
    """Convert OpenAI's name of a retention time to seconds; None: no time."""
    return None if name is None else _KEPT_S.get(name)


class CacheFields(StrictModel):
    """Fields of the prefix cache: retention of the prompt, and the key of related prompts."""

    prompt_cache_key: Annotated[str, Field(max_length=MAX_CACHE_KEY)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def cache_key_hint(self) -> str:
        return self.prompt_cache_key or ""

    @model_validator(mode="after")
    def _one_lifetime(self) -> CacheFields:
        options = self.prompt_cache_options
        if self.prompt_cache_retention is not None and options is not None and options.ttl is not None:
            raise ParamError(
                "prompt_cache_retention and prompt_cache_options.ttl exclude each other: leave one out.",
                "prompt_cache_retention",
            )
        return self

    @property
    def is_explicit(self) -> bool:
        """True if only the parts up to breakpoints stay cached."""
        return self.prompt_cache_options is not None and self.prompt_cache_options.mode == "explicit"

    @property
    def compared_with(self) -> str | None:
        """Id of the earlier request to compare with."""
        options = self.prompt_cache_options
        return None if options is None else options.comparison_response_id

    @property
    def pinned_s(self) -> float | None:
        """Return the seconds to pin the whole prompt after each use; None: no pin.

        The implicit breakpoint: there is one where anything is said of breakpoints.
        """
        options = self.prompt_cache_options
        if options is None or not (options.mode or options.ttl or options.prewarm):
            return kept_s(self.prompt_cache_retention)
        return None if self.is_explicit else self.breakpoint_s()

    def breakpoint_s(self, ttl: str | None = None) -> float:
        """Return the seconds to pin a breakpoint, by its own time or the default."""
        options = self.prompt_cache_options
        given = ttl or self.prompt_cache_retention or (options.ttl if options is not None else None)
        return kept_s(given) or kept_s(DEFAULT_TTL) or 0.0


class PrewarmFields(CacheFields):
    """Fields of the prefix cache for generation routes."""

    generate: bool | None = None

    @property
    def prewarms(self) -> bool:
        """True if the request only fills the cache and generates nothing."""
        options = self.prompt_cache_options
        return self.generate is False or bool(options is not None and options.prewarm)


class ChatTemplateFields(StrictModel):
    """Fields beyond OpenAI's: another template, and its variables."""

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_kwargs(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or ():
            if name in RESERVED_TEMPLATE_KWARGS or not _IDENTIFIER.fullmatch(name):
                raise ValueError(f"{name[:100]!r} can't be set through chat_template_kwargs.")
        return value

    def template_options(self, *, trusted: bool) -> dict[str, Any]:
        """Return the arguments of the chat template, and the template itself if the request has one.

        Args:
            trusted: requests may bring templates.

        Raises:
            ApiError: 400; the request brings one, and may not.
        """
        options = dict(self.chat_template_kwargs or {})
        if self.chat_template is not None:
            if not trusted:
                message = "chat_template in a request is not allowed on this server."
                raise bad_request(message, param="chat_template", code="unsupported_parameter")
            options["chat_template"] = self.chat_template
        return options
