# SPDX-License-Identifier: Apache-2.0
"""Steps launched before the tokens of the one before are known: what that hides, and that it shows nowhere.

`tests/engine/fuzz_small_pools.py --ahead` does the same with seeded traffic in pools with hardly enough
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nightly import by_day
from paged_language_model import (
    VOCAB,
    LetterGrammarSource,
    LetterTokenizer,
    PagedHashModel,
    make_engine,
    run_all,
)
from pool_traffic import Parrot
from pool_traffic import run as run_traffic
from scripted_tier import ScriptedTier
from stateful_hash_model import StatefulHashModel
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model
from windowed_hash_model import WindowedHashModel

from radixkv import LLM
from radixkv.cache.states.window_pool import WindowSpec
from radixkv.engine.engine import Engine
from radixkv.model.cuda_graphs import StepGraphs
from radixkv.model.runner import ModelRunner
from radixkv.sampling.device_arrays import Fetch
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.structured import StructuredOutputs
from radixkv.scheduling.batch import Batch

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def prompt(seed: int, length: int = 20) -> list[int]:
    """Some tokens."""
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def engines(**options: Any) -> tuple[Engine, Engine]:
    """One that launches steps ahead, and one that does not."""
    ahead, _ = make_engine(async_scheduling=True, **options)
    other, _ = make_engine(async_scheduling=False, **options)
    return ahead, other


def answers(engine: Engine, asks: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """Tokens, texts, logprobs and ends of all samples."""
    ids = [engine.add_request(*ask) for ask in asks]
    outputs = run_all(engine)
    return [
        [(o.token_ids, o.text, o.logprobs, o.finish_reason, o.stop_reason) for o in outputs[one].outputs]
        for one in ids
    ]


# ---------------------------------------------------------------------- what it hides


class Device(PagedHashModel):
    """A device beside the host, on a clock of the test's: a step takes 10 ms there from when it is free."""

    STEP_S = 0.010

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
        super().__init__(num_blocks, 8)
        self.now = self.free_at = 0.0
        device, wait, init = self, Fetch.wait, Fetch.__init__

        def begin(fetch: Any, columns: Any) -> None:
            init(fetch, columns)
            fetch.done_at = device.free_at

        def wait_for(fetch: Any) -> Any:
            device.now = max(device.now, fetch.done_at)
            return wait(fetch)

        monkeypatch.setattr(Fetch, "__init__", begin)
        monkeypatch.setattr(Fetch, "wait", wait_for)

    def execute(self, batch: Batch) -> torch.Tensor:
        self.free_at = max(self.now, self.free_at) + self.STEP_S
        return super().execute(batch)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_the_hosts_work_is_hidden_while_the_device_runs(
    looks_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, 64)

    def work(token: int) -> None:  # 1 ms for each token's text
        device.now += 0.001

    engine, _ = make_engine(
        model=device,
        tokenizer=LetterTokenizer(on_decode=work),
        clock=lambda: device.now,
        async_scheduling=looks_ahead,
        speculation="off",
    )
    for i in range(4):
        engine.add_request(prompt(i), SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    run_all(engine)
    stats = engine.stats()
    assert 100 <= stats.steps <= 103
    assert stats.model_time_s + stats.gap_time_s == pytest.approx(device.now, abs=0.005)
    if looks_ahead:
        assert stats.steps_ahead >= 97
        # Every step's 4 ms but those of the first ones and the last.
        assert device.now == pytest.approx(stats.steps * 0.010, abs=0.020)
        assert stats.gap_time_s <= 0.013
    else:
        assert stats.steps_ahead == 0
        assert device.now == pytest.approx(stats.steps * 0.010 + 400 * 0.001)
        assert stats.gap_time_s == pytest.approx(0.4, abs=0.02)


# ---------------------------------------------------------------------- that it shows nowhere


def test_what_ran_after_the_last_token_is_in_nobodys_prefix() -> None:
    """A stop token ends the answer while the next step runs already, at every place of a block."""
    [[(full, *_)]] = answers(engines(speculation="off")[1], [(prompt(3), GREEDY)])
    for place in range(1, 18):
        ahead, other = engines(speculation="off")
        stop = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(full[place],), ignore_eos=True)
        end = full.index(full[place]) + 1
        for engine in (ahead, other):
            [[(tokens, _, _, reason, _)]] = answers(engine, [(prompt(3), stop)])
            assert (tokens, reason) == (full[:end], "stop")
        assert ahead.stats().steps_ahead >= min(end - 2, 1)
        known = prompt(3) + full
        for engine in (ahead, other):
            assert engine.cache.explain(known).num_hit_tokens == len(prompt(3)) + end - 1
        assert ahead.cache.stats.free_blocks == other.cache.stats.free_blocks
        assert answers(ahead, [(known, GREEDY)]) == answers(other, [(known, GREEDY)])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, temperature=0.0, bad_words=[[3, 4]]),
        SamplingParams(max_tokens=20, temperature=0.0, structured=StructuredOutputs(regex="[a-e]{3,15}")),
        SamplingParams(max_tokens=20, temperature=0.7, seed=3, n=3),
    ],
    ids=["bad_words", "grammar", "samples"],
)
def test_steps_that_need_the_tokens_wait_for_them(params: SamplingParams) -> None:
    class Letters(LetterTokenizer):
        def grammar_source(self) -> Any:
            return LetterGrammarSource()

    ahead, other = engines(speculation="off", tokenizer=Letters())
    asks = [(prompt(1), params), (prompt(2), GREEDY)]
    assert answers(ahead, asks) == answers(other, asks)
    # While both run nothing runs ahead; the other one goes on alone.
    assert 0 < ahead.stats().steps_ahead < 24


