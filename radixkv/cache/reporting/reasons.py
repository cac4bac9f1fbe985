# SPDX-License-Identifier: Apache-2.0
"""Reasons of misses, in the order in which a report tries them for the first token that was not found.

The last four are found only by rules that watch another server's cache. `radixkv.observe.causes` has a label,
a meaning and advice for each, and what can lie below it.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A reason for which the rest of a prompt was not found."""

    HIT = "hit"
    SKIPPED = "skipped"
    PARTIAL_BLOCK = "partial_block"
    NO_STATE = "no_state"
    EVICTED = "evicted"
    EXPIRED = "expired"
    RESET = "reset"
    LENGTH = "length"
    NAMESPACE = "namespace"
    DIVERGED = "diverged"
    FIRST_SEEN = "first_seen"
    LOAD_TOO_SLOW = "load_too_slow"
    CHECKSUM = "checksum"
    UPSTREAM_MISSED = "upstream_missed"
    TOO_SHORT = "too_short"
    NO_BREAKPOINT = "no_breakpoint"
    CONCURRENT = "concurrent"


#: Reasons that a report of our own cache can have.
REASONS: tuple[Reason, ...] = tuple(Reason)[: tuple(Reason).index(Reason.UPSTREAM_MISSED)]
