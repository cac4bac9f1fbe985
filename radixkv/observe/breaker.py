# SPDX-License-Identifier: Apache-2.0
"""Breaker: the cause by which a prompt parts from an earlier one, by kind and place; else `unknown`.

The kinds are the ones found in practice. Each is named on evidence alone: both prompts were compared,
or the cache remembers the fate of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

SHOWN_CHARS = 60  # of each side

#: Kind -> its description, and advice against it.
KINDS = {
    "client_metadata": (
        "what the client writes about itself at the head of the prompt",
        "have the client leave it out, or the server hold it constant",
    ),
    "model": ("another model", "send requests that share a prompt to one model"),
    "tools_reordered": ("tools in another order", "list tools in one order, or serve with --canonical-tools"),
    "tools_changed": (
        "another set of tools",
        "keep the tools of a session the same, and add new ones in messages",
    ),
    "schema_keys_reordered": (
        "JSON with its keys in another order",
        "write keys in one order, or serve with --canonical-tools",
    ),
    "tool_warning": (
        "text added to a tool's description",
        "say it in a message, or in the tool's result, not in its description",
    ),
    "working_directory": ("a working directory", "say it in the first user message"),
    "timestamp": ("a time", "say it in the latest user message, or only the day"),
    "id": ("an id", "leave it out, or say it at the end of the prompt"),
    "user_name": ("a user's name", "say it after what all users share"),
    "examples": ("examples that are drawn anew", "draw them once, in one order, or put them at the end"),
    "thinking_stripped": (
        "reasoning of an earlier turn that is not sent back",
        "send each message's reasoning back with it",
    ),
    "arguments_reserialised": (
        "JSON of an earlier turn that is written otherwise",
        "send back the arguments as they came",
    ),
    "attachment_moved": (
        "an attachment that stands in another message",
        "leave attachments in the message that they came with",
    ),
    "compaction": (
        "earlier messages that were dropped, cleared or summed up",
        "this happens once; do it rarely, and at the end of the prompt where that can be",
    ),
    "whitespace": ("white space", "send back texts as they came"),
    "image_replaced": ("an image that became another one or a mark", "send images back as they came"),
    "evicted": (
        "what was cached had to make room",
        "pin what must stay, ask for a quota with a floor, or give the server more blocks",
    ),
    "evicted_by_others": (
        "what was cached had to make room for requests of other tenants",
        "pin what must stay, or ask for a quota with a floor",
    ),
    "pool_too_small": (
        "contexts that need more than the pool",
        "add a tier (--kv-tier), memory or replicas, and let the last request of a session say session_done",
    ),
    "ttl_passed": ("a pin that ran out before its next use", "pin it for longer, or use it in between"),
    "reset": ("a reset of the cache", "nothing: the next request brings it back"),
    "concurrent": (
        "a request that began before an earlier one with the same beginning was computed",
        "wait for the first token of one request before the others that share its prompt are sent",
    ),
    "unknown": ("text that differs", "see what differs there"),
}


@dataclass(frozen=True, slots=True)
class Breaker:
    """Cause of a prompt's break.

    Attributes:
        kind: one of `KINDS`.
        what: the same in words, more exactly where that is known, as `a session id`.
        message: index of the later prompt's message that it is in; None: it is in the tools, or everywhere.
        tool: name of the tool that it is in; None: it is in a message.
        place: the place in words, as `the 2nd user message`.
        old, new: the texts there in the earlier prompt and in the later one; parts of them.
        same_tools: both prompts show the same tools.
    """

    kind: str
    what: str
    message: int | None = None
    tool: str | None = None
    place: str = ""
    old: str = ""
    new: str = ""
    same_tools: bool = False

    @property
    def remedy(self) -> str:
        """Advice against it."""
        return KINDS[self.kind][1]

    @property
    def detail(self) -> str:
        """Cause, place and advice as one sentence."""
        where = f" in {self.place}" if self.place and self.place not in self.what else ""
        both = self.old and self.new
        words = f" (“{self.new}” instead of “{self.old}”)" if both else ""
        return f"{self.what[0].upper()}{self.what[1:]}{where}{words}: {self.remedy}."


def shown(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else line[: SHOWN_CHARS - 1] + "…"


def make_breaker(kind: str, what: str = "", old: str = "", new: str = "", tool: str | None = None) -> Breaker:
    """A breaker whose place is not named yet."""
    name = None if tool is None else shown(tool)
    return Breaker(kind, what or KINDS[kind][0], tool=name, old=shown(old), new=shown(new))
