# SPDX-License-Identifier: Apache-2.0
"""Rules for texts that clients write about themselves into prompts: the kept part of each.

Such text is no part of the conversation: the provider that it is meant for takes it out. To any other server
it is a prompt whose first line changes with every request, so that nothing after it is found in the cache. A
rule holds it constant before the chat template sees it.

A rule looks only at its client's place: the head of a chat's first message, if that is a system message. Text
of users, and text in any other place, stays unchanged, whatever it quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClientRule:
    """Text of a client at the head of the system prompt.

    Args:
        client: name of the client.
        what: name of the text.
        head: pattern of the text; the text after it stays unchanged.
        constant: replacement.
    """

    client: str
    what: str
    head: re.Pattern[str]
    constant: Callable[[re.Match[str]], str]

    def applied(self, text: str) -> str | None:
        """A system prompt with the client's text held constant; None: it does not begin with such text."""
        found = self.head.match(text)
        return None if found is None else self.constant(found) + text[found.end() :]


#: Fields of Claude Code's header that differ from request to request, some of them missing in the first.
_OF_ONE_REQUEST = frozenset(
    {
        *("cc_prev_req", "cc_prev_msg", "cc_prompt_id", "cc_turn_origin"),
        *("cc_prompt_index", "cc_turn_index", "cc_prev_prompt_index", "cc_prev_turn_index"),
    }
)
_FIELD = re.compile(r"([a-z][a-z0-9_]*)=([^;\s]*)")
_VERSION = re.compile(r"(\d+\.\d+\.\d+(?:[-+.].*)?)\.[^.]+")


def _claude_code(found: re.Match[str]) -> str:
    """The header with constants for the checksum and the session's part of the version."""
    kept = []
    for name, value in _FIELD.findall(found["fields"]):
        if name == "cch":
            value = "00000"
        elif name == "cc_version":
            value = _VERSION.sub(r"\1.000", value)
        if name not in _OF_ONE_REQUEST:
            kept.append(f"{name}={value};")
    return " ".join([found["name"], *kept])


CLIENT_RULES = (
    ClientRule(
        client="Claude Code",
        what="x-anthropic-billing-header",
        head=re.compile(
            r"(?P<name>x-anthropic-billing-header:)"
            r"(?P<fields>(?:[ \t]*[a-z][a-z0-9_]*=[^;\s]*(?:;|(?=\s|\Z)))+)"
        ),
        constant=_claude_code,
    ),
)


def normalized(messages: Sequence[Message]) -> tuple[list[Message], ClientRule | None]:
    """A chat with what its client wrote about itself held constant, and the rule that did so; None: none did.

    Args:
        messages: as chat templates take them, content as text.
    """
    first = messages[0] if messages else {}
    text = first.get("content")
    if first.get("role") != "system" or not isinstance(text, str):
        return list(messages), None
    for rule in CLIENT_RULES:
        constant = rule.applied(text)
        if constant is not None:
            return [{**first, "content": constant}, *messages[1:]], rule
    return list(messages), None
