"""Rules: what a cache with these rules finds of each request, where prompts break, and whose fault that is.

The real tree grows over the prompts. What providers hold at breakpoints alone is looked up beside it. Nothing
is blamed without evidence: what is not recorded stays `unknown`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

from radixkv.audit.breakpoint_entries import BreakpointEntries, BreakpointHit
from radixkv.audit.earlier_prompts import EarlierPrompt, EarlierPrompts, chain_of
from radixkv.audit.prompt_units import CharacterCoding, PromptCoding, PromptUnits
from radixkv.audit.record import Block, Record
from radixkv.audit.rule_sets import RuleSet
from radixkv.cache.keys import TOKEN_BYTES, EncodedTokens
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.insight.breaker import Breaker, make_breaker
from radixkv.insight.prompt_difference import find_breaker
from radixkv.insight.prompt_parts import PromptParts
from radixkv.insight.similarity import same_later

Reason = Literal[
    "hit",  # all that an earlier prompt left is found
    "first",  # nothing that begins like this was seen before
    "broken",  # the prompt parts from the one that it should go on after
    "expired",  # what was written had run out
    "evicted",  # it had to make room
    "too_short",  # for these rules to cache it
    "no_breakpoint",  # nothing says that it is to be cached, or too far from what was
    "concurrent",  # what it shares was being computed for another request
]
Fault = Literal["none", "prompt", "time", "room", "client", "provider", "unknown"]

#: The prompt's end, where the assistant begins to speak, is not the same in a later turn with all templates.
TAIL_TOKENS = 16
SHOWN_CHARS = 240
_BEFORE_CHARS = 80
_BLOCK_UNITS = 16
_AROUND_CHARS = 600  # on each side of a difference
_MAX_DIFFERING = (
    24_000  # characters of a message, from the first difference on, that are compared word by word
)
_BLOCK_BYTES = 120  # beside its tokens: identity and id, a share of a node, and of what is remembered as gone
_COMPARED_UNITS = 400_000  # of each side, after a break
_MAX_COMPARED = (
    2_000_000  # characters of prompts that are compared word by word, above these by their place alone
)


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of one request; all counts are of tokens.

    Attributes:
        conversation: as the client named it, or a number.
        prompt_tokens: of the prompt: by the tokenizer, else as reported, else estimated.
        is_estimate: counts are made of characters, in proportion to what was reported.
        shared_tokens: that it begins with and the earlier prompt had, too.
        cached_tokens: that these rules find.
        best_tokens: that they would find, had what differs come after all that is the same.
        reported_tokens: that were found, as the answer told; None: it did not.
        reported_prompt: tokens of the prompt by the same answer, in which other tokens may be counted.
        reason: why these rules find no more.
        fault: what is to be done something about, by what is known.
        breaker: what breaks the prompt; None: nothing.
        before: the text in front of where they part; old, new: how the earlier prompt and this one go on.
        lost_tokens: that would have been found without.
        age_s: how long ago what was found or missed was used last; None: not known.
        earlier: where the earlier prompt stands in the log; empty: there is none.
        written: tokens that these rules write for each time to live, where that is told apart.
    """

    conversation: str
    prompt_tokens: int
    is_estimate: bool
    shared_tokens: int
    cached_tokens: int
    best_tokens: int
    reported_tokens: int | None
    reason: Reason
    fault: Fault
    breaker: Breaker | None = None
    before: str = ""
    old: str = ""
    new: str = ""
    lost_tokens: int = 0
    age_s: float | None = None
    earlier: str = ""
    written: tuple[tuple[int, float], ...] = ()
    reported_prompt: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Looked:
    """A prompt, and what there was of it when it came.

    Attributes:
        chain: see `chain_of`.
        earlier: the prompt that it should go on after; is_after_running: that had no answer yet.
        in_tree: units that the tree had; evicted: it had had more.
        steady, place: units and characters that it shares with the earlier one.
        found: of what is held at breakpoints alone; None: these rules hold all prefixes.
    """

    record: Record
    units: PromptUnits
    chain: list[bytes]
    now: float
    earlier: EarlierPrompt | None
    is_after_running: bool
    conversation: str
    in_tree: int
    evicted: bool
    steady: int
    place: int
    found: BreakpointHit | None


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A request whose answer has not ended: what is expected of it, and what `Rules.end` needs of it."""

    observation: Observation
    looked: Looked
    kept: EarlierPrompt


class Rules:
    """Observes the requests of a log one after the other, in the order of their beginning.

    Args:
        rule_set: what is found, and for how long.
        coding: makes units of prompts; None: characters stand for tokens.
        memory_bytes: for all that is remembered; the oldest is forgotten.
        capacity_tokens: of the cache; None: as many as the memory holds.

    Attributes:
        cache: the tree, of characters (their code points) where no tokenizer is given.
        num_forgotten: prompts of which there was more to find, had it not had to make room in the memory.
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
        block = rule_set.block_tokens if self.coding.is_exact and rule_set.block_tokens > 1 else _BLOCK_UNITS
        blocks = max(64, memory_bytes // 2 // (block * TOKEN_BYTES + _BLOCK_BYTES))
        self._is_bounded = capacity_tokens is not None
        if capacity_tokens is not None:
            per_token = 1.0 if self.coding.is_exact else 4.0
            blocks = min(blocks, max(1, int(capacity_tokens * per_token) // block))
        self.cache = PrefixCache(blocks, block, ghost_blocks=max(64, blocks // 4), clock=lambda: self._now)
        self._earlier = EarlierPrompts(memory_bytes * 3 // 8)
        self._entries = BreakpointEntries(rule_set, max(1000, memory_bytes // 8 // 300))

    def observe(self, record: Record) -> Observation:
        """What these rules make of a request, which from then on later ones can find. O(its size).

        Raises:
            NoRequest: its prompt can't be rendered.
        """
        looked = self._look(record)
        observation = self._observation(looked)
        available = _available(looked.record)
        if looked.found is not None and not record.failed:
            when = looked.now if available is None else available
            self._entries.note(looked.record, looked.chain, looked.found, looked.now, when)
        if not record.failed:
            self._keep(looked, available)
            self._supersede(looked)
        return observation

    def begin(self, record: Record) -> Begun:
        """As `observe`, of a request without its answer: later ones find it from now on. `end` it once.

        Raises:
            NoRequest: its prompt can't be rendered.
        """
        looked = self._look(record, grows=False)
        observation = self._observation(looked)
        if looked.found is not None:
            self._entries.note(looked.record, looked.chain, looked.found, looked.now, math.inf)
        return Begun(observation, looked, self._keep(looked, math.inf))

    def end(self, begun: Begun, record: Record) -> Observation:
        """What these rules make of a request that was begun, now that its answer is known. O(its size).

        What it could find was settled when it began; the answer tells of how many tokens that was.
        """
        looked, kept = begun.looked, begun.kept
        whole = replace(record, blocks=looked.record.blocks)
        units = self.coding.encode(whole)
        _, evicted = self._grow(whole, units)
        looked = replace(looked, record=whole, units=units, evicted=evicted)
        available = _available(whole)
        if looked.found is not None and record.failed:
            self._entries.forget_running(looked.chain, looked.found)
        elif looked.found is not None:
            when = looked.now if available is None else available
            self._entries.note(whole, looked.chain, looked.found, looked.now, when)
        if record.failed:
            self._earlier.drop(kept)
        else:
            kept.record, kept.units, kept.available = replace(whole, body={}), units, available
            self._earlier.answered(kept, whole.answer)
            self._supersede(looked)
        return self._observation(looked)

    def _look(self, record: Record, *, grows: bool = True) -> Looked:
        """Everything that a prompt finds when it comes.

        Args:
            grows: it is in the tree from then on, unless it failed; else a running one before it counts.
        """
        if not self.rule_set.tools_first and record.tools:
            record = replace(record, blocks=_system_first(record.blocks))
        units = self.coding.encode(record)
        chain = chain_of(record)
        now = self._now if record.time is None else record.time
        self._now = max(self._now, now)
        earlier, conversation = self._earlier.find(record, chain)
        is_running = earlier is not None and earlier.available == math.inf
        steady, place = _shared(earlier, units)
        if grows:
            in_tree, evicted = self._grow(record, units)
        else:
            in_tree, evicted = self.cache.match(units.units, self._namespace(record)).num_tokens, False
            in_tree = max(in_tree, steady if is_running else 0)
        found = None
        if self.rule_set.matching != "prefix":
            tokens = [units.tokens_at(end) for end in units.block_ends]
            found = self._entries.read(record, chain, tokens, now)
        return Looked(
            record,
            units,
            chain,
            now,
            earlier,
            is_running,
            conversation,
            in_tree,
            evicted,
            steady,
            place,
            found,
        )

    def _observation(self, looked: Looked) -> Observation:
        """What is made of it. Changes nothing."""
        record, units, found, earlier = looked.record, looked.units, looked.found, looked.earlier
        told = record.usage.prompt
        total = told if told and not units.is_exact else units.num_tokens
        rate = units.tokens_per_unit
        if found is None:
            cached = self._in_blocks(looked.in_tree * rate, total)
        else:
            end = units.block_ends[found.block] if found.block >= 0 else 0
            cached = min(round(units.tokens_at(end)), total)
        shared = max(round(looked.in_tree * rate), round(looked.steady * rate))
        reason, breaker, lost, (before, old, new) = self._judge(looked, cached, total)
        return Observation(
            conversation=looked.conversation,
            prompt_tokens=total,
            is_estimate=not units.is_exact,
            shared_tokens=min(shared, total),
            cached_tokens=cached,
            best_tokens=min(total, cached + lost) if reason == "broken" else cached,
            reported_tokens=record.usage.cached,
            reason=reason,
            fault=self._fault(looked, reason, cached),
            breaker=breaker,
            before=before,
            old=old,
            new=new,
            lost_tokens=lost,
            age_s=_age(earlier, record),
            earlier=earlier.record.place if earlier is not None else "",
            written=self._written(found, units),
            reported_prompt=told,
        )

    # ------------------------------------------------------------------ the tree

    def _grow(self, record: Record, units: PromptUnits) -> tuple[int, bool]:
        """Units that the tree has of a prompt, and whether it had more; from now on it has all of it.

        Of a request that failed nothing was computed.
        """
        namespace = self._namespace(record)
        data = units.units
        if not len(data):
            return 0, False
        if record.failed:
            return self.cache.match(data, namespace).num_tokens, False
        try:
            match = self.cache.match(data, namespace)
            lease = self.cache.acquire(data, namespace, match=match)
        except OutOfBlocks:
            self.num_forgotten += 1
            return self.cache.match(data, namespace).num_tokens, True
        evicted = lease.report.reason in ("evicted", "expired")
        self.num_forgotten += evicted and not self._is_bounded
        lease.commit(len(data))
        if self.rule_set.keeps_answers and len(units.after):
            try:
                lease.append(units.after)
                lease.commit(lease.num_tokens)
            except OutOfBlocks:
                pass
        lease.release()
        return match.num_tokens, evicted

    def _namespace(self, record: Record) -> tuple[str, str, str]:
        return (record.key if self.rule_set.by_key else "", record.salt, record.model)

    def _in_blocks(self, tokens: float, total: int) -> int:
        """Tokens of a prefix that a hit is made of: whole blocks, and never all of the prompt."""
        most = min(int(tokens + 1e-6), total - 1)
        return max(0, most - most % self.rule_set.block_tokens)

    def _written(self, found: BreakpointHit | None, units: PromptUnits) -> tuple[tuple[int, float], ...]:
        """Tokens that are written for each time to live: those after what was read, or after one before."""
        if found is None or not found.written:
            return ()
        written, before = [], units.tokens_at(units.block_ends[found.block]) if found.block >= 0 else 0.0
        for block, ttl in found.written:
            end = units.tokens_at(units.block_ends[block])
            written.append((round(end - before), ttl))
            before = end
        return tuple(written)

    def _keep(self, looked: Looked, available: float | None) -> EarlierPrompt:
        """Later prompts can go on after this one."""
        record = replace(looked.record, body={})
        kept = EarlierPrompt(record, looked.units, looked.conversation, (), available)
        self._earlier.add(kept, looked.chain, looked.record.answer)
        return kept

    def _supersede(self, looked: Looked) -> None:
        """What a prompt of the same conversation goes on after needs to be kept no longer."""
        earlier = looked.earlier
        if earlier is None or looked.conversation != earlier.conversation:
            return
        if not _parts(earlier, looked.units, looked.steady):
            self._earlier.drop(earlier)

    # ------------------------------------------------------------------ why

    def _judge(
        self, looked: Looked, cached: int, total: int
    ) -> tuple[Reason, Breaker | None, int, tuple[str, str, str]]:
        """Why no more was found, what breaks the prompt, tokens lost by it, and the texts there."""
        record, units, earlier, found = looked.record, looked.units, looked.earlier, looked.found
        steady, place = looked.steady, looked.place
        rate, none = units.tokens_per_unit, ("", "", "")
        if earlier is not None and _parts(earlier, units, steady):
            breaker = self._breaker(record, earlier, units, place)
            lost = 0 if breaker is None else self._lost(earlier, units, steady, place) - cached
            if lost > 0:
                return "broken", breaker, lost, _texts_at(earlier.units.text, units.text, place)
        within = self._in_blocks(steady * rate, total) if found is None else round(steady * rate)
        missed = max(0, within - cached)
        slack = max(TAIL_TOKENS, self.rule_set.block_tokens)
        if found is not None:
            tokens = [units.tokens_at(end) for end in units.block_ends]
            if found.expired_block > found.block:
                lost = round(tokens[found.expired_block]) - cached
                what = make_breaker("ttl_passed", "what was cached had run out before it was used again")
                return "expired", what, lost, none
            if found.running_block > found.block:
                return (
                    "concurrent",
                    make_breaker("concurrent"),
                    round(tokens[found.running_block]) - cached,
                    none,
                )
            if missed > slack:
                minimum = self.rule_set.minimum(record.model)
                reason: Reason = "too_short" if within < minimum else "no_breakpoint"
                return reason, None, missed if reason == "no_breakpoint" else 0, none
        elif missed > slack and looked.evicted:
            return "evicted", make_breaker("evicted"), missed, none
        return ("first" if earlier is None or not cached else "hit"), None, 0, none

    def _breaker(
        self, record: Record, earlier: EarlierPrompt, units: PromptUnits, place: int
    ) -> Breaker | None:
        if len(units.text) + len(earlier.units.text) > _MAX_COMPARED:
            old, new = earlier.units.text[place:], units.text[place:]
            return make_breaker("unknown", old=old[:SHOWN_CHARS], new=new[:SHOWN_CHARS])
        at = _block_at(units, place)
        in_tools = at < len(record.blocks) and record.blocks[at].kind == "tool"
        one, other = _around_difference(earlier.record.parts, record.parts)
        return find_breaker(one, other, in_tools=in_tools)

    def _lost(self, earlier: EarlierPrompt, units: PromptUnits, steady: int, place: int) -> int:
        """Tokens that both prompts share before the break and, in runs, after it."""
        if units.is_exact:
            new, old, start = units.units, earlier.units.units, steady
        else:
            new, old, start = units.units, earlier.units.units, place
        compared = slice(start * TOKEN_BYTES, (start + _COMPARED_UNITS) * TOKEN_BYTES)
        one, other = (EncodedTokens(each.data[compared]) for each in (new, old))
        return round((steady + same_later(one, other)) * units.tokens_per_unit)

    def _fault(self, looked: Looked, reason: Reason, cached: int) -> Fault:
        """What is to blame for tokens that were not found, by evidence."""
        if reason == "broken":
            return "prompt"
        units, earlier = looked.units, looked.earlier
        told, prompt = looked.record.usage.cached, looked.record.usage.prompt
        slack = self.rule_set.block_tokens
        if prompt and units.is_exact and prompt != units.num_tokens:  # they count in other tokens
            cached = cached * prompt // units.num_tokens
        if not units.is_exact or (prompt and prompt != units.num_tokens):
            slack = max(128, cached // 50)
        if told is not None and told + slack < cached:
            if looked.is_after_running:
                return "client"  # what it shares was being computed for another request
            # These rules find it, and its time is known: the prompt was steady.
            is_timed = (
                looked.record.time is not None and earlier is not None and earlier.record.time is not None
            )
            return "provider" if is_timed or self.rule_set.ttl_s is None else "unknown"
        by_reason: dict[str, Fault] = {
            "expired": "time",
            "evicted": "room",
            "no_breakpoint": "client",
            "concurrent": "client",
        }
        return by_reason.get(reason, "none")


def _available(record: Record) -> float | None:
    """When what a request wrote can be read; None: not known."""
    waits = record.first_seconds if record.first_seconds is not None else record.seconds
    return None if record.time is None or waits is None else record.time + waits


def _system_first(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """The blocks with the tools after what the system says first."""
    tools = [block for block in blocks if block.kind == "tool"]
    rest = blocks[len(tools) :]
    system = list(itertools.takewhile(lambda block: block.role == "system", rest))
    return (*system, *tools, *rest[len(system) :])


def _around_difference(one: PromptParts, other: PromptParts) -> tuple[PromptParts, PromptParts]:
    """Two prompts whose first message that differs is cut to what is around the difference, if it is long."""
    pairs = enumerate(zip(one.messages, other.messages, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), None)
    if at is None:
        return one, other
    a, b = one.messages[at].text, other.messages[at].text
    start = max(0, common_length(a, b) - _AROUND_CHARS)
    a, b = a[start:], b[start:]
    after = max(0, common_length(a[::-1], b[::-1]) - _AROUND_CHARS)
    texts = a[: len(a) - after][:_MAX_DIFFERING], b[: len(b) - after][:_MAX_DIFFERING]
    if start + len(a) + len(b) - len(texts[0]) - len(texts[1]) < _AROUND_CHARS:
        return one, other
    cut = []
    for prompt, text in zip((one, other), texts, strict=True):
        messages = list(prompt.messages)
        messages[at] = replace(messages[at], text=text)
        cut.append(replace(prompt, messages=tuple(messages)))
    return cut[0], cut[1]


def _age(earlier: EarlierPrompt | None, record: Record) -> float | None:
    if earlier is None or earlier.record.time is None or record.time is None:
        return None
    return record.time - earlier.record.time


def _shared(earlier: EarlierPrompt | None, units: PromptUnits) -> tuple[int, int]:
    """Units that a prompt shares with an earlier one, and characters of their texts."""
    if earlier is None:
        return 0, 0
    place = common_length(earlier.units.text, units.text)
    if not units.is_exact:
        return place, place
    one, other = earlier.units.units.data, units.units.data
    return common_length(one, other) // TOKEN_BYTES, place


def common_length(one: str | bytes, other: str | bytes) -> int:
    """How much two texts share at their beginning. O(n), at the speed of comparing memory."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    step = 1024
    while low < high and one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(high, low + step)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _parts(earlier: EarlierPrompt, units: PromptUnits, steady: int) -> bool:
    """Whether a prompt does not begin with the earlier one, but for how that ended."""
    return steady * units.tokens_per_unit < earlier.units.num_tokens - TAIL_TOKENS


def _block_at(units: PromptUnits, place: int) -> int:
    return next((at for at, end in enumerate(units.block_ends) if place < end), len(units.block_ends))


def _texts_at(old: str, new: str, place: int) -> tuple[str, str, str]:
    """The text in front of a place, and how both go on there."""
    before = new[max(0, place - _BEFORE_CHARS) : place]
    return before, old[place : place + SHOWN_CHARS], new[place : place + SHOWN_CHARS]
