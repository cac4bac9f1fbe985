# SPDX-License-Identifier: Apache-2.0
"""Long prompts: a prompt with much to compute begins when its turn to be computed has come, not before.

An admission allocates the blocks of a whole prompt. Allocated long before the token budget can compute them,
these blocks displace prefixes that are asked for again a second later; their owners come back cold and
displace others in turn. The halving rule ends this: a prompt that misses more than `threshold` tokens begins
only if every long prompt in progress has at least twice as many left to compute.

    in progress     |=================== 40,000 left ===================|
    12,000 missing  begins: 2 x 12,000 <= 40,000
    30,000 missing  waits, and holds no block
    400 missing     is not long (a warm turn): begins at once

At most log2(longest / threshold) long prompts are in progress, and their held, not computed blocks
are at most twice the blocks of the longest. With no long prompt in progress the next one begins.

It waits, too, while it would displace prefixes that are in use (`reuse_guard`) and other requests run.

There are three exceptions. A prompt does not wait for prompts of a larger rank. One prompt at a time of a
tenant without running requests may begin early, where the policy says so. And any prompt may begin while
those in progress, capped as they are, leave a part of the step.

A long prompt is passed by at most `max_overtake` later long ones of its line; after that, no other one of its
line begins before it. It then waits at most for the tokens that it was queued behind, the tokens of the
prompts that passed it, and twice the tokens of the longest.
"""

from __future__ import annotations

from radixkv.cache.keys import NamespaceName
from radixkv.cache.prefix_cache import Match
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.policy import AdmissionPolicy
from radixkv.scheduling.reuse_guard import ReuseGuard
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.seams import TierLoads
from radixkv.scheduling.sequence import Sequence
from radixkv.scheduling.step_plan import MAX_LOGITS_CHUNK
from radixkv.scheduling.token_budget import TokenBudget

# Steps whose budget a prompt may miss before it counts as long.
SHORT_STEPS = 2
# More steps than the bound on overtaking ever allows.
TOO_MANY_STEPS = 1 << 30


