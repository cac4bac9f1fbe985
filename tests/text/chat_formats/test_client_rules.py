# SPDX-License-Identifier: Apache-2.0
"""What clients write about themselves is held constant where they write it, and nowhere else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from radixkv.text.chat_formats.client_rules import CLIENT_RULES, normalized

#: As Claude Code 2.1.330 sends it in `system[0]`, in two sessions.
REAL = (
    "x-anthropic-billing-header: cc_version=2.1.330.9c5; cc_entrypoint=sdk-cli;",
    "x-anthropic-billing-header: cc_version=2.1.330.cc9; cc_entrypoint=sdk-cli;",
)
#: As its earlier versions do, and as it does where it takes a server for its own provider's.
WITH_CHECKSUM = (
    "x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint=cli; cch=56445;",
    "x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint=cli; cch=0ab1f;",
)
#: Further fields of 2.1.330, which come and go within a session.
LATER_TURNS = (
    "x-anthropic-billing-header: cc_version=2.1.330.9c5; cc_entrypoint=cli; cch=00000; "
    "cc_prompt_id=0c7c5fd2-6a65-4ef1-8d7e-5b9cfb0f3a11; cc_turn_origin=user; "
    "cc_prompt_index=0; cc_turn_index=1;",
    "x-anthropic-billing-header: cc_version=2.1.330.9c5; cc_entrypoint=cli; cch=f00d1; "
    "cc_prev_req=req_011CUx7; cc_prompt_id=5b9cfb0f-6a65-4ef1-8d7e-0c7c5fd23a11; cc_turn_origin=tool; "
    "cc_prompt_index=0; cc_turn_index=2; cc_prev_msg=msg_01Ab; cc_prev_prompt_index=0; cc_prev_turn_index=1;",
)
BEFORE_RELEASE = (
    "x-anthropic-billing-header: cc_version=3.0.0-beta.12.c39; cc_entrypoint=cli; cch=56445;",
    "x-anthropic-billing-header: cc_version=3.0.0-beta.12.0d1; cc_entrypoint=cli; cch=aa111;",
)
RECORDED = Path(__file__).resolve().parents[2] / "data" / "claude_code"
REST = "\nYou are Claude Code, Anthropic's official CLI for Claude."


def head_of(text: str) -> str:
    (first, *_), _ = normalized([{"role": "system", "content": text}, {"role": "user", "content": "Hi"}])
    return str(first["content"])


@pytest.mark.parametrize("headers", [REAL, WITH_CHECKSUM, LATER_TURNS, BEFORE_RELEASE])
@pytest.mark.parametrize("rest", [REST, "", " You are Claude Code."])
def test_requests_of_claude_code_become_the_same(headers: tuple[str, str], rest: str) -> None:
    one, other = (head_of(header + rest) for header in headers)
    assert one == other
    assert re.match(r"x-anthropic-billing-header: cc_version=\d\.\d\.[^;]*\.000;", one)
    assert one.endswith(rest)
    assert head_of(one) == one


def test_what_was_recorded_of_the_real_program_begins_with_it() -> None:
    bodies = [
        json.loads(path.read_text(encoding="utf-8"))["body"] for path in sorted(RECORDED.glob("*.json"))
    ]
    heads = [body["system"][0]["text"] for body in bodies if isinstance(body.get("system"), list)]
    found = [head for head in heads if head.startswith("x-anthropic-billing-header")]
    assert found
    for head in found:
        constant = head_of(head)
        version = re.search(r"cc_version=(\d+\.\d+\.\d+)\.", head)
        assert version is not None
        assert f"cc_version={version[1]}.000;" in constant


def test_what_tells_versions_and_programs_apart_stays() -> None:
    assert head_of(REAL[0]) == "x-anthropic-billing-header: cc_version=2.1.330.000; cc_entrypoint=sdk-cli;"
    assert head_of(WITH_CHECKSUM[0]).endswith("cc_version=2.1.39.000; cc_entrypoint=cli; cch=00000;")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": WITH_CHECKSUM[0] + REST}],
        [{"role": "system", "content": "Be brief."}, {"role": "system", "content": WITH_CHECKSUM[0]}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": WITH_CHECKSUM[0]}],
        [{"role": "system", "content": "What is this?\n" + WITH_CHECKSUM[0]}],
        [{"role": "system", "content": "x-anthropic-billing-header: is sent by Claude Code; cch=12345;"}],
        [{"role": "system", "content": "x-anthropic-billing-header:"}],
        [{"role": "assistant", "content": WITH_CHECKSUM[0]}],
        [{"role": "system", "content": None}],
        [],
    ],
)
def test_what_only_quotes_it_is_left_alone(messages: list[dict[str, str]]) -> None:
    assert normalized(messages) == (messages, None)


def test_of_the_rest_of_the_system_prompt_nothing_changes() -> None:
    quoted = f"{REAL[0]}\nExplain {WITH_CHECKSUM[0]} to me: cch=56445;"
    assert head_of(quoted).endswith(f"\nExplain {WITH_CHECKSUM[0]} to me: cch=56445;")


def test_each_rule_names_its_client() -> None:
    assert [rule.client for rule in CLIENT_RULES] == ["Claude Code"]
    messages = [{"role": "system", "content": REAL[0]}]
    changed, rule = normalized(messages)
    assert rule is CLIENT_RULES[0]
    assert changed != messages
    assert messages[0]["content"] == REAL[0], "what was given is not changed"