@pytest.mark.parametrize("guesses", [False, True])
def test_penalties_and_biases_stop_no_step_ahead(guesses: bool) -> None:
    """The running step's token is counted where it is chosen, and taken back where it was none after all."""
    options = {} if guesses else {"speculation": "off"}
    kind = Parrot if guesses else PagedHashModel
    ahead, _ = make_engine(model=kind(200, 8), async_scheduling=True, **options)
    other, _ = make_engine(model=kind(200, 8), async_scheduling=False, speculation="off")
    [[(full, *_)]] = answers(other, [(prompt(3), GREEDY)])
    params = [
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, repetition_penalty=0.7, max_tokens=40),
        replace(GREEDY, presence_penalty=1.5, frequency_penalty=0.5),
        replace(GREEDY, temperature=0.8, seed=4, logit_bias={5: 3.0}),
        replace(GREEDY, temperature=0.8, seed=5, frequency_penalty=-1.0, repetition_penalty=1.2),
        replace(GREEDY, temperature=2.0, seed=6, allowed_token_ids=tuple(range(3, 20))),
        replace(GREEDY, min_tokens=9, stop_token_ids=(full[2], full[10]), presence_penalty=0.2),
        GREEDY,
    ]
    for together in range(2):  # other requests, rows of ended ones
        asks = [(prompt(i + together, 9 + i), one) for i, one in enumerate(params)]
        assert answers(ahead, asks) == answers(other, asks)
    if not guesses:
        assert ahead.stats().steps_ahead > 50


def test_counts_on_the_device_survive_steps_that_fail() -> None:
    penalty = replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.7)
    for failing in range(1, 14):
        calls = iter(range(1000))
        model = PagedHashModel(64, 8, fail_if=lambda batch: next(calls) == failing)  # noqa: B023
        engine, _ = make_engine(model=model, async_scheduling=True, speculation="off")
        other, _ = make_engine(async_scheduling=False, speculation="off")
        asks = [(prompt(1), penalty), (prompt(2), penalty)]
        assert answers(engine, asks) == answers(other, asks)


def test_guesses_come_before_steps_ahead() -> None:
    ahead, _ = make_engine(model=Parrot(64, 8), async_scheduling=True)
    other, _ = make_engine(model=Parrot(64, 8), speculation="off", async_scheduling=False)
    for _ in range(2):
        assert answers(ahead, [(prompt(7), GREEDY)]) == answers(other, [(prompt(7), GREEDY)])
    stats = ahead.stats()
    assert stats.steps_ahead > 0
    assert stats.speculation.num_accepted_tokens > 10  # the second time all is known


def test_random_tokens_stop_strings_and_logprobs_are_those_of_steps_one_by_one() -> None:
    rng = np.random.default_rng(5)
    ahead, other = engines(speculation="off", tokenizer=LetterTokenizer(), num_blocks=200)
    asks = []
    for i in range(40):
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0.0, 0.8, 3.0])),
            top_p=float(rng.choice([0.5, 1.0])),
            top_k=int(rng.choice([0, 7])),
            seed=i,
            logprobs=int(rng.integers(0, 3)) if i % 3 else None,
            stop=tuple(chr(33 + int(t)) for t in rng.integers(0, VOCAB, 2)) if i % 2 else None,
        )
        asks.append((prompt(i % 7, 5 + i), params))
    assert answers(ahead, asks) == answers(other, asks)
    assert ahead.stats().steps_ahead > 10


