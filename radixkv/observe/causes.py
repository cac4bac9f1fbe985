# SPDX-License-Identifier: Apache-2.0
"""Causes of misses: one table of their words and detectors, for all that speaks of misses.

A cause is either a `Reason`, which a cache's report or the rules of an audit give, or lies below one of them:

    reason         says where a prompt was no longer found; O(1) for each request
    cause below    says what differs there, or what took its room; found on demand, by the reason's detector

Each is named on evidence alone: both prompts were compared, or the cache remembers the fate of its blocks.
`radixkv.observe.explanation.explain` finds the cause of a miss.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from radixkv.cache.reporting.reasons import Reason

SHOWN_CHARS = 60  # of each side


class Detector(StrEnum):
    """Method by which the cause of a prompt's break is found."""

    NOTHING = "nothing"  # the prompt is as it was: the reason says all, and nothing breaks the prompt
    REASON = "reason"  # the reason itself is the cause
    ROOM = "room"  # the reason, or those who wrote into the cache since
    POOL = "pool"  # all prompts of the last minutes, counted together
    PROMPTS = "prompts"  # comparing the prompt with an earlier one: `prompt_difference.find_breaker`


@dataclass(frozen=True, slots=True)
class Cause:
    """Row of the table: a cause's words, and how it is found.

    Attributes:
        code: its name: that of a reason, or of a cause below one.
        meaning: a phrase that begins a sentence, without its capital and period.
        advice: a remedy, in the same form; None: there is nothing to do.
        detector: of a reason: how the cause of the break is found; of a cause below one: how it was found.
        label: its name for people; empty: it is no reason.
        below: the reason that it is found for; None: it is a reason itself.
        kind: its name as a prompt's breaker in our APIs, where that is another one.
    """

    code: str
    meaning: str
    advice: str | None = None
    detector: Detector = Detector.NOTHING
    label: str = ""
    below: Reason | None = None
    kind: str = ""

    @property
    def sentence(self) -> str:
        """Meaning as a sentence."""
        return f"{_capitalised(self.meaning)}."

    @property
    def advice_sentence(self) -> str | None:
        """Meaning and advice as a sentence; None: there is nothing to do."""
        return None if self.advice is None else f"{_capitalised(self.meaning)}: {self.advice}."


_REASONS = (
    Cause(Reason.HIT, "only the last token was computed, as always", label="Hit"),
    Cause(
        Reason.SKIPPED,
        "the request asked not to look it up, or for logprobs of its prompt, which are computed",
        label="Skipped",
    ),
    Cause(
        Reason.PARTIAL_BLOCK,
        "cached, but less than a whole block of it could be shared",
        "the server shares whole blocks only",
        label="Partial block",
    ),
    Cause(
        Reason.NO_STATE,
        "its keys and values are cached, but no state of the model's state layers near their end",
        "prompts that part here get a state at the second sight; mark the end of the steady part "
        "(cache_control), or give states more memory (--state-memory)",
        label="No state",
    ),
    Cause(
        Reason.EVICTED,
        "what was cached had to make room",
        "pin what must stay, ask for a quota with a floor, or give the server more blocks",
        detector=Detector.ROOM,
        label="Evicted",
    ),
    Cause(
        Reason.EXPIRED,
        "what was cached had run out before its next use",
        "use it in between, or keep it for longer (a pin's ttl)",
        detector=Detector.REASON,
        label="Expired",
        kind="ttl_passed",
    ),
    Cause(
        Reason.RESET,
        "the cache was reset",
        "nothing to do, the next request brings it back",
        detector=Detector.REASON,
        label="Reset",
    ),
    Cause(
        Reason.LENGTH,
        "it is cached for prompts of another length, with other rotary frequencies",
        "prompts on either side of that length compute it once",
        label="Other length",
    ),
    Cause(
        Reason.NAMESPACE,
        "another tenant or cache_salt has it",
        "publish it if all may share it (POST /v1/cache/public)",
        label="Other tenant",
    ),
    Cause(
        Reason.DIVERGED,
        "a token differs from the cached one",
        "put the varying part at the end of the prompt",
        detector=Detector.PROMPTS,
        label="Diverged",
    ),
    Cause(
        Reason.FIRST_SEEN,
        "it goes on with text that has not been here, as new prompts and a chat's next turn do",
        "if it should have been, check that the key and the cache_salt are the same, and that the prompt "
        "begins with the part that all of them share",
        detector=Detector.PROMPTS,
        label="New text",
    ),
    Cause(
        Reason.LOAD_TOO_SLOW,
        "a tier has it, but it was quicker to compute, or did not come in time",
        "look at radixkv_tier_up and at the speed of the disk or the network",
        label="Load too slow",
    ),
    Cause(
        Reason.CHECKSUM,
        "the copy in a tier was damaged and dropped, and it was computed and saved again",
        "if it happens again, look at the disk (`radixkv cache verify PATH`)",
        label="Checksum",
    ),
    Cause(
        Reason.UPSTREAM_MISSED,
        "the upstream did not find it, though the prompt was steady and its time not over",
        "look for the cause at the upstream: nothing in the prompt is to be changed",
        label="Upstream missed",
    ),
    Cause(
        Reason.TOO_SHORT,
        "its shared part is shorter than the upstream caches",
        "let prompts share a longer beginning",
        label="Too short",
    ),
    Cause(
        Reason.NO_BREAKPOINT,
        "no breakpoint asks to cache it, or none near enough to what was cached before",
        "mark the end of what stays the same, and of the newest message, to be cached",
        label="No breakpoint",
    ),
    Cause(
        Reason.CONCURRENT,
        "its shared part was being computed for another request",
        "wait for the first token of one request before the others that share its prompt are sent",
        detector=Detector.REASON,
        label="Concurrent",
    ),
)

