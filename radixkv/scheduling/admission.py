# SPDX-License-Identifier: Apache-2.0
"""Admission: which waiting requests run in a step, why the others don't, and the way back.

Admission is `PrefixCache.acquire`: the cached prefix is locked, blocks for the rest are allocated. Preemption
releases the lease and queues the request again. All rules of admission are in here, but for those in which
the policies differ (`radixkv.scheduling.policy`):

 1. The first of a line, or the most urgent, may be entitled to room: running requests are preempted for it.
    Background requests are preempted for any other one that waits for a slot or for blocks.
 2. Requests are tried in the policy's order, with those overtaken too often first in their lines.
 3. A request whose next tokens are being computed waits for them.
 4. A request fits if there are a sequence slot and the blocks, and one block of headroom is left for each
    running request: an admission must not cause a preemption at once. With nothing else running, it may take
    all blocks.
 5. A request that does not fit may be passed, unless its rank is smaller or it was passed too often.
 6. When little of the budget is left and many prompts are in progress, the rest is for short prompts.
 7. A prompt with much to compute is not tried before its turn (`long_prompts`); it bars no other request.
"""

from __future__ import annotations

from collections import abc
from enum import Enum
from itertools import takewhile

from radixkv.cache.keys import NamespaceName
from radixkv.cache.prefix_cache import Match, PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.long_prompts import LongPrompts
from radixkv.scheduling.policy import AdmissionPolicy, Barred, tenant_of
from radixkv.scheduling.running import RunningRequests
from radixkv.scheduling.seams import ImageWaits, TierLoads
from radixkv.scheduling.sequence import Sequence
from radixkv.scheduling.step_plan import SchedulerStats, StepPlan
from radixkv.scheduling.waiting_queue import WaitingQueue

# With this many prompts in progress, the reserve of a step is for short prompts only.
MANY_PROMPTS = 4
# The matches that are made sure of in one step; of more requests, a part in turn.
MAX_RENEWED = 256


class AdmissionResult(Enum):
    """Outcome of trying to admit a waiting request: admitted, or the reason why not."""

    ADMITTED = "it runs"
    IN_FLIGHT = "its next tokens are being computed by another request, or loaded"
    NO_SLOT = "too many requests run"
    NO_BLOCKS = "too few blocks are free or evictable"
    AT_CEILING = "its quota's ceiling leaves it too few blocks"
    NO_BUDGET = "what is left of the step is for shorter prompts"


