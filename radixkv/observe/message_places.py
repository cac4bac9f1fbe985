# SPDX-License-Identifier: Apache-2.0
"""Names of a chat's messages, and the search for the one that contains a position of its prompt.

Templates put the text of messages into prompts unchanged, but for white space at its ends. The search looks
in the messages for the text on both sides of a place, whatever the template puts between messages:

    the prompt:      <|im_start|>system\\nIt is 08: | 41. Be brief.<|im_end|>\\n<|im_start|>user...
    a message fits:                      It is 08: | 41. Be brief.

It fits if both sides agree up to the ends of the message, or of the known part of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MIN_BYTES = 4  # that have to agree
_PROBE = 16  # bytes on each side of a place by which it is looked for
_MAX_PROBES = 16  # of one kind that are compared


def place_name(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], before: bytes, after: bytes
) -> str | None:
    """Name the part that contains a place of the prompt, such as `the system prompt`; None: not known.

    Args:
        messages: in the form of chat templates, their content as text.
        before, after: the prompt's text on both sides of the place, UTF-8; some hundred bytes.

    O(bytes of the messages): a search through them.
    """
    fits = [_fit(_text(message), before, after) for message in messages]
    best = max(fits, default=0)
    if best >= MIN_BYTES:
        roles = [message["role"] for message in messages]
        return message_name(roles, fits.index(best)) if fits.count(best) == 1 else None
    if max((_fit(text.encode(), before, after) for text in _texts_in(tools)), default=0) >= MIN_BYTES:
        return "the tools"
    return None


def _text(message: Mapping[str, Any]) -> bytes:
    content = message.get("content")
    return content.strip().encode("utf-8", "replace") if isinstance(content, str) else b""


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the strings of JSON-like data, including names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from _texts_in(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts_in(item)


def _fit(text: bytes, before: bytes, after: bytes) -> int:
    """Return the bytes of a text that agree with both sides of a place, at its best fit; 0: none fits."""
    best = 0
    for at in _candidates(text, before, after):
        if not 0 <= at <= len(text):
            continue
        left, right = min(at, len(before)), min(len(text) - at, len(after))
        if text[at - left : at] == before[len(before) - left :] and text[at : at + right] == after[:right]:
            best = max(best, left + right)
    return best


def _candidates(text: bytes, before: bytes, after: bytes) -> Iterator[int]:
    """Yield candidate places in a text: by its ends, if the prompt shows them, or by the text around."""
    shown, middle = before + after, len(before)
    for start in _places(shown, text[: 2 * _PROBE]):
        yield middle - start
    for start in _places(shown, text[-2 * _PROBE :]):
        yield middle - start + max(0, len(text) - 2 * _PROBE)
    head = before[-_PROBE:]
    for start in _places(text, head + after[:_PROBE]):
        yield start + len(head)


def _places(text: bytes, sought: bytes) -> Iterator[int]:
    at = -1
    for _ in range(_MAX_PROBES):
        at = text.find(sought, at + 1) if sought else -1
        if at < 0:
            return
        yield at


def message_name(roles: Sequence[str], index: int) -> str:
    """Return the name of a message, such as `the 2nd user message`.

    Args:
        roles: of all messages of the chat; empty for a prompt that is no chat.
    """
    role = roles[index]
    same = [at for at, other in enumerate(roles) if other == role]
    kind = {"system": "system prompt", "tool": "tool result", "": "prompt"}.get(role, f"{role} message")
    if len(same) == 1:
        return f"the {kind}"
    number = same.index(index) + 1
    return f"the last {kind}" if number == len(same) else f"the {_ordinal(number)} {kind}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
