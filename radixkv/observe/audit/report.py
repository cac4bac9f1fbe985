# SPDX-License-Identifier: Apache-2.0
"""AuditReport: totals of a log's observations, as plain data."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixkv.cache.reporting.reasons import Reason
from radixkv.observe.audit.observation import Observation
from radixkv.observe.audit.prices import ModelPrices, Prices
from radixkv.observe.audit.record import Json, Record
from radixkv.observe.audit.rule_sets import RuleSet
from radixkv.observe.causes import CAUSES

WORST = 10
MAX_POINTS = 240  # of the growth over time: twice as many are halved
MAX_GROUPS = 1000  # models, keys, conversations each; those seen longest ago become `others`
MAX_REQUESTS = 500  # shown one by one, the latest
OTHERS = "(others)"
#: Reasons that have another name in the report.
_REASONS = {Reason.FIRST_SEEN: "first", Reason.DIVERGED: "broken"}


@dataclass(slots=True)
class Sums:
    """Sums over requests. All but `requests` and `num_reported` count tokens.

    Attributes:
        num_reported: number of answers that reported cached tokens; reported_prompt: tokens of their prompts;
            reported: cached tokens of these.
        cached, best: tokens found under these rules, and with parts in the best order.
        provider: tokens found under these rules that the provider did not read.
    """

    requests: int = 0
    prompt: int = 0
    num_reported: int = 0
    reported_prompt: int = 0
    reported: int = 0
    cached: int = 0
    best: int = 0
    lost: int = 0
    provider: int = 0

    def add(self, seen: Observation) -> None:
        """Add a request."""
        self.requests += 1
        self.prompt += seen.prompt_tokens
        self.cached += seen.cached_tokens
        self.best += seen.best_tokens
        self.lost += seen.lost_tokens
        if seen.reported_tokens is not None:
            self.num_reported += 1
            self.reported_prompt += seen.reported_prompt or seen.prompt_tokens
            self.reported += seen.reported_tokens
            if seen.fault == "provider":
                self.provider += max(0, seen.cached_tokens - seen.reported_tokens)

    def merge(self, other: Sums) -> None:
        """Add the requests of other sums."""
        for name in Sums.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_dict(self) -> Json:
        """Return the counts and the hit rates as JSON."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt,
            "requests_with_usage": self.num_reported,
            "reported_cached_tokens": self.reported if self.num_reported else None,
            "predicted_cached_tokens": self.cached,
            "best_tokens": self.best,
            "lost_tokens": self.lost,
            "provider_tokens": self.provider,
            "hit_rate": self.reported / self.reported_prompt if self.reported_prompt else None,
            "rules_hit_rate": self.cached / self.prompt if self.prompt else None,
            "best_hit_rate": self.best / self.prompt if self.prompt else None,
        }


@dataclass(slots=True)
class BreakTally:
    """Tally of the requests that miss for one cause at one place, with the one that lost most.

    `money` is None until there is a request with a known price.
    """

    count: int = 0
    lost: int = 0
    money: float | None = None
    worst: int = -1
    example: Json = field(default_factory=dict)