class AdmissionControl:
    """Moves requests from the queue to the running ones, and back.

    Args:
        max_num_seqs: most running requests.
        tier_loads: the loads for which requests wait; None: there are no tiers.
        image_waits: the images for which requests wait; None: the model takes none.
        long_prompts: decides which long prompts begin; None: all that fit.
    """

    def __init__(
        self,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: RunningRequests,
        in_flight: InFlightPrefixes,
        policy: AdmissionPolicy,
        stats: SchedulerStats,
        *,
        max_num_seqs: int,
        tier_loads: TierLoads | None,
        image_waits: ImageWaits | None = None,
        long_prompts: LongPrompts | None = None,
    ) -> None:
        self._tier_loads = tier_loads
        self._image_waits = image_waits
        self._long_prompts = long_prompts
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._in_flight = in_flight
        self._policy = policy
        self._stats = stats
        self._max_num_seqs = max_num_seqs
        self._turn = 0
        self._matches: dict[Sequence, Match] = {}  # cached prefixes of waiting requests, when last looked up

    # ------------------------------------------------------------------ order and room

    def make_room(self, plan: StepPlan) -> Sequence | None:
        """Preempt running requests for the entitled one, if that makes it fit; return the entitled one."""
        if self._long_prompts is not None:
            self._long_prompts.begin_step()
        if not len(self._waiting):
            return None
        if self._running.background and self._waiting.num_foreground:
            self._displace_background(plan)
        request = self._policy.entitled(self._waiting.firsts(), self._running.num_foreground_of)
        if request is not None and len(self._running) and self._has_turn(plan, request):
            result = self.foresee(plan, request)
            if result not in (AdmissionResult.ADMITTED, AdmissionResult.IN_FLIGHT):
                self._displace(plan, request)
        return request

    def _displace_background(self, plan: StepPlan) -> None:
        """Preempt background requests, the latest first, until the others that wait have slots and blocks."""
        slots = blocks = 0
        victims = list(self._running.background)
        for request in self._waiting.foreground():
            if self._in_flight.is_produced(request) or not self._has_turn(plan, request):
                continue
            slots += request.num_sequence_slots
            needed = self._needed_blocks(plan, request)
            blocks += needed
            while victims:
                in_pool, allowed = self._room(plan, request.namespace)
                at_ceiling = needed > allowed and blocks <= in_pool
                if slots <= plan.sequence_slots and blocks <= in_pool and not at_ceiling:
                    break
                if at_ceiling and slots <= plan.sequence_slots:
                    shares = self._cache.shares_quota
                    own = [one for one in victims if shares(one.namespace, request.namespace)]
                    if not own:
                        break
                    victims.remove(own[-1])
                    self.preempt(plan, own[-1])
                else:
                    self.preempt(plan, victims.pop())
            if not victims:
                return

    def _displace(self, plan: StepPlan, request: Sequence) -> None:
        """Preempt running requests for a waiting one, if that makes it fit."""
        victims = self._policy.displaced_for(request, self._running)
        slots = plan.sequence_slots + sum(victim.num_sequence_slots for victim in victims)
        freed = sum(len(victim.lease.block_table) for victim in victims if victim.lease)
        if slots < min(request.num_sequence_slots, self._max_num_seqs):
            return
        if self._fits(plan, request, freed=freed) is not AdmissionResult.ADMITTED:
            return
        for victim in victims:
            self.preempt(plan, victim)
            if self.foresee(plan, request) is AdmissionResult.ADMITTED:
                return

    def in_order(self, plan: StepPlan, entitled: Sequence | None = None) -> list[Sequence]:
        """Return the waiting requests in the order of trial; none if no admission is possible.

        Args:
            entitled: the request that room was made for: it, or else the first of its line, comes first.
        """
        if plan.sequence_slots <= 0 or plan.budget <= 0 or not len(self._waiting):
            return []
        lengths = self._matched_tokens
        order = self._waiting.in_order_of_trial(lambda requests: lengths(plan, requests))
        if entitled is None:
            return order
        first = entitled
        if not plan.preempted:
            line = self._policy.line
            first = next((request for request in order if line(request) == line(entitled)), entitled)
        if order[0] is first:
            return order
        return [first, *(request for request in order if request is not first)]

    def more_urgent(self, order: abc.Sequence[Sequence], prompts: abc.Sequence[Sequence]) -> list[Sequence]:
        """Return the requests of `order` with a smaller rank than all prompts in progress."""
        if not prompts or not order:
            return []
        rank = self._policy.rank
        first = min([rank(request) for request in prompts])
        return list(takewhile(lambda request: rank(request) < first, order))

    @property
    def waits_for_transfers(self) -> bool:
        """True if a tier's answer, the end of a load or save, or an image may let a waiting request run."""
        waits = (self._tier_loads, self._image_waits)
        return any(each is not None and each.somebody_waits for each in waits)

    # ------------------------------------------------------------------ cached prefixes

    def _matched_tokens(self, plan: StepPlan, requests: abc.Sequence[Sequence]) -> list[int]:
        """Return the lengths of the requests' cached prefixes.

        A request that waits for its producer keeps its earlier length: it does not compete meanwhile. When
        more than `MAX_RENEWED` wait, only that many are looked up, in turn: a new prefix of one in a thousand
        is noticed four steps later at most (its admission always looks again). O(requests), and a lookup for
        each whose part of the tree has changed.
        """
        chosen = requests
        if len(requests) > MAX_RENEWED:
            parts = -(-len(requests) // MAX_RENEWED)
            self._turn = (self._turn + 1) % parts
            chosen = requests[self._turn :: parts]
        is_current, is_produced = self._cache.is_current, self._in_flight.is_produced
        matches = self._matches
        for request in chosen:
            match = matches.get(request)
            if match is None or not (is_current(match) or is_produced(request)):
                matches[request] = self._cache.match(request.lookup_tokens, request.namespace)
        plan.matches_are_current = chosen is requests
        return [(matches.get(request) or self._match(plan, request)).resume for request in requests]

    def _match(self, plan: StepPlan, request: Sequence) -> Match:
        """Return the request's cached prefix."""
        match = self._matches.get(request)
        if match is None or not (plan.matches_are_current or self._cache.is_current(match)):
            match = self._matches[request] = self._cache.match(request.lookup_tokens, request.namespace)
        return match

    def _has_turn(self, plan: StepPlan, request: Sequence) -> bool:
        """Return True if no long prompt in progress comes before the request."""
        return self._long_prompts is None or self._long_prompts.has_turn(request, self._match(plan, request))

    # ------------------------------------------------------------------ what fits

    def foresee(self, plan: StepPlan, request: Sequence) -> AdmissionResult:
        """Predict the result of `admit`, with headroom in blocks. O(1) but for changes since."""
        if self._in_flight.is_produced(request):
            return AdmissionResult.IN_FLIGHT
        if request.num_sequence_slots > plan.sequence_slots and plan.sequence_slots < self._max_num_seqs:
            found = AdmissionResult.NO_SLOT
        else:
            found = self._fits(plan, request)
        if found is not AdmissionResult.ADMITTED and self._waiting.barred_by(request) is Barred.NOBODY:
            return found
        if self._in_flight.is_coming(request, self._match(plan, request)):
            return AdmissionResult.IN_FLIGHT
        return found

    def _fits(self, plan: StepPlan, request: Sequence, freed: int = 0) -> AdmissionResult:
        """Return whether there are blocks to admit it: `ADMITTED`, `NO_BLOCKS` or `AT_CEILING`.

        Args:
            freed: blocks that preempted requests would give up for it.
        """
        if not len(self._running):
            return AdmissionResult.ADMITTED
        in_pool, allowed = self._room(plan, request.namespace, freed)
        needed = self._needed_blocks(plan, request)
        if needed <= allowed:
            return AdmissionResult.ADMITTED
        return AdmissionResult.AT_CEILING if needed <= in_pool else AdmissionResult.NO_BLOCKS

    def _needed_blocks(self, plan: StepPlan, request: Sequence) -> int:
        """Return the blocks that a waiting request would take beside those of its cached prefix."""
        size = self._cache.block_size
        needed = -(-request.num_tokens // size) + request.num_forks
        if not request.needs_prompt_logits:
            needed -= self._match(plan, request).num_tokens // size
        return needed

    def _any_fits(self, plan: StepPlan, requests: abc.Sequence[Sequence]) -> bool:
        """Return True if trying `requests` makes sense at all: usually none fits into a pool in full use.

        By the matches of `_matched_tokens`. O(requests), and much cheaper than a trial of each.
        """
        if not len(self._running):
            return True
        size, rooms, matches = self._cache.block_size, plan.room, self._matches
        for request in requests:
            match = matches.get(request) or self._match(plan, request)
            needed = -(-request.num_tokens // size) - match.num_tokens // size + request.num_forks
            room = rooms.get(request.namespace) or self._room(plan, request.namespace)
            if needed <= room[1]:
                return True
        return False

    def _room(self, plan: StepPlan, namespace: NamespaceName, freed: int = 0) -> tuple[int, int]:
        """Return the blocks that a new request may take of the pool, and those that its ceiling allows.

        A block of headroom is kept for each running request. Under a ceiling, only those of its tenant need
        headroom: requests of other tenants don't use its room. If none of its tenant runs, the ceiling is
        left to the cache: the tenant's pins give way only to requests that could never fit.
        """
        room = plan.room.get(namespace) if not freed else None
        if room is not None:
            return room
        in_pool, below = self._cache.room(namespace)
        allowed = in_pool = in_pool + freed - len(self._running)
        own = self._running.num_of(tenant_of(namespace))
        if below is not None and own:
            below = min(below + freed, self._cache.ceiling(namespace)) - own
            allowed = min(in_pool, below)
        if not freed:
            plan.room[namespace] = in_pool, allowed
        return in_pool, allowed

    def _fits_reserve(self, plan: StepPlan, request: Sequence, held_back: set[NamespaceName]) -> bool:
        """Return True if a request that fits may start although only the reserve of the budget is left.

        Args:
            held_back: namespaces of earlier requests that may not. If one is another tenant's, the cached
                part of this prompt must not decide.
        """
        if plan.budget > plan.reserve or plan.num_chunks < MANY_PROMPTS:
            return True
        if self._waiting.barred_by(request) is not Barred.NOBODY:
            return True
        size = request.num_tokens
        if held_back <= {request.namespace}:
            size -= self._match(plan, request).resume
        return self._policy.fits_reserve(size, plan.reserve)

    # ------------------------------------------------------------------ admission

    def admit_in_order(self, plan: StepPlan, ordered: abc.Sequence[Sequence]) -> list[Sequence]:
        """Admit the fitting requests in this order; return those still admissible in this step."""
        if plan.budget <= 0 or plan.sequence_slots <= 0 or not self._any_fits(plan, ordered):
            return []
        rank = self._policy.rank
        postponed: list[Sequence] = []
        unfit: list[Sequence] = []
        num_passed = 0  # the first ones of `unfit`, which the last admission has passed
        at_ceiling: dict[str, list[Sequence]] = {}  # by tenant: other tenants' requests don't use its room
        barred: set[str] = set()  # tenants without further admissions in this step
        held_back: set[NamespaceName] = set()
        for i, request in enumerate(ordered):
            if plan.budget <= 0 or plan.sequence_slots <= 0:
                break
            tenant = tenant_of(request.namespace)
            if request.lease is not None or tenant in barred:
                continue
            if unfit and rank(request) > rank(unfit[0]):
                break
            if tenant in at_ceiling and rank(request) > rank(at_ceiling[tenant][0]):
                continue
            if self._long_prompts is not None and not self._has_turn(plan, request):
                is_late = self._long_prompts.postpone(request)
                if is_late and self._fits(plan, request) is not AdmissionResult.AT_CEILING:
                    self._long_prompts.close_line(request)
                continue
            result = self.foresee(plan, request)
            if result is AdmissionResult.ADMITTED:
                if self._fits_reserve(plan, request, held_back):
                    result = self.admit(plan, request, shares_budget=i + 1 < len(ordered))
                else:
                    held_back.add(request.namespace)
                    result = AdmissionResult.NO_BUDGET
            if result is AdmissionResult.ADMITTED:
                num_passed = len(unfit)
                plan.held_up.update((other.arrival_order, other) for other in at_ceiling.get(tenant, ()))
            elif result in (AdmissionResult.IN_FLIGHT, AdmissionResult.NO_BUDGET):
                postponed.append(request)
            else:
                bars = self._waiting.barred_by(request)
                if result is AdmissionResult.AT_CEILING:
                    at_ceiling.setdefault(tenant, []).append(request)
                elif bars is Barred.ALL:
                    break
                else:
                    unfit.append(request)
                if bars is not Barred.NOBODY:
                    barred.add(tenant)
        plan.held_up.update((request.arrival_order, request) for request in unfit[:num_passed])
        return postponed

    def admit(
        self, plan: StepPlan, request: Sequence, *, shares_budget: bool, is_alone: bool = False
    ) -> AdmissionResult:
        """Give a request its blocks and its first chunk; nothing changes unless it is admitted.

        Args:
            shares_budget: requests after it in this step have prompt tokens to compute, too.
            is_alone: it runs alone, as a step with it has failed. It waits for no image, or one that can't
                be encoded and others that were dropped for room would go round for ever.
        """
        skip = "prompt_logprobs" if request.needs_prompt_logits else None
        match = self._match(plan, request)
        if plan.is_ahead and not self._may_join(request, match):
            return AdmissionResult.IN_FLIGHT
        if skip is None and self._running.num_rows:
            # A decode's addition to the request's prefix becomes shareable first.
            identity, num_whole = self._cache.identity(match)
            other = self._running.continuation(request, match.num_tokens, identity, num_whole)
            if other is not None and plan.is_ahead:
                return AdmissionResult.IN_FLIGHT  # its tokens are not known
            if other is not None:
                self.make_entry(plan, other)
                match = self._match(plan, request)
        if self._tier_loads is not None and self._tier_loads.holds_up(
            request, match, self._in_flight.wait_for
        ):
            plan.leases_changed()
            return AdmissionResult.IN_FLIGHT
        if self._image_waits is not None and request.request.images and not is_alone:
            num_known = 0 if request.needs_prompt_logits else match.resume
            if self._image_waits.holds_up(request, num_known):
                return AdmissionResult.IN_FLIGHT
        known = match.num_tokens
        try:
            lease = self._cache.acquire(
                request.encoded,
                request.namespace,
                match=match,
                skip=skip,
                cache_key_hint=request.request.cache_key_hint,
                most_shared=request.request.adapter_from or None,
            )
        except OutOfBlocks as error:
            if self.stop_copy(request, error):
                return self.admit(plan, request, shares_budget=shares_budget, is_alone=is_alone)
            in_pool, below = self._cache.room(request.namespace)
            if below is None or below >= in_pool:
                return AdmissionResult.NO_BLOCKS
            if not self._running.num_of(tenant_of(request.namespace)) and not self.waits_for_transfers:
                plan.add_stuck(request)  # the end of another request would give it no block
            return AdmissionResult.AT_CEILING
        self._waiting.remove(request)
        self._matches.pop(request, None)
        self._in_flight.admitted(request)
        request.lease = lease
        if lease.states is not None:  # the user declared these prefixes as steady
            asked = request.request
            lease.states.want_ends((*asked.checkpoints, *(pin.num_tokens for pin in asked.pins)))
            if asked.keep_tokens is not None:
                lease.states.want_ends((asked.keep_tokens,))
        request.num_computed = lease.resume_at
        self._running.add(request)
        if self._long_prompts is not None:
            self._long_prompts.began(request)
        plan.sequence_slots -= request.num_sequence_slots
        line, latest = self._policy.line(request), plan.latest_admitted
        latest[line] = max(latest.get(line, -1), request.arrival_order)
        if request.num_preemptions:
            request.resumed_at = request.num_tokens
        if not request.was_admitted:
            request.num_cached_tokens = lease.resume_at
            request.num_cache_write_tokens = (
                max(0, request.num_kept_tokens - known) if self._cache.enabled else 0
            )
            request.cache_report = lease.report
            self._stats.admitted += 1
            self._stats.prompt_tokens += request.num_prompt_tokens
            self._stats.cached_prompt_tokens += lease.resume_at
        if self._tier_loads is not None:
            self._tier_loads.admitted(request)
        if self._image_waits is not None:
            self._image_waits.forget(request)
        request.was_admitted = True
        plan.add(request, plan.chunk(request, shares_budget=shares_budget))
        return AdmissionResult.ADMITTED

    @staticmethod
    def _may_join(request: Sequence, match: Match) -> bool:
        """Return True if a request can be admitted while the step before still runs.

        Blocks that it takes over when it commits must be known before its step is launched: where all of its
        prompt is cached, they are not. Forks and logits of prompts need the step before, too.
        """
        asked = request.params
        if request.num_forks or request.needs_prompt_logits or asked.samples_nothing or request.is_background:
            return False
        return match.num_tokens < request.most_found

    def may_serve(self, namespace: NamespaceName, request: Sequence, error: OutOfBlocks) -> bool:
        """Return True if blocks of a namespace would help the request: at its ceiling, its quota's."""
        _, below = self._cache.room(request.namespace)
        if below is None or below >= error.needed:
            return True
        return self._cache.shares_quota(namespace, request.namespace)

    def stop_copy(self, request: Sequence, error: OutOfBlocks, *, at_once: bool = False) -> bool:
        """End a copy to a tier for the blocks that it holds; False: there is none.

        Args:
            at_once: the request runs, and does not wait at all.
        """
        return self._tier_loads is not None and self._tier_loads.stop_copy(
            lambda other: self.may_serve(other, request, error), at_once=at_once
        )

    def give_up_load(self, request: Sequence, error: OutOfBlocks) -> bool:
        """Give up a load from a tier for the blocks that it holds; False: there is none."""
        return self._tier_loads is not None and self._tier_loads.give_up_load(
            lambda other: self.may_serve(other, request, error)
        )

    def make_entry(self, plan: StepPlan, request: Sequence) -> None:
        """Turn a row into an entry of the plan: its lease gets all its tokens."""
        self._running.drop_row(request)
        plan.row_left()
        # The tokens fit into its last block, so no request is preempted for them.
        assert request.lease is not None
        request.lease.append(request.encoded_part(request.lease.num_tokens))
        plan.add(request, 1)

    # ------------------------------------------------------------------ preemption

    def preempt(self, plan: StepPlan, request: Sequence) -> None:
        """Release the lease and queue the request again; its computed part stays cached."""
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        plan.preempted.append(request)
        plan.sequence_slots += request.num_sequence_slots
        if self.put_back(request):
            plan.row_left()
        plan.leases_changed()

    def forget(self, request: Sequence) -> None:
        """Drop all notes of a request that has ended."""
        self._matches.pop(request, None)
        if self._tier_loads is not None:
            self._tier_loads.forget(request)
        if self._image_waits is not None:
            self._image_waits.forget(request)

    def put_back(self, request: Sequence) -> bool:
        """Let a running request wait again, without a lease; return True if it was a row."""
        was_row = self._running.remove(request)
        self._waiting.put_back(request)
        self._in_flight.forget(request)
        assert request.lease is not None
        request.release()
        request.preempt()
        return was_row
