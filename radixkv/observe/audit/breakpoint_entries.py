# SPDX-License-Identifier: Apache-2.0
"""BreakpointEntries: cache entries of providers that cache only at breakpoints, and lookups in them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from radixkv.observe.audit.record import DEFAULT_TTL, Block, Record
from radixkv.observe.audit.rule_sets import RuleSet


class BreakpointEntry(NamedTuple):
    """Written prefix.

    Attributes:
        ttl: seconds that each use renews.
        available: when it could first be read; used: when it was last.
    """

    ttl: float
    available: float
    used: float


class BreakpointHit(NamedTuple):
    """Result of looking up a prompt.

    Attributes:
        block: last block that is read; -1: none.
        expired_block: last block that would have been read if entries had not expired.
        written: block and time to live of each breakpoint after the read blocks.
        running_block: last block that would have been read if the answer to an earlier request had begun.
        breakpoints: number of breakpoints.
    """

    block: int
    expired_block: int
    running_block: int
    written: tuple[tuple[int, float], ...]
    breakpoints: int


class BreakpointEntries:
    """Entries by the hash of their prefix.

    Args:
        max_entries: the ones used longest ago are forgotten.
    """

    def __init__(self, rules: RuleSet, max_entries: int) -> None:
        self._rules = rules
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, BreakpointEntry] = OrderedDict()

    def breakpoints(self, record: Record) -> list[tuple[int, float]]:
        """Return the blocks of a prompt that end at a breakpoint, in order, with their times to live."""
        rules = self._rules
        default = rules.ttl_s or 0.0
        found = {at: block.ttl for at, block in enumerate(record.blocks) if block.ttl is not None}
        # Other APIs than Anthropic's can't ask for an automatic one: who marks blocks there means these.
        asks = record.automatic_ttl is not None and (record.dialect == "messages" or not found)
        automatic = _last_cacheable(record) if (asks or rules.automatic) and not record.explicit_only else -1
        explicit = rules.max_breakpoints - (automatic >= 0 and automatic not in found)
        found = dict(list(found.items())[-explicit:] if explicit > 0 else [])
        if automatic >= 0:
            found.setdefault(automatic, record.automatic_ttl or DEFAULT_TTL)
        return [(at, ttl or default) for at, ttl in sorted(found.items())]

    def read(
        self, record: Record, chain: Sequence[bytes], tokens: Callable[[int], float], now: float
    ) -> BreakpointHit:
        """Return the entries that a prompt reads now, and would write.

        Args:
            chain: see `chain_of`.
            tokens: returns the prompt's tokens up to the end of a block.
        """
        breakpoints = self.breakpoints(record)
        minimum = self._rules.minimum(record.model)
        best = expired = running = -1
        for at, _ in reversed(breakpoints):
            for block in range(at, max(-1, at - self._rules.looks_back - 1), -1):
                if block <= best or tokens(block) < minimum:
                    break
                entry = self._entries.get(chain[block])
                if entry is None:
                    continue
                if entry.available > now:
                    running = max(running, block)
                elif entry.used + entry.ttl < now:
                    if block > expired:
                        expired = block
                else:
                    best = block
                    break
        written = tuple((at, ttl) for at, ttl in breakpoints if at > best and tokens(at) >= minimum)
        return BreakpointHit(best, expired, running, written, len(breakpoints))

    def note(
        self, record: Record, chain: Sequence[bytes], found: BreakpointHit, now: float, available: float
    ) -> None:
        """Record a prompt's reads and writes. O(its breakpoints).

        Args:
            available: time from which its entries can be read; infinite: a later call will set it.
        """
        entry = self._entries.get(chain[found.block]) if found.block >= 0 else None
        if entry is not None:
            self._entries[chain[found.block]] = entry._replace(used=max(now, entry.used))
            self._entries.move_to_end(chain[found.block])
        for at, ttl in found.written:
            known = self._entries.get(chain[at])
            if known is None or known.available == math.inf or known.used + known.ttl < now:
                self._entries[chain[at]] = BreakpointEntry(ttl, available, now)
            self._entries.move_to_end(chain[at])
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def forget_running(self, chain: Sequence[bytes], found: BreakpointHit) -> None:
        """Drop the entries of a prompt that was noted but failed."""
        for at, _ in found.written:
            known = self._entries.get(chain[at])
            if known is not None and known.available == math.inf:
                del self._entries[chain[at]]


def _last_cacheable(record: Record) -> int:
    """Return the last block of a prompt that can have a breakpoint; -1: none."""
    blocks = record.blocks
    return next((at for at in range(len(blocks) - 1, -1, -1) if _is_cacheable(blocks[at])), -1)


def _is_cacheable(block: Block) -> bool:
    return block.kind != "thinking" and bool(block.text)
