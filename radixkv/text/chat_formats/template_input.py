# SPDX-License-Identifier: Apache-2.0
"""Input of a chat template: messages and tools in the form that it knows.

Nothing of tools, calls and results may vanish. Where the template shows them, it gets them in the form that
it takes; where it does not, they are written into the texts of the messages as the model's family does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from radixkv.text.chat_formats.derive import REASONING_FIELDS, Message, TemplateTraits
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.json_text import JsonText

_NUMBERED = re.compile(r"functions\.[\w.\-]+:\d+")


def template_tools(
    tools: Sequence[Mapping[str, Any]], chat_format: ChatFormat, traits: TemplateTraits
) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """Return the tools that the template is given as such, and further arguments for it."""
    if not tools or (chat_format.forms and not traits.tools):
        return (), {}
    return (tools, {}) if traits.tools_option is None else ((), {traits.tools_option: list(tools)})


def template_messages(
    messages: Iterable[Message],
    tools: Sequence[Mapping[str, Any]],
    chat_format: ChatFormat,
    traits: TemplateTraits,
    *,
    tools_first: bool = False,
) -> list[Message]:
    """Return messages in OpenAI's form, arguments of calls as objects, as the template must get them.

    Args:
        tools: the tools on offer.
        tools_first: show them before the system prompt, where that can be (`can_show_tools_first`).
    """
    if not traits.late_system:
        messages = _with_one_system(messages)
    if tools and tools_first and traits.tools_place == "movable":
        messages = _with_empty_system(list(messages))
    if not chat_format.forms:
        return list(messages)
    if traits.calls and traits.one_call:
        messages = _with_one_call_each(messages)
    if chat_format.numbers_ids:
        messages = _with_numbered_ids(messages)
    prepared = [_prepared(message, chat_format, traits) for message in messages]
    if tools and not traits.tools:
        prepared = _with_preamble(prepared, chat_format.write_preamble(tools), first=tools_first)
        if not traits.system:
            prepared = _without_system(prepared)
    return prepared


def can_show_tools_first(chat_format: ChatFormat, traits: TemplateTraits) -> bool:
    """Return whether tools that would be shown after the system prompt can be shown before it."""
    return traits.tools_place == "movable" if traits.tools else bool(chat_format.forms)


def _with_one_call_each(messages: Iterable[Message]) -> list[Message]:
    """Put each call in a message of its own, with its result after it.

    Templates that show one call of a message refuse the others, or drop them.
    """
    divided: list[Message] = []
    waiting: list[Message] = []  # messages of calls, and their results so far
    results: list[Message] = []

    def pair_results() -> None:
        for message in waiting:
            at = next((i for i, result in enumerate(results) if _calls_for(message, result)), None)
            divided.extend([message] if at is None else [message, results.pop(at)])
        divided.extend(results)
        waiting.clear()
        results.clear()

    for message in messages:
        if message.get("role") == "tool" and waiting:
            results.append(message)
            continue
        pair_results()
        calls = list(message.get("tool_calls") or ())
        if message.get("role") == "assistant" and len(calls) > 1:
            waiting.append({**message, "tool_calls": [calls[0]]})
            others = {"role": "assistant", "content": ""}
            waiting.extend({**others, "tool_calls": [call]} for call in calls[1:])
        else:
            divided.append(message)
    pair_results()
    return divided


def _calls_for(message: Message, result: Message) -> bool:
    """Return whether a message's only call is the one that a result belongs to."""
    return message["tool_calls"][0].get("id") == result.get("tool_call_id")


def _with_numbered_ids(messages: Iterable[Message]) -> list[Message]:
    """Write ids of calls as Kimi K2 does, `functions.NAME:N`, counted through the conversation."""
    known: dict[Any, str] = {}
    numbered: list[Message] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            given, name = call.get("id"), call["function"]["name"]
            is_own = isinstance(given, str) and _NUMBERED.fullmatch(given) is not None
            known[given] = given if is_own else f"functions.{name}:{len(known)}"
            calls.append({**call, "id": known[given]})
        if calls:
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool" and message.get("tool_call_id") in known:
            message = {**message, "tool_call_id": known[message["tool_call_id"]]}
        numbered.append(message)
    return numbered


