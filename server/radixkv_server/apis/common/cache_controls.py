# SPDX-License-Identifier: Apache-2.0
"""OpenAI's controls of the prompt cache: the breakpoints that a request writes, and the tokens that stay.

The cache finds every prefix, wherever it ends. A breakpoint therefore changes no match while there is room;
it protects the prompt up to there from eviction for at least the breakpoint's TTL.

    mode        breakpoints that are written             the rest of the request
    implicit    the end of the prompt, the latest 3      stays cached until evicted
                on parts
    explicit    the latest 4 on parts, perhaps none      is dropped with the answer, unless other
                                                         requests used it
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
    """Return the parts of a message that end with a breakpoint, in the text of `content.joined`."""
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
    """Set a request's pins from its breakpoints, and the number of its tokens that may stay cached.

    Args:
        chat: the chat from which the request's prompt was rendered.
        marked: parts with breakpoints, each with the index of its message in the chat, in their order.
        others: breakpoints in other forms than OpenAI's.
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
