# SPDX-License-Identifier: Apache-2.0
"""Bodies of the Responses and Conversations APIs: pydantic models, checked strictly.

See `radixkv_server.http.fields` for fields without effect and refused ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from radixkv_server.apis.common.fields import (
    MAX_TOOLS,
    AnyToolChoice,
    CacheFields,
    ChatTemplateFields,
    ForOpenAI,
    IncludeObfuscation,
    PrewarmFields,
    SamplingFields,
    ServiceTier,
    check_logprobs,
    check_stream_options,
)
from radixkv_server.apis.common.media import TEXT_ONLY, WithImages
from radixkv_server.apis.responses.configuration import ConfigurationFields
from radixkv_server.apis.responses.items import InputItem
from radixkv_server.apis.responses.tools import AnyTool
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel
from radixkv_server.http.fields import Refused, WithoutEffect

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# The others belong to tools that run at OpenAI.
INCLUDABLE = frozenset(
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


def _small_metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > MAX_METADATA:
        raise ValueError(f"at most {MAX_METADATA} pairs are allowed, not {len(value)}.")
    for key, text in value.items():
        if len(key) > MAX_METADATA_KEY or len(text) > MAX_METADATA_VALUE:
            raise ValueError(
                f"keys have at most {MAX_METADATA_KEY} characters and values {MAX_METADATA_VALUE}; "
                f"{key[:MAX_METADATA_KEY]!r} has more."
            )
    return value


Metadata = Annotated[dict[str, str], AfterValidator(_small_metadata)]


class ResponseStreamOptions(StrictModel):
    include_obfuscation: IncludeObfuscation = None


#: Most input items of one response, without the conversation before, and most items of a conversation.
MAX_INPUT_ITEMS = 8192
#: Most items that one request adds to a conversation.
MAX_ADDED_ITEMS = 20


class ConversationReference(StrictModel):
    id: str


AnyConversation = Annotated[
    ConversationReference,
    BeforeValidator(
        lambda value: {"id": value} if isinstance(value, str) else value,
        json_schema_input_type=str | ConversationReference,
    ),
]


class ConversationFields(WithImages):
    """The fields that name the conversation of a body."""

    input: Annotated[Annotated[list[InputItem], FAIL_FAST] | str, TEXT_ONLY] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: AnyConversation | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _input_shape(cls, value: Any) -> Any:
        # By hand: a union reports the errors of the branch that the client did not mean.
        if value is not None and not isinstance(value, str | list):
            raise ParamError("input must be a string or a list of items.", "input", "invalid_type")
        if value in ("", []):
            raise ParamError("input must not be empty.", "input")
        if isinstance(value, list) and len(value) > MAX_INPUT_ITEMS:
            # Before the items are checked one by one, which blocks all other requests.
            raise ParamError(f"input may have at most {MAX_INPUT_ITEMS} items.", "input")
        return value

    @property
    def conversation_id(self) -> str | None:
        """The stored conversation that the body continues."""
        return None if self.conversation is None else self.conversation.id

    @model_validator(mode="after")
    def _some_input(self) -> ConversationFields:
        if self.conversation is not None and self.previous_response_id is not None:
            raise ParamError(
                "conversation and previous_response_id exclude each other: send one of them.",
                "conversation",
                code="mutually_exclusive_parameters",
            )
        if self.input is None and self.previous_response_id is None and self.conversation is None:
            raise ParamError(
                "Missing required parameter: 'input'.", "input", code="missing_required_parameter"
            )
        return self


class ResponsePromptFields(ConversationFields, ConfigurationFields, ChatTemplateFields):
    """The fields that decide the prompt of a response."""

    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ConversationRequest(StrictModel):
    """Body of POST /v1/conversations."""

    items: Annotated[list[InputItem], Field(max_length=MAX_ADDED_ITEMS), FAIL_FAST] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(StrictModel):
    """Body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None


class ConversationItems(StrictModel):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ADDED_ITEMS), FAIL_FAST]


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
    metadata: Metadata | None = None
    background: bool | None = None
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

    @field_validator("include")
    @classmethod
    def _known_includes(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in INCLUDABLE:
                raise ValueError(f"{name[:80]!r} is none of {', '.join(sorted(INCLUDABLE))}.")
        return value

    @model_validator(mode="after")
    def _only_what_works(self) -> ResponseRequest:
        check_stream_options(self, self.stream_options)
        check_logprobs(self.top_logprobs, "top_logprobs")
        if self.background and self.store is False:
            raise ParamError(
                "a background response is stored, so that it can be retrieved: leave store out.",
                "store",
            )
        return self

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())
