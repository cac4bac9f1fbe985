# SPDX-License-Identifier: Apache-2.0
"""Explanation of a miss: its cause, the place and the words there, its cost, and one advice.

`explain` is the one way from a miss to its cause, for prompts of our own cache, for two prompts that are
compared, and for the requests of a log. It takes facts, and looks nothing up:

    report      MissReport: the cache's reason, or that of an audit's rules
    prompt      the prompt's messages and tools, made if they have to be compared
    earlier     Predecessor: the earlier prompt that it shares most with
    place       MissPlace: where the found part ends, with the texts on both sides

and returns an Explanation:

    cause       Breaker: a row of `radixkv.observe.causes`, found by the detector of the report's reason
    advice      a sentence with one remedy: of the cause, if it is known; else of the chat format's hint,
                of the place, or of the reason
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.explain import MissReport
from radixkv.cache.reporting.reasons import Reason
from radixkv.observe.causes import CAUSES, Breaker, Detector, make_breaker
from radixkv.observe.image_difference import IMAGE_WORDS
from radixkv.observe.message_difference import changing
from radixkv.observe.message_places import message_name
from radixkv.observe.prompt_difference import find_breaker
from radixkv.observe.prompt_parts import MakeParts
from radixkv.observe.recoverable import MIN_RUN
from radixkv.observe.volatile_text import kind_at
from radixkv.text.chat_formats.client_rules import (
    CLIENT_DROPS_REASONING,
    RESERIALISED,
    TEMPLATE_DROPS_REASONING,
)

#: Reasons that the next request does not meet where a tier has what was missing.
_LOADED_NEXT = (Reason.EVICTED, Reason.EXPIRED, Reason.RESET, Reason.FIRST_SEEN, Reason.NO_STATE)
#: Causes that hints of the chat format stand for.
_OF_HINTS = {
    TEMPLATE_DROPS_REASONING: "thinking_stripped",
    CLIENT_DROPS_REASONING: "thinking_stripped",
    RESERIALISED: "arguments_reserialised",
}
SHOWN_TOKENS = 48  # of a prompt, on each side of a place
MIN_PROMPT_GROUP = 2  # of one alone there is no share to tell
_SHOWN_CHARS = 40  # of a word

_LITTLE_IS_THE_SAME = (
    f"After it fewer than {MIN_RUN} tokens in a row are the same, "
    "so there is little to win by moving it alone"
)
_WORD_BEFORE = re.compile(r"[^\s<>|\"“”]*\Z")
_WORD_AFTER = re.compile(r"[^\s<>|\"“”]*")


@dataclass(frozen=True, slots=True)
class Predecessor:
    """Earlier prompt that shares most with the explained one.

    Attributes:
        parts: makes its parts, in the same form as those of the explained one: as a chat, or as a text.
        shared: length of the common prefix, in tokens.
        is_whole: the explained prompt begins with all of it.
        was_computed: it had been computed when the explained one came.
        lost_to_others: other tenants wrote more into the cache since than its own tenant did.
    """

    parts: MakeParts
    shared: int
    is_whole: bool = False
    was_computed: bool = True
    lost_to_others: bool = False


@dataclass(frozen=True, slots=True)
class MissPlace:
    """Place where the found part of a prompt ends, or where all prompts of a group leave cached text.

    Attributes:
        position: of the first token that is not found, or that differs.
        missed: tokens from there on; 0: of a group.
        recoverable: number of them that are equal to cached ones again, further on; of a group: of all
            its prompts.
        part: part of the prompt that contains the place, such as `the system prompt`; None: not known.
        before, new: the prompt's text on both sides of the place; "": not to be shown.
        old: text that the other prompt has there instead; "": not known, or not to be shown.
        other: name of the other prompt.
        group: record of prompts with the same beginning that leave cached text there; None: there is none.
    """

    position: int
    missed: int
    recoverable: int = 0
    part: str | None = None
    before: str = ""
    new: str = ""
    old: str = ""
    other: str = "what is cached"
    group: BreakPoint | None = None

    @property
    def kind(self) -> str | None:
        """Kind of the text there, such as `a timestamp`; `text`: nothing special; None: not to be shown."""
        if not self.new:
            return None
        if IMAGE_WORDS.match(self.new):
            return "an image"
        return kind_at(self.before, self.new) or kind_at(self.before, self.old) or "text"

    @property
    def in_tools(self) -> bool | None:
        """True if it is in the text of the tools; None: not known."""
        return None if self.part is None else self.part == "the tools"

    def without_texts(self) -> MissPlace:
        """Return the place for callers who may not read the prompt."""
        return replace(self, before="", new="", old="")

    @property
    def cost(self) -> str:
        """Describe it and its cost, without a remedy."""
        what, gain = self._what_breaks(), self.recoverable
        if self.missed and gain:
            missed = _tokens(self.missed)
            return f"{what}: about {gain:,} of the {missed} from there on would be found, had it come later."
        if self.missed:
            return f"{what}: the {_tokens(self.missed)} from there on are computed."
        return (
            f"{what}: about {_tokens(gain)} more would have been found, had it come later."
            if gain
            else f"{what}."
        )

    @property
    def advice(self) -> str:
        """Describe it, its cost, and the remedy that is known without a cause."""
        if self.recoverable:
            missed = _tokens(self.missed)
            gain = (
                f"{self.recoverable:,} of the {missed} from there on would be found"
                if self.missed
                else f"{_tokens(self.recoverable)} more would have been found"
            )
            return f"{self._what_breaks()}: move it to the end of the prompt, and about {gain}."
        if self.missed and self.kind in ("text", None):
            # Prompts differ in their questions, which breaks nothing.
            text, missed = replace(self, group=None)._what_breaks(), _tokens(self.missed)
            return f"{text}: the {missed} from there on are new, and there is nothing to win by moving them."
        return f"{self.cost} {_LITTLE_IS_THE_SAME}."

    def advice_with_hint(self, hint: str) -> str:
        """Describe it with a cause that is likely."""
        return f"{self._what_breaks()}: {_tokens(self.missed)} are computed for it. It seems that {hint}."

    def _what_breaks(self) -> str:
        """Return `A date at token 41, in the system prompt (“3 May” instead of “2 May”), breaks ...`."""
        kind = self.kind or "something"
        what = "Text that differs" if kind == "text" else kind[0].upper() + kind[1:]
        one, other = word_at(self.before, self.new), word_at(self.before, self.old)
        words = f" (“{one}” instead of “{other}”)" if one and other else f" (“{one}”)" if one else ""
        place = f", in {self.part}{words}," if self.part else words
        return f"{what} at token {self.position:,}{place} {self._what_it_does()}"

    def _what_it_does(self) -> str:
        if self.group is None or self.group.count < MIN_PROMPT_GROUP:
            return f"is where the prompt parts from {self.other}"
        here, anywhere = self.group.count, self.group.group_count
        return f"breaks {here / anywhere:.0%} of this family's misses ({here:,} of {anywhere:,} lately)"


def sides_of(position: int) -> tuple[slice, slice]:
    """Return the slices of a prompt's tokens that are shown before a place and from there on."""
    return slice(max(0, position - SHOWN_TOKENS), position), slice(position, position + SHOWN_TOKENS)


