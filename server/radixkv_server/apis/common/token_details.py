# SPDX-License-Identifier: Apache-2.0
"""What vLLM's clients ask to be told of tokens: ids of prompt and answer, and the prompt's logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from radixkv.sampling.logprobs import Logprob, TokenLogprobs
from radixkv_server.apis.common.fields import check_logprobs
from radixkv_server.apis.common.logprobs import finite
from radixkv_server.dialect import Json
from radixkv_server.http.body import StrictModel


class TokenDetailFields(StrictModel):
    """vLLM's fields of chat and text completions."""

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None

    @model_validator(mode="after")
    def _few_prompt_logprobs(self) -> TokenDetailFields:
        check_logprobs(self.prompt_logprobs, "prompt_logprobs")
        return self


class TokenDetails:
    """The fields of an answer that a body asks for; none where it asks for none."""

    def __init__(self, body: TokenDetailFields) -> None:
        self._with_ids = bool(body.return_token_ids)
        self._num_top = body.prompt_logprobs

    def of_prompt(self, ids: npt.NDArray[np.int32], logprobs: Sequence[TokenLogprobs | None] | None) -> Json:
        """`prompt_token_ids`, and `prompt_logprobs`: for each token `{id: {logprob, rank, decoded_token}}`.

        Nothing precedes the first token: null. The others have the token itself, then the likeliest.
        """
        details: Json = {"prompt_token_ids": ids.tolist()} if self._with_ids else {}
        if self._num_top is not None and logprobs is not None:
            num_top = self._num_top
            details["prompt_logprobs"] = [
                None if entry is None else _by_id((entry.chosen, *entry.top[:num_top])) for entry in logprobs
            ]
        return details

    def of_answer(self, ids: Sequence[int]) -> Json:
        """`token_ids`, those that end the answer included."""
        return {"token_ids": ids} if self._with_ids else {}


def _by_id(items: Iterable[Logprob]) -> Json:
    return {
        str(item.token_id): {
            "logprob": finite(item.logprob),
            "rank": item.rank,
            "decoded_token": item.text,
        }
        for item in items
    }
