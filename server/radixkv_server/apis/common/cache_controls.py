# SPDX-License-Identifier: Apache-2.0
"""OpenAI's controls of the prompt cache: which breakpoints a request writes, and what of it stays cached.

The cache finds every prefix, wherever it ends. A breakpoint therefore decides nothing about what is found
while there is room, but what stays: the prompt up to there is pinned for at least the breakpoint's time.

    mode        breakpoints that are written             what else of the request stays cached
    implicit    the end of the prompt, the latest 3      all of it, until its turn to be evicted comes
                on parts
    explicit    the latest 4 on parts; there may be      nothing: what lies beyond the last breakpoint is
                none                                     forgotten with the answer, unless others used it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from radixkv.cache.keys import EncodedTokens
from radixkv.scheduling.request import Request
from radixkv_server.apis.common.chat_messages import TextPart
from radixkv_server.apis.common.fields import CacheFields
from radixkv_server.chats.breakpoints import MAX_BREAKPOINTS, Breakpoint, prefix_pins
from radixkv_server.chats.chat import Chat
from radixkv_server.context import ServerContext
from radixkv_server.generation.request import pin_whole


@dataclass(frozen=True, slots=True)
class MarkedPart:
    """A part with a `prompt_cache_breakpoint`.

    Args:
        ttl: of the breakpoint, as the client wrote it; None: the request's.
        chars: where the part ends in the text of its message.
    """

    ttl: str | None
    chars: int


def marked_parts(content: str | Sequence[TextPart] | None) -> Iterator[MarkedPart]:
    """The parts of a message that end with a breakpoint, in the text that `content.joined` gives."""
    chars = -1
    for part in content if not isinstance(content, str) and content else ():
        chars += 1 + len(part.words)
        if part.prompt_cache_breakpoint is not None:
            yield MarkedPart(part.prompt_cache_breakpoint.ttl, chars)


async def with_cache_controls(
    context: ServerContext,
    body: CacheFields,
    chat: Chat,
    request: Request,
    marked: Sequence[tuple[int, MarkedPart]],
    others: Sequence[Breakpoint] = (),
) -> None:
    """Give a request the pins of its breakpoints, and say how much of it may stay cached.

    Args:
        chat: what the request's prompt was rendered from.
        marked: parts with breakpoints, each with the index of its message in the chat, in their order.
        others: breakpoints that are not OpenAI's.
    """
    breakpoints = [
        *others,
        *(
            Breakpoint(body.breakpoint_s(part.ttl), message=message, chars=part.chars)
            for message, part in marked[-(MAX_BREAKPOINTS - (not body.is_explicit)) :]
        ),
    ]
    if breakpoints:
        assert isinstance(request.prompt, EncodedTokens)
        request.pins = await prefix_pins(context, chat, breakpoints, request.prompt)
    if body.is_explicit:
        request.keep_tokens = max((pin.num_tokens for pin in request.pins), default=0)
    else:
        pin_whole(request, body.breakpoint_s() if marked else body.pinned_s)
