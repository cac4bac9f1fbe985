# SPDX-License-Identifier: Apache-2.0
"""Explanations as JSON, in the one form that all views of prompts and requests have."""

from __future__ import annotations

from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.explain import MissReport
from radixkv.observe.causes import Breaker
from radixkv.observe.explanation import Explanation, MissPlace
from radixkv.text.chat_formats.client_rules import ClientRule
from radixkv_server.dialect import Json


def explanation_json(
    report: MissReport, explanation: Explanation, around: Json | None, rule: ClientRule | None
) -> Json:
    """Return an explanation as the views of a request and of a prompt have it.

    Args:
        around: texts where the match ends; None: not to be shown.
        rule: the rule by which the prompt's client was held constant.
    """
    place = explanation.place
    return {
        **report_json(report),
        "place": None if place is None else place.part,
        "normalized": normalized_json(rule),
        "recoverable_tokens": explanation.recoverable_tokens,
        "family": prompt_group_json(None if place is None else place.group),
        "around": around,
        "breaker": breaker_json(explanation.breaker),
        "advice": explanation.advice,
    }


def around_json(place: MissPlace) -> Json:
    """Return the text before a place, and its continuations in the prompt and in what is cached."""
    return {
        "position": place.position,
        "before": place.before,
        "prompt": place.new,
        "cached": place.old or None,
    }


def report_json(report: MissReport) -> Json:
    """Return the facts of a report, without any tokens."""
    return {
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_hit_tokens,
        "missed_tokens": report.num_missed_tokens,
        "reason": report.reason,
        "position": None if report.reason == "hit" else report.num_hit_tokens,
        "age_s": None if report.age_s is None else round(report.age_s, 3),
        "evicted_by": report.evicted_by,
        "skipped": report.skipped,
        "tier": report.tier,
        "tier_tokens": report.num_tier_tokens,
    }


def normalized_json(rule: ClientRule | None) -> Json | None:
    """Describe the client's text about itself that was held constant in a prompt, or None."""
    return None if rule is None else {"client": rule.client, "what": rule.what, "detail": rule.effect}


def prompt_group_json(point: BreakPoint | None) -> Json | None:
    """Return counts of the group's prompts that break there, and anywhere."""
    return None if point is None else {"here": point.count, "anywhere": point.group_count}


def breaker_json(found: Breaker | None) -> Json | None:
    """Return a breaker as JSON; None: nothing breaks the prompt."""
    if found is None:
        return None
    return {
        "kind": found.kind,
        "what": found.what,
        "place": found.place or None,
        "message": found.message,
        "tool": found.tool,
        "earlier": found.old or None,
        "now": found.new or None,
        "remedy": found.remedy,
        "detail": found.detail,
    }
