# SPDX-License-Identifier: Apache-2.0
"""Text and chats to token ids for engines on event loops, without holding the loops up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from radixkv.text.thread_priority import yield_to_steps

if TYPE_CHECKING:
    from radixkv.text.segments import Encode, TokenArray
    from radixkv.text.text_tokenizer import TextTokenizer


def text_size(*values: Any, limit: int) -> int:
    """Count characters in all strings of JSON-like data, keys included, and one for each other value.

    A lower bound of the rendered chat, if its template shows everything. Looking ends beyond `limit`. Objects
    that give pairs of name and value when iterated over, as pydantic's models do, count as their pairs.
    O(min(values, limit)) time, O(depth) space.

    >>> text_size([{"role": "user", "content": "hello"}], {"a": [1, 2]}, limit=1000)
    27
    >>> text_size(["x" * 100, "y"], limit=10)
    101
    """
    size = 0
    left: list[Iterator[Any]] = [iter(values)]
    while left and size <= limit:
        for value in left[-1]:
            if isinstance(value, str):
                size += len(value)
            else:
                size += 1
                if isinstance(value, Mapping):
                    left += [iter(value.values()), iter(value)]
                    break
                if isinstance(value, Iterable) and not isinstance(value, bytes):
                    left.append(iter(value))
                    break
            if size > limit:
                break
        else:
            left.pop()
    return size


T = TypeVar("T")

# A prompt longer than this is encoded in a worker thread, so that the event loop stays free (characters or
# token ids).
LONG_TEXT = 4096
# And beyond this, two at a time with a tenth of a busy core each: the engine needs cores, too.
HUGE_TEXT = 32768
HUGE_TEXTS_AT_ONCE = 2
HUGE_TEXT_NICENESS = 10


@runtime_checkable
class KeepsSegments(Protocol):
    """A tokenizer that keeps token ids of a conversation's segments."""

    def prepare_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[int, Encode]:
        """Render a conversation and look up its segments; see `Tokenizer.prepare_chat`."""


class RendersChats:
    """Rendering and encoding of chats for engines on event loops; several loops may use one."""

    def __init__(self) -> None:
        self._huge_texts = ThreadPoolExecutor(
            HUGE_TEXTS_AT_ONCE,
            thread_name_prefix="radixkv-huge-texts",
            initializer=yield_to_steps,
            initargs=(HUGE_TEXT_NICENESS,),
        )

    if TYPE_CHECKING:

        @property
        def tokenizer(self) -> TextTokenizer: ...

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, run in a thread if `size` characters would hold up the loop."""
        if size <= LONG_TEXT:
            return work()
        if size <= HUGE_TEXT:
            return await asyncio.to_thread(work)
        return await asyncio.get_running_loop().run_in_executor(self._huge_texts, work)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> Sequence[int] | TokenArray:
        """Return token ids of a conversation, int32 [n] where the tokenizer keeps segments.

        Args:
            options: further arguments of `apply_chat_template`.

        Raises:
            InvalidRequestError: there is no chat template, or it refuses the messages.
        """
        tokenizer = self.tokenizer
        given: dict[str, Any] = {
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        size = text_size(messages, tools, options, limit=HUGE_TEXT)
        if not isinstance(tokenizer, KeepsSegments):
            return await self._off_loop(
                size, lambda: tokenizer.apply_chat_template(list(messages), **given, **options)
            )
        # Rendering and lookups take a hundredth of the time of encoding: the new text's length decides.
        num_unknown, encode = await self._off_loop(
            min(size, HUGE_TEXT), lambda: tokenizer.prepare_chat(list(messages), **given, **options)
        )
        return await self._off_loop(num_unknown, encode)