def _without_system(messages: list[Message]) -> list[Message]:
    """Put the system's text in front of the user's first, and join the user's messages in a row."""
    merged: list[Message] = []
    for message in messages:
        role = "user" if message.get("role") == "system" else message.get("role")
        before = merged[-1] if merged else {}
        texts = (before.get("content"), message.get("content"))
        if role == before.get("role") == "user" and all(isinstance(text, str) for text in texts):
            merged[-1] = {**before, "content": "\n\n".join(map(str, texts))}
        else:
            merged.append({**message, "role": role})
    return merged


def _with_one_system(messages: Iterable[Message]) -> list[Message]:
    """Make messages of the system after others the user's, as parts of the messages before or after them.

    Templates that refuse them, or drop them, mostly want the roles to take turns, too.
    """
    merged: list[Message] = []
    is_late = False
    for message in messages:
        role = message.get("role")
        before = merged[-1] if merged else {}
        late = role == "system" and any(other.get("role") != "system" for other in merged[:1] + merged[-1:])
        if late:
            message = {**message, "role": "user"}
        joins = message.get("role") == before.get("role") == "user" and (late or is_late)
        if joins and all(isinstance(part.get("content"), str) for part in (before, message)):
            merged[-1] = {**before, "content": f"{before['content']}\n\n{message['content']}"}
            is_late = True
        else:
            merged.append(message)
            is_late = late
    return merged


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return an assistant message's reasoning, by any of the names in use."""
    found = (message.get(name) for name in REASONING_FIELDS)
    return next((text for text in found if isinstance(text, str) and text), "")


def _prepared(message: Message, chat_format: ChatFormat, traits: TemplateTraits) -> Message:
    role = message.get("role")
    if role == "tool":
        return _result(message, chat_format, traits)
    if role != "assistant":
        return message
    message = dict(message)
    if reasoning := reasoning_of(message):
        for name in REASONING_FIELDS:
            message.pop(name, None)
        message[traits.reasoning_field or REASONING_FIELDS[0]] = reasoning
    calls = message.get("tool_calls")
    if not calls:
        return message
    if traits.calls:
        message["tool_calls"] = [_call(call, chat_format, traits) for call in calls]
        return message
    del message["tool_calls"]
    content = message.get("content") or ""
    message["content"] = chat_format.write_calls_after(
        f"{content}\n" if content else "",
        [_written(call["function"]) for call in calls],
        [int(call["id"].rpartition(":")[2]) for call in calls] if chat_format.numbers_ids else (),
    )
    return message


def _call(call: Mapping[str, Any], chat_format: ChatFormat, traits: TemplateTraits) -> Message:
    call = dict(call)
    if isinstance(call.get("id"), str):
        call["id"] = chat_format.call_id(call["id"])
    if traits.arguments_as_text:
        function = call["function"]
        call["function"] = {**function, "arguments": _written(function)[1]}
    return call


def _written(function: Mapping[str, Any]) -> tuple[str, str]:
    """Return a function's name and the JSON text of its arguments."""
    arguments = function.get("arguments")
    if isinstance(arguments, JsonText):
        return function["name"], arguments.text
    return function["name"], json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _result(message: Message, chat_format: ChatFormat, traits: TemplateTraits) -> Message:
    if not traits.results:
        return {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    if isinstance(message.get("tool_call_id"), str):
        return {**message, "tool_call_id": chat_format.call_id(message["tool_call_id"])}
    return message


def _with_empty_system(messages: list[Message]) -> list[Message]:
    """Add an empty system message, in which the template shows the tools, before the one that has a text."""
    first = messages[0] if messages else {}
    if first.get("role") != "system" or not first.get("content"):
        return messages
    return [{"role": "system", "content": ""}, *messages]


def _with_preamble(messages: list[Message], preamble: str, *, first: bool) -> list[Message]:
    """Put the preamble at the beginning or end of the first system message, or in one of its own."""
    system = messages[0] if messages else {}
    if system.get("role") != "system":
        return [{"role": "system", "content": preamble}, *messages]
    content = system.get("content") or ""
    texts = (preamble, content) if first else (content, preamble)
    return [{**system, "content": "\n\n".join(filter(None, texts))}, *messages[1:]]
