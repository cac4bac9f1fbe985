# SPDX-License-Identifier: Apache-2.0
"""ReuseGuard: while others keep the engine busy, a long prompt displaces no cached prefix that is in use.

An agent that pauses for a second uses its prefix, though no request holds it. If the prefix is evicted for
another agent's prompt, it is computed again a second later. How long an idle prefix is worth its blocks
follows from the machine alone: blocks that are kept for the time to compute the whole pool have cost as much
as their computation. The guard allows half of that time, so that prompts which turn the pool over at full
speed do not wait for one another.

    idle for   0 ---- in use ---- half of the time to compute the pool ---- may go for a long prompt ---->

The prompt begins all the same where the engine has nothing else to do, and after `PATIENCE` times that age.
Where hardly any request comes back for a cached prefix, none counts as in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from radixkv.cache.keys import NamespaceName
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.scheduling.sequence import Sequence
from radixkv.scheduling.token_budget import TokenBudget

# Share of the time to compute the pool for which an idle prefix counts as in use.
IN_USE_SHARE = 0.5
# A prompt is held back for this multiple of the age at which prefixes may go.
PATIENCE = 8
# Prefixes count as in use where this share of the latest requests found half of their prompts cached.
RETURNING_SHARE = 0.25
# Weight of the steps, and requests, before the latest one.
_DECAY = 0.98


class ReuseGuard:
    """Tells whether a long prompt would displace prefixes in use.

    Nothing counts as in use before the time of a full step was measured.

    Args:
        budget: the most tokens of a step.
        clock: seconds.
    """

    def __init__(self, cache: PrefixCache, *, budget: TokenBudget, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._budget = budget
        self._clock = clock
        self._seconds = self._tokens = 0.0
        self._came_back = self._admitted = 0.0
        self._held_back_since: dict[Sequence, float] = {}  # clock readings
        # Of the step being built, by namespace: the fewest blocks known to displace a prefix in use.
        self._too_many: dict[NamespaceName, float] = {}

    def begin_step(self) -> None:
        """Forget the findings of the last step."""
        self._too_many.clear()

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step; those at least half full tell the time of a prompt's token."""
        if 2 * num_tokens >= self._budget.num_tokens and seconds > 0:
            self._seconds = _DECAY * self._seconds + seconds
            self._tokens = _DECAY * self._tokens + num_tokens

    def admitted(self, num_found: int, num_tokens: int) -> None:
        """Record how many of a new request's tokens were cached."""
        self._came_back = _DECAY * self._came_back + (2 * num_found >= num_tokens)
        self._admitted = _DECAY * self._admitted + 1

    @property
    def in_use_s(self) -> float:
        """The age, in seconds, up to which an idle prefix counts as in use; 0.0: none does."""
        if not self._tokens or self._came_back < RETURNING_SHARE * self._admitted:
            return 0.0
        pool = self._cache.num_blocks * self._cache.block_size
        return IN_USE_SHARE * pool * self._seconds / self._tokens

    def holds_back(self, request: Sequence, num_tokens: int) -> bool:
        """Return True if room for these tokens would displace prefixes in use. O(evicted leaves)."""
        age_s = self.in_use_s
        if not age_s:
            return False
        num_blocks = -(-num_tokens // self._cache.block_size)
        namespace = request.namespace
        if num_blocks < self._too_many.get(namespace, math.inf):
            if not self._cache.displaces_younger(num_blocks, age_s, namespace):
                return False
            self._too_many[namespace] = num_blocks
        now = self._clock()
        return now - self._held_back_since.setdefault(request, now) < PATIENCE * age_s

    def forget(self, request: Sequence) -> None:
        """Drop the note of a request that has ended."""
        self._held_back_since.pop(request, None)
