"""From text and messages to checked token ids, without holding up the event loop.

Short prompts are tokenised in place; a long one goes to a thread, since it takes milliseconds to seconds
during which every stream of the server would stand still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from radixkv.errors import ContextLengthExceededError, InvalidRequestError
from radixkv_server.errors import bad_request

if TYPE_CHECKING:
    from radixkv.async_engine import AsyncEngine

T = TypeVar("T")

INLINE_CHARS = 4096
_THREADS = 2


class PromptEncoder:
    """Tokenises and checks prompts for one engine. `close` ends its threads."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="radixkv-tokenize")
        self._longest_token: int | None = None

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, param: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Raises:
            InvalidRequestError: the text gives no tokens, or too many (ContextLengthExceededError).
        """
        ids = await self._run(
            len(text), lambda: self._encode_checked(text, param, add_special_tokens=add_special_tokens)
        )
        return self.check_length(ids, param)

    async def encode_unchecked(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, however many."""
        return await self._run(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of a chat, through the model's chat template; the length is not checked.

        Raises:
            InvalidRequestError: the template refuses the messages, or there is none.
        """
        size = sum(len(str(message.get("content") or "")) for message in messages)
        self._refuse_hopeless(size, "messages")

        def render() -> list[int]:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **options,
            )

        return await self._run(size, render)

    def check_ids(self, ids: Sequence[int], param: str) -> list[int]:
        """The given ids as a list, each within the vocabulary and the whole within the context limit."""
        size = self.tokenizer.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            wrong = next(token for token in ids if not 0 <= token < size)
            raise bad_request(f"Token id {wrong} is outside the vocabulary of {size} tokens.", param=param)
        return self.check_length(list(ids), param)

    def check_length(self, ids: list[int], param: str) -> list[int]:
        """`ids`, if they are at least one and leave room for a token of output."""
        if not ids:
            raise bad_request(f"{param} must not be empty: it has no tokens.", param=param)
        if len(ids) >= self.max_model_len:
            raise self._too_long(f"{len(ids)} tokens", param)
        return ids

    def _too_long(self, size: str, param: str) -> ContextLengthExceededError:
        return ContextLengthExceededError(
            f"This model's maximum context length is {self.max_model_len} tokens, of which at least one is "
            f"for the output. However, your {param} resulted in {size}. Please reduce the length.",
            param=param,
        )

    def _encode_checked(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        self._refuse_hopeless(len(text), param)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _refuse_hopeless(self, num_chars: int, param: str) -> None:
        """Refuse a text too long for the context whatever its tokens are, without tokenising it."""
        if num_chars <= self.max_model_len * 16:
            return
        if self._longest_token is None:
            tokenizer = self.tokenizer
            self._longest_token = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        # Twice the bound, since some tokenizers fold several characters into one before they look.
        if num_chars > 2 * self.max_model_len * max(1, self._longest_token):
            raise self._too_long(f"{num_chars} characters, more than any {self.max_model_len} tokens", param)

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= INLINE_CHARS:
            return work()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except RecursionError:
            raise InvalidRequestError("the chat template can't render messages nested this deep") from None
