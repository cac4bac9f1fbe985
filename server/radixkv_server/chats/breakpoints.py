# SPDX-License-Identifier: Apache-2.0
"""Breakpoints: `cache_control` in a chat, and the tokens of its prompt to pin.

A breakpoint stands after a block of a conversation, and covers the whole prompt up to there, in tokens.
Templates do not report where a block of their input ends in the output, so a second rendering finds out: it
has another text right after the breakpoint, and as little as possible after that. The common prefix of both
prompts is the prefix of the breakpoint.

    prompt:   <|im_start|>system\\nBe brief.<|im_end|>\\n<|im_start|>user\\nHello<|im_end|>\\n...
    changed:  <|im_start|>system\\nBe brief.0 another text<|im_end|>\\n<|im_start|>user\\n0<|im_end|>\\n...
    prefix:   <|im_start|>system\\nBe brief.

This holds for every template, in whichever order it prints its input, and is exact: text after the breakpoint
did not change these tokens. It costs a rendering of the text before it, off the event loop if that is long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens, encode_tokens, shared_bytes
from radixkv.scheduling.request import PrefixPin
from radixkv.text.chat_formats.call_results import order_of_results
from radixkv.text.json_text import JsonText
from radixkv_server.chats.chat import Chat, Message
from radixkv_server.chats.render import chat_prompt
from radixkv_server.context import ServerContext
from radixkv_server.http.body import ParamError, StrictModel
from radixkv_server.http.fields import WithoutEffect

MAX_BREAKPOINTS = 4
SECONDS = {"5m": 300.0, "1h": 3600.0}

_OTHER_TEXT = " another text"
_STUB = "0"
# Its name comes after all others where tools are sorted.
_OTHER_TOOL = {"type": "function", "function": {"name": "~another_tool", "parameters": {"type": "object"}}}


class CacheControl(StrictModel):
    """Request of a block: keep the prompt up to here for `ttl` after each use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Annotated[Any, WithoutEffect("what is kept is the tenant's")] = None

    @property
    def seconds(self) -> float:
        return SECONDS[self.ttl or "5m"]


def check_breakpoints(controls: Sequence[CacheControl]) -> None:
    """Refuse breakpoints that no API allows.

    Args:
        controls: in the order of the prompt: tools, system, messages.

    Raises:
        ParamError: more than `MAX_BREAKPOINTS`, or a longer time after a shorter one.
    """
    if len(controls) > MAX_BREAKPOINTS:
        most, found = MAX_BREAKPOINTS, len(controls)
        raise ParamError(f"at most {most} blocks may have cache_control, not {found}.", "cache_control")
    times = [control.seconds for control in controls]
    if times != sorted(times, reverse=True):
        message = "a cache_control with ttl '1h' must not come after one with ttl '5m'."
        raise ParamError(message, "cache_control")


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Place of a breakpoint in a converted chat.

    Args:
        ttl: time to keep the prefix, in seconds.
        tool: index of the tool before it; None: it is in a message.
        message: index of its message.
        chars: number of characters of the message's content before it.
        call: index of the tool call before it, instead of `chars`.
    """

    ttl: float
    tool: int | None = None
    message: int = 0
    chars: int = 0
    call: int | None = None


async def prefix_pins(
    context: ServerContext, chat: Chat, breakpoints: Sequence[Breakpoint], prompt: EncodedTokens
) -> tuple[PrefixPin, ...]:
    """Return the prefixes of a chat's breakpoints, shortest first.

    Args:
        chat: the rendered chat.
        breakpoints: places in the messages that the chat's `convert` returns.
        prompt: the chat's prompt.

    A breakpoint after text that the template leaves out has no effect.
    """
    lengths: dict[int, float] = {}
    for breakpoint in breakpoints:
        other = await chat_prompt(context, _changed_after(breakpoint, chat))
        length = shared_bytes(prompt.data, encode_tokens(other.ids)) // TOKEN_BYTES
        if 0 < length < len(prompt):
            lengths[length] = max(breakpoint.ttl, lengths.get(length, 0.0))
    return tuple(PrefixPin(length, ttl) for length, ttl in sorted(lengths.items()))


def _changed_after(breakpoint: Breakpoint, chat: Chat) -> Chat:
    """Return the chat up to a breakpoint, followed by another text, in messages of the same roles."""

    def convert() -> list[Message]:
        messages, place = _in_order(chat.convert(), breakpoint, chat.param)
        if breakpoint.tool is not None:
            return messages  # some templates show the tools before the last one
        at = place.message
        return [*messages[:at], _change(messages[at], place), *map(_stub, messages[at + 1 :])]

    tools = chat.tools
    if breakpoint.tool is not None:
        last = breakpoint.tool + 1 == len(tools)
        tools = [*tools, _OTHER_TOOL] if last else tools[: breakpoint.tool + 1]
    return replace(chat, convert=convert, tools=tools, orders_results=False)


def _in_order(
    messages: Sequence[Message], breakpoint: Breakpoint, param: str
) -> tuple[list[Message], Breakpoint]:
    """Return messages as they are rendered, and the last place up to which a breakpoint covers all."""
    order = order_of_results(messages, param)
    ordered = [messages[at] for at in order]
    if breakpoint.tool is not None:
        return ordered, breakpoint
    covered = next((k for k, at in enumerate(order) if at > breakpoint.message), len(order))
    last = covered - 1
    if order[last] == breakpoint.message:
        return ordered, replace(breakpoint, message=last)
    calls = len(ordered[last].get("tool_calls") or ())
    end = replace(
        breakpoint, message=last, chars=len(ordered[last]["content"]), call=calls - 1 if calls else None
    )
    return ordered, end


def _change(message: Message, breakpoint: Breakpoint) -> Message:
    if breakpoint.call is None:
        text = message["content"]
        before, after = text[: breakpoint.chars], text[breakpoint.chars :]
        # Reasoning stands before the content, tool calls after it.
        return {**message, **_stubbed_calls(message), "content": before + _mark(before, after) + _OTHER_TEXT}
    calls = message["tool_calls"][: breakpoint.call + 1]
    function = calls[-1]["function"]
    other = {**function, "arguments": _with_another(function["arguments"])}
    return {**message, "tool_calls": [*calls[:-1], {**calls[-1], "function": other}]}


def _with_another(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with an additional one at the end."""
    members = {**arguments, "another": 0}
    if not isinstance(arguments, JsonText):
        return members
    comma = ", " if arguments else ""
    return JsonText(members, arguments.text.rstrip().removesuffix("}").rstrip() + comma + '"another": 0}')


def _mark(before: str, after: str) -> str:
    """Return a character that forms no token with the text before it, and differs from the next one."""
    usual = "x" if before[-1:].isdigit() else "0"
    return usual if after[:1] != usual else "~"


def _stub(message: Message) -> Message:
    """Return the shortest message of the same kind that templates accept."""
    thought = {"reasoning_content": _STUB} if message.get("reasoning_content") else {}
    return {**message, **_stubbed_calls(message), **thought, "content": _STUB}


def _stubbed_calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return {}
    return {"tool_calls": [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]}
