# SPDX-License-Identifier: Apache-2.0
"""Agents in closed loops: their jobs, the simulation over the real scheduler, and the load over HTTP."""

from __future__ import annotations

import pytest

from benchmarks.agents import NEVER_LONG, Machine, measure
from radixkv.cli.bench.agent_jobs import KINDS, AgentAnswer, agent_figures, make_jobs


def test_jobs_depend_on_the_seed_alone_and_are_as_their_table_says():
    for kind in KINDS:
        assert make_jobs(kind, 5, 3) == make_jobs(kind, 8, 3)[:5] != make_jobs(kind, 5, 4)
    jobs = make_jobs("agents", 60, 1)
    turns = sorted(len(job.turns) for job in jobs)
    assert 35 <= turns[30] <= 50
    all_turns = [turn for job in jobs for turn in job.turns]
    assert 0.01 < sum(bool(turn.forks) for turn in all_turns) / len(all_turns) < 0.06
    assert any(turn.compact_to for turn in all_turns)


@pytest.mark.nightly
def test_the_rule_of_long_prompts_saves_the_cache_of_agents_beyond_the_pool():
    """20 agents of 1,200 tokens in a pool of 14,400, in virtual time: 1.7 times what it holds."""
    machine = Machine(14_400, 64, 64, 0.004, 400e-6)
    jobs = make_jobs("cliff", 20, 5, scale=0.1)
    rule = measure(machine, jobs, long_prompt_tokens=None)
    without = measure(machine, jobs, long_prompt_tokens=NEVER_LONG)
    assert rule == measure(machine, jobs, long_prompt_tokens=None), "the same on every machine"
    assert rule["turns"] == without["turns"] == 160
    assert rule["turns_per_s"] > 1.5 * without["turns_per_s"]
    assert rule["computed_over_first_time"] < 0.6 * without["computed_over_first_time"]
    halving = measure(machine, jobs, long_prompt_tokens=None, guard=False)
    assert rule["computed_over_first_time"] < halving["computed_over_first_time"], "it spares prefixes in use"
    assert rule["job_mean_s"] < halving["job_mean_s"]
    done = measure(machine, jobs, long_prompt_tokens=None, say_done=True)
    assert done["computed_over_first_time"] < rule["computed_over_first_time"]
    assert done["hit_rate_after_first"] > rule["hit_rate_after_first"]
    assert rule["hit_rate_after_first"] <= rule["possible_hit_rate"]


def test_sub_agents_and_compaction_end_with_all_turns():
    machine = Machine(60_000, 512, 64, 0.004, 40e-6)
    jobs = make_jobs("agents", 3, 2, scale=0.02)
    assert any(turn.forks for job in jobs for turn in job.turns)
    found = measure(machine, jobs, long_prompt_tokens=None)
    assert found["turns"] == sum(job.num_requests for job in jobs)
    assert found["failed"] == 0


def test_figures_of_two_turns():
    first = AgentAnswer(0, 0, 0.0, 1.0, 2.0, 100, 0, 5, 100, True)
    second = AgentAnswer(0, 1, 3.0, 3.5, 4.0, 150, 90, 5, 45)
    failed = AgentAnswer(1, 0, 0.0, error="HTTP 500")
    figures = agent_figures([first, second, failed])
    assert figures["hit_rate_after_first"] == 90 / 150
    assert figures["possible_hit_rate"] == 105 / 150
    assert figures["computed_over_first_time"] == 160 / 145
    assert figures["longest_wait_s"] == 1.0
    assert (figures["turns"], figures["failed"]) == (2, 1)
