# SPDX-License-Identifier: Apache-2.0
"""Rules: simulation of a cache with given rules: hits of each request, breaks of prompts, and causes.

The real tree grows over the prompts. Entries of providers that cache only at breakpoints are kept beside it.
A cause is named only with evidence: without a record of it, it stays `unknown`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.reporting.explain import MissReport
from radixkv.cache.reporting.reasons import Reason
from radixkv.errors import InvalidRequestError, OutOfBlocks
from radixkv.observe.audit.breakpoint_entries import BreakpointEntries, BreakpointHit
from radixkv.observe.audit.earlier_prompts import EarlierPrompt, EarlierPrompts
from radixkv.observe.audit.observation import Fault, Observation
from radixkv.observe.audit.prompt_break import (
    parts_from,
    place_of_break,
    shared_beginning,
    tokens_in_best_order,
)
from radixkv.observe.audit.prompt_keys import KnownChains, PromptKeys, keys_of
from radixkv.observe.audit.prompt_units import CharacterCoding, PromptCoding, PromptUnits
from radixkv.observe.audit.record import Block, Json, Record
from radixkv.observe.audit.rule_sets import RuleSet
from radixkv.observe.explanation import Explanation, Predecessor, explain
from radixkv.observe.prompt_difference import TAIL_TOKENS
from radixkv.text.chat_formats.call_results import order_of_results
from radixkv.text.chat_formats.client_rules import CLIENT_RULES

#: Causes to act upon that these rules do not find.
_FAULTS: dict[Reason, Fault] = {
    Reason.DIVERGED: "prompt",
    Reason.EXPIRED: "time",
    Reason.EVICTED: "room",
    Reason.NO_BREAKPOINT: "client",
    Reason.CONCURRENT: "client",
}
_BLOCK_TOKENS = 16  # of the tree, where hits need be no whole blocks
_BLOCK_CHARS = 64  # the same, where units are characters
_BLOCK_BYTES = 120  # beside its tokens: identity and id, a share of a node, and of what is remembered as gone


@dataclass(frozen=True, slots=True, eq=False)
class Looked:
    """Prompt with the state of the cache at its arrival.

    Attributes:
        prompt: the prompt, for comparison with later ones.
        earlier: the prompt that it should continue; is_after_running: True if that had no answer yet.
        in_tree: number of its units in the tree; evicted: True if the tree had more before.
        steady, place: units and characters in common with the earlier prompt.
        found: hit among the entries at breakpoints; None: these rules cache all prefixes.
    """

    record: Record
    units: PromptUnits
    keys: PromptKeys
    now: float
    prompt: EarlierPrompt
    earlier: EarlierPrompt | None
    is_after_running: bool
    in_tree: int
    evicted: bool
    steady: int
    place: int
    found: BreakpointHit | None


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """Request whose answer has not ended: the prediction, and data for `Rules.end`."""

    observation: Observation
    looked: Looked


class Rules:
    """Observes the requests of a log one after the other, in the order of their beginning.

    Args:
        rule_set: rules of the cache.
        coding: converts prompts into units; None: characters stand for tokens.
        memory_bytes: memory for all records; the oldest are dropped.
        capacity_tokens: capacity of the cache; None: limited by the memory.

    Attributes:
        cache: the tree, of characters (their code points) without a tokenizer.
        num_forgotten: number of prompts with a shorter match because records were dropped.
    """

    def __init__(
        self,
        rule_set: RuleSet,
        coding: PromptCoding | None = None,
        *,
        memory_bytes: int = 512 * 1024 * 1024,
        capacity_tokens: int | None = None,
    ) -> None:
        self.rule_set = rule_set
        self.coding = coding if coding is not None else CharacterCoding()
        self.num_forgotten = 0
        self._now = 0.0  # of the log
        self._default_model = ""  # that requests without `model` get, by the answers so far
        block = _BLOCK_CHARS
        if self.coding.is_exact:
            block = rule_set.block_tokens if rule_set.block_tokens > 1 else _BLOCK_TOKENS
        blocks = max(64, memory_bytes // 2 // (block * TOKEN_BYTES + _BLOCK_BYTES))
        self._is_bounded = capacity_tokens is not None
        if capacity_tokens is not None:
            per_token = 1.0 if self.coding.is_exact else 4.0
            blocks = min(blocks, max(1, int(capacity_tokens * per_token) // block))
        self.cache = PrefixCache(blocks, block, ghost_blocks=max(64, blocks // 4), clock=lambda: self._now)
        self._earlier = EarlierPrompts(memory_bytes * 3 // 8)
        self._chains = KnownChains(memory_bytes // 16)
        self._entries = BreakpointEntries(rule_set, max(1000, memory_bytes // 8 // 300))

    def observe(self, record: Record) -> Observation:
        """Observe a complete request, and add it to the cache. O(its size).

        Raises:
            NoRequest: its prompt can't be rendered.
        """
        looked = self._look(record)
        observation = self._observation(looked)
        available = _available(looked.record)
        if looked.found is not None and not record.failed:
            when = looked.now if available is None else available
            self._entries.note(looked.record, looked.keys.chain, looked.found, looked.now, when)
        if not record.failed:
            looked.prompt.available = available
            self._earlier.add(looked.prompt, looked.keys, _said(looked.record), self._continued(looked))
        return observation

    def begin(self, record: Record) -> Begun:
        """As `observe`, of a request without its answer: later ones find it from now on. `end` it once.

        Raises:
            NoRequest: its prompt can't be rendered.
        """
        looked = self._look(record, grows=False)
        observation = self._observation(looked)
        if looked.found is not None:
            self._entries.note(looked.record, looked.keys.chain, looked.found, looked.now, math.inf)
        looked.prompt.available = math.inf
        self._earlier.add(looked.prompt, looked.keys, ())
        return Begun(observation, looked)

    def end(self, begun: Begun, record: Record) -> Observation:
        """Observe a begun request now that its answer is known. O(its size).

        Its hit was decided when it began; the answer's usage converts it into tokens.
        """
        looked, prompt = begun.looked, begun.looked.prompt
        whole = self._with_model(replace(record, blocks=looked.record.blocks))
        if whole.model != prompt.model:  # known by its answer: later prompts find it under that name
            self._earlier.drop(prompt)
            prompt.model = whole.model
            self._earlier.add(prompt, keys_of(whole, self._chains), ())
        units = self.coding.encode(whole)
        _, evicted = self._grow(whole, units)
        looked = replace(looked, record=whole, units=units, evicted=evicted)
        available = _available(whole)
        if looked.found is not None and record.failed:
            self._entries.forget_running(looked.keys.chain, looked.found)
        elif looked.found is not None:
            when = looked.now if available is None else available
            self._entries.note(whole, looked.keys.chain, looked.found, looked.now, when)
        if record.failed:
            self._earlier.drop(prompt)
        else:
            prompt.units, prompt.available = units, available
            self._earlier.answered(prompt, _said(whole))
            if (earlier := self._continued(looked)) is not None:
                self._earlier.drop(earlier, prompt)
        return self._observation(looked)

    def _look(self, record: Record, *, grows: bool = True) -> Looked:
        """Everything that a prompt finds when it comes.

        Args:
            grows: it is in the tree from then on, unless it failed; else a running one before it counts.
        """
        if not self.rule_set.tools_first and record.tools:
            record = replace(record, blocks=_system_first(record.blocks))
        if self.rule_set.holds_clients and (blocks := _held_constant(record.blocks)) is not record.blocks:
            record = replace(record, blocks=blocks)
        if (
            self.rule_set.orders_results
            and (blocks := _in_order_of_calls(record.blocks)) is not record.blocks
        ):
            record = replace(record, blocks=blocks)
        record = self._with_model(record)
        units = self.coding.encode(record)
        keys = keys_of(record, self._chains)
        now = self._now if record.time is None else record.time
        self._now = max(self._now, now)
        earlier, conversation = self._earlier.find(record, keys)
        is_running = earlier is not None and earlier.available == math.inf
        steady, place = shared_beginning(earlier, units)
        if grows:
            in_tree, evicted = self._grow(record, units)
        else:
            in_tree, evicted = self.cache.match(units.units, self._namespace(record)).num_tokens, False
            in_tree = max(in_tree, steady if is_running else 0)
        found = None
        if self.rule_set.matching != "prefix":
            found = self._entries.read(record, keys.chain, units.tokens_to_block, now)
        prompt = EarlierPrompt.of(record, units, conversation)
        return Looked(
            record, units, keys, now, prompt, earlier, is_running, in_tree, evicted, steady, place, found
        )

    def _with_model(self, record: Record) -> Record:
        """Return a record that names its model: where its body does not, the one that answers do."""
        if not record.model:
            return replace(record, model=self._default_model)
        if not record.body.get("model"):
            self._default_model = record.model
        return record

    def _observation(self, looked: Looked) -> Observation:
        """Return the observation of a prompt, without changing anything."""
        record, units, found, earlier = looked.record, looked.units, looked.found, looked.earlier
        reported = record.usage.prompt
        total = reported if reported and not units.is_exact else units.num_tokens
        rate = units.tokens_per_unit
        if record.skips_cache:
            cached = 0
        elif found is None:
            cached = self._in_blocks(looked.in_tree * rate, total)
        else:
            read = units.tokens_to_block(found.block) if found.block >= 0 else 0.0
            cached = min(round(read), total)
        shared = max(round(looked.in_tree * rate), round(looked.steady * rate))
        reason, lost, explanation = self._explain(looked, cached, total)
        place = explanation.place
        return Observation(
            conversation=looked.prompt.conversation,
            prompt_tokens=total,
            is_estimate=not units.is_exact,
            shared_tokens=min(shared, total),
            cached_tokens=cached,
            best_tokens=min(total, cached + lost) if reason is Reason.DIVERGED else cached,
            reported_tokens=record.usage.cached,
            reason=reason,
            fault=self._fault(looked, reason, cached, lost),
            breaker=explanation.breaker,
            before="" if place is None else place.before,
            old="" if place is None else place.old,
            new="" if place is None else place.new,
            lost_tokens=lost,
            age_s=_age(earlier, record),
            earlier=earlier.place if earlier is not None else "",
            written=self._written(found, units),
            reported_prompt=reported,
        )

    # ------------------------------------------------------------------ the tree

    def _grow(self, record: Record, units: PromptUnits) -> tuple[int, bool]:
        """Units that the tree has of a prompt, and whether it had more; from now on it has all of it.

        Of a request that failed nothing was computed.
        """
        namespace = self._namespace(record)
        prompt = units.units
        if not len(prompt):
            return 0, False
        match = self.cache.match(prompt, namespace)
        if record.failed:
            return match.num_tokens, False
        answers = [after for after in units.after if len(after)] if self.rule_set.keeps_answers else []
        try:
            lease = self.cache.acquire(prompt, namespace, match=match)
        except OutOfBlocks:
            self.num_forgotten += 1
            return match.num_tokens, True
        evicted = match.num_tokens < len(prompt) and lease.report.reason in ("evicted", "expired")
        self.num_forgotten += evicted and not self._is_bounded
        self._compute(lease, answers[0] if answers else None)
        for other in answers[1:]:
            with suppress(OutOfBlocks):
                self._compute(self.cache.acquire(prompt, namespace), other)
        return match.num_tokens, evicted

    def _compute(self, lease: Lease, after: EncodedTokens | None) -> None:
        """Let the tree have the lease's tokens, and those after them if there is room; the lease ends."""
        if after is not None:
            with suppress(OutOfBlocks):
                lease.append(after)
        lease.commit(lease.num_tokens)
        lease.release()

    def _namespace(self, record: Record) -> tuple[str, str, str]:
        return (record.key if self.rule_set.by_key else "", record.salt, record.model)

    def _in_blocks(self, tokens: float, total: int) -> int:
        """Tokens of a prefix that a hit is made of: whole blocks, and never all of the prompt."""
        most = min(int(tokens + 1e-6), total - 1)
        return max(0, most - most % self.rule_set.block_tokens)

    def _written(self, found: BreakpointHit | None, units: PromptUnits) -> tuple[tuple[int, float], ...]:
        """Return tokens written for each time to live, from the read ones or the previous breakpoint on."""
        if found is None or not found.written:
            return ()
        written, before = [], units.tokens_to_block(found.block) if found.block >= 0 else 0.0
        for block, ttl in found.written:
            end = units.tokens_to_block(block)
            written.append((round(end - before), ttl))
            before = end
        return tuple(written)

    def _continued(self, looked: Looked) -> EarlierPrompt | None:
        """Return the earlier prompt that this one continues: it is no longer needed."""
        earlier = looked.earlier
        if earlier is None or looked.prompt.conversation != earlier.conversation:
            return None
        return None if parts_from(earlier, looked.units, looked.steady) else earlier

    # ------------------------------------------------------------------ why

    def _explain(self, looked: Looked, cached: int, total: int) -> tuple[Reason, int, Explanation]:
        """Return the reason why no more was found, the tokens lost by it, and the explanation."""
        broken = self._broken(looked, cached, total)
        if broken is not None:
            return Reason.DIVERGED, broken.recoverable_tokens, broken
        reason, lost = self._reason(looked, cached, total)
        report = MissReport(reason, total, cached)
        return reason, lost, explain(report, lambda: looked.prompt.parts, None, None)

    def _broken(self, looked: Looked, cached: int, total: int) -> Explanation | None:
        """Explain the break between a prompt and the one that it should continue; None: there is none."""
        earlier, units, steady, place = looked.earlier, looked.units, looked.steady, looked.place
        if looked.record.skips_cache or earlier is None or not parts_from(earlier, units, steady):
            return None
        best = tokens_in_best_order(earlier, units, steady, place)
        whole = self._in_blocks(best, total) if looked.found is None else min(round(best), total)
        if whole <= cached:
            return None
        there = place_of_break(earlier, looked.prompt, steady, place, whole - cached)
        predecessor = Predecessor(lambda: earlier.parts, there.position)
        explanation = explain(None, lambda: looked.prompt.parts, predecessor, there)
        return None if explanation.breaker is None else explanation

    def _reason(self, looked: Looked, cached: int, total: int) -> tuple[Reason, int]:
        """Return why no more of an unbroken prompt was found, and the tokens lost by it."""
        record, units, found = looked.record, looked.units, looked.found
        if record.skips_cache:
            return Reason.SKIPPED, 0
        rate, steady = units.tokens_per_unit, looked.steady
        within = self._in_blocks(steady * rate, total) if found is None else round(steady * rate)
        missed = max(0, within - cached)
        slack = max(TAIL_TOKENS, self.rule_set.block_tokens)
        if found is not None:
            if found.expired_block > found.block:
                return Reason.EXPIRED, round(units.tokens_to_block(found.expired_block)) - cached
            if found.running_block > found.block:
                return Reason.CONCURRENT, round(units.tokens_to_block(found.running_block)) - cached
            if missed > slack:
                is_short = within < self.rule_set.minimum(record.model)
                return (Reason.TOO_SHORT, 0) if is_short else (Reason.NO_BREAKPOINT, missed)
        elif missed > slack and looked.evicted:
            return Reason.EVICTED, missed
        return (Reason.FIRST_SEEN if looked.earlier is None or not cached else Reason.HIT), 0

    def _fault(self, looked: Looked, reason: Reason, cached: int, lost: int) -> Fault:
        """Return the cause of most of the missed tokens, by evidence."""
        units, earlier = looked.units, looked.earlier
        reported, prompt = looked.record.usage.cached, looked.record.usage.prompt
        slack = self.rule_set.block_tokens
        if prompt and units.is_exact and prompt != units.num_tokens:  # they count in other tokens
            cached = cached * prompt // units.num_tokens
        if not units.is_exact or (prompt and prompt != units.num_tokens):
            slack = max(128, cached // 50)
        if reported is not None and reported + slack < cached and cached - reported > lost:
            if looked.is_after_running:
                return "client"  # what it shares was being computed for another request
            # These rules find it, and its time is known: the prompt was steady.
            is_timed = looked.record.time is not None and earlier is not None and earlier.time is not None
            return "provider" if is_timed or self.rule_set.ttl_s is None else "unknown"
        return _FAULTS.get(reason, "none")


def _said(record: Record) -> tuple[tuple[Block, ...], ...]:
    return (record.answer, *record.other_answers)


def _available(record: Record) -> float | None:
    """Return the time from which a request's entries can be read; None: not known."""
    waits = record.first_seconds if record.first_seconds is not None else record.seconds
    return None if record.time is None or waits is None else record.time + waits


def _system_first(blocks: Sequence[Block]) -> Sequence[Block]:
    """Return the blocks with the tools after the first system message."""
    tools = [block for block in blocks if block.kind == "tool"]
    rest = blocks[len(tools) :]
    system = list(itertools.takewhile(lambda block: block.role == "system", rest))
    return (*system, *tools, *rest[len(system) :])


def _age(earlier: EarlierPrompt | None, record: Record) -> float | None:
    if earlier is None or earlier.time is None or record.time is None:
        return None
    return record.time - earlier.time


def _in_order_of_calls(blocks: Sequence[Block]) -> Sequence[Block]:
    """Return the blocks with results of calls in the order of the calls, as a server renders them. O(blocks).

    Results that fit no calls, which a server refuses, stay where they are.
    """
    if not any(block.role == "tool" for block in blocks):
        return blocks
    groups = [list(group) for _, group in itertools.groupby(blocks, key=lambda block: block.message)]
    try:
        order = order_of_results([_as_message(group) for group in groups])
    except InvalidRequestError:
        return blocks
    if order == sorted(order):
        return blocks
    return tuple(block for at in order for block in groups[at])


def _as_message(blocks: Sequence[Block]) -> Json:
    """Return the calls of a message of blocks, in OpenAI's form."""
    first = blocks[0]
    calls = [
        {"id": block.call_id, "function": {"name": block.name}} for block in blocks if block.kind == "call"
    ]
    return {"role": first.role, "tool_call_id": first.call_id, "tool_calls": calls}


def _held_constant(blocks: Sequence[Block]) -> Sequence[Block]:
    """Return the blocks with a known client's text, at the head of a first system message, replaced by a
    constant. O(blocks) if there is such text.
    """
    at = next((at for at, block in enumerate(blocks) if block.kind != "tool"), None)
    if at is None or blocks[at].role != "system" or blocks[at].kind != "text":
        return blocks
    block = blocks[at]
    for rule in CLIENT_RULES:
        constant = rule.applied(block.text)
        if constant is not None:
            return (*blocks[:at], block._replace(text=constant), *blocks[at + 1 :])
    return blocks
