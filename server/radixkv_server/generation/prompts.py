"""From text and messages to checked token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from radixkv.client import EngineClient
from radixkv.errors import ContextLengthExceededError, InvalidRequestError
from radixkv.text.text_size import text_size
from radixkv_server.errors import bad_request

T = TypeVar("T")
IdsT = TypeVar("IdsT", bound=Sequence[int])

# Work on texts longer than this is done in a thread: it takes milliseconds to seconds, during which every
# stream of the server would stand still.
INLINE_CHARS = 4096


class PromptEncoder:
    """The one place of the server where prompts are rendered, tokenised and checked, by one engine."""

    def __init__(self, engine: EngineClient) -> None:
        self.max_model_len = engine.max_model_len
        self._engine = engine
        self._most_chars: int | None = None

    async def encode(self, text: str, *, param: str) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InvalidRequestError: the text can't be tokenised, or gives no tokens.
            ContextLengthExceededError: it gives too many.
        """
        return self.check_length(await self.tokenize(text, param=param), param)

    async def tokenize(
        self, text: str, *, param: str, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Token ids of a text; their number is not checked.

        Args:
            allow_special: spellings of control tokens in the text mean these tokens; False: they are text.

        Raises:
            InvalidRequestError: the text can't be tokenised.
            ContextLengthExceededError: it is far too long for the context; it was not tokenised.
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
    ) -> list[int]:
        """Token ids of a chat, through the model's chat template; their number is not checked.

        Args:
            messages: the chat as JSON-like data, for its size.
            convert: makes of it what templates expect.
            options: further arguments of the template.
            param: what the body calls the messages.

        Raises:
            InvalidRequestError: the template refuses the messages, or there is none.
            ContextLengthExceededError: they are far too long for the context; nothing was rendered.
        """
        size = await self.check_size(messages, tools, options, param=param)
        try:
            return await self._engine.render_chat(
                await _off_loop(size, convert),
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except RecursionError:
            raise InvalidRequestError("the chat template can't render messages nested this deep") from None

    def check_ids(self, ids: Sequence[int], param: str) -> list[int]:
        """The given ids as a list, each within the vocabulary and the whole within the context limit."""
        self.check_length(ids, param)
        return list(self._in_vocabulary(ids, param))

    async def detokenize(self, ids: Sequence[int], param: str) -> str:
        """The text of ids, special tokens included.

        Raises:
            ApiError: an id is outside the vocabulary.
        """

        def work() -> str:
            return self._engine.tokenizer.decode(self._in_vocabulary(ids, param), skip_special_tokens=False)

        return await _off_loop(len(ids), work)

    def _in_vocabulary(self, ids: Sequence[int], param: str) -> Sequence[int]:
        size = self._engine.tokenizer.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            wrong = next(token for token in ids if not 0 <= token < size)
            raise bad_request(f"Token id {wrong} is outside the vocabulary of {size} tokens.", param=param)
        return ids

    def check_length(self, ids: IdsT, param: str) -> IdsT:
        """`ids`, if they are at least one and leave room for a token of output."""
        if not ids:
            raise bad_request(f"{param} must not be empty: it has no tokens.", param=param)
        if len(ids) >= self.max_model_len:
            raise self._too_long(f"{len(ids)} tokens", param)
        return ids

    async def check_size(self, *values: Any, param: str) -> int:
        """Characters in all strings of JSON-like data, if the context could hold them, whatever their tokens.

        Raises:
            ContextLengthExceededError: it could not; found without tokenising, and without counting them all.
        """
        size = text_size(*values, limit=INLINE_CHARS)
        if size <= INLINE_CHARS:
            return size
        most = await asyncio.to_thread(self._find_most_chars)
        size = await asyncio.to_thread(text_size, *values, limit=most)
        if size > most:
            raise self._too_long(f"over {most} characters, more than any {self.max_model_len} tokens", param)
        return size

    def _find_most_chars(self) -> int:
        """More characters than this don't fit into the context."""
        if self._most_chars is None:
            tokenizer = self._engine.tokenizer
            longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
            # Twice the bound, since some tokenizers fold several characters into one before they look.
            self._most_chars = max(INLINE_CHARS, 2 * self.max_model_len * max(1, longest))
        return self._most_chars

    def _too_long(self, size: str, param: str) -> ContextLengthExceededError:
        most, own = self.max_model_len, self._engine.context_length
        limit, advice = f"This model's maximum context length is {most} tokens", "Please reduce the length"
        if most < own:
            block_size = self._engine.config.block_size
            limit = (
                f"This server's KV cache is a pool of {most // block_size} blocks, which hold {most} of the "
                f"{own} tokens that the model can take"
            )
            advice += ", or have the server started with a larger --kv-cache-memory or --num-blocks"
        return ContextLengthExceededError(
            f"{limit}, of which at least one is for the output. However, your {param} resulted in {size}. "
            f"{advice}.",
            param=param,
        )


async def _off_loop(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)