_BELOW_EVICTED = (
    (
        "evicted_by_others",
        "what was cached had to make room for requests of other tenants",
        "pin what must stay, or ask for a quota with a floor",
        Detector.ROOM,
    ),
    (
        "pool_too_small",
        "contexts that need more than the pool",
        "add a tier (--kv-tier), memory or replicas, and let the last request of a session say session_done",
        Detector.POOL,
    ),
)

#: Differences between prompts.
_BELOW_DIVERGED = (
    (
        "client_metadata",
        "what the client writes about itself at the head of the prompt",
        "have the client leave it out, or the server hold it constant",
    ),
    ("model", "another model", "send requests that share a prompt to one model"),
    ("tools_reordered", "tools in another order", "list tools in one order, or serve with --canonical-tools"),
    (
        "tools_changed",
        "another set of tools",
        "keep the tools of a session the same, and add new ones in messages",
    ),
    (
        "tools_by_mode",
        "a list of tools that changes with the client's mode",
        "list the tools of all modes in each request, and say in the latest message, or by tool_choice's "
        "allowed_tools, which of them may be used",
    ),
    (
        "schema_keys_reordered",
        "JSON with its keys in another order",
        "write keys in one order, or serve with --canonical-tools",
    ),
    (
        "tool_warning",
        "text added to a tool's description",
        "say it in a message, or in the tool's result, not in its description",
    ),
    ("working_directory", "a working directory", "say it in the first user message"),
    ("timestamp", "a time", "say it in the latest user message, or only the day"),
    ("id", "an id", "leave it out, or say it at the end of the prompt"),
    ("user_name", "a user's name", "say it after what all users share"),
    ("examples", "examples that are drawn anew", "draw them once, in one order, or put them at the end"),
    (
        "thinking_stripped",
        "reasoning of an earlier turn that is not sent back",
        "send each message's reasoning back with it",
    ),
    (
        "arguments_reserialised",
        "JSON of an earlier turn that is written otherwise",
        "send back the arguments as they came",
    ),
    (
        "attachment_moved",
        "an attachment that stands in another message",
        "leave attachments in the message that they came with",
    ),
    (
        "compaction",
        "earlier messages that were dropped, cleared or summed up",
        "this happens once; do it rarely, and at the end of the prompt where that can be",
    ),
    (
        "compaction_request",
        "a request to sum the conversation up that is written as a prompt of its own",
        "ask for the summary in a last message after the conversation, with the same system prompt and tools",
    ),
    ("whitespace", "white space", "send back texts as they came"),
    (
        "image_resized",
        "the same image at another size",
        "shrink an image once, before its first turn, and send the same bytes again",
    ),
    (
        "another_image",
        "another image",
        "send the images of earlier turns as they were; show new ones after them",
    ),
    ("image_replaced", "an image that became another one or a mark", "send images back as they came"),
    ("unknown", "text that differs", "see what differs there"),
)

#: All causes by their codes: reasons, in the order of `Reason`, then those below them.
CAUSES: dict[str, Cause] = {
    cause.code: cause
    for cause in (
        *_REASONS,
        *(Cause(*words, below=Reason.EVICTED) for words in _BELOW_EVICTED),
        *(Cause(*words, Detector.PROMPTS, below=Reason.DIVERGED) for words in _BELOW_DIVERGED),
    )
}


@dataclass(frozen=True, slots=True)
class Breaker:
    """Cause of a prompt's break.

    Attributes:
        cause: one of `CAUSES`.
        what: its meaning, more exactly where that is known, as `a session id`.
        message: index of the later prompt's message that it is in; None: it is in the tools, or everywhere.
        tool: name of the tool that it is in; None: it is in a message.
        place: the place in words, as `the 2nd user message`.
        old, new: the texts there in the earlier prompt and in the later one; parts of them.
        same_tools: both prompts show the same tools.
    """

    cause: Cause
    what: str
    message: int | None = None
    tool: str | None = None
    place: str = ""
    old: str = ""
    new: str = ""
    same_tools: bool = False

    @property
    def kind(self) -> str:
        """Name of the cause in our APIs."""
        return self.cause.kind or self.cause.code

    @property
    def is_known(self) -> bool:
        """False if no more is known than that texts differ."""
        return self.cause.code != "unknown"

    @property
    def remedy(self) -> str:
        """Advice against it."""
        return self.cause.advice or ""

    @property
    def detail(self) -> str:
        """Cause, place and advice as one sentence."""
        where = f" in {self.place}" if self.place and self.place not in self.what else ""
        both = self.old and self.new
        words = f" (“{self.new}” instead of “{self.old}”)" if both else ""
        return f"{_capitalised(self.what)}{where}{words}: {self.remedy}."


def _capitalised(phrase: str) -> str:
    return phrase[0].upper() + phrase[1:]


def shown(text: str) -> str:
    """Return the beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else line[: SHOWN_CHARS - 1] + "…"


def make_breaker(code: str, what: str = "", old: str = "", new: str = "", tool: str | None = None) -> Breaker:
    """Return a breaker whose place is not named yet.

    Args:
        code: of a row of `CAUSES`.
        what: its meaning, more exactly; empty: as in the table.
        old, new: the texts that differ.
        tool: name of the tool that it is in.
    """
    name, cause = None if tool is None else shown(tool), CAUSES[code]
    return Breaker(cause, what or cause.meaning, tool=name, old=shown(old), new=shown(new))
