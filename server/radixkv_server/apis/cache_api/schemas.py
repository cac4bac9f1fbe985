# SPDX-License-Identifier: Apache-2.0
"""Bodies of the cache routes: the prompt fields of chats and completions, and a few more.

A prompt is `messages`, with all other fields of a chat completion, or `prompt`: text or token ids.
The body of a request whose misses need explaining can thus be sent unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator, model_validator

from radixkv_server.apis.common.chat_messages import ChatMessage
from radixkv_server.apis.common.media import TEXT_ONLY, as_text
from radixkv_server.apis.openai.schemas import ChatCompletionRequest
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel

MAX_TTL_S = 30 * 24 * 3600.0
DEFAULT_TTL_S = 3600.0

_MESSAGES = TypeAdapter(Annotated[list[ChatMessage], FAIL_FAST])


def _one_of(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        given = [name for name in names if value.get(name) is not None]
        if len(given) != 1:
            raise ParamError(f"give exactly one of {', '.join(names)}.", names[0])
        if value.get("messages") == []:
            raise ParamError("messages must not be empty.", "messages")
        if value.get("continue_final_message") and value.get("messages") is None:
            raise ParamError("continue_final_message needs messages.", "continue_final_message")
    return value


def _text_or_ids(value: Any) -> Any:
    """Check by hand, as a union would report an error per element and branch."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    raise ValueError("must be a string or a list of token ids.")


class CachePromptFields(ChatCompletionRequest):
    """A chat or a prompt, in the fields of generation requests."""

    messages: Annotated[list[ChatMessage], FAIL_FAST, TEXT_ONLY] = Field(default_factory=list)
    prompt: Any = None

    @field_validator("prompt")
    @classmethod
    def _known_shape(cls, value: Any) -> Any:
        return _text_or_ids(value)


class PromptBody(CachePromptFields):
    """Body of POST and DELETE /v1/cache/public."""

    @model_validator(mode="before")
    @classmethod
    def _one_input(cls, value: Any) -> Any:
        return _one_of(value, ("messages", "prompt"))


class ComparedPrompts(StrictModel):
    """Two prompts, each a text, token ids, messages, or a whole body."""

    prompt: Any
    other: Any = Field(alias="with")

    @field_validator("prompt", "other")
    @classmethod
    def _known_shape(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return _MESSAGES.validate_python(as_text(value, info), context=info.context)
        if isinstance(value, dict) and value.keys() & {"messages", "prompt"}:
            return PromptBody.model_validate(value, context=info.context)
        if not value:
            raise ValueError("must be a text, token ids, messages or the body of a request, and not empty.")
        return _text_or_ids(value)


class ExplainBody(CachePromptFields):
    """Body of POST /v1/cache/explain: a prompt, or two prompts to compare."""

    compare: ComparedPrompts | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_input(cls, value: Any) -> Any:
        return _one_of(value, ("messages", "prompt", "compare"))

    def compared(self) -> tuple[CachePromptFields, CachePromptFields]:
        """Return both prompts as bodies of their own, with the other fields of this one."""
        assert self.compare is not None
        return self._about(self.compare.prompt), self._about(self.compare.other)

    def _about(self, value: Any) -> CachePromptFields:
        if isinstance(value, CachePromptFields):
            return value
        is_chat = isinstance(value, list) and isinstance(value[0], ChatMessage)
        return self.model_copy(
            update={"messages": value if is_chat else [], "prompt": None if is_chat else value}
        )


class PinBody(CachePromptFields):
    """Body of POST /v1/cache/pins: a prompt, or the node of the tree up to whose end to pin."""

    node: str | None = None
    ttl: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_input(cls, value: Any) -> Any:
        return _one_of(value, ("messages", "prompt", "node"))

    @field_validator("ttl")
    @classmethod
    def _some_time(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value <= MAX_TTL_S:
            raise ValueError(f"ttl must be above 0 and at most {MAX_TTL_S:.0f} seconds.")
        return value


class SessionBody(CachePromptFields):
    """Body of DELETE /v1/cache/sessions: the conversation that is over, with its last answer or without."""

    @model_validator(mode="before")
    @classmethod
    def _one_input(cls, value: Any) -> Any:
        return _one_of(value, ("messages", "prompt"))


class UnpinBody(CachePromptFields):
    """Body of DELETE /v1/cache/pins: the prompt that was pinned, or the pin's id."""

    id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_input(cls, value: Any) -> Any:
        return _one_of(value, ("messages", "prompt", "id"))
