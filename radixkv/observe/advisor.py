# SPDX-License-Identifier: Apache-2.0
"""Advisor: places where prompts break the prefix, and the gain from moving them.

The advisor watches lookups that diverged from something cached and groups them by prompt group (their first
tokens) and by the block in which they part. Of a sample of them it counts the recoverable tokens.
"""

from __future__ import annotations

from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens, NamespaceKey, decode_tokens
from radixkv.cache.node import Namespace
from radixkv.cache.radix_tree import Walk
from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.tree_view import continuation
from radixkv.observe.recoverable import recoverable_tokens

GROUP_TOKENS = 4
EXAMPLE_TOKENS = 16
COMPARED_TOKENS = 4096
_CREDIT = 1 / 64  # comparisons per lookup observed: each costs as much as an acquire
WINDOW = 10_000  # divergences after which older ones begin to be forgotten
_EXACT = 512  # divergences of a window that are all looked at; of later ones every eighth, counted as eight
_STRIDE = 8


_Place = tuple[NamespaceKey, bytes, int]  # whose, the group's first tokens, the block


class _Tally:
    __slots__ = ("before", "cached", "count", "new", "next_sample", "position", "recoverable", "sampled")

    def __init__(self, position: int) -> None:
        self.count = self.sampled = self.recoverable = 0
        self.next_sample = 1
        self.position = position
        self.before = self.cached = self.new = b""


def _sample(tally: _Tally, data: bytes, walk: Walk, found: int, owner: Namespace) -> bool:
    """Compare the continuation with the cached one there; False: that has been evicted meanwhile. O(n)."""
    known = continuation(walk, COMPARED_TOKENS * TOKEN_BYTES)
    if not known:
        return False
    new = data[found * TOKEN_BYTES :]
    tally.sampled += 1
    tally.recoverable += recoverable_tokens(EncodedTokens(new), EncodedTokens(known))
    is_own = walk.neighbour is not None and walk.neighbour.owner is owner
    shown = EXAMPLE_TOKENS * TOKEN_BYTES
    tally.cached = known[:shown] if is_own else b""  # the text of others is not told
    tally.new = new[:shown]
    tally.before = data[: found * TOKEN_BYTES][-shown:]
    return True


class Advisor:
    """Aggregate of divergences, about the last `WINDOW` to `2 * WINDOW` of them.

    Counts are exact up to some hundred divergences and estimates beyond.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size  # tokens per block
        self._now: dict[_Place, _Tally] = {}
        self._before: dict[_Place, _Tally] = {}
        self._seen = 0
        self._to_skip = 0  # divergences that count for nothing: the next one stands for them
        self._credit = 16.0  # comparisons that may be made at once

    def observe(self, data: bytes, walk: Walk, owner: Namespace) -> None:
        """Record a lookup in `owner` that left `walk.neighbour` after some tokens. O(1), some O(n)."""
        if self._to_skip:
            self._to_skip -= 1
            return
        found = walk[1] + walk[2]
        key = owner.key, data[: min(GROUP_TOKENS, found) * TOKEN_BYTES], found // self._size
        tally = self._now.get(key)
        if tally is None:
            if self._seen > WINDOW:
                self._before, self._now, self._seen = self._now, {}, 0
            tally = self._now[key] = _Tally(found)
        weight = 1
        if self._seen >= _EXACT:
            weight = _STRIDE
            self._to_skip = _STRIDE - 1
        self._seen += weight
        tally.count += weight
        if found < tally.position:
            tally.position = found
        self._credit += _CREDIT
        if (
            self._credit >= 1
            and tally.count >= tally.next_sample
            and _sample(tally, data, walk, found, owner)
        ):
            self._credit -= 1
            tally.next_sample *= 2  # the first, second, fourth, eighth, ..., as far as the credit goes

    def advice(self, limit: int = 10, owner: NamespaceKey | None = None) -> list[BreakPoint]:
        """Return the places with the largest gain, best first. O(places).

        Args:
            owner: leading parts of the namespaces that are asked about; None: all.
        """
        merged: dict[_Place, list[_Tally]] = {}
        groups: dict[tuple[NamespaceKey, bytes], int] = {}
        for generation in (self._now, self._before):
            for key, tally in generation.items():
                if owner is None or key[0][: len(owner)] == owner:
                    merged.setdefault(key, []).append(tally)
                    groups[key[:2]] = groups.get(key[:2], 0) + tally.count
        points = []
        for key, tallies in merged.items():
            count = sum(t.count for t in tallies)
            sampled = sum(t.sampled for t in tallies)
            latest = tallies[0]
            points.append(
                BreakPoint(
                    position=min(t.position for t in tallies),
                    count=count,
                    recoverable_tokens=sum(t.recoverable for t in tallies) * count // max(1, sampled),
                    group_tokens=tuple(decode_tokens(key[1])),
                    example_cached=tuple(decode_tokens(latest.cached)),
                    example_new=tuple(decode_tokens(latest.new)),
                    namespace=key[0],
                    group_count=groups[key[:2]],
                    example_before=tuple(decode_tokens(latest.before)),
                )
            )
        points.sort(key=lambda p: (-p.recoverable_tokens, -p.count, p.position))
        return points[:limit]
