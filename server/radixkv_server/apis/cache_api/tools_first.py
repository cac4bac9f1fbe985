# SPDX-License-Identifier: Apache-2.0
"""Advice on `--tools-first`: the tokens of the same tools behind a system prompt that breaks."""

from __future__ import annotations

from radixkv.observe.causes import Breaker
from radixkv.observe.prompt_parts import MakeParts
from radixkv.text.chat_formats.template_input import can_show_tools_first
from radixkv_server.chats.chat import Chat
from radixkv_server.chats.render import chat_prompt
from radixkv_server.context import ServerContext


async def tools_first_tokens(
    context: ServerContext, breaker: Breaker | None, parts: MakeParts | None
) -> int | None:
    """Return the tokens of a prompt's tools, where `--tools-first` lets them be found; None: it does not.

    Args:
        breaker: what breaks the prompt.
        parts: the prompt's.

    Two small prompts are rendered and encoded.
    """
    if breaker is None or breaker.message is None or not breaker.same_tools or parts is None:
        return None
    prompt = parts()
    if context.settings.tools_first or prompt.messages[breaker.message].role != "system":
        return None
    template = await context.templates.find(None)
    if not can_show_tools_first(template.format, template.traits):
        return None
    tools: list[dict[str, object]] = [{"type": "function", "function": tool} for tool in prompt.tools]
    shown, bare = [await _length(context, some) for some in (tools, [])]
    return shown - bare


async def _length(context: ServerContext, tools: list[dict[str, object]]) -> int:
    """Return the tokens of a small chat with tools."""
    source = [{"role": role, "content": "."} for role in ("system", "user")]
    return len((await chat_prompt(context, Chat(source, lambda: [*source], tools=tools))).ids)
