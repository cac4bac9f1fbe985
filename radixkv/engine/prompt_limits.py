# SPDX-License-Identifier: Apache-2.0
"""PromptLimits: permitted lengths and token ids of prompts; for all entry points."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from radixkv.cache.keys import EncodedTokens, TokenIds, encode_tokens
from radixkv.errors import ContextLengthExceededError, InvalidRequestError

# Ids that are encoded at once. Other threads wait meanwhile: a million take 50 ms.
_PIECE = 65536


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of one engine's prompts; plain data, for any thread and any process.

    Attributes:
        max_model_len: longest prompt plus output, in tokens.
        context_length: limit of the model, or of the settings; more than `max_model_len` where the cache's
            pool is smaller.
        block_size: tokens in a block of that pool.
        vocab_size: token ids must be below it; None: unchecked.
    """

    max_model_len: int
    context_length: int
    block_size: int
    vocab_size: int | None

    def encode(self, token_ids: TokenIds, param: str = "prompt") -> EncodedTokens:
        """Check token ids and encode them. O(n).

        Args:
            param: name of the prompts, for errors.

        Raises:
            InvalidRequestError: no flat sequence of token ids of this model.
        """
        try:
            encoded = _encode_in_pieces(token_ids)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), param=param, code=error.code) from None
        except TypeError:
            message = f"{param} is text or a sequence of token ids, not {token_ids!r:.80}"
            raise InvalidRequestError(message, param=param) from None
        if len(encoded):
            self.check_ids([int(encoded.token_ids.max())], param)
        return encoded

    def check_ids(self, token_ids: Iterable[int], param: str) -> None:
        """Raise InvalidRequestError where one lies outside the vocabulary. O(n)."""
        limit = 2**31 if self.vocab_size is None else self.vocab_size
        largest = max(token_ids, default=0)
        if largest >= limit:
            message = (
                f"{param}: token id {largest} is out of range: this model's vocabulary is 0 to {limit - 1}"
            )
            raise InvalidRequestError(message, param=param)

    def check_length(self, num_tokens: int, param: str = "prompt") -> None:
        """Raise unless a prompt of this many tokens has one, and leaves room for a token of output. O(1).

        Raises:
            InvalidRequestError: it has none.
            ContextLengthExceededError: it leaves no room.
        """
        if num_tokens == 0:
            message = f"{param} must not be empty: it has no tokens; give at least one"
            raise InvalidRequestError(message, param=param)
        if num_tokens >= self.max_model_len:
            raise self.too_long(f"{num_tokens} tokens", param)

    def too_long(self, size: str, param: str = "prompt") -> ContextLengthExceededError:
        """The error for a prompt of such a size."""
        most = self.max_model_len
        limit, advice = f"This model's maximum context length is {most} tokens", "Please reduce the length"
        if most < self.context_length:
            limit = (
                f"This server's KV cache is a pool of {most // self.block_size} blocks, which hold {most} of "
                f"the {self.context_length} tokens that the model can take"
            )
            advice += ", or have the server started with a larger --kv-cache-memory or --num-blocks"
        return ContextLengthExceededError(
            f"{limit}, of which at least one is for the output. However, your {param} resulted in {size}. "
            f"{advice}.",
            param=param,
        )


def _encode_in_pieces(token_ids: TokenIds) -> EncodedTokens:
    if isinstance(token_ids, EncodedTokens):
        return token_ids
    if isinstance(token_ids, list) and len(token_ids) > _PIECE:
        pieces = (token_ids[at : at + _PIECE] for at in range(0, len(token_ids), _PIECE))
        return EncodedTokens(b"".join(map(encode_tokens, pieces)))
    return EncodedTokens(encode_tokens(token_ids))
