# SPDX-License-Identifier: Apache-2.0
"""Break between a prompt and an earlier one: its place, the change there, and equal text after it."""

from __future__ import annotations

from dataclasses import replace

from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens
from radixkv.observe.advisor import same_later, same_later_in_texts
from radixkv.observe.audit.earlier_prompts import EarlierPrompt
from radixkv.observe.audit.prompt_units import PromptUnits
from radixkv.observe.causes import Breaker, make_breaker
from radixkv.observe.prompt_difference import find_breaker
from radixkv.observe.prompt_parts import PromptParts

#: The prompt's end, where the assistant begins to speak, is not the same in a later turn with all templates.
TAIL_TOKENS = 16
SHOWN_CHARS = 240
_BEFORE_CHARS = 80
_AROUND_CHARS = 600  # on each side of a difference
_MAX_DIFFERING = 12_000  # characters of a message, from where it differs, that are compared word by word
_MAX_COMPARED = 2_000_000  # characters of both prompts; longer ones are compared by their place alone
_COMPARED_UNITS = 400_000  # of each side, after a break


def shared_beginning(earlier: EarlierPrompt | None, units: PromptUnits) -> tuple[int, int]:
    """Return the common prefix of a prompt and an earlier one, in units and in characters of their texts."""
    if earlier is None:
        return 0, 0
    one, other = earlier.units.text, units.text
    place = len(one) if one.is_prefix_of(other) else common_length(str(one), str(other))
    if not units.is_exact:
        return place, place
    return common_length(earlier.units.units.data, units.units.data) // TOKEN_BYTES, place


def common_length(one: str | bytes, other: str | bytes) -> int:
    """Return the length of the common prefix of two texts. O(n), at the speed of comparing memory."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    step = 1024
    while low < high and one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(high, low + step)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def parts_from(earlier: EarlierPrompt, units: PromptUnits, steady: int) -> bool:
    """Tell whether a prompt does not begin with the earlier one, apart from that one's ending."""
    return steady * units.tokens_per_unit < earlier.units.num_tokens - TAIL_TOKENS


def tokens_in_best_order(earlier: EarlierPrompt, units: PromptUnits, steady: int, place: int) -> float:
    """Return the tokens that both prompts share before the break and, in runs, after it."""
    if units.is_exact:
        compared = slice(steady * TOKEN_BYTES, (steady + _COMPARED_UNITS) * TOKEN_BYTES)
        later = same_later(*(EncodedTokens(each.units.data[compared]) for each in (units, earlier.units)))
    else:
        texts = (str(each.text)[place : place + _COMPARED_UNITS] for each in (units, earlier.units))
        later = same_later_in_texts(*texts)
    return (steady + later) * units.tokens_per_unit


def breaker_between(earlier: EarlierPrompt, prompt: EarlierPrompt, place: int) -> Breaker | None:
    """Return the cause of a break at a character of the prompt's text, or None without one."""
    old, new = str(earlier.units.text), str(prompt.units.text)
    if len(old) + len(new) > _MAX_COMPARED:
        old, new = (text[place : place + SHOWN_CHARS] for text in (old, new))
        return make_breaker("unknown", old=old, new=new)
    in_tools = _kind_at(prompt, place) == "tool"
    one, other = earlier.parts, prompt.parts
    if earlier.tools_text == prompt.tools_text:
        one, other = replace(one, tools=()), replace(other, tools=())
    return find_breaker(*_around_difference(one, other), in_tools=in_tools)


def _kind_at(prompt: EarlierPrompt, place: int) -> str:
    ends = zip(prompt.units.text.ends, prompt.blocks, strict=True)
    return next((block.kind for end, block in ends if place < end), "")


def _around_difference(one: PromptParts, other: PromptParts) -> tuple[PromptParts, PromptParts]:
    """Return both prompts with a long first differing message cut to the text around the difference."""
    pairs = enumerate(zip(one.messages, other.messages, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), None)
    if at is None:
        return one, other
    a, b = one.messages[at].text, other.messages[at].text
    start = max(0, common_length(a, b) - _AROUND_CHARS)
    a, b = a[start:], b[start:]
    after = max(0, common_length(a[::-1], b[::-1]) - _AROUND_CHARS)
    texts = a[: len(a) - after][:_MAX_DIFFERING], b[: len(b) - after][:_MAX_DIFFERING]
    if start + len(a) + len(b) - len(texts[0]) - len(texts[1]) < _AROUND_CHARS:
        return one, other
    cut = []
    for prompt, text in zip((one, other), texts, strict=True):
        messages = list(prompt.messages)
        messages[at] = replace(messages[at], text=text)
        cut.append(replace(prompt, messages=tuple(messages)))
    return cut[0], cut[1]


def texts_at(old: str, new: str, place: int) -> tuple[str, str, str]:
    """Return the text before a place, and its continuations in both prompts."""
    before = new[max(0, place - _BEFORE_CHARS) : place]
    return before, old[place : place + SHOWN_CHARS], new[place : place + SHOWN_CHARS]
