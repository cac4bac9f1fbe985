# SPDX-License-Identifier: Apache-2.0
"""LoadWaits: requests that wait for blocks of a tier instead of computing their tokens.

A request is about to be admitted; its cached prefix ends before the end of its prompt:

    a load under way brings the next one  ->  it waits for that, as for a request that computes its prefix
    the tier says HIT or PENDING          ->  a load is started, and the request waits for it
    the tier says RETRY                   ->  it waits, and the tier is asked again a little later
    MISS, a failure, no room, or too late ->  it is admitted, and computes the missing tokens

It holds nothing while it waits, and is looked up again when the load has ended: the loaded blocks are part of
its cached prefix then. No request waits longer than its deadline, counted from the beginning of its wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import NamespaceName, TokenIds
from radixkv.cache.prefix_cache import Match, PrefixCache
from radixkv.cache.reporting.explain import MissReport, TierHit
from radixkv.cache.reporting.reasons import Reason
from radixkv.scheduling.seams import WaitFor
from radixkv.scheduling.sequence import Sequence
from radixkv.tiers.loads import TierLoad
from radixkv.tiers.measured_tier import TOO_SLOW, Found
from radixkv.tiers.tier import TierState
from radixkv.tiers.transfers import Transfers

# Seconds after which a tier that did not know is asked again.
RETRY_S = 0.005
# Seconds for which a tier's answer tells how much work a waiting prompt is.
WEIGHT_S = 1.0


class NotLoaded(NamedTuple):
    """Blocks that a tier has, but that were, or would be, computed nevertheless.

    Attributes:
        tier: name of the tier.
        end: tokens up to the end of the last block.
        reason: value of `MissReport.reason` that says why; None: there is no such value.
    """

    tier: str
    end: int
    reason: str | None


@dataclass(slots=True, eq=False)
class TierWait:
    """A request's use of the tiers since it last ran.

    Attributes:
        deadline: time up to which it may wait for the next load; a reading of the clock.
        ask_at: time at which an undecided tier is asked again; None: never.
        asked: name of that tier.
        model_s: seconds of the engine's steps (`LoadWaits.model_s`) when the tiers were last asked.
        load: the last load that it waited for.
        matched: tokens found at the beginning of that wait; with states, up to the nearest one.
        num_kv_tokens: tokens whose K/V was cached at that time.
        since: beginning of the wait, or the time up to which waits for an answer were counted.
        is_over: the tiers are not asked again.
        hits: blocks brought so far by each tier.
        not_loaded: blocks last left in a tier; None: no such blocks are known.
    """

    deadline: float
    ask_at: float | None = None
    asked: str = ""
    model_s: float = 0.0
    load: TierLoad | None = None
    matched: int = 0
    num_kv_tokens: int = 0
    since: float = 0.0
    is_over: bool = False
    hits: dict[str, TierHit] = field(default_factory=dict)
    not_loaded: NotLoaded | None = None

    def ask_again(self, tier: str, when: float, now: float) -> None:
        """Wait for a tier's decision."""
        self.asked, self.ask_at, self.since = tier, when, now

    def answered(self, now: float) -> None:
        """End the wait for a tier's decision, and count its time."""
        self._add(self.asked, 0, now - self.since)
        self.since = now

    def begin(self, load: TierLoad, matched: int, num_kv_tokens: int, now: float) -> None:
        """Wait for a load."""
        self.load, self.since, self.ask_at = load, now, None
        self.matched, self.num_kv_tokens = matched, num_kv_tokens

    def end(self, matched: int, now: float) -> None:
        """End the wait for a load, after which `matched` tokens are found."""
        load = self.load
        assert load is not None
        name = load.tier.name
        end = min(matched, load.run.start + load.num_written * load.run.block_size)
        self._add(name, max(0, end - self.matched), now - self.since)
        self.is_over |= load.has_failed
        if load.refused is not None:
            self.not_loaded = NotLoaded(name, load.run.end, load.refused)
        self.load = None

    def _add(self, tier: str, num_tokens: int, seconds: float) -> None:
        before = self.hits.get(tier, TierHit(tier, 0, 0.0))
        self.hits[tier] = TierHit(tier, before.num_tokens + num_tokens, before.seconds + seconds)


