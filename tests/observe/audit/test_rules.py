# SPDX-License-Identifier: Apache-2.0
"""What rules make of conversations: hits, breaks, times to live, breakpoints, and whose fault a miss is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from radixkv.observe.audit.exchange import make_record
from radixkv.observe.audit.prompt_units import byte_coding
from radixkv.observe.audit.record import Record
from radixkv.observe.audit.rule_sets import RULE_SETS, rule_set
from radixkv.observe.audit.rules import Observation, Rules

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
    assert seen[0].reason == "first_seen"
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
    assert (seen.reason, seen.fault) == ("diverged", "prompt")
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


TEXT = "Ships of this line leave the harbour before the tide turns, says rule {:03d}. "


def blocks(count: int, marks: tuple[int, ...] = (), chars: int = 400, **more: Any) -> dict[str, Any]:
    """A request of so many parts of about so many bytes each, some with a breakpoint."""
    parts = [
        {"type": "text", "text": (TEXT.format(n) * (chars // 70 + 1))[:chars], **(MARK if n in marks else {})}
        for n in range(count)
    ]
    return {"model": "claude-sonnet-5", "messages": [{"role": "user", "content": parts}], **more}


def cached(rules: Rules, sent: dict[str, Any], time: float = 0.0) -> int:
    return rules.observe(make_record(sent, time=time, seconds=0.0)).cached_tokens


def by_bytes(name: str) -> Rules:
    return Rules(rule_set(name), byte_coding())


@pytest.mark.parametrize(("before", "found"), [(20, True), (21, False)])
def test_an_entry_is_looked_for_twenty_blocks_before_a_breakpoint(before: int, found: bool) -> None:
    rules = by_bytes("anthropic")
    cached(rules, blocks(10, (9,)))
    assert (cached(rules, blocks(10 + before, (9 + before,)), 1.0) > 3800) is found


@pytest.mark.parametrize("name", sorted(RULE_SETS))
def test_a_request_that_failed_leaves_nothing(name: str) -> None:
    rules = by_bytes(name)
    sent = blocks(20, (19,))
    refused = {"error": {"type": "rate_limit_error", "message": "later"}}
    rules.observe(make_record(sent, refused, time=0.0, failed=True))
    assert cached(rules, sent, 1.0) == 0
    assert cached(rules, sent, 2.0) > 7000


def test_four_breakpoints_count() -> None:
    rules = by_bytes("anthropic")
    cached(rules, blocks(60, (4, 30, 40, 50, 59)))
    assert cached(rules, blocks(5, (4,)), 1.0) == 0
    assert cached(rules, blocks(31, (30,)), 2.0) > 0


@pytest.mark.parametrize(
    ("model", "least"),
    [("claude-sonnet-5", 1024), ("claude-3-5-haiku", 2048), ("claude-haiku-4-5-20251001", 4096)],
)
def test_shorter_prompts_than_the_models_least_are_not_kept(model: str, least: int) -> None:
    for chars, is_kept in ((least - 90, False), (least + 90, True)):
        rules = by_bytes("anthropic")
        sent = blocks(1, (0,), chars, model=model)
        cached(rules, sent)
        assert (cached(rules, sent, 1.0) > 0) is is_kept


def test_an_hour_where_it_is_asked_for() -> None:
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    sent = blocks(5)
    sent["messages"][0]["content"][4].update(hour)
    rules = by_bytes("anthropic")
    cached(rules, sent)
    assert cached(rules, sent, 3500.0) > 0
    assert cached(rules, sent, 7000.0) > 0, "each use renews it"
    assert cached(rules, sent, 10700.0) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": {"type": "any"}},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        {"image": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}},
    ],
)
def test_what_shapes_messages_leaves_the_systems_entry(more: dict[str, Any]) -> None:
    rules = by_bytes("anthropic")
    system = [{"type": "text", "text": SYSTEM, **MARK}]
    cached(rules, blocks(5, (4,), system=system))
    image = more.pop("image", None)
    sent = blocks(5, (4,), system=system, **more)
    if image:
        sent["messages"].append({"role": "user", "content": [image]})
    found = cached(rules, sent, 1.0)
    assert len(SYSTEM) <= found < len(SYSTEM) + 60


def test_an_automatic_breakpoint_is_at_the_last_block_that_can_have_one() -> None:
    rules = by_bytes("anthropic")
    for time in (0.0, 1.0):
        sent = blocks(5, cache_control={"type": "ephemeral"})
        sent["messages"].append(
            {"role": "assistant", "content": [{"type": "thinking", "thinking": f"{time}"}]}
        )
        found = cached(rules, sent, time)
    assert found > 1900


def test_marks_in_chats_are_all_that_is_kept_of_them() -> None:
    """As LiteLLM logs what goes on to Anthropic: nothing is marked that its client did not mark."""
    rules = by_bytes("anthropic")
    cached(rules, blocks(10, (5,), model="gpt-x"))
    assert 2300 < cached(rules, blocks(10, (5,), model="gpt-x"), 1.0) < 2600


def openai(count: int, marks: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
    sent = blocks(count, model="gpt-5")
    for at in marks:
        sent["messages"][0]["content"][at]["prompt_cache_breakpoint"] = {"type": "ephemeral"}
    return {**sent, **({"prompt_cache_options": options} if options else {})}


def test_openai_keeps_the_newest_message_and_three_breakpoints() -> None:
    rules = by_bytes("openai")
    cached(rules, openai(40, (5, 15, 25, 35)))
    assert cached(rules, openai(40), 1.0) > 15000
    assert cached(rules, openai(6, (5,), mode="explicit"), 2.0) == 0, "a fourth has no room"
    assert cached(rules, openai(16, (15,), mode="explicit"), 3.0) > 0


def test_openai_keeps_nothing_where_it_is_asked_for_nothing() -> None:
    rules = by_bytes("openai")
    cached(rules, openai(20, mode="explicit"))
    assert cached(rules, openai(20), 1.0) == 0
    rules = by_bytes("openai")
    cached(rules, openai(2))
    assert cached(rules, openai(2), 1.0) == 0, "less than 1,024 tokens"


def test_openais_entries_stay_half_an_hour_after_their_last_use() -> None:
    rules = by_bytes("openai")
    times = (0.0, 1700.0, 3400.0, 5300.0)
    assert [cached(rules, openai(20), time) > 0 for time in times] == [False, True, True, False]
    rules = by_bytes("openai")
    cached(rules, openai(20, ttl="12h"))
    assert cached(rules, openai(20, ttl="12h"), 43000.0) > 0


@pytest.mark.parametrize("name", ["radixkv", "anthropic"])
def test_what_is_expected_is_settled_when_a_request_begins(name: str) -> None:
    """One is asked while the other has no answer: their ends, in either order, change nothing of that."""
    head = {"role": "system", "content": "You are the harbour master of Bergen. " * 600}

    def asked(text: str, start: float, *, ended: bool) -> Record:
        body: dict[str, Any] = {"model": "claude-sonnet-4-5", "max_tokens": 5}
        body["system"] = [{"type": "text", "text": head["content"], "cache_control": {"type": "ephemeral"}}]
        body["messages"] = [{"role": "user", "content": text}]
        usage = {"input_tokens": 5000, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
        answer = {"type": "message", "content": [{"type": "text", "text": "Yes."}], "usage": usage}
        times = {"time": start, "seconds": 9.0, "first_seconds": 8.0} if ended else {"time": start}
        return make_record(body, answer if ended else None, path="/v1/messages", **times)

    rules = Rules(rule_set(name))
    one = rules.begin(asked("Which ships?", 100.0, ended=False))
    two = rules.begin(asked("Which pilots?", 101.0, ended=False))
    assert one.observation.cached_tokens == 0
    last = rules.end(two, asked("Which pilots?", 101.0, ended=True))
    first = rules.end(one, asked("Which ships?", 100.0, ended=True))
    assert first.cached_tokens == 0
    assert first.reason == "first_seen"
    assert last.fault == "client", "its prefix was being computed: the upstream did not miss"
    later = rules.observe(asked("Which cranes?", 120.0, ended=True))
    assert later.cached_tokens > 4000
    assert later.fault == "provider"


@pytest.mark.parametrize("name", ["radixkv", "anthropic"])
def test_what_was_begun_and_failed_leaves_nothing(name: str) -> None:
    rules = Rules(rule_set(name))
    sent = blocks(20, (19,))
    begun = rules.begin(make_record(sent, time=0.0))
    refused = {"error": {"type": "rate_limit_error", "message": "later"}}
    rules.end(begun, make_record(sent, refused, time=0.0, seconds=0.1, failed=True))
    again = rules.begin(make_record(sent, time=1.0))
    assert again.observation.cached_tokens == 0
    rules.end(again, make_record(sent, time=1.0, seconds=0.1))
    assert cached(rules, sent, 2.0) > 0


@pytest.mark.parametrize("sample", [0, 1, 2])
def test_any_sample_can_be_gone_on_after(sample: int) -> None:
    rules = Rules(rule_set("radixkv"), byte_coding())
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(0)}]
    said = [{"role": "assistant", "content": f"Sample {n}: {answer(n)}"} for n in range(3)]
    choices = [{"index": n, "message": message} for n, message in enumerate(said)]
    rules.observe(make_record({"model": "m", "messages": messages, "n": 3}, {"choices": choices}, time=0.0))
    later = [*messages, said[sample], {"role": "user", "content": question(1)}]
    seen = rules.observe(make_record({"model": "m", "messages": later}, time=1.0))
    assert seen.reason == "hit"
    assert len(SYSTEM + question(0) + answer(sample)) < seen.cached_tokens < seen.prompt_tokens


def test_a_provider_that_reads_nothing_is_named_though_the_prompts_end_changed() -> None:
    rules = by_bytes("radixkv")
    rules.observe(make_record(blocks(40), told(0, 16500, 0), time=0.0, seconds=1.0))
    changed = blocks(40)
    changed["messages"][0]["content"][38]["text"] = "Today is 2026-11-21 10:00:30. Another text."
    seen = rules.observe(make_record(changed, told(1, 16500, 0), time=5.0, seconds=1.0))
    assert seen.cached_tokens > 15000
    assert seen.fault == "provider"


@pytest.mark.parametrize(
    ("asked", "expects_hit"),
    [
        ({}, True),
        ({"echo": True}, True),
        ({"logprobs": 1}, True),
        ({"echo": True, "logprobs": 0}, False),
        ({"prompt_logprobs": 0}, False),
    ],
)
def test_logprobs_of_a_prompt_are_computed_whatever_is_cached(
    asked: dict[str, Any], expects_hit: bool
) -> None:
    rules = Rules(rule_set("radixkv"), byte_coding())
    seen = [
        rules.observe(make_record({"model": "m", "prompt": SYSTEM, **more}, {})) for more in ({}, asked, {})
    ]
    assert (seen[1].reason, seen[1].fault) == ("hit" if expects_hit else "skipped", "none")
    assert bool(seen[1].cached_tokens) is expects_hit
    assert seen[1].lost_tokens == 0
    assert seen[2].reason == "hit"


def test_requests_without_a_model_find_what_the_served_one_left() -> None:
    """Those that name the model that answers the others share their prefixes, running or ended."""
    rules = Rules(rule_set("radixkv"), byte_coding())
    told = {"object": "text_completion", "model": "served", "choices": [{"index": 0, "text": "yes"}]}
    for number, body in enumerate([{}, {}, {"model": "served"}, {"model": "other"}]):
        sent = {"prompt": SYSTEM, **body}
        begun = rules.begin(make_record(sent))
        assert bool(begun.observation.cached_tokens) is (number in (1, 2))
        assert (
            rules.end(begun, make_record(sent, told)).reason
            == ("first_seen", "hit", "hit", "first_seen")[number]
        )


@pytest.mark.parametrize("in_parts", [True, False])
def test_what_a_client_writes_about_itself_breaks_no_prompt_of_this_server(in_parts: bool) -> None:
    """The header of Claude Code changes with each request, and a radixkv server holds it constant."""
    observers = {name: Rules(rule_set(name)) for name in ("radixkv", "vllm")}
    seen: dict[str, list[Observation]] = {name: [] for name in observers}
    for turn in range(3):
        header = (
            f"x-anthropic-billing-header: cc_version=2.1.7.a{turn}; cch={turn}1c4e; cc_turn_index={turn};"
        )
        system: Any = f"{header}\n{SYSTEM}"
        if in_parts:
            system = [{"type": "text", "text": header}, {"type": "text", "text": SYSTEM, **MARK}]
        record = make_record({**body(turn), "system": system}, told(turn, 4000, 0), time=10.0 * turn)
        for name, rules in observers.items():
            seen[name].append(rules.observe(record))
    for first, *later in seen.values():
        assert first.cached_tokens == 0
        assert len(later) == 2
    assert all(one.cached_tokens > 0.7 * one.prompt_tokens for one in seen["radixkv"][1:])
    assert all(one.breaker is None for one in seen["radixkv"])
    assert all(one.cached_tokens < 0.1 * one.prompt_tokens for one in seen["vllm"][1:])
    assert {one.breaker.kind for one in seen["vllm"][1:] if one.breaker} == {"client_metadata"}


NAMES = ("alpha", "beta", "gamma")
GO_ON = {"role": "user", "content": "go on"}


def _chat(order: tuple[int, ...]) -> dict[str, Any]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": NAMES[i], "arguments": "{}"}}
        for i in range(3)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"from {NAMES[i]}"} for i in order]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    return {"model": "m", "messages": [{"role": "user", "content": SYSTEM}, turn, *results, GO_ON]}


def _messages(order: tuple[int, ...]) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": f"c{i}", "name": NAMES[i], "input": {}} for i in range(3)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": f"from {NAMES[i]}"} for i in order]
    turns = [{"role": "user", "content": SYSTEM}, {"role": "assistant", "content": calls}]
    last = {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}
    return {"model": "claude-x", "max_tokens": 9, "messages": [*turns, last]}


def _responses(order: tuple[int, ...]) -> dict[str, Any]:
    calls = [
        {"type": "function_call", "call_id": f"c{i}", "name": NAMES[i], "arguments": "{}"} for i in range(3)
    ]
    results = [
        {"type": "function_call_output", "call_id": f"c{i}", "output": f"from {NAMES[i]}"} for i in order
    ]
    return {"model": "m", "input": [{"role": "user", "content": SYSTEM}, *calls, *results, GO_ON]}


@pytest.mark.parametrize("make", [_chat, _messages, _responses])
def test_results_of_parallel_calls_stand_in_the_order_of_the_calls(make: Any) -> None:
    seen = {}
    for name in ("radixkv", "vllm"):
        rules = Rules(rule_set(name), byte_coding())
        rules.observe(make_record(make((0, 1, 2)), time=0.0))
        observations = [
            rules.observe(make_record(make(order), time=1.0 + n))
            for n, order in enumerate(itertools.permutations(range(3)))
        ]
        seen[name] = [one.prompt_tokens - one.cached_tokens for one in observations]
        assert observations[0].reason == "hit"
    assert seen["radixkv"] == [1] * 6, "as the server renders it, in whatever order they arrived"
    assert min(seen["vllm"][1:]) > len("from alpha"), "as it was sent"


def test_results_that_fit_no_call_stay_where_they_are() -> None:
    for order in ((2,), (0, 0), (1, 0, 2, 2)):
        rules = Rules(rule_set("radixkv"), byte_coding())
        seen = [rules.observe(make_record(_chat(order), time=time)) for time in (0.0, 1.0)]
        assert seen[1].cached_tokens == seen[1].prompt_tokens - 1
