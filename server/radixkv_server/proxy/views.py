# SPDX-License-Identifier: Apache-2.0
"""Watched requests as JSON, in the forms of a server's `/v1/cache` routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import inf

from radixkv.observe.audit.prices import Prices
from radixkv.observe.audit.record import Record
from radixkv.observe.causes import CAUSES
from radixkv_server.activity.hit_windows import history_json
from radixkv_server.activity.node_names import NodeNames
from radixkv_server.apis.cache_api.caller import Onlooker
from radixkv_server.apis.cache_api.tree import TreeJson
from radixkv_server.apis.common.explanation_json import breaker_json
from radixkv_server.dialect import Json
from radixkv_server.proxy.watched import SHOWN_CHARS, Watched, WatchedRequest


def _text_of(units: Sequence[int]) -> str:
    return _shown("".join(map(chr, units)))  # a tree's units are characters


def _shown(text: str) -> str:
    """Return text with the marks between messages as lines."""
    return text.replace("\x1e", "\n").replace("\x1f", ": ").strip("\n")


class Views:
    """Answers of the console's routes as JSON."""

    def __init__(self, watched: Watched, prices: Prices | None = None) -> None:
        self._watched = watched
        self._prices = prices
        self._names = NodeNames()

    def overview(self) -> Json:
        """Return the body of GET /v1/cache."""
        watched, stats = self._watched, self._watched.stats()
        return {
            "object": "cache",
            "role": "admin",
            "tenant": "",
            "cache_salt": None,
            "enabled": True,
            "rules": watched.rule_set.name,
            "requests_not_seen": watched.num_dropped,
            "block_size": watched.rule_set.block_tokens,
            "windows": {name: sums.to_json() for name, sums in watched.windows().items()},
            "history": history_json(watched.history()),
            "missed_tokens": dict(watched.missed),
            "upstreams": [
                {**asdict(state), **watched.of_upstream(state.address).to_json()} for state in watched.states
            ],
            "running_requests": sum(state.running for state in watched.states) or watched.num_running,
            "pool": {
                "cached_blocks": stats.cached_blocks,
                "held_blocks": stats.held_blocks,
                "pinned_blocks": stats.pinned_blocks,
            },
        }

    def requests(self, limit: int, after: int = 0) -> list[Json]:
        """Return the data of GET /v1/cache/requests."""
        return [self._summary(one) for one in self._watched.latest(limit, after)]

    def request(self, name: str) -> Json | None:
        """Return the body of GET /v1/cache/requests/NAME; None: not among the latest."""
        one = self._watched.find(name)
        if one is None:
            return None
        observed = one.observation
        around = None
        if observed.reason == "diverged":
            position = observed.shared_tokens
            around = {"position": position, "before": _shown(observed.before)}
            around |= {"prompt": _shown(observed.new), "cached": _shown(observed.old)}
        explanation = {
            "prompt_tokens": observed.prompt_tokens,
            "cached_tokens": one.cached_tokens,
            "expected_tokens": observed.cached_tokens,
            "reason": one.reason,
            "position": None if around is None else observed.shared_tokens,
            "detail": _detail(one),
            "around": around,
            "breaker": breaker_json(observed.breaker),
            "recoverable_tokens": observed.lost_tokens,
            "advice": _advice(one),
        }
        return {"object": "cache.request", **self._summary(one), "nodes": [], "explanation": explanation}

    def tree(self, limit: int, depth: int) -> Json:
        """Return the body of GET /v1/cache/tree; counts are in tokens, as far as known."""
        found = self._tree(SHOWN_CHARS).heaviest(limit, depth)
        rate = self._watched.tokens_per_unit
        for node in found["nodes"]:
            for name in ("start", "tokens", "subtree_tokens"):
                node[name] = round(node[name] * rate)
        found["totals"]["tokens"] = round(found["totals"]["tokens"] * rate)
        return found

    def search(self, text: str, limit: int) -> Json:
        """Return the body of GET /v1/cache/tree?search=TEXT."""
        return self._tree(-1).search(text, limit)

    def _tree(self, shown: int) -> TreeJson:
        return TreeJson(self._watched.snapshot(shown), Onlooker(), self._names, _text_of)

    def advice(self, limit: int) -> list[Json]:
        """Return causes of recent breaks, the most expensive first."""
        costs: dict[tuple[str, str], list[WatchedRequest]] = {}
        for one in self._watched.latest(1000):
            breaker = one.observation.breaker
            if one.observation.reason == "diverged" and breaker is not None:
                costs.setdefault((breaker.kind, breaker.place), []).append(one)
        groups = sorted(costs.values(), key=lambda group: -sum(one.observation.lost_tokens for one in group))
        found = []
        for group in groups[:limit]:
            lost, latest = sum(one.observation.lost_tokens for one in group), group[0].observation
            found.append(
                {
                    "count": len(group),
                    "recoverable_tokens": lost,
                    "advice": f"{len(group)} prompts, {lost:,} tokens: {_advice(group[0])}",
                    "example": {"before": _shown(latest.before), "prompt": _shown(latest.new)},
                }
            )
        return found

    def metrics(self) -> str:
        """Return times to the first byte in Prometheus' format."""
        name, (bounds, counts, total) = "radixkv_time_to_first_token_seconds", self._watched.first_bytes()
        lines = [f"# TYPE {name} histogram"]
        for bound, count in zip(bounds, counts, strict=True):
            lines.append(f'{name}_bucket{{le="{"+Inf" if bound == inf else bound}"}} {count}')
        return "\n".join([*lines, f"{name}_count {counts[-1]}", f"{name}_sum {total}", ""])

    def _summary(self, one: WatchedRequest) -> Json:
        record, observed = one.record, one.observation
        exchange = one.seen.exchange
        failed = record.failed or not one.seen.is_whole
        return {
            "id": one.name,
            "operation": exchange.path,
            "upstream": one.seen.upstream,
            "choice": None if one.seen.choice is None else asdict(one.seen.choice),
            "model": record.model,
            "conversation": observed.conversation,
            "state": "failed" if failed else "finished",
            "error_code": (str(exchange.status) if exchange.status >= 400 else "cut off") if failed else None,
            "started_at": round(exchange.time or 0.0, 3),
            "prompt_tokens": observed.prompt_tokens,
            "estimated": record.usage.prompt is None,
            "cached_tokens": one.cached_tokens,
            "expected_tokens": observed.cached_tokens,
            "reported_tokens": observed.reported_tokens,
            "completion_tokens": record.usage.output or 0,
            "reason": one.reason,
            "fault": observed.fault,
            "cost": self._cost(one),
            "comparison": None,
            "ttft_s": _rounded(record.first_seconds),
            "duration_s": _rounded(record.seconds),
            "tokens_per_s": _speed(record),
            "text": _shown(record.blocks[0].text[:SHOWN_CHARS]) if record.blocks else "",
            "last_message": _shown(record.blocks[-1].text[:SHOWN_CHARS]) if len(record.blocks) > 1 else None,
            "tenant": record.key or None,
            "cache_salt": record.salt or None,
        }

    def _cost(self, one: WatchedRequest) -> Json | None:
        """Return the prompt's cost and its lowest possible cost; None: no prices are known."""
        price = None if self._prices is None else self._prices.of(one.record.model)
        if self._prices is None or price is None:
            return None
        total, written = one.observation.prompt_tokens, one.record.usage.written or 0
        best = min(total, max(one.cached_tokens, one.observation.best_tokens))
        return {
            "prompt": round(price.prompt(total, one.cached_tokens, written), 8),
            "best": round(price.prompt(total, best, written), 8),
            "currency": self._prices.currency,
            "prices_of": self._prices.date,
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _speed(record: Record) -> float | None:
    if not record.usage.output or record.seconds is None or record.first_seconds is None:
        return None
    spent = record.seconds - record.first_seconds
    return round(record.usage.output / spent, 1) if spent > 0 else None


def _detail(one: WatchedRequest) -> str:
    observed = one.observation
    reported = "did not say" if observed.reported_tokens is None else f"reported {observed.reported_tokens:,}"
    expected = f"Of {observed.prompt_tokens:,} tokens {observed.cached_tokens:,} were to be found"
    return f"{expected}; the upstream {reported}."


def _advice(one: WatchedRequest) -> str | None:
    breaker = one.observation.breaker
    if breaker is not None and one.reason == one.observation.reason:
        return breaker.detail
    return CAUSES[one.reason].advice_sentence
