# SPDX-License-Identifier: Apache-2.0
"""Reasons why a conversation parts from the cached text of its own earlier turns."""

from __future__ import annotations

import re

from radixkv.text.chat_formats.format import ChatFormat

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
