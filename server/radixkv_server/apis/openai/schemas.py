# SPDX-License-Identifier: Apache-2.0
"""Body of POST /v1/completions, checked strictly; the body of a chat is shared with other APIs.

How a field is declared to work, to change nothing, or to be refused: see `radixkv_server.http.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import field_validator, model_validator

from radixkv_server.apis.common.chat_completion import CommonFields
from radixkv_server.apis.common.fields import check_logprobs
from radixkv_server.http.body import ParamError
from radixkv_server.http.fields import Refused


class CompletionRequest(CommonFields):
    """Body of POST /v1/completions."""

    prompt: Any
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Annotated[Any, Refused("text insertion", usual=("",))] = None

    @field_validator("prompt")
    @classmethod
    def _known_shape(cls, value: Any) -> Any:
        # By hand: a union of four list types would report one error per element and branch.
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            if all(isinstance(item, str) for item in value) or _all_ints(value):
                return value
            if all(isinstance(item, list) and _all_ints(item) for item in value):
                return value
        elif value == []:
            raise ValueError("prompt must not be empty.")
        raise ValueError("prompt must be a string, a list of strings, token ids, or a list of such lists.")

    @model_validator(mode="after")
    def _only_what_works(self) -> CompletionRequest:
        check_logprobs(self.logprobs, "logprobs")
        if self.prompt_only and self.num_samples > 1:
            raise ParamError("n and best_of must be 1 where max_tokens is 0: all would be the same.", "n")
        samples = self.best_of
        if self.stream and samples is not None and samples > (self.n or 1):
            raise ParamError("a best_of above n can't be streamed.", "best_of")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def prompt_only(self) -> bool:
        """True if only the prompt is computed: for the cache, or with `echo` for its logprobs."""
        return self.max_tokens == 0

    @property
    def num_samples(self) -> int:
        return max(self.n or 1, self.best_of or 1)


def _all_ints(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)
