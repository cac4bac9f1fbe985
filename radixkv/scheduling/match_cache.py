"""What the scheduler reads from the cache in a step, kept until a lease changes it.

A thousand waiting requests are looked at in every step: each keeps its match, looked up again only when the
tree changed under it, and the number of available blocks is read once per namespace.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.prefix_cache import Match, PrefixCache
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.request_state import Namespace, Request

# The matches that are made sure of in one step; of more requests, a part in turn.
MOST_RENEWED = 256


class MatchCache:
    """Matches and room of waiting requests."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._available: dict[Namespace, int] = {}
        self._all_are_current = False
        self._turn = 0

    def touched(self) -> None:
        """A lease was changed, or time has passed. O(1)."""
        self._available.clear()
        self._all_are_current = False

    def matched_tokens(self, requests: Sequence[Request]) -> list[int]:
        """The lengths of the requests' cached prefixes.

        For a request that waits for its producer the length it had before: it does not compete meanwhile.
        When more than `MOST_RENEWED` wait, only so many are made sure of, in turn: what comes to be cached
        for one of a thousand is noticed four steps later at most (its admission always looks again).
        O(requests), and a lookup for each that is looked at and whose part of the tree changed.
        """
        chosen = requests
        if len(requests) > MOST_RENEWED:
            parts = -(-len(requests) // MOST_RENEWED)
            self._turn = (self._turn + 1) % parts
            chosen = requests[self._turn :: parts]
        is_current, is_produced = self._cache.is_current, InFlightPrefixes.is_produced
        for request in chosen:
            match = request.match
            if match is None or not (is_current(match) or is_produced(request)):
                request.match = self._cache.match(request.tokens.encoded, request.namespace)
        self._all_are_current = chosen is requests
        lengths: list[int] = []
        for request in requests:
            match = request.match
            if match is None:
                match = request.match = self._cache.match(request.tokens.encoded, request.namespace)
            lengths.append(match.num_tokens)
        return lengths

    def match(self, request: Request) -> Match:
        """The request's cached prefix."""
        match = request.match
        if match is None or not (self._all_are_current or self._cache.is_current(match)):
            match = request.match = self._cache.match(request.tokens.encoded, request.namespace)
        return match

    def available(self, request: Request) -> int:
        """Blocks that the request could get now."""
        room = self._available.get(request.namespace)
        if room is None:
            room = self._cache.available_blocks(request.namespace)
            self._available[request.namespace] = room
        return room

    def fits(self, request: Request, num_running: int, *, freed: int = 0) -> bool:
        """Whether there are blocks to admit it, and one of headroom for each request that runs or will fork.

        An admission must not cause a preemption at once; with nothing else running it may take all.

        Args:
            freed: blocks that others would give up for it.
        """
        size = self._cache.block_size
        needed = -(-request.tokens.length // size)
        if not request.needs_prompt_logits:
            match = request.match
            if match is None or not self._all_are_current:
                match = self.match(request)
            needed -= match.num_tokens // size
        if num_running:
            needed += num_running + request.num_forks
        room = self.available(request)
        if freed:
            room = min(room + freed, self._cache.ceiling(request.namespace))
        return needed <= room

    def any_fits(self, requests: Sequence[Request], num_running: int) -> bool:
        """Whether trying `requests` makes sense at all: usually nobody fits into a pool in full use.

        By the matches of `matched_tokens`. O(requests), and much cheaper than a trial of each.
        """
        if not num_running:
            return True
        size, available = self._cache.block_size, self._available
        for request in requests:
            match = request.match or self.match(request)
            needed = -(-request.tokens.length // size) - match.num_tokens // size
            room = available.get(request.namespace)
            if room is None:
                room = self.available(request)
            if needed + num_running + request.num_forks <= room:
                return True
        return False