def test_a_step_ahead_that_fails_harms_nobody() -> None:
    for failing in range(1, 12):
        calls = iter(range(1000))
        model = PagedHashModel(64, 8, fail_if=lambda batch: next(calls) == failing)  # noqa: B023
        engine, _ = make_engine(model=model, async_scheduling=True, speculation="off")
        other, _ = make_engine(async_scheduling=False, speculation="off")
        asks = [(prompt(1), GREEDY), (prompt(2), GREEDY)]
        assert answers(engine, asks) == answers(other, asks)
        assert not model.violations
        assert engine.stats().steps_ahead > 5


def test_an_interruption_while_a_step_is_launched_ahead_ends_the_step() -> None:
    class Interrupted(PagedHashModel):
        def execute(self, batch: Batch) -> torch.Tensor:
            if batch.fed_tokens is not None and self.num_computed == 25:
                self.num_computed += 1
                raise KeyboardInterrupt
            return super().execute(batch)

    engine, _ = make_engine(model=Interrupted(64, 8), async_scheduling=True, speculation="off")
    other, _ = make_engine(async_scheduling=False, speculation="off")
    request_id = engine.add_request(prompt(1), GREEDY)
    with pytest.raises(KeyboardInterrupt):
        run_all(engine)
    assert engine.has_work
    outputs = run_all(engine)
    [[(tokens, *_)]] = answers(other, [(prompt(1), GREEDY)])
    assert outputs[request_id].outputs[0].token_ids == tokens


def test_requests_end_by_abort_and_by_time_while_a_step_runs_ahead() -> None:
    now = [0.0]
    engine, model = make_engine(
        async_scheduling=True, speculation="off", clock=lambda: now[0], request_timeout_s=5.0
    )
    long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    aborted, late = engine.add_request(prompt(1), long), engine.add_request(prompt(2), long)
    outputs: dict[str, Any] = {}
    for step in range(60):
        if step == 9:
            engine.abort(aborted)
        now[0] += 0.3 if step < 40 else 0.0
        if not engine.has_work:
            break
        outputs.update({output.request_id: output for output in engine.step().finished})
        engine.check()
    assert outputs[aborted].outputs[0].finish_reason == "abort"
    assert outputs[late].error_code == "timeout"
    assert engine.cache.stats.held_blocks == 0
    assert not model.violations
    # What was left in the air is nobody's: the next request is served as ever.
    other, _ = make_engine(async_scheduling=False, speculation="off")
    assert answers(engine, [(prompt(1), GREEDY)]) == answers(other, [(prompt(1), GREEDY)])


