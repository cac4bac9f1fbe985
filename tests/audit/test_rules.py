"""What rules make of conversations: hits, breaks, times to live, breakpoints, and whose fault a miss is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from radixkv.audit.exchange import make_record
from radixkv.audit.rule_sets import RULE_SETS, rule_set
from radixkv.audit.rules import Observation, Rules

SYSTEM = " ".join(
    f"Rule {n}: ships of the line {n} leave the harbour before the tide turns." for n in range(90)
)
MARK = {"cache_control": {"type": "ephemeral"}}


def question(turn: int) -> str:
    return f"Question {turn}: " + " ".join(f"which crane lifts the load {turn}-{n}?" for n in range(40))


def answer(turn: int) -> str:
    return f"Answer {turn}: crane {turn} lifts it, and pier {turn} takes it in before the evening."


def body(turn: int, system: str = SYSTEM, **more: Any) -> dict[str, Any]:
    """The request of a turn, with breakpoints after the system prompt and the newest message."""
    messages: list[dict[str, Any]] = []
    for earlier in range(turn):
        messages.append({"role": "user", "content": [{"type": "text", "text": question(earlier)}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer(earlier)}]})
    messages.append({"role": "user", "content": [{"type": "text", "text": question(turn), **MARK}]})
    text = {"type": "text", "text": system, **MARK}
    return {"model": "claude-x", "max_tokens": 9, "system": [text], "messages": messages, **more}


def told(turn: int, prompt: int, cached: int) -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg_{turn}",
        "content": [{"type": "text", "text": answer(turn)}],
        "usage": {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 20,
        },
    }


def observe(rules: Rules, turn: int, time: float | None, cached: int = 0, **more: Any) -> Observation:
    sent = body(turn, **more)
    chars = len(str(sent))
    return rules.observe(make_record(sent, told(turn, chars // 4, cached), time=time, seconds=2.0))


@pytest.mark.parametrize("name", sorted(RULE_SETS))
def test_a_conversation_that_goes_on_finds_what_it_left(name: str) -> None:
    rules = Rules(rule_set(name))
    seen = [observe(rules, turn, 30.0 * turn) for turn in range(5)]
    assert seen[0].cached_tokens == 0
    assert seen[0].reason == "first"
    for before, after in itertools.pairwise(seen):
        assert before.prompt_tokens * 0.9 < after.cached_tokens < after.prompt_tokens
        assert after.reason == "hit"
        assert after.conversation == before.conversation
        assert after.cached_tokens % RULE_SETS[name].block_tokens == 0


@pytest.mark.parametrize("name", sorted(RULE_SETS))
def test_a_time_in_the_system_prompt_breaks_it_and_costs_what_follows(name: str) -> None:
    rules = Rules(rule_set(name))
    observe(rules, 0, 0.0, system="Today is 2026-11-21 10:00:00. " + SYSTEM)
    seen = observe(rules, 1, 30.0, system="Today is 2026-11-21 10:00:30. " + SYSTEM)
    assert (seen.reason, seen.fault) == ("broken", "prompt")
    assert seen.breaker is not None
    assert seen.breaker.kind == "timestamp"
    assert seen.old.startswith("00. Rule 0")
    assert seen.new.startswith("30. Rule 0")
    assert seen.lost_tokens > 0.8 * len(SYSTEM) / 5
    assert seen.best_tokens == seen.cached_tokens + seen.lost_tokens


def test_what_runs_out_is_not_found_and_each_use_renews_it() -> None:
    for pause, reason in ((290.0, "hit"), (310.0, "expired")):
        rules = Rules(rule_set("anthropic"))
        observe(rules, 0, 0.0)
        assert observe(rules, 1, 290.0).reason == "hit"
        seen = observe(rules, 2, 290.0 + pause)
        assert seen.reason == reason
        assert (seen.fault == "time") is (reason == "expired")
    assert seen.lost_tokens > 1000


def test_without_a_breakpoint_providers_keep_nothing() -> None:
    rules = Rules(rule_set("anthropic"))
    plain = body(0)
    for part in (plain["system"][0], plain["messages"][0]["content"][0]):
        del part["cache_control"]
    for time in (0.0, 10.0):
        seen = rules.observe(make_record(plain, told(0, 4000, 0), time=time, seconds=1.0))
    assert (seen.reason, seen.fault, seen.cached_tokens) == ("no_breakpoint", "client", 0)
    assert seen.lost_tokens > 3000


def test_a_steady_prefix_that_was_not_read_is_the_providers() -> None:
    rules = Rules(rule_set("anthropic"))
    observe(rules, 0, 0.0)
    assert observe(rules, 1, 10.0, cached=0).fault == "provider"
    timeless = Rules(rule_set("anthropic"))
    observe(timeless, 0, None)
    assert observe(timeless, 1, None, cached=0).fault == "unknown"


def test_keys_and_salts_keep_prompts_apart() -> None:
    for name, key_matters in (("radixkv", True), ("vllm", False)):
        rules = Rules(rule_set(name))
        for key in ("key-1", "key-2"):
            seen = rules.observe(make_record(body(0), told(0, 4000, 0), key=key, time=1.0))
        assert (seen.cached_tokens == 0) is key_matters
        salted = rules.observe(
            make_record(body(0, cache_salt="other"), told(0, 4000, 0), key="key-1", time=2.0)
        )
        assert salted.cached_tokens == 0
