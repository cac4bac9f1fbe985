"""What the scheduler reads from the cache in a step, kept until a lease changes it.

A thousand waiting requests are looked at in every step: each keeps its match, looked up again only when the
tree changed under it, and the number of available blocks is read once per namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixkv.cache.prefix_cache import Match, PrefixCache
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.policy import tenant_of
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.schedule_result import AdmissionResult
from radixkv.scheduling.sequence_state import NamespaceName, SequenceState

# The matches that are made sure of in one step; of more requests, a part in turn.
MAX_RENEWED = 256


class RoomLeft(NamedTuple):
    """Blocks that a new request may take, its forks included.

    Attributes:
        pool: its ceiling aside.
        most: as its ceiling allows, too, while others of the tenant run.
    """

    pool: int
    most: int


class MatchCache:
    """Matches and room of waiting requests."""

    def __init__(self, cache: PrefixCache, running: RunningRequests) -> None:
        self._cache = cache
        self._running = running
        self._rooms: dict[NamespaceName, RoomLeft] = {}
        self._all_are_current = False
        self._turn = 0

    def touched(self) -> None:
        """A lease was changed, or time has passed. O(1)."""
        self._rooms.clear()
        self._all_are_current = False

    def matched_tokens(self, requests: Sequence[SequenceState]) -> list[int]:
        """The lengths of the requests' cached prefixes.

        For a request that waits for its producer the length it had before: it does not compete meanwhile.
        When more than `MAX_RENEWED` wait, only so many are made sure of, in turn: what comes to be cached
        for one of a thousand is noticed four steps later at most (its admission always looks again).
        O(requests), and a lookup for each that is looked at and whose part of the tree changed.
        """
        chosen = requests
        if len(requests) > MAX_RENEWED:
            parts = -(-len(requests) // MAX_RENEWED)
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

    def match(self, request: SequenceState) -> Match:
        """The request's cached prefix."""
        match = request.match
        if match is None or not (self._all_are_current or self._cache.is_current(match)):
            match = request.match = self._cache.match(request.tokens.encoded, request.namespace)
        return match

    def _room(self, namespace: NamespaceName, freed: int = 0) -> RoomLeft:
        """What an admission would find, with a block of headroom kept for each request that runs.

        Under a ceiling only for those of its own tenant: others take nothing of what it leaves. Where none of
        these runs, the ceiling is left to the cache: the tenant's pins give way to what could never fit.
        """
        running = self._running
        pool, below = self._cache.room(namespace)
        pool += freed - len(running)
        own = running.num_of(tenant_of(namespace))
        if below is None or not own:
            return RoomLeft(pool, pool)
        below = min(below + freed, self._cache.ceiling(namespace)) - own
        return RoomLeft(pool, min(pool, below))

    def _needed(self, request: SequenceState) -> int:
        """Blocks for all its tokens that are not cached."""
        size = self._cache.block_size
        needed = -(-request.tokens.length // size)
        if not request.needs_prompt_logits:
            match = request.match
            if match is None or not self._all_are_current:
                match = self.match(request)
            needed -= match.num_tokens // size
        return needed

    def fits(self, request: SequenceState, *, freed: int = 0) -> AdmissionResult:
        """Whether there are blocks to admit it: `ADMITTED`, `NO_BLOCKS` or `AT_CEILING`.

        One of headroom is kept for each request that runs or will fork: an admission must not cause a
        preemption at once; with nothing else running it may take all.

        Args:
            freed: blocks that others would give up for it.
        """
        if not len(self._running):
            return AdmissionResult.ADMITTED
        room = self._rooms.get(request.namespace) if not freed else None
        if room is None:
            room = self._room(request.namespace, freed)
            if not freed:
                self._rooms[request.namespace] = room
        needed = self._needed(request) + request.num_forks
        if needed <= room.most:
            return AdmissionResult.ADMITTED
        return AdmissionResult.AT_CEILING if needed <= room.pool else AdmissionResult.NO_BLOCKS

    def refusal(self, request: SequenceState) -> AdmissionResult:
        """Why the cache has refused it blocks: `NO_BLOCKS` or `AT_CEILING`."""
        pool, below = self._cache.room(request.namespace)
        if below is not None and below < pool:
            return AdmissionResult.AT_CEILING
        return AdmissionResult.NO_BLOCKS

    def any_fits(self, requests: Sequence[SequenceState]) -> bool:
        """Whether trying `requests` makes sense at all: usually nobody fits into a pool in full use.

        By the matches of `matched_tokens`. O(requests), and much cheaper than a trial of each.
        """
        if not len(self._running):
            return True
        size, rooms = self._cache.block_size, self._rooms
        for request in requests:
            match = request.match or self.match(request)
            needed = -(-request.tokens.length // size) - match.num_tokens // size
            room = rooms.get(request.namespace)
            if room is None:
                room = rooms[request.namespace] = self._room(request.namespace)
            if needed + request.num_forks <= room.most:
                return True
        return False
