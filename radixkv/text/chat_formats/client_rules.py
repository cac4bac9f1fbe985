# SPDX-License-Identifier: Apache-2.0
"""Rules for texts that clients write about themselves into prompts: the kept part of each.

Such text is no part of the conversation: the provider that it is meant for takes it out. To any other server
it is a prompt whose first line changes with every request, so that nothing after it is found in the cache. A
rule holds it constant before the chat template sees it.

A rule looks only at its client's place: the head of a chat's first message, if that is a system message. Text
of users, and text in any other place, stays unchanged, whatever it quotes.

`divergence_hint` names other reasons why a conversation parts from the cached text of its own earlier turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.text.chat_formats.format import ChatFormat

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

    @property
    def effect(self) -> str:
        """Effect of the rule, in words."""
        return f"{self.what}, which {self.client} writes at the head of the system prompt, is held constant"

    def applied(self, text: str) -> str | None:
        """Return a system prompt with the client's text held constant; None: it does not begin with one."""
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
    """Return the header with constants for the checksum and the session's part of the version."""
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
    """Hold constant the text of a client about itself; return the chat, and the rule, None if none fits.

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


TEMPLATE_DROPS_REASONING = (
    "the chat template leaves out the reasoning of earlier turns: turn reasoning off, or use a template that "
    "keeps it"
)
CLIENT_DROPS_REASONING = (
    "the reasoning of earlier turns is not sent back: send each message's reasoning_content with it"
)
RESERIALISED = (
    "the same text is written otherwise, as by re-serialised arguments of a tool call: send back the "
    "arguments as they came"
)
TEMPLATE_DROPS_CONTENT = "the chat template leaves out what a message says beside its tool calls"
OTHER_TOKENS = "the same text comes in other tokens than the model had generated"
OTHER_FORM = "the chat template writes tool calls in another form than the model does"
OTHER_WORDS = "the chat template writes true, false and null in other words than the model does"
ADDED_IDS = "the chat template adds ids to tool calls, which the model had not written"

_CONSTANT = re.compile(r"(?i:true|false|null|none)\b")


def divergence_hint(
    cached: str,
    new: str,
    chat_format: ChatFormat,
    *,
    reasoning_sent: bool = False,
    content_dropped: bool = False,
) -> str | None:
    """Return the cause of a changed earlier turn, judged by a few tokens; None: nothing known.

    Args:
        cached: the text that the cache holds after the place where the prompt parts from it.
        new: the text that the prompt has there.
        reasoning_sent: the request's messages carry the reasoning of earlier turns.
        content_dropped: the template drops the text of a message beside its calls, and there is some.
    """
    opens = chat_format.reasoning.opens if chat_format.reasoning is not None else ()
    marks = {mark.strip() for mark in opens}
    if _begins(cached, marks) and not _begins(new, marks):
        return TEMPLATE_DROPS_REASONING if reasoning_sent else CLIENT_DROPS_REASONING
    calls = {mark.strip() for form in chat_format.forms for mark in form.opens}
    written = {mark for mark in calls if _begins(cached, {mark})}
    if new and written and not _begins(new, written):
        return OTHER_FORM
    if content_dropped and cached and not written and _begins(new, calls):
        return TEMPLATE_DROPS_CONTENT
    if not cached or not new:
        return None
    if chat_format.call_id_length is not None and new.lstrip(" ,").startswith('"id"'):
        return ADDED_IDS
    if cached.startswith(new) or new.startswith(cached):
        return OTHER_TOKENS
    one, other = "".join(cached.split()), "".join(new.split())
    if (one.startswith(other) or other.startswith(one)) and min(len(one), len(other)) > 1:
        return RESERIALISED
    if ("\\u" in cached) != ("\\u" in new):
        return RESERIALISED
    words = (_CONSTANT.match(cached), _CONSTANT.match(new))
    if None not in words and cached[0] != new[0]:
        return OTHER_WORDS
    return None


def _begins(text: str, marks: set[str]) -> bool:
    text = text.lstrip()
    return any(text.startswith(mark) or (len(text) > 3 and mark.startswith(text)) for mark in marks)
