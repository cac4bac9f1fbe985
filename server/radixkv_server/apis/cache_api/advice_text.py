# SPDX-License-Identifier: Apache-2.0
"""Sentences for people about the difference at a break, and the remedy for a miss."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.explain import MissReport
from radixkv.cache.reporting.reasons import Reason
from radixkv.observe.advisor import MIN_RUN
from radixkv.observe.causes import CAUSES
from radixkv.observe.volatile_text import kind_at

#: Reasons that the next request does not meet where a tier has what was missing.
_LOADED_NEXT = (Reason.EVICTED, Reason.EXPIRED, Reason.RESET, Reason.FIRST_SEEN, Reason.NO_STATE)
MIN_PROMPT_GROUP = 2  # of one alone there is no share to tell
_SHOWN_CHARS = 40  # of a word
_LITTLE_IS_THE_SAME = (
    f"After it fewer than {MIN_RUN} tokens in a row are the same, "
    "so there is little to win by moving it alone"
)
_WORD_BEFORE = re.compile(r"[^\s<>|\"“”]*\Z")
_WORD_AFTER = re.compile(r"[^\s<>|\"“”]*")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Place where a prompt departs from another one.

    Args:
        position: of the first token that differs.
        kind: kind of the text there, such as `a timestamp`; `text`: nothing special; None: not to be shown.
        missed: tokens computed because of it.
        recoverable: number of them that are equal again further on.
        words: texts there in the prompt and in the other one; "": not known, or not to be shown.
        place: part that contains it, such as `the system prompt`; None: not known.
        other: name of the other prompt.
        group: record of prompts with the same beginning that depart there; None: there is none.
    """

    position: int
    kind: str | None
    missed: int
    recoverable: int
    words: tuple[str, str] = ("", "")
    place: str | None = None
    other: str = "what is cached"
    group: BreakPoint | None = None

    def with_text(self, before: str, one: str, other: str | None) -> Divergence:
        """Return the divergence with the differing texts, which begin after `before`."""
        words = (word_at(before, one), word_at(before, other) if other else "")
        kind = kind_at(before, one) or kind_at(before, other or "")
        return replace(self, kind=kind or "text", words=words)


def word_at(before: str, after: str) -> str:
    """Return the word in which a text is cut; "": none."""
    begin, end = _WORD_BEFORE.search(before), _WORD_AFTER.match(after)
    assert begin is not None
    assert end is not None
    if not end[0]:
        return ""
    word = (begin[0] + end[0]).rstrip(".,;:!?)]}")
    if len(word) <= _SHOWN_CHARS:
        return word
    start = max(0, len(begin[0]) - _SHOWN_CHARS // 2)
    return word[start : start + _SHOWN_CHARS]


def divergence_advice(found: Divergence) -> str:
    """Describe a break: its cause, place and cost, and the remedy."""
    missed = _tokens(found.missed)
    if found.recoverable:
        return (
            f"{_what_breaks(found)}: move it to the end of the prompt, and about {found.recoverable:,} of "
            f"the {missed} from there on would be found."
        )
    if found.kind in ("text", None):
        # Prompts differ in their questions, which breaks nothing.
        text = _what_breaks(replace(found, group=None))
        return f"{text}: the {missed} from there on are new, and there is nothing to win by moving them."
    return f"{divergence_cost(found)} {_LITTLE_IS_THE_SAME}."


def divergence_cost(found: Divergence) -> str:
    """Describe a break and its cost, without a remedy."""
    what, gain = _what_breaks(found), found.recoverable
    if not found.missed:  # of a group
        return (
            f"{what}: about {_tokens(gain)} more would have been found, had it come later."
            if gain
            else f"{what}."
        )
    if gain:
        missed = _tokens(found.missed)
        return f"{what}: about {gain:,} of the {missed} from there on would be found, had it come later."
    return f"{what}: the {_tokens(found.missed)} from there on are computed."


def cause_advice(found: Divergence, cause: str) -> str:
    """Describe a break with a known cause."""
    return f"{_what_breaks(found)}: {_tokens(found.missed)} are computed for it. It seems that {cause}."


def prompt_group_advice(found: Divergence) -> str:
    """Describe a break of all prompts of a group: `recoverable` is their sum."""
    if not found.recoverable:
        return f"{_what_breaks(found)}. {_LITTLE_IS_THE_SAME}."
    return (
        f"{_what_breaks(found)}: move it to the end of the prompt, and about {_tokens(found.recoverable)} "
        "more would have been found."
    )


def _what_breaks(found: Divergence) -> str:
    """Return `A date at token 41, in the system prompt (“3 May” instead of “2 May”), breaks ...`."""
    kind = found.kind or "something"
    what = "Text that differs" if kind == "text" else kind[0].upper() + kind[1:]
    one, other = found.words
    words = f" (“{one}” instead of “{other}”)" if one and other else f" (“{one}”)" if one else ""
    place = f", in {found.place}{words}," if found.place else words
    return f"{what} at token {found.position:,}{place} {_what_it_does(found)}"


def _what_it_does(found: Divergence) -> str:
    if found.group is None or found.group.count < MIN_PROMPT_GROUP:
        return f"is where the prompt parts from {found.other}"
    here, anywhere = found.group.count, found.group.group_count
    return f"breaks {here / anywhere:.0%} of this family's misses ({here:,} of {anywhere:,} lately)"


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


def miss_advice(report: MissReport, found: Divergence, cause: str | None = None) -> str | None:
    """Return advice on a miss, or None without any.

    Args:
        found: place where the prompt left the cached text.
        cause: the cause, if more than the place is known.
    """
    if report.reason == Reason.DIVERGED:
        return divergence_advice(found) if cause is None else cause_advice(found, cause)
    if report.tier is not None and report.reason in _LOADED_NEXT:
        return f"The tier {report.tier} has it: the next request that needs it loads it from there."
    if report.reason == Reason.FIRST_SEEN and report.num_hit_tokens:
        return None  # the prompt goes on from what is cached, as the next turn of a chat does
    return CAUSES[report.reason].advice_sentence
