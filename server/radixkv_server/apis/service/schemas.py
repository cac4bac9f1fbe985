"""The bodies of the service routes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from radixkv_server.apis.openai.messages import ChatMessage
from radixkv_server.apis.openai.schemas import MAX_TOOLS, Tool
from radixkv_server.http.body import FAIL_FAST, ParamError, StrictModel


class TokenizeRequest(StrictModel):
    """Body of POST /tokenize: a `prompt`, or `messages` as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), FAIL_FAST] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ParamError("give either prompt or messages.", "prompt")
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
