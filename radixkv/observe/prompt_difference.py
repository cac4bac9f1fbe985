# SPDX-License-Identifier: Apache-2.0
"""First difference of two prompts, and its cause: their models, tools and messages compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from radixkv.observe.causes import Breaker, make_breaker
from radixkv.observe.message_difference import changing, rewritten, squeezed
from radixkv.observe.message_places import message_name
from radixkv.observe.prompt_parts import MessageParts, PromptParts
from radixkv.observe.text_difference import common_length, differences, share_in_common
from radixkv.observe.tools_difference import tools_breaker

#: A prompt's end, where the assistant begins to speak: with some templates it differs in the next turn.
TAIL_TOKENS = 16
#: That must be the same after a difference for a user's message to be the same one.
_MIN_SAME_CHARS = 120
_MAX_CHARS = 100_000  # of a message that are compared as they are
_MAX_DIFFERING = 12_000  # of these, from the place where they differ, that are compared word by word
_CHARS_BEFORE = 1024  # of a message that is cut, before that place
_MAX_EXAMPLES = 64  # messages
_MIN_MOVED = 24  # characters of text that moved
_SUMMARY = re.compile(
    r"summar[iy]|compact|conversation so far|continued from|(?:previous|earlier|prior) "
    r"(?:conversation|messages|context|turns)|"
    r"\brecap\b|zusammenfassung|bisherig|resum[eo]n?|r[ée]sum[ée]|riassunto|сводк|резюме|краткое "
    r"содержание|摘要|总结|要約|요약",
    re.I,
)
_MAX_ASKED = 4000  # characters in which a request says what it wants
_MIN_HISTORY = 2  # messages
#: Names of tools that lead from one mode of a client's into another.
_MODE_TOOL = re.compile(r"(?:^|[\W_])\w*mode(?:[\W_]|$)|\w+_mode_\w+|(?:Enter|Exit|Switch)\w*Mode", re.I)
_MODE = re.compile(
    r"\b(?:plan|act|ask|agent|code|edit|build|debug|architect|read[- ]?only|chat|review|normal|default)"
    r"[- ]?mode\b|\bmode:|<mode>",
    re.I,
)
_CLEARED = re.compile(
    r"clear|trunc|omit|remov|elid|elided|redact|compact|snip|shortened|dropped|no longer|gekürzt|entfernt|"
    r"omitid|supprim|rimoss|удал|省略|清除|削除",
    re.I,
)


def find_breaker(old: PromptParts, new: PromptParts, *, in_tools: bool | None = None) -> Breaker | None:
    """Find the cause that breaks the common prefix of two prompts; None: there is none.

    Args:
        old: the earlier one.
        in_tools: whether they part in the text of the tools; None: not known. Where tools and messages both
            differ it says which of them comes first; without it the tools do.

    Nothing breaks where the later prompt goes on after the earlier one, asks something else at its end, or is
    another conversation. O(size of the prompts), and a comparison of some hundred words.
    """
    finders = [_in_model, _in_request_for_summary, _in_tools, _in_messages]
    if in_tools is False:
        finders = [_in_model, _in_request_for_summary, _in_messages, _in_tools]
    return next((found for find in finders if (found := find(old, new)) is not None), None)


def _in_model(old: PromptParts, new: PromptParts) -> Breaker | None:
    if not old.model or not new.model or old.model == new.model:
        return None
    return replace(make_breaker("model", old=old.model, new=new.model), place="the model")


def _in_request_for_summary(old: PromptParts, new: PromptParts) -> Breaker | None:
    """Find a prompt of its own that sums up the earlier one's conversation; O(their size).

    Its head (system prompt or tools) is another one, what it asks speaks of a summary, and it has most of the
    earlier conversation, as messages or as text within one.
    """
    heads = [(prompt.tools, _system_text(prompt)) for prompt in (old, new)]
    if heads[0] == heads[1] or not new.messages:
        return None
    last, asks = new.messages[-1], (_system_text(new), new.messages[-1].text[-_MAX_ASKED:])
    if last.role != "user" or not any(map(_SUMMARY.search, asks)) or _SUMMARY.search(heads[0][1]):
        return None
    history = [m.text for m in old.messages if m.role != "system" and len(m.text) >= _MIN_MOVED]
    there = "\n".join(message.text for message in new.messages)
    if len(history) < _MIN_HISTORY or sum(text in there for text in history) * 2 < len(history):
        return None
    changed = "the tools" if heads[0][0] != heads[1][0] else "the system prompt"
    return replace(make_breaker("compaction_request"), message=len(new.messages) - 1, place=changed)


def _system_text(prompt: PromptParts) -> str:
    return "\n".join(message.text for message in prompt.messages if message.role == "system")


def _in_tools(old: PromptParts, new: PromptParts) -> Breaker | None:
    found = tools_breaker(old.tools, new.tools)
    if found is None:
        return None
    if found.cause.code == "tools_changed" and _changes_mode(old, new, found):
        mode = make_breaker("tools_by_mode", old=found.old, new=found.new, tool=found.tool)
        return replace(mode, place="the tools")
    where = f"the tool {found.tool}" if found.tool else "the tools"
    return replace(found, place="the tools" if found.kind.startswith("tools_") else where)


def _changes_mode(old: PromptParts, new: PromptParts, found: Breaker) -> bool:
    """Return True if tools that came or went, or the messages since, speak of a mode of the client's."""
    if not (found.old or found.new):  # the same names
        return False
    if _MODE_TOOL.search(f"{found.old}, {found.new}"):
        return True
    said = [message.text for message in new.messages[len(old.messages) :] if message.role != "assistant"]
    systems = _system_text(old), _system_text(new)
    if systems[0] != systems[1]:
        said += [part for place in differences(*systems) for part in (place.old_part, place.new_part)]
    return any(_MODE.search(text[:_MAX_ASKED]) for text in said)


