"""The body of POST /v1/responses: a pydantic model of the request, checked strictly.

How a field is declared to work, to change nothing, or to be refused: see `radixkv_server.http.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from radixkv.sampling.structured import StructuredOutputs
from radixkv_server.apis.common.chat_completion import MAX_TOOLS
from radixkv_server.apis.common.fields import (
    AnyToolChoice,
    CacheFields,
    ChatTemplateFields,
    ForOpenAI,
    IncludeObfuscation,
    PrewarmFields,
    SamplingFields,
    ServiceTier,
    Verbosity,
    check_logprobs,
    check_stream_options,
)
from radixkv_server.apis.common.grammars import SchemaFields
from radixkv_server.apis.common.media import TEXT_ONLY
from radixkv_server.apis.responses.items import InputItem
from radixkv_server.apis.responses.tools import AnyTool
from radixkv_server.chats.structured import format_grammar
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel
from radixkv_server.http.fields import Refused, WithoutEffect

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# What else may be asked for belongs to tools that run at OpenAI.
_INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        ENCRYPTED_REASONING,
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)


class TextFormat(SchemaFields):
    type: str

    def grammar(self) -> StructuredOutputs | None:
        """What the text must look like; None: anything."""
        return format_grammar({"type": self.type}, self.given(), "text.format")

    def plain(self) -> dict[str, Any]:
        """As it is told in the response."""
        return {"type": self.type, **self.given()}


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: Verbosity = None


_InFull = Annotated[Any, WithoutEffect("reasoning is given in full", usual=("auto",))]


class Reasoning(StrictModel):
    effort: str | None = None
    summary: _InFull = None
    generate_summary: _InFull = None
    context: Annotated[Any, WithoutEffect("the template decides", usual=("auto",))] = None
    mode: Annotated[Any, WithoutEffect("the model has one", usual=("standard",))] = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: IncludeObfuscation = None


#: Input items of one response; the conversation before comes on top.
MAX_INPUT_ITEMS = 8192


class ConversationFields(StrictModel):
    """What says which conversation a body is about."""

    input: Annotated[Annotated[list[InputItem], FAIL_FAST] | str, TEXT_ONLY] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[Any, Refused("a stored conversation (use previous_response_id)")] = None

    @field_validator("input", mode="before")
    @classmethod
    def _input_shape(cls, value: Any) -> Any:
        # By hand: a union reports the errors of the branch that the client did not mean.
        if value is not None and not isinstance(value, str | list):
            raise ParamError("input must be a string or a list of items.", "input", "invalid_type")
        if value in ("", []):
            raise ParamError("input must not be empty.", "input")
        if isinstance(value, list) and len(value) > MAX_INPUT_ITEMS:
            # Before they are looked at one by one, which nobody else is served meanwhile.
            raise ParamError(f"input may have at most {MAX_INPUT_ITEMS} items.", "input")
        return value

    @model_validator(mode="after")
    def _some_input(self) -> ConversationFields:
        if self.input is None and self.previous_response_id is None:
            raise ParamError(
                "Missing required parameter: 'input'.", "input", code="missing_required_parameter"
            )
        return self


class ResponsePromptFields(ConversationFields, ChatTemplateFields):
    """What decides the prompt of a response."""

    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None


class InputTokensRequest(ResponsePromptFields):
    """Body of POST /v1/responses/input_tokens."""

    model: str | None = None
    personality: Annotated[Any, Refused("a personality (say it in the instructions)")] = None


class CompactRequest(ConversationFields, CacheFields):
    """Body of POST /v1/responses/compact."""

    model: str | None = None
    cache_salt: str | None = None
    image: Annotated[Any, Refused("image input")] = None
    service_tier: ServiceTier = None

    @model_validator(mode="after")
    def _with_a_summary(self) -> CompactRequest:
        if self.prompt_cache_options is not None and self.prompt_cache_options.prewarm:
            raise ParamError(
                "a compaction is an answer: it can't be prewarmed.", "prompt_cache_options.prewarm"
            )
        return self


class ResponseRequest(ResponsePromptFields, PrewarmFields, SamplingFields):
    """Body of POST /v1/responses."""

    store: bool | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    background: Annotated[Any, Refused("answering in the background (stream the answer instead)")] = None
    stream_options: ResponseStreamOptions | None = None
    access_programs: Annotated[Any, Refused()] = None
    context_management: Annotated[Any, Refused("compaction (leave out old items yourself)")] = None
    image: Annotated[Any, Refused("image input")] = None
    moderation: Annotated[Any, Refused("moderation")] = None
    prompt: Annotated[Any, Refused("a stored prompt template (send input and instructions)")] = None
    max_tool_calls: Annotated[Any, WithoutEffect("this server runs no tools itself")] = None
    safety_identifier: ForOpenAI = None
    service_tier: ServiceTier = None
    client_metadata: Annotated[Any, WithoutEffect("only says who asks")] = None

    @field_validator("metadata")
    @classmethod
    def _small_metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value is not None and len(value) > MAX_METADATA:
            raise ValueError(f"at most {MAX_METADATA} pairs are allowed, not {len(value)}.")
        for key, text in (value or {}).items():
            if len(key) > MAX_METADATA_KEY or len(text) > MAX_METADATA_VALUE:
                raise ValueError(
                    f"keys have at most {MAX_METADATA_KEY} characters and values {MAX_METADATA_VALUE}; "
                    f"{key[:MAX_METADATA_KEY]!r} has more."
                )
        return value

    @field_validator("include")
    @classmethod
    def _known_includes(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in _INCLUDABLE:
                raise ValueError(f"{name[:80]!r} is none of {', '.join(sorted(_INCLUDABLE))}.")
        return value

    @model_validator(mode="after")
    def _only_what_works(self) -> ResponseRequest:
        check_stream_options(self, self.stream_options)
        check_logprobs(self.top_logprobs, "top_logprobs")
        return self

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())
