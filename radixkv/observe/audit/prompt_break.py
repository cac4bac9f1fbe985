# SPDX-License-Identifier: Apache-2.0
"""Break between a prompt and an earlier one: its place, the texts there, and equal text after it."""

from __future__ import annotations

from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens, shared_bytes
from radixkv.observe.audit.earlier_prompts import EarlierPrompt
from radixkv.observe.audit.prompt_units import PromptUnits
from radixkv.observe.explanation import MissPlace
from radixkv.observe.prompt_difference import TAIL_TOKENS
from radixkv.observe.recoverable import recoverable_characters, recoverable_tokens
from radixkv.observe.text_difference import common_length

SHOWN_CHARS = 240
_BEFORE_CHARS = 80
_COMPARED_UNITS = 400_000  # of each side, after a break


def shared_beginning(earlier: EarlierPrompt | None, units: PromptUnits) -> tuple[int, int]:
    """Return the common prefix of a prompt and an earlier one, in units and in characters of their texts."""
    if earlier is None:
        return 0, 0
    one, other = earlier.units.text, units.text
    place = len(one) if one.is_prefix_of(other) else common_length(str(one), str(other))
    if not units.is_exact:
        return place, place
    return shared_bytes(earlier.units.units.data, units.units.data) // TOKEN_BYTES, place


def parts_from(earlier: EarlierPrompt, units: PromptUnits, steady: int) -> bool:
    """Tell whether a prompt does not begin with the earlier one, apart from that one's ending."""
    return steady * units.tokens_per_unit < earlier.units.num_tokens - TAIL_TOKENS


def tokens_in_best_order(earlier: EarlierPrompt, units: PromptUnits, steady: int, place: int) -> float:
    """Return the tokens that both prompts share before the break and, in runs, after it."""
    if units.is_exact:
        part = slice(steady * TOKEN_BYTES, (steady + _COMPARED_UNITS) * TOKEN_BYTES)
        new, old = (EncodedTokens(each.units.data[part]) for each in (units, earlier.units))
        later = recoverable_tokens(new, old)
    else:
        part = slice(place, place + _COMPARED_UNITS)
        later = recoverable_characters(str(units.text)[part], str(earlier.units.text)[part])
    return (steady + later) * units.tokens_per_unit


def place_of_break(
    earlier: EarlierPrompt, prompt: EarlierPrompt, steady: int, place: int, lost: int
) -> MissPlace:
    """Return the place where a prompt leaves an earlier one, with the texts there.

    Args:
        steady, place: their common prefix, in units and in characters.
        lost: tokens that would have been found without the break.
    """
    old, new = str(earlier.units.text), str(prompt.units.text)
    position = round(steady * prompt.units.tokens_per_unit)
    return MissPlace(
        position,
        prompt.units.num_tokens - position,
        lost,
        "the tools" if _kind_at(prompt, place) == "tool" else "the messages",
        new[max(0, place - _BEFORE_CHARS) : place],
        new[place : place + SHOWN_CHARS],
        old[place : place + SHOWN_CHARS],
    )


def _kind_at(prompt: EarlierPrompt, place: int) -> str:
    ends = zip(prompt.units.text.ends, prompt.blocks, strict=True)
    return next((block.kind for end, block in ends if place < end), "")
