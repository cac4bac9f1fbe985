# SPDX-License-Identifier: Apache-2.0
"""Background requests: they get what others leave, under every policy, and others don't feel them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_language_model import make_engine
from scheduled_prompts import ONE, prompt, steps_until

from radixkv.cache.accounts import Quota
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.policy import POLICIES

POLICY = pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"auto"}))


def answer(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def chats_alone_and_with_lines(policy, chats, *, lines, **sizes):
    """Steps from a chat's arrival to its first token, by chat; without background requests, and with them."""
    found = []
    for num_lines in (0, lines):
        engine, _ = make_engine(scheduling_policy=policy, max_model_len=200, **sizes)
        for i in range(num_lines):
            engine.add_request(
                prompt(1000 + i, 70), answer(20), request_id=f"line-{i}", namespace="a", background=True
            )
        for _ in range(3 if num_lines else 0):
            engine.step()
        waits, came = {}, {}
        todo = list(enumerate(chats))
        wait = step = 0
        while todo or len(waits) < len(chats):
            while todo and wait <= 0:
                i, (tenant, length, output, wait) = todo.pop(0)
                came[f"{i}"] = step
                engine.add_request(
                    prompt(i, length), answer(output), request_id=f"{i}", namespace=tenant, stream=True
                )
            wait -= 1
            for delta in engine.step().deltas:
                if delta.token_ids and not delta.request_id.startswith("line"):
                    waits.setdefault(delta.request_id, step - came[delta.request_id])
            engine.check()
            step += 1
            assert step < 300
        found.append(waits)
    return found


@POLICY
@settings(max_examples=4, deadline=None)
@given(
    chats=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 60), st.integers(1, 8), st.integers(0, 12)),
        min_size=1,
        max_size=8,
    ),
    num_blocks=st.sampled_from([40, 60, 200]),
    slots=st.sampled_from([4, 16]),
)
def test_chats_have_their_first_tokens_as_soon_as_without_lines(policy, chats, num_blocks, slots):
    alone, beside = chats_alone_and_with_lines(
        policy, chats, lines=10, num_blocks=num_blocks, max_num_seqs=slots, budget=128
    )
    # Decodes of lines that run take a token each of a step's budget: a chunk may end one step later.
    assert all(beside[name] <= alone[name] + 1 for name in alone), (alone, beside)


@POLICY
def test_a_chat_takes_slot_and_blocks_of_a_background_request(policy):
    engine, _ = make_engine(scheduling_policy=policy, num_blocks=24, max_num_seqs=2, budget=64)
    for i in range(2):
        engine.add_request(prompt(i, 60), answer(60), request_id=f"line-{i}", background=True)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.num_running == 2
    engine.add_request(prompt(7, 50), answer(5), request_id="chat", stream=True)
    assert steps_until(engine, "chat") == 1
    assert [one.request_id for one in engine.scheduler.waiting] == ["line-1"], "the latest is preempted first"
    finished = {}
    while engine.has_work:
        finished |= {output.request_id: output for output in engine.step().finished}
    assert {len(finished[f"line-{i}"].outputs[0].token_ids) for i in range(2)} == {60}


def test_at_a_ceiling_a_tenants_own_lines_give_way():
    engine, _ = make_engine(scheduling_policy="fair", num_blocks=100, max_num_seqs=8, budget=64)
    engine.cache.set_quotas({"a": Quota(ceiling=12), "b": Quota()})
    for name in "ab":
        engine.add_request(
            prompt(ord(name), 60), answer(30), request_id=f"line-{name}", namespace=name, background=True
        )
    for _ in range(4):
        engine.step()
    engine.add_request(prompt(7, 80), ONE, request_id="chat", namespace="a", stream=True)
    steps_until(engine, "chat", 3)
    assert [one.request_id for one in engine.scheduler.waiting] in ([], ["line-a"])
    while engine.has_work:
        engine.step()
    engine.check()


def test_a_tenants_lines_are_not_held_against_its_chats():
    engine, _ = make_engine(scheduling_policy="fair", num_blocks=200, max_num_seqs=1, budget=64)
    for i in range(8):
        engine.add_request(prompt(i, 40), ONE, request_id=f"line-{i}", namespace="a", background=True)
    while engine.has_work:
        engine.step()
    for name in "ba":
        engine.add_request(prompt(ord(name), 40), answer(2), request_id=name, namespace=name)
    assert engine.scheduler.policy.served.get("a", 0.0) == 0.0


def test_lines_wait_while_a_chat_waits_and_get_a_part_of_its_steps():
    engine, model = make_engine(num_blocks=200, max_num_seqs=4, budget=64, scheduling_policy="prefix")
    engine.add_request(prompt(1, 20), answer(30), request_id="chat", stream=True)
    engine.step()
    model.batches.clear()
    engine.add_request(prompt(2, 100), ONE, request_id="line", background=True, stream=True)
    steps_until(engine, "line")
    counts = [count for batch in model.batches for name, _, count in batch if name.startswith("line")]
    assert len(counts) == -(-100 // 16)
