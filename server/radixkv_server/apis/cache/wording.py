"""Sentences for people: what differs at a break, and what to do about a miss."""

from __future__ import annotations

import re

from radixkv.cache.insight.explain import MissReport

_CONTEXT = 40  # characters before and behind the break in which a kind is looked for

_KINDS = (
    (re.compile(r"\d{4}-\d\d?-\d\d?[T ]\d\d?:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?"), "a timestamp"),
    (re.compile(r"\b[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "an id"),
    (re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4}"), "a date"),
    (re.compile(r"\d\d?:\d\d(:\d\d(\.\d+)?)?"), "a time"),
    (
        re.compile(
            r"\b(Mon|Tues?|Wed(nes)?|Thu(rs)?|Fri|Sat(ur)?|Sun)(day)?\b"
            r"|\b(Jan(uary)?|Feb(ruary)?|Mar(ch)?|Apr(il)?|June?|July?|Aug(ust)?|Sep(tember)?|Oct(ober)?"
            r"|Nov(ember)?|Dec(ember)?)\b[ .]*\d*"
        ),
        "a date",
    ),
    (re.compile(r"\b\d{10}(\d{3})?\b"), "a timestamp"),
    (re.compile(r"\b(?=[0-9a-zA-Z_-]*\d)[0-9a-zA-Z_-]{8,}\b"), "an id"),
    (re.compile(r"\d+([.,]\d+)*"), "a number"),
)


def what_is_at(before: str, after: str) -> str | None:
    """What stands where a text is cut, such as `a timestamp`; None: nothing special."""
    head = before[-_CONTEXT:]
    text = head + after[:_CONTEXT]
    for pattern, name in _KINDS:
        for found in pattern.finditer(text):
            if found.start() <= len(head) + 1 and found.end() > len(head):
                return name
    return None


def what_differs(before: str, one: str, other: str) -> str:
    """What makes two texts part behind `before`."""
    return what_is_at(before, one) or what_is_at(before, other) or "text"


def break_advice(kind: str, position: int, missed: int, recoverable: int) -> str:
    """What to do where a prompt parts from a cached one.

    Args:
        missed: tokens that are computed again for it.
        recoverable: of them, those that are equal further on.
    """
    start = f"{kind[0].upper()}{kind[1:]} at token {position} is not what is cached there: "
    if not recoverable:
        return f"{start}the {missed} tokens from there on are computed."
    return (
        f"{start}the {missed} tokens from there on are computed, though about {recoverable} of them are the "
        "same as before. Put what changes behind what stays, best at the end of the prompt."
    )


def miss_advice(report: MissReport, kind: str | None, recoverable: int) -> str | None:
    """What to do about a miss, or None: nothing."""
    missed, position = report.num_missed_tokens, report.num_hit_tokens
    if report.reason == "diverged":
        return break_advice(kind or "text", position, missed, recoverable)
    if report.reason == "evicted":
        return (
            "The cache had too little room for it. Pin what must stay (POST /v1/cache/pins), ask for a quota "
            "with a floor, or give the server more blocks."
        )
    if report.reason == "expired":
        return "Its pin ran out before it was used again: pin it for longer."
    if report.reason == "reset":
        return "The cache was reset since; the next request brings it back."
    if report.reason == "namespace":
        return "Another tenant or cache_salt has it. Publish it if all may share it (POST /v1/cache/public)."
    if report.reason == "first_seen":
        return (
            "Nothing that begins like this was cached here lately. If it should have been, look whether the "
            "key and the cache_salt are the same, and whether the prompt begins with what all of them share."
        )
    if report.reason == "partial_block":
        return "The server shares whole blocks only."
    return None