class AuditReport:
    """Sums of a log's observations, of bounded size.

    Args:
        prefill_rate: prompt tokens that are computed in a second; None: not known, and no time is told.
        prices: None: no money is told.
    """

    def __init__(
        self, rule_set: RuleSet, prefill_rate: float | None = None, prices: Prices | None = None
    ) -> None:
        self.total = Sums()
        self.rule_set = rule_set
        self._rate = prefill_rate
        self._prices = prices
        self._groups: dict[str, OrderedDict[str, Sums]] = {
            name: OrderedDict() for name in ("model", "key", "conversation")
        }
        self._breaks: dict[tuple[str, str, str], BreakTally] = {}
        self._faults: dict[str, list[int]] = {}
        self._growth = _Growth()
        self._latest: list[Json] = []
        self._money = {"reported": 0.0, "rules": 0.0, "best": 0.0}
        self._any_priced = False
        self._unpriced: set[str] = set()
        self._exact = [0, 0]  # requests whose reported tokens are what these rules find, and others
        self.failed = 0
        self._counted_otherwise = 0  # requests of which the answer counts other tokens than a tokenizer

    @property
    def num_requests(self) -> int:
        """Return the number of requests so far, failed ones included."""
        return self.total.requests + self.failed

    def add(self, record: Record, seen: Observation) -> None:
        """Add a request. A failed one is only counted."""
        if record.failed:
            self.failed += 1
            return
        self.total.add(seen)
        for name, value in (
            ("model", record.model),
            ("key", record.key),
            ("conversation", seen.conversation),
        ):
            _group(self._groups[name], value or "(none)").add(seen)
        self._growth.add(record.time, seen)
        prices = None if self._prices is None else self._price(record.model)
        if prices is not None:
            self._pay(prices, record, seen)
        if seen.reported_tokens is not None:
            self._exact[seen.reported_tokens != seen.cached_tokens] += 1
        if seen.reported_prompt and not seen.is_estimate:
            self._counted_otherwise += seen.reported_prompt != seen.prompt_tokens
        fault = self._faults.setdefault(seen.fault, [0, 0])
        fault[0] += 1
        fault[1] += self._missed(seen)
        self._break(record, seen, prices)
        self._latest.append(request_json(record, seen))
        if len(self._latest) > 2 * MAX_REQUESTS:
            del self._latest[:-MAX_REQUESTS]

    def _missed(self, seen: Observation) -> int:
        if seen.fault == "provider" and seen.reported_tokens is not None:
            return max(0, seen.cached_tokens - seen.reported_tokens)
        return seen.lost_tokens

    def _price(self, model: str) -> ModelPrices | None:
        assert self._prices is not None
        found = self._prices.of(model)
        if found is None and len(self._unpriced) < 100:
            self._unpriced.add(model)
        return found

    def _pay(self, prices: ModelPrices, record: Record, seen: Observation) -> None:
        total, long = seen.prompt_tokens, (prices.cache_write_long - prices.cache_write)
        written = sum(tokens for tokens, _ in seen.written)
        more = sum(tokens * long for tokens, ttl in seen.written if ttl > (self.rule_set.ttl_s or 0.0))
        was = seen.cached_tokens if seen.reported_tokens is None else seen.reported_tokens
        paid = total if seen.reported_tokens is None else seen.reported_prompt or total
        reported = record.usage.written
        self._any_priced = True
        self._money["reported"] += prices.prompt(paid, was, written if reported is None else reported)
        self._money["rules"] += prices.prompt(total, seen.cached_tokens, written) + more
        self._money["best"] += prices.prompt(total, seen.best_tokens, written) + more

    def _break(self, record: Record, seen: Observation, prices: ModelPrices | None) -> None:
        if not seen.lost_tokens:
            return
        breaker = seen.breaker
        kind = seen.reason if breaker is None else breaker.kind
        what = CAUSES[seen.reason].meaning if breaker is None else breaker.what
        place = "" if breaker is None else breaker.place
        group = self._breaks.setdefault((kind, what, place), BreakTally())
        group.count += 1
        group.lost += seen.lost_tokens
        if prices is not None:
            paid = prices.cache_write if seen.written else prices.input
            group.money = (group.money or 0.0) + seen.lost_tokens * (paid - prices.cache_read)
        if seen.lost_tokens > group.worst:
            group.worst = seen.lost_tokens
            group.example = _example(record, seen)
        if len(self._breaks) > MAX_GROUPS:
            least = heapq.nsmallest(MAX_GROUPS // 2, self._breaks, key=lambda key: self._breaks[key].lost)
            for key in least:
                del self._breaks[key]

    def breaks(self) -> Iterator[Json]:
        """Yield the places where prompts miss, most tokens first."""
        for (kind, what, place), found in sorted(self._breaks.items(), key=lambda item: -item[1].lost):
            yield {
                "kind": kind,
                "what": what,
                "where": place or None,
                "requests": found.count,
                "lost_tokens": found.lost,
                "lost_seconds": None if self._rate is None else found.lost / self._rate,
                "lost_money": None if self._prices is None else found.money,
                "example": found.example,
            }

    def to_dict(self) -> Json:
        """Return the whole report as JSON."""
        breaks = list(self.breaks())
        lost = sum(found["lost_tokens"] for found in breaks)
        return {
            "rules": self.rule_set.name,
            "summary": self.total.to_dict(),
            "failed_requests": self.failed,
            "as_reported": {"equal": self._exact[0], "other": self._exact[1]},
            "counted_otherwise": self._counted_otherwise,
            "lost_tokens": lost,
            "lost_seconds": None if self._rate is None else lost / self._rate,
            "prefill_rate": self._rate,
            "money": self._money_of(breaks),
            "breaks": breaks[:100],
            "worst": breaks[:WORST],
            "faults": {
                name: {"requests": count, "tokens": tokens}
                for name, (count, tokens) in sorted(self._faults.items())
            },
            "growth": self._growth.points(),
            **{
                f"by_{name}": [
                    {name: value, **sums.to_dict()}
                    for value, sums in sorted(groups.items(), key=lambda item: -item[1].prompt)
                ][:200]
                for name, groups in self._groups.items()
            },
            "requests": self._latest[-MAX_REQUESTS:],
        }

    def _money_of(self, breaks: list[Json]) -> Json | None:
        if self._prices is None:
            return None
        return {
            "currency": self._prices.currency,
            "date": self._prices.date,
            **{name: amount if self._any_priced else None for name, amount in self._money.items()},
            "lost": sum(found["lost_money"] or 0.0 for found in breaks) if self._any_priced else None,
            "models_without_price": sorted(self._unpriced),
        }


def _group(groups: OrderedDict[str, Sums], name: str) -> Sums:
    sums = groups.get(name)
    if sums is None:
        sums = groups[name] = Sums()
        if len(groups) > MAX_GROUPS:
            oldest = next(key for key in groups if key != OTHERS)
            groups.setdefault(OTHERS, Sums()).merge(groups.pop(oldest))
    groups.move_to_end(name)
    return sums


def request_json(record: Record, seen: Observation) -> Json:
    """Return a request in the report's form."""
    return {
        "place": record.place,
        "failed": record.failed,
        "time": record.time,
        "model": record.model,
        "conversation": seen.conversation,
        "prompt_tokens": seen.prompt_tokens,
        "predicted_cached_tokens": seen.cached_tokens,
        "reported_cached_tokens": seen.reported_tokens,
        "reason": _REASONS.get(seen.reason, seen.reason),
        "fault": seen.fault,
        "kind": None if seen.breaker is None else seen.breaker.kind,
        "lost_tokens": seen.lost_tokens,
    }


def _example(record: Record, seen: Observation) -> Json:
    breaker = seen.breaker
    return {
        **request_json(record, seen),
        "earlier": seen.earlier or None,
        "age_s": seen.age_s,
        "message": None if breaker is None else breaker.message,
        "tool": None if breaker is None else breaker.tool,
        "before": seen.before,
        "old": seen.old,
        "new": seen.new,
        "what_to_move": CAUSES[seen.reason].advice if breaker is None else breaker.remedy,
        "detail": None if breaker is None else breaker.detail,
    }


class _Growth:
    """Sums of stretches of the log, equally many requests each, twice as many when there are too many."""

    def __init__(self) -> None:
        self._points: list[tuple[float | None, Sums]] = []
        self._each = 1

    def add(self, time: float | None, seen: Observation) -> None:
        if not self._points or self._points[-1][1].requests >= self._each:
            if len(self._points) >= 2 * MAX_POINTS:
                self._halve()
            self._points.append((time, Sums()))
        self._points[-1][1].add(seen)

    def _halve(self) -> None:
        self._each *= 2
        pairs = zip(self._points[::2], self._points[1::2], strict=True)
        self._points = []
        for (time, one), (_, other) in pairs:
            one.merge(other)
            self._points.append((time, one))

    def points(self) -> list[dict[str, Any]]:
        """Return each stretch: when it begins, its own sums, and the tokens up to its end."""
        shown, total = [], Sums()
        for time, sums in self._points:
            total.merge(sums)
            up_to = {"prompt": total.prompt, "reported": total.reported, "cached": total.cached}
            shown.append({"time": time, **sums.to_dict(), "up_to": up_to})
        return shown
