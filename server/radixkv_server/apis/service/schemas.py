"""The bodies of the service routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

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
    tokens: Annotated[list[int], FAIL_FAST]
