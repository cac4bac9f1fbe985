"""Content blocks: what the messages of this API are made of, as clients may send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from radixkv_server.apis.anthropic.kinds import BY_TYPE, known_kind
from radixkv_server.chat.breakpoints import CacheControl
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel
from radixkv_server.http.fields import NoOp, Refused


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


def _known(*names: str) -> BeforeValidator:
    return known_kind(
        *names,
        what="a content block",
        refusal=lambda kind: (
            f"content blocks of type {kind!r} are not supported here (only {', '.join(names)}): "
            "this server takes text, and fetches nothing."
        ),
    )


Text = Annotated[TextBlock, _known("text")]


def _text_or(items: str) -> Discriminator:
    return Discriminator(lambda value: "[text]" if isinstance(value, str) else items)


Texts = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[list[Text], FAIL_FAST, Tag("[blocks]")],
    _text_or("[blocks]"),
]


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: NoOp = None


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")],
    BY_TYPE,
    _known("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]

_OF_ROLE = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class InputMessage(StrictModel):
    """One message; a string is short for one text block."""

    role: Literal["user", "assistant", "system"]
    clear_at: Annotated[Any, Refused("a message that is shown for one turn", usual=("never",))] = None
    output_config: Annotated[Any, Refused("an effort of one turn")] = None
    content: Annotated[
        Annotated[str, Tag("[text]")] | Annotated[list[Block], FAIL_FAST, Tag("[blocks]")],
        _text_or("[blocks]"),
    ]

    @model_validator(mode="before")
    @classmethod
    def _content_shape(cls, value: Any) -> Any:
        if isinstance(value, dict) and "content" in value and not isinstance(value["content"], str | list):
            raise ParamError("content must be a string or a list of content blocks.", code="invalid_type")
        return value

    @model_validator(mode="after")
    def _blocks_of_the_role(self) -> InputMessage:
        for block in self.blocks:
            if not isinstance(block, _OF_ROLE[self.role]):
                raise ParamError(f"a message of the {self.role} can't have a block of type {block.type!r}.")
        says_nothing = all(isinstance(block, TextBlock) and not block.text for block in self.blocks)
        if says_nothing and self.role != "assistant":
            raise ParamError("content must not be empty.")
        return self

    @property
    def blocks(self) -> list[Any]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)] if self.content else []
        return self.content
