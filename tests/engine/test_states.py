# SPDX-License-Identifier: Apache-2.0
"""Models with states through the whole engine: the same answers, whatever is resumed or replayed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fuzz_states import RESTART, fuzz
from late_copies import LateStateWindowedModel
from nightly import by_day
from paged_language_model import greedy_reference, make_engine, run_all
from scripted_tier import ScriptedTier
from stateful_hash_model import StatefulHashModel
from windowed_hash_model import WindowedHashModel

from radixkv.cache.states.window_pool import WindowSpec
from radixkv.engine.engine import Engine
from radixkv.errors import ConfigError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.selection import Selection

TEXT = [1 + i * i % 90 for i in range(400)]
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 320, 384, 385]


def engine_with_states(num_slots: int = 16, **options: Any) -> tuple[Engine, StatefulHashModel]:
    options = {"num_blocks": 128, "block_size": 16, "budget": 96, "max_num_seqs": 4, **options}
    model = StatefulHashModel(options["num_blocks"], options["block_size"], num_slots)
    engine, _ = make_engine(model=model, **options)
    return engine, model


def ask(engine: Engine, prompt: list[int], num: int = 4, **options: Any) -> Any:
    """Run one request alone; its answer is what it must be."""
    name = engine.add_request(prompt, SamplingParams(max_tokens=num, temperature=0.0), **options)
    output = run_all(engine)[name]
    assert output.outputs[0].token_ids == greedy_reference(prompt, num)
    return output


@pytest.mark.parametrize("seed", [2, 3, 1004])  # odd ones with a tier
def test_answers_are_the_same_whatever_happens(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="radixkv")
    counts = fuzz(seed, num_requests=12)
    assert counts["compared"] >= 4


@pytest.mark.parametrize(("kind", "seed"), [("windows", 5), ("windows", 7), ("both", 3), ("both", 4)])
def test_answers_are_the_same_where_windows_are_freed(
    kind: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="radixkv")
    assert fuzz(seed, num_requests=12, kind=kind)["compared"] >= 4


@pytest.mark.parametrize(("kind", "seed"), [("states", 6), ("windows", 4), ("both", 4)])
def test_answers_are_the_same_over_what_another_engine_left_in_tiers(
    kind: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="radixkv")
    runs = [fuzz(each, num_requests=12, store=tmp_path, kind=kind) for each in (seed, RESTART + seed)]
    assert sum(run["compared"] for run in runs) >= 8
    assert runs[1]["loaded_states"]


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
def test_a_prompt_asked_again_computes_at_most_a_grid_step(length: int) -> None:
    engine, _ = engine_with_states()
    assert ask(engine, TEXT[:length], 70).num_cached_tokens == 0
    again = ask(engine, TEXT[:length], 70)
    assert again.num_cached_tokens == (length - 1) // 64 * 64
    answer = greedy_reference(TEXT[:length], 70)
    follow_up = TEXT[:length] + answer + [5] * 10
    assert ask(engine, follow_up).num_cached_tokens >= (length + len(answer) - 1) // 64 * 64 - 64


@pytest.mark.parametrize("kind", ["states", "windows", "both"])
@pytest.mark.parametrize("lengths", by_day([LENGTHS, range(1, 401)], LENGTHS), ids=["some", "all"])
def test_every_way_to_leave_a_prompt_serves_the_next_one(kind: str, lengths: Iterable[int]) -> None:
    for length in lengths:
        check_each_way(kind, length)


def check_each_way(kind: str, length: int) -> None:
    def engine_with(**options: Any) -> Engine:
        if kind == "states":
            return engine_with_states(**options)[0]
        spec = WindowSpec(100, 100, 96, 8 * 16)
        model: Any
        if kind == "windows":
            model = WindowedHashModel(128, 16, spec)
        else:
            model = LateStateWindowedModel(128, 16, 16, spec=spec)
        return make_engine(model=model, num_blocks=128, block_size=16, budget=96, **options)[0]

    def cached(engine: Engine, name: str) -> int:
        return int(ask(engine, prompt, 2, namespace=name).num_cached_tokens)

    prompt, last = [1 + i * i % 89 for i in range(length)], (length - 1) // 64 * 64
    engine = engine_with()
    assert [cached(engine, "again") for _ in range(3)] == [0, last, last]
    engine.add_request(prompt, SamplingParams(max_tokens=0), namespace="prewarmed")
    run_all(engine)
    assert cached(engine, "prewarmed") == last
    ask(engine, [*prompt, *[5] * 70], namespace="pinned", pins=[PrefixPin(length)])
    engine.cache.evict(128)
    assert cached(engine, "pinned") == last
    ask(engine, [*prompt, *[5] * 70], namespace="kept", keep_tokens=length)
    assert cached(engine, "kept") == last
    tier = ScriptedTier(at_once=True)
    first, second = (engine_with(tier=tier, clock=lambda: 0.0) for _ in range(2))
    assert [cached(each, "tier") for each in (first, second)] == [0, last]
    engine.check()


def test_requests_that_come_together_compute_their_common_part_once() -> None:
    engine, model = engine_with_states()
    prompts = [TEXT[:200] + [token] * 30 for token in (1, 2, 3)]
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=3, temperature=0.0))
    for name, output in run_all(engine).items():
        assert output.outputs[0].token_ids == greedy_reference(output.prompt_token_ids, 3), name
    assert model.num_computed < 230 + 2 * (230 - 192) + 3 * 4


def test_chunks_of_a_prompt_end_on_the_grid() -> None:
    """A budget of 150 tokens takes 128: a chunk cut between grid points would be computed in part again."""
    engine, _ = engine_with_states(budget=150)
    engine.add_request(TEXT, SamplingParams(max_tokens=1, temperature=0.0))
    computed = []
    while engine.has_work:
        before = engine.stats().computed_prompt_tokens
        engine.step()
        computed.append(engine.stats().computed_prompt_tokens - before)
    assert computed == [128, 128, 144]


def test_a_declared_breakpoint_is_kept() -> None:
    engine, _ = engine_with_states()
    ask(engine, TEXT[:300], checkpoints=[140])
    assert ask(engine, [*TEXT[:140], *[7] * 50]).num_cached_tokens == 128


def test_a_state_that_is_gone_is_reported() -> None:
    engine, _ = engine_with_states(num_slots=2, max_num_seqs=1)
    ask(engine, TEXT[:200])
    ask(engine, [3] * 390)
    ask(engine, [4] * 390)
    output = ask(engine, TEXT[:200])
    assert output.num_cached_tokens == 0
    assert output.cache_report.reason == "no_state"
    assert output.cache_report.num_kv_tokens == 192


def test_no_more_requests_run_than_have_two_slots() -> None:
    engine, _ = engine_with_states(num_slots=5, max_num_seqs=4)
    for i in range(6):
        engine.add_request(TEXT[: 50 + i], SamplingParams(max_tokens=80, temperature=0.0))
    most = 0
    while engine.has_work:
        engine.step()
        engine.check()
        most = max(most, engine.scheduler.num_running)
    assert most == 2


def test_swapped_states_give_other_tokens() -> None:
    """The canary: a model whose slots were mixed up must not go unnoticed."""
    engine, model = engine_with_states()
    ask(engine, TEXT[:200])
    ask(engine, [3] * 200)
    one, other = [checkpoint.slot for checkpoint in engine.cache.states or ()][:2]
    model.slots[one], model.slots[other] = model.slots[other], model.slots[one]
    logging.getLogger("radixkv").disabled = True
    try:
        engine.add_request(TEXT[:200], SamplingParams(max_tokens=4, temperature=0.0))
        run_all(engine)
    finally:
        logging.getLogger("radixkv").disabled = False
    assert any("the state of other tokens" in text for text in model.violations)
    model.violations.clear()


def test_a_tier_without_states_is_refused() -> None:
    tier = ScriptedTier()
    tier.keeps_states = False
    with pytest.raises(ConfigError, match=r"keeps no states.*--kv-tier"):
        engine_with_states(tier=tier)


def with_tier(tier: ScriptedTier, **options: Any) -> Engine:
    return engine_with_states(tier=tier, **options)[0]


def test_the_next_engine_resumes_at_a_state_of_the_tier() -> None:
    tier = ScriptedTier(at_once=True)
    ask(with_tier(tier), TEXT[:300])
    assert 256 in [run.end for run, _, _ in tier.kept.values() if run.is_state]
    engine = with_tier(tier)
    assert ask(engine, TEXT[:300]).num_cached_tokens == 256
    (figures,) = engine.stats().tiers
    assert (figures.loaded_states, figures.loaded_blocks) == (1, 16)  # no K/V beyond the state


def test_the_hosts_memory_keeps_states() -> None:
    tier = HostTier(1 << 26, selection=Selection(0))
    ask(engine_with_states(tier=tier)[0], TEXT[:300])
    tier.flush(30)
    assert ask(engine_with_states(tier=tier)[0], TEXT[:300]).num_cached_tokens == 256
    tier.close()


def test_a_state_alone_comes_back_where_only_that_is_missing() -> None:
    tier = ScriptedTier(at_once=True)
    engine = with_tier(tier, num_slots=2, max_num_seqs=1)
    ask(engine, TEXT[:300])
    ask(engine, [3] * 190)
    assert ask(engine, TEXT[:300]).num_cached_tokens == 256
    (figures,) = engine.stats().tiers
    assert (figures.loaded_states, figures.loaded_blocks) == (1, 0)


@pytest.mark.parametrize("lost", ["states", "K/V"])
def test_a_load_counts_only_if_both_came(lost: str) -> None:
    tier = ScriptedTier(at_once=True)
    ask(with_tier(tier), TEXT[:300])
    tier.kept = {name: one for name, one in tier.kept.items() if one[0].is_state == (lost == "K/V")}
    tier.is_open = False
    engine = with_tier(tier)
    assert ask(engine, TEXT[:300]).num_cached_tokens == 0
    (figures,) = engine.stats().tiers
    assert (figures.loaded_states, figures.loaded_blocks) == (0, 0)


def test_a_damaged_state_is_computed() -> None:
    tier = ScriptedTier(at_once=True)
    ask(with_tier(tier), TEXT[:300])
    for name, (run, place, data) in tier.kept.items():
        if run.is_state:
            tier.kept[name] = run, place, data[:-1]
    engine = with_tier(tier)
    assert ask(engine, TEXT[:300]).num_cached_tokens == 0
    assert engine.stats().transfers.failed_loads == 1