class LateWrites(PagedHashModel):
    """A device whose latest step writes its K/V last: when whatever comes after it on its stream begins.

    Args:
        one_stream: loads are on that stream, too; else they do not wait for the step.
    """

    def __init__(self, num_blocks: int, *, one_stream: bool) -> None:
        super().__init__(num_blocks, 8)
        self.one_stream = one_stream
        self.late: tuple[Any, list[Any]] | None = None  # slots, and what each memory gets there
        self.raced = 0  # loads into blocks that a step still had to write to

    def _memories(self) -> list[Any]:
        return [self.tokens, self.positions, self.hashes]

    def finish_step(self) -> None:
        """The latest step writes now."""
        if self.late is not None:
            slots, values = self.late
            for memory, value in zip(self._memories(), values, strict=True):
                memory[slots] = value
        self.late = None

    def execute(self, batch: Batch) -> torch.Tensor:
        self.finish_step()
        before = [memory[batch.write_slots].copy() for memory in self._memories()]
        logits = super().execute(batch)
        self.late = batch.write_slots, [memory[batch.write_slots].copy() for memory in self._memories()]
        for memory, value in zip(self._memories(), before, strict=True):
            memory[batch.write_slots] = value
        return logits

    def save(self, blocks: Sequence[int]) -> Any:
        self.finish_step()
        return super().save(blocks)

    def load(self, blocks: Sequence[int], data: Sequence[Any]) -> None:
        self.raced += self.late is not None and bool({*(self.late[0] // 8).tolist()} & {*blocks})
        if self.one_stream:
            self.finish_step()
        super().load(blocks, data)


@pytest.mark.parametrize("one_stream", [True, False])
def test_a_load_may_get_the_block_that_a_step_for_nothing_still_writes(one_stream: bool) -> None:
    """A stop token ends the only request while a step of it runs in a new block, which a load gets at once.

    Nothing on the host waits for that step: so runners load after all steps that were launched, and a device
    that does not is found out here.
    """
    stored, tier = prompt(8, 52), ScriptedTier(at_once=True)
    source, _ = make_engine(tier=tier, speculation="off")
    source.add_request(stored, replace(GREEDY, max_tokens=1))
    run_all(source)
    assert len(tier.kept) >= 6
    [[(full, *_)]] = answers(engines(speculation="off")[1], [(prompt(3), GREEDY)])
    raced = violations = 0
    for place in range(1, 18):
        model = LateWrites(8, one_stream=one_stream)
        engine, _ = make_engine(
            model=model, num_blocks=8, tier=tier, async_scheduling=True, speculation="off"
        )
        stop = replace(GREEDY, stop_token_ids=(full[place],))
        engine.add_request(prompt(3), stop)
        while engine.scheduler.num_running or engine.scheduler.num_waiting:
            engine.step()
        engine.add_request(stored, GREEDY)
        run_all(engine)
        raced += model.raced
        violations += len(model.violations)
        model.violations.clear()  # no others are allowed to be left
        assert engine.stats().steps_ahead > 0
    assert raced > 0
    assert bool(violations) is not one_stream


def run_again(step: Any) -> Any:
    """Stands for CUDA's recording."""
    result = step().clone()
    return lambda: result.copy_(step()), result


@pytest.mark.parametrize("recorded", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("options", by_day([{}, {"deterministic": True}, {"kv_cache_dtype": "int8"}], {}))
def test_a_model_gives_the_same_texts(options: dict[str, Any], recorded: bool, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "llama", "llama")
    prompts = [np.random.default_rng(i).integers(3, VOCAB_SIZE, 5 + 7 * i).tolist() for i in range(5)]
    params = [
        SamplingParams(max_tokens=30, temperature=0.9 * (i % 2), top_p=0.9, seed=i, logprobs=1)
        for i in range(5)
    ]
    texts = []
    for looks_ahead in (False, True):
        llm = LLM(
            str(folder),
            device="cpu",
            num_blocks=60,
            block_size=8,
            speculation="off",
            async_scheduling=looks_ahead,
            **options,
        )
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        if recorded and not options.get("deterministic"):
            runner.graphs = StepGraphs(runner.model, runner.kv, runner.backend, max_rows=64, record=run_again)
        outputs = llm.generate(prompts, params)
        texts.append([(o.outputs[0].token_ids, o.outputs[0].text) for o in outputs])
        assert (llm.engine.stats().steps_ahead > 20) is looks_ahead
    assert texts[0] == texts[1]


def test_small_pools_tenants_and_cancels_with_steps_ahead() -> None:
    outcomes = [run_traffic(seed, 30, ahead=True, check_every=3) for seed in range(3)]
    assert sum(outcome.steps_ahead for outcome in outcomes) > 100
    run_traffic(1000, 30, ahead=True, faults=True, check_every=4)
    run_traffic(2000, 30, ahead=True, tier=True, controls=True, check_every=4)


@pytest.mark.parametrize("policy", ["prefix", "fcfs", "fair", "priority"])
def test_requests_that_wait_for_a_place_stop_no_step_ahead(policy: str) -> None:
    """All places are taken: nobody could be admitted, unless the policy displaces somebody."""
    ahead, other = engines(max_num_seqs=2, speculation="off", scheduling_policy=policy, num_blocks=80)
    asks = [(prompt(i, 9 + i), GREEDY) for i in range(8)]
    assert answers(ahead, asks) == answers(other, asks)
    assert (ahead.stats().steps_ahead > 60) is (policy != "priority")


# ---------------------------------------------------------------------- beside prompts and guesses


class Watched(PagedHashModel):
    """Notes steps that were launched ahead with both decodes and a chunk of a prompt in them."""

    mixed = 0

    def execute(self, batch: Batch) -> torch.Tensor:
        chunks = batch.num_tokens - batch.num_rows
        self.mixed += batch.fed_tokens is not None and chunks > 1
        return super().execute(batch)


def arriving(engine: Engine, at: dict[int, tuple[list[int], SamplingParams]], aborted: int = -1) -> list[Any]:
    """Tokens and ends of requests that come before the given steps; the second one may be aborted."""
    ids, outputs, step = [], {}, 0
    while engine.has_work or at:
        if step in at:
            ids.append(engine.add_request(*at.pop(step)))
        if step == aborted:
            engine.abort(ids[1])
        outputs.update({output.request_id: output for output in engine.step().finished})
        engine.check()
        step += 1
    return [[(o.token_ids, o.finish_reason) for o in outputs[one].outputs] for one in ids]


@pytest.mark.parametrize("tenants", [False, True])
def test_decodes_go_on_ahead_while_a_prompt_is_computed(tenants: bool) -> None:
    results = []
    for looks_ahead in (True, False):
        model = Watched(100, 8)
        engine, _ = make_engine(
            model=model,
            async_scheduling=looks_ahead,
            speculation="off",
            budget=24,
            scheduling_policy="fair" if tenants else "prefix",
        )
        long = replace(GREEDY, max_tokens=60)
        results.append(
            arriving(engine, {0: (prompt(1), long), 5: (prompt(2, 150), GREEDY), 20: (prompt(3, 60), long)})
        )
        stats = engine.stats()
        assert not model.violations
        if looks_ahead:
            # Of the first long prompt's seven chunks, all but the one it was admitted with; then others.
            assert model.mixed >= 6
            assert stats.steps - stats.steps_ahead <= 12
        else:
            assert stats.steps_ahead == 0
    assert results[0] == results[1]


def test_prompts_that_end_between_their_chunks_leave_nothing_behind() -> None:
    """Aborted at every step: a chunk that runs ahead then is nobody's, and its blocks hold no prefix."""
    for aborted in range(6, 16):
        found = []
        for looks_ahead in (True, False):
            model = Watched(100, 8)
            engine, _ = make_engine(model=model, async_scheduling=looks_ahead, speculation="off", budget=24)
            at = {0: (prompt(1), replace(GREEDY, max_tokens=40)), 5: (prompt(2, 150), GREEDY)}
            [first, *_] = arriving(engine, at, aborted)
            again = answers(engine, [(prompt(2, 150), GREEDY)])
            found.append((first, [[one[0] for one in samples] for samples in again]))
            assert not model.violations
            assert engine.cache.stats.held_blocks == 0
        assert found[0] == found[1]


def test_a_chunk_ahead_that_fails_harms_nobody() -> None:
    for failing in range(3, 16):
        calls = iter(range(1000))
        model = PagedHashModel(100, 8, fail_if=lambda batch: next(calls) == failing)  # noqa: B023
        engine, _ = make_engine(model=model, async_scheduling=True, speculation="off", budget=24)
        other, _ = make_engine(async_scheduling=False, speculation="off", num_blocks=100)
        asks = [(prompt(1), GREEDY), (prompt(2, 100), GREEDY), (prompt(2, 110), GREEDY)]
        assert answers(engine, asks) == answers(other, asks)
        assert not model.violations
        engine.check()


def joining(engine: Engine, prompts: list[list[int]], *, aborted: int = -1) -> list[Any]:
    """Answers to requests that come one after the other, three steps apart, beside one that decodes."""
    long = replace(GREEDY, max_tokens=60)
    at = {0: (prompt(1), long)} | {4 + 3 * i: (ids, GREEDY) for i, ids in enumerate(prompts)}
    return arriving(engine, at, aborted)


def test_requests_join_steps_ahead() -> None:
    """Of the steps that somebody joins, hardly one waits for the tokens of the one before."""
    prompts = [prompt(50 + i, 9 + 5 * i) for i in range(6)]
    prompts += [[*prompts[3][:-2], 7, 8, 9], [*prompts[3][:12], 1, 2, 3]]  # after a cached prefix, copied
    ahead, other = engines(speculation="off", budget=24, num_blocks=100)
    assert joining(ahead, prompts) == joining(other, prompts)
    stats = ahead.stats()
    assert stats.steps - stats.steps_ahead <= 8
    assert ahead.cache.stats.held_blocks == 0


@pytest.mark.parametrize("kind", ["states", "windows", "tier"])
def test_requests_join_steps_ahead_of_models_with_states_windows_or_tiers(kind: str) -> None:
    """Prompts that follow one another, some after a cached prefix: hardly a step waits for tokens."""
    prompts = [prompt(50 + i, 20 + 15 * i) for i in range(6)]
    prompts += [[*prompts[5][:70], 7, 8, 9], [*prompts[5], 1, 2, 3]]
    found = []
    for looks_ahead in (True, False):
        options: dict[str, Any] = {}
        if kind == "states":
            options["model"] = StatefulHashModel(100, 8, 40)
        elif kind == "windows":
            options["model"] = WindowedHashModel(100, 8, WindowSpec(17, 200, 96, 64))
        else:
            options["tier"] = ScriptedTier(at_once=True)
        engine, model = make_engine(
            async_scheduling=looks_ahead, speculation="off", budget=96, num_blocks=100, **options
        )
        found.append(joining(engine, prompts))
        assert not model.violations
        if looks_ahead:
            stats = engine.stats()
            assert stats.steps - stats.steps_ahead <= 8
    assert found[0] == found[1]


def test_requests_that_join_together_share_what_they_compute() -> None:
    """Each prompt token is computed once, whichever of the equal prompts joins first."""
    found = []
    for looks_ahead in (True, False):
        engine, _ = make_engine(async_scheduling=looks_ahead, speculation="off", budget=24, num_blocks=100)
        engine.add_request(prompt(1), replace(GREEDY, max_tokens=60))
        for _ in range(5):
            engine.step()
        before = engine.stats()
        ids = [engine.add_request(prompt(2, 70), GREEDY) for _ in range(3)]
        outputs = run_all(engine)
        after = engine.stats()
        computed = after.computed_prompt_tokens - before.computed_prompt_tokens
        assert computed <= 70 + 2 + 2 * engine.cache.block_size
        found.append([outputs[one].outputs[0].token_ids for one in ids])
    assert found[0] == found[1]


def test_a_request_that_joins_may_be_aborted_or_its_step_fail() -> None:
    for aborted in range(5, 12):
        ahead, other = engines(speculation="off", budget=24, num_blocks=100)
        results = [
            joining(engine, [prompt(2, 60), prompt(3, 30)], aborted=aborted) for engine in (ahead, other)
        ]
        assert [results[0][0], results[0][2]] == [results[1][0], results[1][2]]
        assert ahead.cache.stats.held_blocks == 0
    for failing in range(3, 16):
        calls = iter(range(1000))
        model = PagedHashModel(100, 8, fail_if=lambda batch: next(calls) == failing)  # noqa: B023
        engine, _ = make_engine(model=model, async_scheduling=True, speculation="off", budget=24)
        other, _ = make_engine(async_scheduling=False, speculation="off", num_blocks=100)
        prompts = [prompt(2, 60), prompt(2, 70), [*prompt(2, 60)[:21], 5, 6]]
        assert joining(engine, prompts) == joining(other, prompts)
        assert not model.violations


def test_an_interruption_of_a_step_that_somebody_joins_ends_that_step() -> None:
    """Its copy of a cached block has not been made: who joined gets another lease."""
    for interrupted in range(6, 14):

        class Interrupted(PagedHashModel):
            calls = 0

            def execute(self, batch: Batch) -> torch.Tensor:
                self.calls += 1
                if self.calls == interrupted:  # noqa: B023
                    raise KeyboardInterrupt
                return super().execute(batch)

        engine, _ = make_engine(model=Interrupted(100, 8), async_scheduling=True, speculation="off")
        other, _ = make_engine(async_scheduling=False, speculation="off", num_blocks=100)
        cached, found = prompt(2), []
        for one in (engine, other):
            at = {0: (cached, GREEDY), 3: ([*cached[:13], 3, 4], GREEDY), 5: (prompt(4), GREEDY)}
            ids, outputs, step = [], {}, 0
            while one.has_work or at:
                if step in at:
                    ids.append(one.add_request(*at.pop(step)))
                try:
                    outputs.update({output.request_id: output for output in one.step().finished})
                except KeyboardInterrupt:
                    assert one is engine
                one.check()
                step += 1
            found.append([outputs[each].outputs[0].token_ids for each in ids])
        assert found[0] == found[1]


def test_a_few_guesses_stop_no_step_ahead_of_the_others() -> None:
    """One request of ten repeats itself: it sits out a step, and the others do not wait for it."""
    ahead, _ = make_engine(model=Parrot(200, 8), async_scheduling=True, max_num_seqs=16)
    other, _ = make_engine(model=Parrot(200, 8), speculation="off", async_scheduling=False, max_num_seqs=16)
    answers(ahead, [(prompt(7), GREEDY)])
    asks = [(prompt(i), replace(GREEDY, temperature=5.0, seed=i)) for i in range(9)] + [(prompt(7), GREEDY)]
    assert answers(ahead, asks) == answers(other, asks)
    stats = ahead.stats()
    assert stats.speculation.num_accepted_tokens > 10
    assert stats.steps_ahead >= 15
