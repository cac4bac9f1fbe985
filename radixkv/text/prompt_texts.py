# SPDX-License-Identifier: Apache-2.0
"""PromptTexts: text and chats to token ids for callers on an event loop, without holding that up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from radixkv.text.text_size import text_size
from radixkv.text.thread_priority import yield_to_steps

if TYPE_CHECKING:
    from radixkv.text.segments import PendingText, TokenArray
    from radixkv.text.text_tokenizer import TextTokenizer

T = TypeVar("T")

# A prompt longer than this is encoded in a worker thread, so that the event loop stays free (characters or
# token ids).
LONG_TEXT = 4096
# And beyond this, two at a time with a tenth of a busy core each: the engine needs cores, too.
HUGE_TEXT = 32768
HUGE_TEXTS_AT_ONCE = 2
HUGE_TEXT_NICENESS = 10


class PromptTexts:
    """Works on texts of any size; several event loops may use one."""

    def __init__(self) -> None:
        self._huge_texts = ThreadPoolExecutor(
            HUGE_TEXTS_AT_ONCE,
            thread_name_prefix="radixkv-huge-texts",
            initializer=yield_to_steps,
            initargs=(HUGE_TEXT_NICENESS,),
        )

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, run in a thread if `size` characters would hold up the loop."""
        if size <= LONG_TEXT:
            return work()
        if size <= HUGE_TEXT:
            return await asyncio.to_thread(work)
        return await asyncio.get_running_loop().run_in_executor(self._huge_texts, work)


@runtime_checkable
class KeepsSegments(Protocol):
    """A tokenizer that keeps token ids of a conversation's segments."""

    def prepare_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> PendingText:
        """Render a conversation and look up its segments."""


class RendersChats:
    """Rendering and encoding of chats for engines on event loops."""

    def __init__(self) -> None:
        self._texts = PromptTexts()

    if TYPE_CHECKING:

        @property
        def tokenizer(self) -> TextTokenizer: ...

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> Sequence[int] | TokenArray:
        tokenizer = self.tokenizer
        given: dict[str, Any] = {
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        size = text_size(messages, tools, options, limit=HUGE_TEXT)
        if not isinstance(tokenizer, KeepsSegments):
            return await self._texts.off_loop(
                size, lambda: tokenizer.apply_chat_template(list(messages), **given, **options)
            )
        # Rendering and lookups take a hundredth of the time of encoding: the new text's length decides.
        prompt = await self._texts.off_loop(
            min(size, HUGE_TEXT), lambda: tokenizer.prepare_chat(list(messages), **given, **options)
        )
        return await self._texts.off_loop(prompt.num_unknown, prompt.finish)
