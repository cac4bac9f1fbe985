# SPDX-License-Identifier: Apache-2.0
"""Probes of a chat template: turns with calls that its form is read off, and their rendering."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.text.chat_formats.answer import Answer
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.template_traits import (
    Message,
    RenderText,
    TemplateTraits,
    probe_tool,
    shown_text,
)

#: Names of the functions, ids of the calls, and their arguments.
NAMES = ("probe_alpha", "probe_beta")
IDS = ("abcdefgh1", "abcdefgh2")
ARGUMENTS = (
    {"probe_key": "probe first", "probe_more": "probe second"},
    {"probe_key": "x", "probe_more": "y z"},
)
USER = "probe question"
THOUGHT = "probe thought"
SAID = "probe said"
RESULT = "probe result"


def probe_tools() -> list[Mapping[str, Any]]:
    """Return the tools that the probes call, in OpenAI's form."""
    return [probe_tool(name, ARGUMENTS[0]) for name in NAMES]


def call_history(
    chat_format: ChatFormat,
    traits: TemplateTraits,
    num_calls: int,
    thought: str = "",
    arguments: Sequence[Mapping[str, Any]] = ARGUMENTS,
) -> list[Message]:
    """Return a question and an answer of one or two calls.

    Args:
        thought: the reasoning before the calls, where the template shows any.
        arguments: those of the calls.
    """
    calls = []
    for i in range(num_calls):
        given: Any = arguments[i]
        function = {"name": NAMES[i], "arguments": json.dumps(given) if traits.arguments_as_text else given}
        call_id = f"functions.{NAMES[i]}:{i}" if chat_format.numbers_ids else IDS[i]
        calls.append({"id": call_id, "type": "function", "function": function})
    answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    if thought and traits.reasoning_field is not None:
        answer[traits.reasoning_field] = thought
    return [{"role": "user", "content": USER}, answer]


def shown_calls(render: RenderText, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the rendering of calls with results after them, or without, where it then shows them."""
    results = [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": RESULT,
        }
        for call in messages[-1]["tool_calls"]
    ]
    text = shown_text(render, [*messages, *results], tools)
    return text if NAMES[0] in text[text.rfind(USER) :] else shown_text(render, messages, tools)


def reads_as(chat_format: ChatFormat, text: str, num_calls: int) -> bool:
    """Return whether a format reads the first probed calls in a text and no others."""
    schema = {"properties": {key: {"type": "string"} for key in ARGUMENTS[0]}}
    parser = chat_format.parser(tools=dict.fromkeys(NAMES, schema))
    read = Answer.of([*parser.push(text), *parser.finish()])
    try:
        calls = [(call.name, json.loads(call.arguments)) for call in read.tool_calls]
    except ValueError:
        return False
    return calls == list(zip(NAMES, ARGUMENTS, strict=True))[:num_calls]
