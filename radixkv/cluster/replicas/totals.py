# SPDX-License-Identifier: Apache-2.0
"""Sums of several engines' counters, which never fall when an engine leaves."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any

from radixkv.engine.counts import EngineStats, TierCounts

#: Gauges, not counts since the start: gone with the engine.
_NOW = {
    *("num_waiting", "num_running", "total_blocks", "free_blocks", "cached_blocks", "held_blocks"),
    *("pinned_blocks", "num_nodes", "num_leases", "num_pins", "ghost_blocks", "waiting_blocks"),
    *("prompts_waiting_for_turn", "reserved_tokens", "state_slots", "free_state_slots", "checkpoints"),
    *("superseded_checkpoints", "window_blocks", "free_window_blocks", "kept_bytes"),
}


def total(stats: Iterable[EngineStats]) -> EngineStats:
    """All of them, at least one, together; tiers of one name are one."""
    return functools.reduce(_sum, stats)


def left_by(stats: EngineStats) -> EngineStats:
    """Counts of a departed engine that still contribute to the totals."""
    return replace(_without_now(stats), tiers=tuple([replace(tier, is_up=True) for tier in stats.tiers]))


def _sum(one: Any, other: Any) -> Any:
    """Field by field; None counts as nothing there."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, TierCounts) and isinstance(other, TierCounts):
        added = {
            item.name: _sum(getattr(one, item.name), getattr(other, item.name))
            for item in fields(one)
            if item.name not in ("name", "is_up", "seconds_per_byte", "answer_s")
        }
        return replace(one, is_up=one.is_up and other.is_up, **added)
    if is_dataclass(one) and not isinstance(one, type):
        pairs = {item.name: (getattr(one, item.name), getattr(other, item.name)) for item in fields(one)}
        return replace(
            one,
            **{name: _sum_tiers(*pair) if name == "tiers" else _sum(*pair) for name, pair in pairs.items()},
        )
    if isinstance(one, dict):
        return dict(Counter(one) + Counter(other))
    if isinstance(one, list | tuple):
        return type(one)([a + b for a, b in zip_longest(one, other, fillvalue=0)])
    return one + other


def _sum_tiers(one: tuple[TierCounts, ...], other: tuple[TierCounts, ...]) -> tuple[TierCounts, ...]:
    by_name: dict[str, TierCounts] = {}
    for tier in (*one, *other):
        by_name[tier.name] = _sum(by_name[tier.name], tier) if tier.name in by_name else tier
    return tuple(by_name.values())


def _without_now(value: Any) -> Any:
    changed = {}
    for item in fields(value):
        found = getattr(value, item.name)
        if item.name in _NOW:
            changed[item.name] = 0
        elif is_dataclass(found):
            changed[item.name] = _without_now(found)
    return replace(value, **changed)
