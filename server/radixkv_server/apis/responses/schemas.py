"""The body of POST /v1/responses: a pydantic model of the request, checked strictly.

As in the other OpenAI routes, a field works, or it is a documented one that changes nothing here (NoOp), or
it is refused by name because ignoring it would change what the answer means.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from radixkv.structured import StructuredOutputs
from radixkv_server.apis.openai.fields import (
    CacheFields,
    ChatTemplateFields,
    NoOp,
    SamplingFields,
    check_logprobs,
    check_stream_options,
)
from radixkv_server.apis.openai.schemas import MAX_TOOLS
from radixkv_server.apis.responses.items import InputItem
from radixkv_server.chat.structured import format_grammar
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel, unsupported

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

LOGPROBS = "message.output_text.logprobs"
# What else may be asked for belongs to tools that run at OpenAI, but for the encrypted reasoning: here an
# answer's reasoning is its item's content, in plain.
_INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)

_REFUSED = {
    "access_programs": "this field",
    "context_management": "compaction (leave out old items yourself)",
    "conversation": "a stored conversation (use previous_response_id)",
    "image": "image input",
    "moderation": "moderation",
    "prompt": "a stored prompt template (send input and instructions)",
}


class FunctionTool(BaseModel):
    """A function that the client runs."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)] = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_function(self) -> FunctionTool:
        if self.type != "function":
            raise ParamError(
                f"tools of type {self.type[:40]!r} are not supported: this server runs no tools itself; give "
                "functions, which your program runs.",
                code="unsupported_parameter",
            )
        if not self.name:
            raise ParamError("a function needs its name.", code="missing_required_parameter")
        return self


class TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str

    def grammar(self) -> StructuredOutputs | None:
        """What the text must look like; None: anything."""
        return format_grammar({"type": self.type}, self.model_extra or {}, "text.format")

    def plain(self) -> dict[str, Any]:
        """As it is told in the response."""
        return {"type": self.type, **(self.model_extra or {})}


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(StrictModel):
    effort: str | None = None
    summary: NoOp = None
    generate_summary: NoOp = None
    context: NoOp = None
    mode: NoOp = None


class StreamOptions(StrictModel):
    include_obfuscation: NoOp = None


#: Input items of one response; the conversation before comes on top.
MAX_INPUT_ITEMS = 8192


class ResponseRequest(ChatTemplateFields, CacheFields, SamplingFields):
    """Body of POST /v1/responses."""

    input: Annotated[list[InputItem], Field(min_length=1), FAIL_FAST] | str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    stream_options: StreamOptions | None = None
    access_programs: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    max_tool_calls: NoOp = None
    safety_identifier: NoOp = None
    service_tier: NoOp = None

    @field_validator("input", mode="before")
    @classmethod
    def _input_shape(cls, value: Any) -> Any:
        # By hand: a union reports the errors of the branch that the client did not mean.
        if value is not None and not isinstance(value, str | list):
            raise ParamError("input must be a string or a list of items.", "input", "invalid_type")
        if value == "":
            raise ParamError("input must not be empty.", "input")
        if isinstance(value, list) and len(value) > MAX_INPUT_ITEMS:
            # Before they are looked at one by one, which nobody else is served meanwhile.
            raise ParamError(f"input may have at most {MAX_INPUT_ITEMS} items.", "input")
        return value

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
        if self.input is None and self.previous_response_id is None:
            raise ParamError(
                "Missing required parameter: 'input'.", "input", code="missing_required_parameter"
            )
        for name, what in _REFUSED.items():
            if getattr(self, name) is not None:
                raise unsupported(name, what)
        if self.background:
            raise unsupported("background", "answering in the background (stream the answer instead)")
        if self.truncation == "auto":
            raise unsupported("truncation", "'auto' (leave out old items yourself, and see usage)")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise unsupported("text.verbosity", "anything but 'medium'")
        check_stream_options(self, self.stream_options)
        check_logprobs(self.top_logprobs, "top_logprobs")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())