def word_at(before: str, after: str) -> str:
    """Return the word in which a text is cut, or the words for the image that comes after; "": none."""
    image = IMAGE_WORDS.match(after)
    if image is not None:
        return image[0]
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


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Cause of a prompt's miss, or of the misses of a group of prompts; made by `explain`.

    Attributes:
        report: of the prompt; None: two prompts were compared, or it is a group.
        place: where the found part ends; None: nothing was missed.
        breaker: the cause; None: nothing breaks the prompt, or it is not to be told.
        hint: a likely cause that the chat format knows.
        tools_first_tokens: tokens that `--tools-first` would let be found; None: it would not help.
    """

    report: MissReport | None
    place: MissPlace | None
    breaker: Breaker | None = None
    hint: str | None = None
    tools_first_tokens: int | None = None

    def without_texts(self) -> Explanation:
        """Return the explanation for callers who may not read the prompt."""
        place = None if self.place is None else self.place.without_texts()
        return replace(self, place=place, breaker=None)

    @property
    def recoverable_tokens(self) -> int:
        """Missed tokens that are equal to cached ones further on."""
        return 0 if self.place is None else self.place.recoverable

    @property
    def advice(self) -> str | None:
        """One sentence: the cause, its place, its cost and the remedy; None: there is nothing to do."""
        advice = self._advice()
        if not self.tools_first_tokens:
            return advice
        tokens = f"{self.tools_first_tokens:,}"
        told = f"With --tools-first about {tokens} tokens of the same tools behind it would have been found."
        return f"{advice} {told}" if advice else told

    def _advice(self) -> str | None:
        breaker = self.breaker
        differs = self.report is None or self.report.reason == Reason.DIVERGED
        place = self.place if differs else None
        if breaker is not None and breaker.is_known:
            return breaker.detail if place is None else f"{place.cost} {breaker.detail}"
        if place is not None:
            return place.advice if self.hint is None else place.advice_with_hint(self.hint)
        return None if self.report is None else _advice_on_reason(self.report)


def _advice_on_reason(report: MissReport) -> str | None:
    if report.tier is not None and report.reason in _LOADED_NEXT:
        return f"The tier {report.tier} has it: the next request that needs it loads it from there."
    if report.reason == Reason.FIRST_SEEN and report.num_hit_tokens:
        return None  # the prompt goes on from what is cached, as the next turn of a chat does
    return CAUSES[report.reason].advice_sentence


def explain(
    report: MissReport | None,
    prompt: MakeParts,
    earlier: Predecessor | None,
    place: MissPlace | None,
    *,
    hint: str | None = None,
    block_size: int = 1,
) -> Explanation:
    """Explain why a prompt missed, by the evidence at hand.

    Args:
        report: what the cache says; None: the prompt is compared with the earlier one, whatever is cached.
        prompt: makes the prompt's parts, if they have to be compared.
        earlier: the earlier prompt; None: none is known.
        place: where the found part ends; None: the report says that nothing was missed.
        hint: a likely cause that the chat format knows.
        block_size: tokens of a block of the cache; that many may be missed though an earlier prompt has them.

    O(1), or O(size of the prompts) if they are compared.
    """
    detector = Detector.PROMPTS if report is None else CAUSES[report.reason].detector
    breaker = None
    if detector is Detector.REASON and report is not None:
        breaker = make_breaker(report.reason)
    elif detector is Detector.ROOM and report is not None:
        is_others = earlier is not None and earlier.lost_to_others
        breaker = make_breaker("evicted_by_others" if is_others else report.reason)
    elif detector is Detector.PROMPTS and place is not None:
        breaker = _compared(prompt, earlier, place, hint, block_size)
    return Explanation(report, place, breaker, hint)


def _compared(
    prompt: MakeParts, earlier: Predecessor | None, place: MissPlace, hint: str | None, block_size: int
) -> Breaker | None:
    """Find the cause by comparing prompts, or, without an earlier one, the texts at the place."""
    if earlier is not None and earlier.is_whole and hint is not None:
        return _in_answer(prompt, earlier, hint)
    if earlier is None or earlier.shared < place.position:
        return changing(place.before + place.old, place.before + place.new) if place.old else None
    if earlier.shared > place.position + block_size:
        if not earlier.was_computed:
            return make_breaker("concurrent")
        return make_breaker("unknown", "what an earlier request had computed, and the cache does not find")
    return find_breaker(earlier.parts(), prompt(), in_tools=place.in_tools)


def _in_answer(prompt: MakeParts, earlier: Predecessor, hint: str) -> Breaker:
    """Describe a prompt that continues an earlier one but departs from the model's answer to it."""
    kind = _OF_HINTS.get(hint, "unknown")
    found = make_breaker(kind, hint if kind == "unknown" else "")
    answer, roles = len(earlier.parts().messages), [message.role for message in prompt().messages]
    if answer >= len(roles):
        return found
    return replace(found, message=answer, place=message_name(roles, answer))
