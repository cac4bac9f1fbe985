# SPDX-License-Identifier: Apache-2.0
"""Content blocks of messages in this API, in the forms that clients may send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from radixkv_server.apis.anthropic.tools import AnyTool
from radixkv_server.apis.common.fields import TEXT_OR_LIST, ByType
from radixkv_server.apis.common.returned_text import result_text
from radixkv_server.chats.breakpoints import CacheControl
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel
from radixkv_server.http.fields import NoOp, Refused, WithoutEffect

Effort = Literal["low", "medium", "high", "xhigh", "max"]


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: NoOp = None

    @model_validator(mode="after")
    def _something_to_keep(self) -> TextBlock:
        if self.cache_control is not None and not self.text:
            raise ParamError("cache_control can't be set on an empty text block.")
        return self


class ThinkingBlock(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(StrictModel):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: NoOp = None
    toolset_name: NoOp = None


class ServerToolUseBlock(StrictModel):
    """A call that ran at a provider."""

    type: Literal["server_tool_use", "mcp_tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]
    server_name: Annotated[Any, WithoutEffect("the name of the tool is shown")] = None
    cache_control: CacheControl | None = None
    caller: NoOp = None


class ServerToolResultBlock(StrictModel):
    """The result of such a call."""

    type: Literal[
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_result",
    ]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: Any = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    caller: NoOp = None

    @property
    def text(self) -> str:
        """Text of the result for the model."""
        text = "" if self.content is None else result_text(self.content)
        return f"Error: {text}" if self.is_error else text


_BLOCK = ByType(
    "a content block",
    lambda kind, known: (
        f"content blocks of type {kind!r} are not supported here (only {known}): this server takes text, and "
        "fetches nothing."
    ),
)
_CHANGE = ByType(
    "the tool of a change",
    lambda kind, known: f"changes of tools by {kind!r} are not supported here, only {known}.",
)

Text = Annotated[TextBlock, _BLOCK]
Texts = Annotated[str | Annotated[list[Text], FAIL_FAST], TEXT_OR_LIST]


def text_of(texts: str | list[Any]) -> str:
    """Return a text, or texts joined by line breaks."""
    return texts if isinstance(texts, str) else "\n".join(block.text for block in texts)


class PlainTextSource(StrictModel):
    type: Literal["text"]
    data: str
    media_type: Literal["text/plain"] | None = None


class ContentSource(StrictModel):
    type: Literal["content"]
    content: Texts


_Citations = Annotated[Any, Refused("citing")]


class DocumentBlock(StrictModel):
    """A document of text."""

    type: Literal["document"]
    source: Annotated[
        PlainTextSource | ContentSource,
        ByType(
            "the source of a document",
            lambda kind, known: f"documents from {kind!r} are not supported here, only {known}.",
        ),
    ]
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None
    citations: _Citations = None

    @property
    def text(self) -> str:
        """Text for the model: title, context and text, each on lines of its own."""
        source = self.source
        body = source.data if isinstance(source, PlainTextSource) else text_of(source.content)
        return "\n".join(part for part in (self.title, self.context, body) if part)


class SearchResultBlock(StrictModel):
    type: Literal["search_result"]
    title: str
    source: str
    content: list[Text]
    cache_control: CacheControl | None = None
    citations: _Citations = None

    @property
    def text(self) -> str:
        """Text for the model: title, source and texts, each on lines of its own."""
        return "\n".join((self.title, self.source, text_of(self.content)))


class ToolReferenceBlock(StrictModel):
    """Definition of a tool that the prompt does not list."""

    type: Literal["tool_reference"]
    tool_name: Annotated[str, Field(min_length=1, max_length=256)]
    cache_control: CacheControl | None = None


class ToolNameReference(StrictModel):
    type: Literal["tool_reference"]
    name: Annotated[str, Field(min_length=1, max_length=256)]


class ToolDefinition(StrictModel):
    type: Literal["tool_definition"]
    definition: AnyTool


class ToolAdditionBlock(StrictModel):
    """Mark from which on a tool can be called."""

    type: Literal["tool_addition"]
    tool: Annotated[ToolNameReference | ToolDefinition, _CHANGE]
    cache_control: CacheControl | None = None


class ToolRemovalBlock(StrictModel):
    """Mark from which on a tool should not be called."""

    type: Literal["tool_removal"]
    tool: Annotated[ToolNameReference, _CHANGE]
    cache_control: CacheControl | None = None


_Sealed = Annotated[Any, WithoutEffect("the summary itself is read")]


class CompactionBlock(StrictModel):
    """Summary that replaces everything before it; null: of nothing."""

    type: Literal["compaction"]
    content: str | None = None
    cache_control: CacheControl | None = None
    encrypted_content: _Sealed = None
    signature: _Sealed = None
    tool_changes: Annotated[Any, Refused("a summary of changes of tools")] = None


_OTHER_MODEL = WithoutEffect("only says which model spoke")


class FallbackBlock(StrictModel):
    """Mark of the place where another model took over; the prompt leaves it out."""

    type: Literal["fallback"]
    origin: Annotated[Any, _OTHER_MODEL, Field(alias="from")] = None
    to: Annotated[Any, _OTHER_MODEL] = None
    trigger: Annotated[Any, _OTHER_MODEL] = None


ResultPart = Annotated[TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, _BLOCK]


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: Annotated[str | Annotated[list[ResultPart], FAIL_FAST], TEXT_OR_LIST] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: NoOp = None


Block = Annotated[
    TextBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ServerToolUseBlock
    | ServerToolResultBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
    | CompactionBlock
    | FallbackBlock,
    _BLOCK,
]


def is_cacheable(block: Any) -> bool:
    """Tell whether a breakpoint may stand after a block: not after thinking or empty text."""
    if isinstance(block, TextBlock | CompactionBlock):
        return bool(block.text if isinstance(block, TextBlock) else block.content)
    return "cache_control" in type(block).model_fields


_SHOWN = (TextBlock, DocumentBlock, SearchResultBlock)
_OF_ROLE = {
    "user": (*_SHOWN, ToolResultBlock, CompactionBlock),
    "assistant": (
        TextBlock,
        ThinkingBlock,
        RedactedThinkingBlock,
        ToolUseBlock,
        ServerToolUseBlock,
        ServerToolResultBlock,
        CompactionBlock,
        FallbackBlock,
    ),
    "system": (TextBlock, ToolAdditionBlock, ToolRemovalBlock),
}


class MessageOutputConfig(StrictModel):
    """Output settings that a system message gives for the turns after it."""

    effort: Effort | None = None


class InputMessage(StrictModel):
    """Message of a conversation; a string is short for a single text block.

    Args:
        clear_at: `next_user_message` drops a system message after the next message of the user.
        output_config: settings for the turns after a system message.
    """

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Annotated[list[Block], FAIL_FAST], TEXT_OR_LIST]
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: MessageOutputConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _content_shape(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("content") is None and value.get("role") == "system" and value.get("output_config"):
            return {**value, "content": ""}
        if "content" in value and not isinstance(value["content"], str | list):
            raise ParamError("content must be a string or a list of content blocks.", code="invalid_type")
        return value

    @model_validator(mode="after")
    def _blocks_of_the_role(self) -> InputMessage:
        for block in self.blocks:
            if not isinstance(block, _OF_ROLE[self.role]):
                raise ParamError(f"a message of the {self.role} can't have a block of type {block.type!r}.")
        if self.role != "system" and (self.clear_at is not None or self.output_config is not None):
            raise ParamError("only a message of the system can have clear_at and output_config.")
        says_nothing = all(isinstance(block, TextBlock) and not block.text for block in self.blocks)
        sets_effort = self.output_config is not None and self.output_config.effort is not None
        if says_nothing and self.role != "assistant" and not sets_effort:
            raise ParamError("content must not be empty.")
        return self

    @property
    def blocks(self) -> list[Any]:
        """Content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)] if self.content else []
        return self.content
