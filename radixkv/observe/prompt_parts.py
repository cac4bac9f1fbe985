# SPDX-License-Identifier: Apache-2.0
"""PromptParts: a prompt as its client sent it, in one form for all APIs, to be compared with others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.text.json_text import JsonText


@dataclass(frozen=True, slots=True)
class MessageParts:
    """A message.

    Args:
        role: `system`, `user`, `assistant`, `tool`; empty: a prompt without messages.
        text: its content; images are marks in it.
        reasoning: its stated thoughts.
        calls: name and JSON text of the arguments of each call.
    """

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt.

    Args:
        messages: the system's, if there is one, first.
        tools: name, description and parameters of each, in the order in which they are shown.
        model: empty: not known.
    """

    messages: tuple[MessageParts, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    model: str = ""

    @classmethod
    def of_chat(
        cls, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), model: str = ""
    ) -> PromptParts:
        """Return the parts of a chat in OpenAI's form, or as chat templates take it. O(its size)."""
        shown = tuple(tool.get("function", tool) for tool in tools)
        return cls(tuple(map(_message, messages)), shown, model)

    @classmethod
    def of_text(cls, text: str) -> PromptParts:
        """Return the parts of a prompt that is known by its text alone."""
        return cls((MessageParts("", text),), ())

    @property
    def is_text(self) -> bool:
        """True if nothing but its text is known."""
        return bool(self.messages) and not self.messages[0].role


#: Makes the parts of a prompt, at the cost of converting all its messages: called on demand.
MakeParts = Callable[[], PromptParts]


def _message(message: Mapping[str, Any]) -> MessageParts:
    reasoning = [message.get(name) for name in ("reasoning_content", "reasoning", "thinking")]
    parts = _parts(message.get("content"))
    thoughts = [text for kind, text in parts if kind == "thinking"]
    given = next((text for text in reasoning if isinstance(text, str) and text), "")
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    role = str(message.get("role") or "user")
    return MessageParts(
        "system" if role == "developer" else role,
        "\n".join(text for kind, text in parts if kind != "thinking"),
        given or "\n".join(thoughts),
        tuple((str(call.get("name")), _written(call.get("arguments"))) for call in calls),
    )


def _parts(content: Any) -> list[tuple[str, str]]:
    """Return the kind and text of each part of a content."""
    if isinstance(content, str):
        return [("text", content)]
    found = []
    for part in content if isinstance(content, Sequence) else ():
        if isinstance(part, str):
            found.append(("text", part))
        elif isinstance(part, Mapping):
            kind = str(part.get("type", "text"))
            text = part.get("text") or part.get("thinking")
            if not isinstance(text, str):
                nested = part.get("content")
                text = (
                    "\n".join(inner for _, inner in _parts(nested))
                    if kind in ("tool_result", "document") and nested is not None
                    else f"<{kind}>{json.dumps(part, ensure_ascii=False, default=str)}</{kind}>"
                )
            found.append(("thinking" if "thinking" in kind else kind, text))
    return found


def _written(arguments: Any) -> str:
    """Return the JSON text of a call's arguments, as the prompt has it."""
    if isinstance(arguments, JsonText):
        return arguments.text
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
