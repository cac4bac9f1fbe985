# SPDX-License-Identifier: Apache-2.0
"""Explanation of a miss: its cause, the place and the words there, its cost, and one advice.

where       Divergence: the place where a prompt leaves cached text, or another prompt
why         Breaker: what differs there, or what took the room; else the hint of the chat format, else the
            words of the report's reason
advice      both as sentences, with one remedy: that of the cause where it is known
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.explain import MissReport
from radixkv.cache.reporting.reasons import Reason
from radixkv.observe.advisor import MIN_RUN
from radixkv.observe.causes import CAUSES, Breaker
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
    """Place where a prompt departs from another one, or all prompts of a group from cached text.

    Args:
        position: of the first token that differs.
        kind: kind of the text there, such as `a timestamp`; `text`: nothing special; None: not to be shown.
        missed: tokens computed because of it; 0: of a group.
        recoverable: number of them that are equal again further on; of a group: of all its prompts.
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
        one, other = self.words
        words = f" (“{one}” instead of “{other}”)" if one and other else f" (“{one}”)" if one else ""
        place = f", in {self.place}{words}," if self.place else words
        return f"{what} at token {self.position:,}{place} {self._what_it_does()}"

    def _what_it_does(self) -> str:
        if self.group is None or self.group.count < MIN_PROMPT_GROUP:
            return f"is where the prompt parts from {self.other}"
        here, anywhere = self.group.count, self.group.group_count
        return f"breaks {here / anywhere:.0%} of this family's misses ({here:,} of {anywhere:,} lately)"


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


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt, or a group of prompts, missed.

    Args:
        report: of the prompt; None: two prompts were compared, or it is a group.
        divergence: where it parts from other text; None: it does not.
        breaker: the cause, from both prompts or from the cache; None: nothing breaks it, or not to be told.
        hint: a likely cause that the chat format knows.
        tools_first_tokens: tokens that `--tools-first` would let be found; None: it would not help.
    """

    report: MissReport | None
    divergence: Divergence | None
    breaker: Breaker | None = None
    hint: str | None = None
    tools_first_tokens: int | None = None

    @property
    def recoverable_tokens(self) -> int:
        """Missed tokens that are the same further on."""
        return 0 if self.divergence is None else self.divergence.recoverable

    @property
    def advice(self) -> str | None:
        """What to do, with the cause, its place and its cost; None: nothing."""
        advice = self._advice()
        if not self.tools_first_tokens:
            return advice
        tokens = f"{self.tools_first_tokens:,}"
        told = f"With --tools-first about {tokens} tokens of the same tools behind it would have been found."
        return f"{advice} {told}" if advice else told

    def _advice(self) -> str | None:
        found, breaker = self.divergence, self.breaker
        if breaker is not None and breaker.is_known:
            return breaker.detail if found is None else f"{found.cost} {breaker.detail}"
        if found is not None:
            return found.advice if self.hint is None else found.advice_with_hint(self.hint)
        return None if self.report is None else _advice_on_reason(self.report)


def _advice_on_reason(report: MissReport) -> str | None:
    if report.tier is not None and report.reason in _LOADED_NEXT:
        return f"The tier {report.tier} has it: the next request that needs it loads it from there."
    if report.reason == Reason.FIRST_SEEN and report.num_hit_tokens:
        return None  # the prompt goes on from what is cached, as the next turn of a chat does
    return CAUSES[report.reason].advice_sentence