def _in_messages(old: PromptParts, new: PromptParts) -> Breaker | None:
    found = _in_history(old.messages, new.messages)
    if found is None or not new.tools:
        return found
    return replace(found, same_tools=tools_breaker(old.tools, new.tools) is None)


def _in_history(old: Sequence[MessageParts], new: Sequence[MessageParts]) -> Breaker | None:
    """Find the cause of a break in the messages; None: the later prompt goes on, or is unrelated.

    O(their size), and a comparison of the texts of the first message that differs.
    """
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if at is None:
        return None
    one, other = _around_difference(old[at], new[at], _MAX_CHARS)
    if at + 1 == len(old) and _goes_on(one, other):
        return None
    found = rewritten(one, other) if one.role == other.role else None
    if found is None:
        if one.role:  # a prompt that is no chat may show its tools as JSON, which is read whole
            one, other = _around_difference(one, other, _MAX_DIFFERING)
        found = _changed([*old[:at], one, *old[at + 1 :]], [*new[:at], other, *new[at + 1 :]], at)
    if found is None:
        return None
    return replace(found, message=at, place=message_name([message.role for message in new], at))


def _around_difference(
    one: MessageParts, other: MessageParts, most: int
) -> tuple[MessageParts, MessageParts]:
    """Return two messages; texts that are too long are cut around the first place where they differ.

    Args:
        most: characters that may differ, and those from the place on that are kept.
    """
    texts = one.text, other.text
    longest = max(map(len, texts))
    if longest <= most:
        return one, other
    first = common_length(*texts)
    same_after = common_length(*(text[first:][::-1] for text in texts))
    if longest <= _MAX_CHARS and longest - first - same_after <= most:
        return one, other
    part = slice(max(0, first - _CHARS_BEFORE), first + most)
    return replace(one, text=one.text[part]), replace(other, text=other.text[part])


def _goes_on(one: MessageParts, other: MessageParts) -> bool:
    """Tell whether a message begins with all of an earlier one."""
    return (
        one.role == other.role
        and other.text.startswith(one.text)
        and other.reasoning.startswith(one.reasoning)
        and other.calls[: len(one.calls)] == one.calls
    )


def _changed(old: Sequence[MessageParts], new: Sequence[MessageParts], at: int) -> Breaker | None:
    """Find the cause of a message that changed its meaning."""
    one, other = old[at], new[at]
    found = _drawn_anew(old, new, at) or _moved(old, new, at) or _shortened(old, new, at)
    if found is not None:
        return found
    if one.role != other.role:
        return make_breaker("unknown", "another message", one.text, other.text)
    if one.role != "system" and not _is_same_message(old, new, at):
        return None if other.role in ("user", "") else make_breaker("unknown", "", one.text, other.text)
    return changing(one.text, other.text)