class LongPrompts:
    """Decides which long prompts begin.

    Args:
        budget: the most tokens of a step.
        threshold: most tokens that a prompt may miss without being long; None: the tokens of two steps.
        max_chunk: most tokens of one prompt in a step; None: there is no cap.
        max_overtake: most later long prompts of its line that begin before a long one.
        tier_loads: the loads that count as prompts in progress; None: there are no tiers.
        guard: tells which prompts would displace prefixes in use; None: that is not asked.
    """

    def __init__(
        self,
        running: RunningRequests,
        in_flight: InFlightPrefixes,
        policy: AdmissionPolicy,
        *,
        budget: TokenBudget,
        threshold: int | None = None,
        max_chunk: int | None = None,
        max_overtake: int = 128,
        tier_loads: TierLoads | None,
        guard: ReuseGuard | None = None,
    ) -> None:
        self._running = running
        self._in_flight = in_flight
        self._policy = policy
        self._budget = budget
        self._threshold = threshold
        self._max_chunk = max_chunk
        self._max_overtake = max_overtake
        self._tier_loads = tier_loads
        self._guard = guard
        self._waiting: set[Sequence] = set()  # their turn had not come when they were last tried
        self._passes: dict[Sequence, int] = {}  # later long prompts of its line that began meanwhile
        self._early: set[Sequence] = set()  # begun beside long prompts, as their tenant had none running
        # Of the step being built: begun prompts by line; namespaces of postponed prompts; closed lines.
        self._begun: dict[str, list[int]] = {}
        self._postponed: set[NamespaceName] = set()
        self._closed: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their turn."""
        return len(self._waiting)

    def forget(self, request: Sequence) -> None:
        """Drop all notes of a request that has ended."""
        self._waiting.discard(request)
        self._early.discard(request)
        self._passes.pop(request, None)
        if self._guard is not None:
            self._guard.forget(request)

    def begin_step(self) -> None:
        """Forget the last step's prompts."""
        self._begun, self._postponed, self._closed = {}, set(), set()
        if self._guard is not None:
            self._guard.begin_step()

    def has_turn(self, request: Sequence, match: Match) -> bool:
        """Return True if a waiting request may begin now. O(running), and O(tokens) where a tier is asked.

        Args:
            match: its cached prefix.
        """
        missing = request.num_tokens - (0 if request.needs_prompt_logits else match.resume)
        self._early.discard(request)
        self._waiting.discard(request)
        if not self._is_long(missing):
            return True
        tier_loads = self._tier_loads
        if tier_loads is not None and tier_loads.has_begun(request):
            return True
        if self._in_flight.is_coming(request, match):  # it computes what comes after its producer's tokens
            missing = request.num_tokens - self._in_flight.produced_until(request)
        elif tier_loads is not None and not request.needs_prompt_logits:
            missing = tier_loads.weigh(request, match)
        if not self._is_long(missing) or self._begins(request, missing):
            return True
        self._waiting.add(request)
        return False

    def _begins(self, request: Sequence, missing: int) -> bool:
        """Return True if a long prompt may begin beside those in progress."""
        if self._policy.line(request) in self._closed:
            return False
        # Behind another tenant's long prompt, the cached part of this one must not decide which comes first.
        needed = missing if self._postponed <= {request.namespace} else request.num_tokens
        own, rank = self._policy.rank(request), self._policy.rank
        rivals = [
            other
            for other in self._running.without_row
            if self._is_long(other.num_to_compute) and rank(other) <= own
        ]
        loads: list[int] = []
        if self._tier_loads is not None:
            loads = [tokens for tokens in self._tier_loads.loads_as_tokens() if self._is_long(tokens)]
        leaves_room = not loads and sum(map(self._chunk, rivals)) < self._budget.num_tokens
        lefts = (*loads, *(other.num_to_compute for other in rivals))
        has_turn = leaves_room or all(tokens >= 2 * needed for tokens in lefts)
        if has_turn and not self._displaces_used(request, needed):
            return True
        may_begin_early = self._policy.may_begin_early(request, self._running.num_foreground_of)
        if not may_begin_early or request.is_background or any(other in self._early for other in rivals):
            return False
        self._early.add(request)
        return True

    def _displaces_used(self, request: Sequence, needed: int) -> bool:
        """Return True if a long prompt waits, while others run, for prefixes in use to be idle for longer."""
        if self._guard is None or self._was_passed(request):
            return False
        if 2 * needed <= request.num_tokens:  # its own prefix is in use, and would be idle for longer
            return False
        if not self._guard.holds_back(request, needed):
            return False
        own, rank = self._policy.rank(request), self._policy.rank
        return any(rank(other) <= own for other in self._running)

    def _is_long(self, missing: int) -> bool:
        return missing > (
            SHORT_STEPS * self._budget.num_tokens if self._threshold is None else self._threshold
        )

    def _chunk(self, request: Sequence) -> int:
        """Return the largest number of tokens that a prompt in progress gets in a step."""
        cap = self._budget.num_tokens if self._max_chunk is None else self._max_chunk
        if request.needs_prompt_logits:
            cap = min(cap, MAX_LOGITS_CHUNK)
        return min(request.num_to_compute, cap)

    def postpone(self, request: Sequence) -> bool:
        """Record that a request's turn has not come; return True if it may not be passed any more."""
        self._postponed.add(request.namespace)
        return self._was_passed(request)

    def _was_passed(self, request: Sequence) -> bool:
        return self._passes.get(request, 0) >= self._max_overtake

    def close_line(self, request: Sequence) -> None:
        """Let no other long prompt of the request's line begin in this step."""
        self._closed.add(self._policy.line(request))

    def began(self, request: Sequence) -> None:
        """Record an admission."""
        if self._guard is not None and not request.was_admitted:
            self._guard.admitted(request.num_computed, request.num_tokens)
        if self._is_long(request.num_to_compute):
            self._begun.setdefault(self._policy.line(request), []).append(request.arrival_order)

    def steps_overtaken(self, request: Sequence) -> int:
        """Return the number of steps for which this step's admissions count as overtaking a request.

        It is 1, but 0 for a prompt that waits for its turn, as short prompts that begin meanwhile cost it
        nothing. It is more than any bound once as many long prompts as allowed have passed it.
        """
        if request not in self._waiting:
            return 1
        later = self._begun.get(self._policy.line(request), ())
        passes = sum(order > request.arrival_order for order in later)
        self._passes[request] = self._passes.get(request, 0) + passes
        return TOO_MANY_STEPS if self._was_passed(request) else 0
