# SPDX-License-Identifier: Apache-2.0
"""Texts and chats to checked token ids, without blocking the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.cache.keys import EncodedTokens
from radixkv.engine.client import EngineClient
from radixkv.errors import InvalidRequestError
from radixkv.text.prompt_texts import text_size
from radixkv_server.concurrency import INLINE_CHARS, off_loop
from radixkv_server.errors import bad_request


class PromptEncoder:
    """Encoder of prompts: all rendering, tokenising and checks of the server, for one engine."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._max_chars: int | None = None

    async def encode(self, text: str, *, param: str) -> EncodedTokens:
        """Encode a prompt, and check its tokens.

        Raises:
            InvalidRequestError: the text can't be tokenised, or gives no tokens.
            ContextLengthExceededError: it gives too many.
        """
        return await self.accept(await self.tokenize(text, param=param), param)

    async def tokenize(
        self, text: str, *, param: str, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Return token ids of a text; their number is not checked.

        Args:
            allow_special: True: spellings of control tokens in the text become these tokens; False: text.

        Raises:
            InvalidRequestError: the text can't be tokenised.
            ContextLengthExceededError: far too long for the context; raised before tokenising.
        """
        await self.check_size(text, param=param)
        return await self._engine.tokenize(
            text, add_special_tokens=add_special_tokens, allow_special=allow_special
        )

    async def render_chat(
        self,
        messages: Sequence[Any],
        convert: Callable[[], list[dict[str, Any]]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
        param: str = "messages",
    ) -> Sequence[int] | npt.NDArray[np.int32]:
        """Return token ids of a chat, through the model's chat template; their number is not checked.

        Args:
            messages: the chat as JSON-like data, used for its size.
            convert: makes the messages that templates expect.
            options: further arguments of the template.
            param: name of the messages' field in the body.

        Raises:
            InvalidRequestError: the template refuses the messages, or there is none.
            ContextLengthExceededError: far too long for the context; raised before rendering.
        """
        size = await self.check_size(messages, tools, options, param=param)
        try:
            return await self._engine.render_chat(
                await off_loop(convert, chars=size),
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except RecursionError:
            raise InvalidRequestError("the chat template can't render messages nested this deep") from None

    async def accept(self, ids: Sequence[int] | npt.NDArray[np.int32], param: str) -> EncodedTokens:
        """Check the given ids against the engine's limits, and return them.

        Raises:
            InvalidRequestError: there are none, or one is outside the vocabulary.
            ContextLengthExceededError: there are too many.
        """
        limits = self._engine.limits
        limits.check_length(len(ids), param)
        return await off_loop(lambda: limits.encode(ids, param), tokens=len(ids))

    async def detokenize(self, ids: Sequence[int] | npt.NDArray[np.int32], param: str) -> str:
        """Return the text of ids, including special tokens.

        Raises:
            ApiError: an id is outside the vocabulary.
        """

        tokenizer = self._engine.tokenizer

        def work() -> str:
            size = tokenizer.vocab_size
            wrong = next((token for token in ids if not 0 <= token < size), None)
            if wrong is not None:
                raise bad_request(
                    f"Token id {wrong} is outside the vocabulary of {size} tokens.", param=param
                )
            return tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)

        return await off_loop(work, tokens=len(ids))

    async def check_size(self, *values: Any, param: str) -> int:
        """Count characters in all strings of JSON-like data; refuse more than the context could ever hold.

        Raises:
            ContextLengthExceededError: it could not; found without tokenising, and without counting them all.
        """
        size = text_size(*values, limit=INLINE_CHARS)
        if size <= INLINE_CHARS:
            return size
        limits = self._engine.limits
        most = await off_loop(self._find_most_chars)
        size = await off_loop(lambda: text_size(*values, limit=most))
        if size > most:
            raise limits.too_long(
                f"over {most} characters, more than any {limits.max_model_len} tokens", param
            )
        return size

    def _find_most_chars(self) -> int:
        """Return the most characters that can fit into the context."""
        if self._max_chars is None:
            tokenizer = self._engine.tokenizer
            longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
            # Twice the bound, since some tokenizers fold several characters into one before they look.
            self._max_chars = max(INLINE_CHARS, 2 * self._engine.limits.max_model_len * max(1, longest))
        return self._max_chars