def _drawn_anew(old: Sequence[MessageParts], new: Sequence[MessageParts], at: int) -> Breaker | None:
    """Name examples that are turns of the chat: the same questions with their answers, in another order."""
    more: Counter[MessageParts] = Counter()  # in the later prompt, less those in the earlier one
    for place in range(at, min(len(old), len(new), at + _MAX_EXAMPLES)):
        if old[place].role != new[place].role:
            return None
        for message, change in ((new[place], 1), (old[place], -1)):
            more[message] += change
            if not more[message]:
                del more[message]
        count = place + 1 - at
        if count >= 4 and count % 2 == 0 and not more:
            return make_breaker("examples", old=old[at].text, new=new[at].text)
    return None


def _is_same_message(old: Sequence[MessageParts], new: Sequence[MessageParts], at: int) -> bool:
    """Return True if two messages are one that changed, not a question and another one."""
    one, other = old[at].text, new[at].text
    if share_in_common(one, other) < 0.5:
        return False
    if at + 1 < min(len(old), len(new)) and old[at + 1] == new[at + 1]:
        return True
    found = differences(one, other)
    after = len(one) - found[0].old[1] - sum(len(place.old_part) for place in found[1:]) if found else 0
    return after >= _MIN_SAME_CHARS


def _moved(old: Sequence[MessageParts], new: Sequence[MessageParts], at: int) -> Breaker | None:
    """Name a text that left this message for another one, or came from another one."""
    for here, there, others in ((old, new, new), (new, old, old)):
        left = _left_over(here[at].text, there[at].text)
        is_whole = not squeezed(there[at].text) or there[at].role != here[at].role
        if len(left) < _MIN_MOVED or is_whole:
            continue
        for index, message in enumerate(others):
            known = here[index].text if index < len(here) else ""
            if index != at and left in squeezed(message.text) and left not in squeezed(known):
                return make_breaker("attachment_moved", old=here[at].text, new=message.text)
    for one, other, others in ((old, new, new), (new, old, old)):
        follows = at + 1 < len(one) and one[at + 1] == other[at]
        if follows and one[at] in others[at + 1 :] and len(squeezed(one[at].text)) >= _MIN_MOVED:
            return make_breaker("attachment_moved", old=old[at].text, new=new[at].text)
    return None


def _left_over(text: str, other: str) -> str:
    """Return the rest of a text that contains all of another one, without invisible parts; else empty."""
    one, shorter = squeezed(text), squeezed(other)
    if one.endswith(shorter):
        return one[: len(one) - len(shorter)]
    head = 0
    while head < min(len(shorter), len(one)) and one[head] == shorter[head]:
        head += 1
    return one[head : len(one) - len(shorter) + head] if one.endswith(shorter[head:]) else ""


def _shortened(old: Sequence[MessageParts], new: Sequence[MessageParts], at: int) -> Breaker | None:
    """Name a history of which messages were dropped, cleared, or summed up."""
    one, other = old[at], new[at]
    if one.role == "system" or not one.role:
        return None
    summed = _SUMMARY.search(other.text[:2000]) is not None
    if _dropped(old, new, at, with_summary=summed):
        return make_breaker("compaction", "", one.text, other.text)
    fewer = len(old) - at >= 2 and len(new) - at < len(old) - at
    if summed and fewer and not _SUMMARY.search(one.text[:2000]):
        return make_breaker("compaction", "", one.text, other.text)
    if one.role == other.role:
        shorter = len(squeezed(other.text)) < 0.7 * len(squeezed(one.text))
        if shorter and _CLEARED.search(other.text[-400:]) and not _CLEARED.search(one.text[-400:]):
            return make_breaker("compaction", "", one.text, other.text)
    return None


def _dropped(
    old: Sequence[MessageParts], new: Sequence[MessageParts], at: int, *, with_summary: bool
) -> bool:
    """Return True if some messages are gone and all later ones, up to the earlier prompt's end, are there.

    In their place may stand a summary, and an answer to it.
    """
    for put in (0, 1, 2) if with_summary else (0,):
        for gone in range(put + (1 if put else 2), len(old) - at):
            rest = list(old[at + gone :])
            if (put or len(rest) > 1) and list(new[at + put : at + put + len(rest)]) == rest:
                return True
    return False
