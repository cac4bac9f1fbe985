# SPDX-License-Identifier: Apache-2.0
"""Bodies of the service routes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from radixkv_server.apis.common.chat_messages import ChatMessage
from radixkv_server.apis.common.media import TEXT_ONLY
from radixkv_server.apis.openai.schemas import ChatFields
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel


class TokenizeRequest(ChatFields):
    """Body of POST /tokenize: a `prompt`, or `messages` as for a chat; or `content`, in llama.cpp's form."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), FAIL_FAST, TEXT_ONLY] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        inputs = {"prompt": self.prompt, "messages": self.messages, "content": self.content}
        given = [name for name, value in inputs.items() if value is not None]
        if len(given) != 1:
            raise ParamError("give either prompt or messages (or content, as llama.cpp does).", "prompt")
        ours = ("return_token_strs", "add_special_tokens")
        theirs = ("add_special", "parse_special", "with_pieces")
        for name in ours if given == ["content"] else theirs:
            asks_for_nothing = getattr(self, name) is False and name in ("return_token_strs", "with_pieces")
            if getattr(self, name) is not None and not asks_for_nothing:
                raise ParamError(f"{name} does not go with {given[0]}.", name)
        if self.messages is not None:
            self.check_ending(self.messages)
        return self


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Any

    @field_validator("tokens")
    @classmethod
    def _ids(cls, value: Any) -> Any:
        # By hand: pydantic checks a list without letting other threads run.
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ValueError("tokens must be a list of token ids.")
        return value
