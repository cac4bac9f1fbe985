# SPDX-License-Identifier: Apache-2.0
"""Requests for a summary with a head of their own, and tools that change with a mode, are named."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.observe.audit.exchange import make_record
from radixkv.observe.audit.record import Json
from radixkv.observe.audit.rule_sets import RULE_SETS
from radixkv.observe.audit.rules import Rules
from radixkv.observe.prompt_difference import find_breaker
from radixkv.observe.prompt_parts import PromptParts

SYSTEM = "You are a careful agent that works on a repository. Read before you write. " * 4
TOOLS = ("read_file", "write_file", "run_tests")
HISTORY = [
    ("user", "Please make the tests of the parser pass, and tell me what was wrong with it."),
    ("assistant", "I read the parser: the loop ends one token early, so the last one is never seen."),
    ("user", "Then mend it, and add a test with a single token, which fails today."),
    ("assistant", "Done: the loop goes to the end, and the new test passes with the others."),
]
ASKS = "Summarise our conversation so far for a successor: goals, files that changed, open points."


def tool(name: str) -> Json:
    return {"name": name, "description": f"Does {name}.", "parameters": {"type": "object"}}


def prompt(
    messages: list[tuple[str, str]], *, system: str = SYSTEM, tools: tuple[str, ...] = TOOLS
) -> PromptParts:
    said = [{"role": role, "content": text} for role, text in [("system", system), *messages]]
    return PromptParts.of_chat(said, [tool(name) for name in tools])


OWN_SYSTEM = "You are a helpful assistant who summarises conversations."
AS_TEXT = "\n\n".join(f"{role}: {text}" for role, text in HISTORY)


@pytest.mark.parametrize(
    "asked",
    [
        prompt([*HISTORY, ("user", ASKS)], system=OWN_SYSTEM, tools=()),
        prompt([*HISTORY, ("user", ASKS)], tools=()),
        prompt([*HISTORY, ("user", ASKS)], system=OWN_SYSTEM),
        prompt([("user", f"{AS_TEXT}\n\n{ASKS}")], system=OWN_SYSTEM, tools=()),
    ],
    ids=["own head", "no tools", "own system prompt", "as text"],
)
def test_a_request_for_a_summary_with_a_head_of_its_own_is_named(asked: PromptParts) -> None:
    found = find_breaker(prompt(HISTORY), asked)
    assert found is not None
    assert found.kind == "compaction_request"
    assert "same system prompt and tools" in found.detail


@pytest.mark.parametrize(
    "later",
    [
        prompt([*HISTORY, ("user", ASKS)]),
        prompt([*HISTORY, ("user", "Thank you, and now the lexer, please.")], tools=()),
        prompt([("user", "Summarise this article about ships, please: they sail.")], system=OWN_SYSTEM),
        prompt([("user", f"Summary: {HISTORY[0][1]}"), ("user", "Go on with the lexer.")]),
    ],
    ids=["goes on", "no summary", "another conversation", "after a compaction"],
)
def test_other_prompts_are_no_requests_for_a_summary(later: PromptParts) -> None:
    found = find_breaker(prompt(HISTORY), later)
    assert found is None or found.kind != "compaction_request"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (prompt(HISTORY), prompt(HISTORY, tools=(*TOOLS, "exit_plan_mode"))),
        (prompt(HISTORY, tools=(*TOOLS, "plan_mode_respond")), prompt(HISTORY, tools=TOOLS[:2])),
        (prompt(HISTORY), prompt(HISTORY, tools=("read_file", "ExitPlanMode"))),
        (
            prompt(HISTORY),
            prompt([*HISTORY, ("user", "You are in plan mode now: do not write.")], tools=TOOLS[:1]),
        ),
        (
            prompt(HISTORY, system=SYSTEM + "Mode: act"),
            prompt(HISTORY, system=SYSTEM + "Mode: read-only mode", tools=TOOLS[:1]),
        ),
    ],
)
def test_tools_that_change_with_a_mode_are_named(old: PromptParts, new: PromptParts) -> None:
    found = find_breaker(old, new)
    assert found is not None
    assert (found.kind, found.place) == ("tools_by_mode", "the tools")
    assert "allowed_tools" in found.detail


@pytest.mark.parametrize(
    "new",
    [
        prompt(HISTORY, tools=(*TOOLS, "search_the_web")),
        prompt([*HISTORY, ("user", "The model of the modern mode of transport, please.")], tools=TOOLS[:2]),
        prompt([*HISTORY, ("assistant", "I am in plan mode.")], tools=TOOLS[:2]),
    ],
)
def test_other_changes_of_the_tools_are_just_that(new: PromptParts) -> None:
    found = find_breaker(prompt(HISTORY), new)
    assert found is not None
    assert found.kind == "tools_changed"


@pytest.mark.parametrize("habit", ["compaction_request", "tools_by_mode"])
def test_an_audit_finds_them_in_a_log(habit: str) -> None:
    def body(messages: list[tuple[str, str]], system: str, tools: tuple[str, ...]) -> dict[str, Any]:
        said = [{"role": role, "content": text * 12} for role, text in messages]
        return {
            "model": "m",
            "messages": [{"role": "system", "content": system}, *said],
            "tools": [{"type": "function", "function": tool(name)} for name in tools],
        }

    later = body([*HISTORY, ("user", ASKS)], OWN_SYSTEM, ())
    if habit == "tools_by_mode":
        later = body([*HISTORY, ("user", "Plan mode is on. ")], SYSTEM, TOOLS[:1])
    rules = Rules(RULE_SETS["radixkv"])
    rules.observe(make_record(body(HISTORY, SYSTEM, TOOLS), None, time=0.0, seconds=1.0))
    seen = rules.observe(make_record(later, None, time=9.0, seconds=1.0))
    assert seen.breaker is not None
    assert seen.breaker.kind == habit
    assert seen.lost_tokens > 0