class LoadWaits:
    """Decides which requests wait for loads; see `radixkv.scheduling.seams.TierLoads`.

    Args:
        clock: seconds.
        deadline_s: longest that a request may wait.

    Attributes:
        model_s: seconds that the engine's steps have taken: meanwhile no tier is asked.
        next_lookup: when an undecided tier is to be asked again, as of the last step; None: never
            until then.
    """

    def __init__(
        self, cache: PrefixCache, transfers: Transfers, clock: Callable[[], float], deadline_s: float
    ) -> None:
        self._cache = cache
        self._blocks = cache.block_leases
        self._transfers = transfers
        self._clock = clock
        self._deadline_s = deadline_s
        self._uses: dict[Sequence, TierWait] = {}  # of the tiers, by waiting requests
        # By waiting request: the length of its match, the tokens that it misses, and until when that holds.
        self._weights: dict[Sequence, tuple[int, int, float]] = {}
        self.model_s = 0.0
        self.next_lookup: float | None = None

    def begin_step(self) -> None:
        self.next_lookup = None

    @property
    def somebody_waits(self) -> bool:
        return self.next_lookup is not None or self._transfers.hold_blocks

    def give_up_load(self, is_rival: Callable[[NamespaceName], bool]) -> bool:
        return self._transfers.loads.give_up_latest(is_rival)

    def stop_copy(self, is_rival: Callable[[NamespaceName], bool], *, at_once: bool = False) -> bool:
        return self._transfers.saves.make_room(is_rival, at_once=at_once)

    def holds_up(self, request: Sequence, match: Match, wait_for: WaitFor) -> bool:
        if request.needs_prompt_logits:
            return False
        wait = self._uses.get(request)
        loads = self._transfers.loads
        now, matched, step_s = self._clock(), self._found(match), 0.0
        if wait is None:
            wait = self._uses[request] = TierWait(now + self._deadline_s)
        elif wait.load is not None:  # that has ended, or the request would not be tried
            if (
                matched > wait.matched or match.num_tokens > wait.num_kv_tokens
            ):  # it brought something: the next part of the prefix may take as long
                wait.deadline = now + self._deadline_s
            wait.end(matched, now)
        elif wait.ask_at is not None:
            step_s = self.model_s - wait.model_s  # meanwhile the tier could not say what it found
            wait.answered(now)
        wait.model_s = self.model_s
        deadline = wait.deadline + step_s
        if now >= deadline or (wait.is_over and not len(loads)):
            wait.ask_at = None
            return False
        is_early = wait.ask_at is not None and now < wait.ask_at
        if is_early and not len(loads):
            return self._asks_later(wait)
        run = self._blocks.missing(match)
        states = self._states_beyond(match, run)
        if not len(run) and not states:
            return False
        found = (loads.load_of(run) if len(run) else None) or loads.state_load_of(states)
        if found is not None:
            load, end = found
            load.deadline = min(load.deadline, deadline)
        elif wait.is_over:
            return False
        elif is_early:
            return self._asks_later(wait)
        else:
            answer, part = self._lookup(match, run, states, deadline - now)
            if answer.state is TierState.RETRY:
                assert answer.tier is not None
                if now >= wait.deadline:
                    wait.ask_at = None
                    return False
                wait.ask_again(answer.tier.name, min(now + RETRY_S, wait.deadline), now)
                return self._asks_later(wait)
            started = wait.ask_at = None
            if answer.tier is not None and answer.num_blocks:
                part = part.part(0, answer.num_blocks)
                started = loads.start(answer.tier, part, match, deadline)
            if started is None:
                wait.not_loaded = _not_loaded(answer, part) or wait.not_loaded
                wait.is_over = True
                return False
            load, end = started, part.end
        wait.begin(load, matched, match.num_tokens, now)
        wait_for(request, load, end)
        return True

    def has_begun(self, request: Sequence) -> bool:
        wait = self._uses.get(request)
        return wait is not None and (wait.load is not None or bool(wait.hits))

    def weigh(self, request: Sequence, match: Match) -> int:
        known, now = self._weights.get(request), self._clock()
        if known is None or known[0] != match.num_tokens or now >= known[2]:
            missing = request.num_tokens - self._found(match)
            until = now + WEIGHT_S
            run = self._blocks.missing(match)
            states = self._states_beyond(match, run)
            if len(run) or states:
                found, part = self._lookup(match, run, states, self._deadline_s, counts=False)
                if found.state is TierState.RETRY:
                    until = now + RETRY_S
                elif found.tier is not None and found.num_blocks:
                    loaded = part.start + found.num_kept * part.block_size - self._found(match)
                    missing -= loaded - int(loaded * found.tier.time_share(part.block_size))
            known = self._weights[request] = match.num_tokens, missing, until
        return known[1]

    def loads_as_tokens(self) -> list[int]:
        return self._transfers.loads.as_tokens()

    def admitted(self, request: Sequence) -> None:
        wait = self._uses.get(request)
        self.forget(request)
        if request.was_admitted:
            return
        request.tier_hits = () if wait is None else tuple(wait.hits.values())
        report = request.cache_report
        if wait is not None and report is not None:
            request.cache_report = _with_tier(report, wait.not_loaded)

    def forget(self, request: Sequence) -> None:
        self._uses.pop(request, None)
        self._weights.pop(request, None)

    def explain(self, report: MissReport, token_ids: TokenIds, namespace: NamespaceName) -> MissReport | None:
        """Return a report as of now with a tier's part of the missing tokens; None: undecided.

        O(tokens). Nothing is counted, and nothing is loaded.
        """
        if report.reason in ("hit", "skipped"):
            return report
        match = self._cache.match(token_ids, namespace)
        run = self._blocks.missing(match)
        states = self._states_beyond(match, run)
        if not len(run) and not states:
            return report
        found, part = self._lookup(match, run, states, self._deadline_s, counts=False)
        return None if found.state is TierState.RETRY else _with_tier(report, _not_loaded(found, part))

    def _found(self, match: Match) -> int:
        """Tokens of a match that need not be computed: with states, those before the nearest one."""
        return match.num_tokens if self._transfers.states is None else match.resume

    def _states_beyond(self, match: Match, missing: BlockRun) -> list[BlockRun]:
        states = self._transfers.states
        return [] if states is None else states.beyond(match, missing)

    def _lookup(
        self, match: Match, run: BlockRun, states: list[BlockRun], wait_s: float, *, counts: bool = True
    ) -> tuple[Found, BlockRun]:
        """Ask the tiers for the blocks after a match; return the answer, and the blocks that it is about.

        With states: for K/V up to the deepest state that a tier has, or, where K/V reaches that far, for the
        state.
        """
        loads = self._transfers.loads
        found = loads.lookup(run, wait_s, counts=counts) if len(run) else Found(TierState.MISS)
        if self._transfers.states is None or found.state is TierState.RETRY:
            return found, run.part(0, found.num_kept)
        reach = run.start + (found.num_kept * run.block_size if found.num_blocks else 0)
        deepest = self._transfers.states.deepest(states, reach)
        if deepest is None:
            return Found(TierState.MISS), run
        tier, state = deepest
        if state is None:
            return Found(TierState.RETRY, tier=tier), run.part(0, 0)
        if state.end > run.start:
            kept = (state.end - run.start) // run.block_size
            some = min(found.num_blocks, kept)
            return found._replace(num_blocks=some, num_kept=kept), run.part(0, kept)
        if tier.state_pays(state.end - match.resume):
            return Found(TierState.HIT, 1, tier, None, 1), state
        return Found(TierState.MISS, 0, tier, TOO_SLOW, 1), state

    def _asks_later(self, wait: TierWait) -> bool:
        """Keep the request waiting, and ask the tier again."""
        assert wait.ask_at is not None
        self._note_lookup(wait.ask_at)
        return True

    def _note_lookup(self, when: float) -> None:
        self.next_lookup = when if self.next_lookup is None else min(self.next_lookup, when)


def _not_loaded(found: Found, run: BlockRun) -> NotLoaded | None:
    """Return the blocks of a run that a tier has."""
    if found.tier is None or not found.num_kept:
        return None
    return NotLoaded(found.tier.name, run.start + found.num_kept * run.block_size, found.refused)


def _with_tier(report: MissReport, left: NotLoaded | None) -> MissReport:
    """Return a report with the missed tokens that a tier has."""
    if left is None or report.reason in ("hit", "skipped"):
        return report
    count = max(0, min(left.end, report.num_prompt_tokens - 1) - report.num_hit_tokens)
    reason = Reason(left.reason or report.reason)
    if reason == "checksum":  # a damaged block is in no tier any more
        count = 0
    elif not count:
        return report
    return replace(report, reason=reason, tier=left.tier, num_tier_tokens=count)
