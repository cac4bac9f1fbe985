# SPDX-License-Identifier: Apache-2.0
"""What every runner promises (`radixkv.engine.runner.Runner`), held against model runner and hash model.

A batch is made by the scheduler over a cache, as in the engine; what counts are the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from paged_language_model import PagedHashModel
from tiny_models import save_tiny_model

from radixkv import PrefixCache
from radixkv.engine.config import EngineConfig, SchedulerConfig
from radixkv.engine.runner import Runner
from radixkv.engine.served_model import ServedModel
from radixkv.engine.startup import StartupPhases
from radixkv.entrypoints.builder import engine_for_model, engine_on_runner, summarize
from radixkv.model.loading.loader import load_model
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence

NUM_BLOCKS, BLOCK, BUDGET = 12, 8, 64
PROMPT = list(range(1, 30))


@pytest.fixture(scope="module")
def model_runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    config = EngineConfig(
        model=str(save_tiny_model(tmp_path_factory.mktemp("runner"), "llama")),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        max_num_batched_tokens=BUDGET,
        threads=1,
    )
    return engine_for_model(config, load_model(config)).runner


@pytest.fixture(params=["hash model", "model runner"])
def make_runner(request: pytest.FixtureRequest) -> Callable[[], Runner]:
    """Gives a runner whose memory holds nothing, or anything: whoever uses it has a new cache over it."""
    if request.param == "hash model":
        return lambda: PagedHashModel(NUM_BLOCKS, BLOCK)
    runner: Runner = request.getfixturevalue("model_runner")
    return lambda: runner


class Steps:
    """Runs requests over a runner, and nothing of an engine."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.cache = PrefixCache(runner.num_blocks, runner.block_size)
        self.scheduler = Scheduler(self.cache, SchedulerConfig(max_num_batched_tokens=BUDGET))

    def run(self, *prompts: list[int], all_logits: bool = False) -> list[torch.Tensor]:
        """Logits [V] after each prompt, or [len, V] at all its positions; all prompts in the same steps."""
        requests = []
        for i, prompt in enumerate(prompts):
            request = Sequence(Request(prompt, SamplingParams(max_tokens=1), request_id=str(i)))
            request.prompt_logprobs = [None] if all_logits else None
            requests.append(request)
            self.scheduler.add(request)
        rows: dict[str, torch.Tensor] = {}
        while len(rows) < len(prompts):
            batch = self.scheduler.schedule().batch
            assert batch is not None
            logits = self.runner.execute(batch)
            assert logits.dtype.is_floating_point
            assert len(logits) == len(batch.logit_rows)
            self.scheduler.complete(batch)
            for entry, first, end in batch.logit_spans():
                if entry.samples:
                    own = logits[first:end].float().clone()
                    rows[entry.request.request_id] = own if all_logits else own[-1]
                    self.scheduler.finish(entry.request)
        self.cache.check()
        return [rows[request.request_id] for request in requests]


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-4)


def test_it_says_what_memory_it_has_and_what_it_is(make_runner):
    runner = make_runner()
    assert (runner.num_blocks, runner.block_size) == (NUM_BLOCKS, BLOCK)
    assert runner.bytes_per_block > 0
    assert runner.backend_name
    assert runner.dtype_name
    assert runner.device_name


def test_a_warm_up_changes_no_result(make_runner):
    expected = Steps(make_runner()).run(PROMPT)[0]
    runner = make_runner()
    runner.warm_up()
    assert close(Steps(runner).run(PROMPT)[0], expected)


def test_logits_depend_on_a_rows_own_context_alone(make_runner):
    alone = [Steps(make_runner()).run(prompt)[0] for prompt in (PROMPT, PROMPT[:11], [7, 7, 7])]
    steps = Steps(make_runner())
    together = steps.run(PROMPT, PROMPT[:11], [7, 7, 7])
    again = steps.run([7, 7, 7], PROMPT[:11], PROMPT)  # all of it cached, with copies of partial blocks
    for got in (together, again[::-1]):
        assert all(close(one, other) for one, other in zip(got, alone, strict=True))
    assert not close(alone[0], alone[1])


def test_several_rows_of_an_entry_are_the_rows_of_its_prefixes(make_runner):
    whole = Steps(make_runner()).run(PROMPT, all_logits=True)[0]
    assert len(whole) == len(PROMPT)
    for length in (1, 8, 13, len(PROMPT)):
        assert close(Steps(make_runner()).run(PROMPT[:length])[0], whole[length - 1])


def test_a_step_makes_its_copies_by_copy_blocks_before_it_reads_them(make_runner, monkeypatch):
    branch = [*PROMPT[:27], 3, 4]
    expected = Steps(make_runner()).run(branch)[0]
    runner = make_runner()
    steps = Steps(runner)
    steps.run(PROMPT)
    made: list[tuple[int, int, int]] = []
    copy_blocks = runner.copy_blocks
    monkeypatch.setattr(runner, "copy_blocks", lambda copies: (made.extend(copies), copy_blocks(copies)))
    assert close(steps.run(branch)[0], expected)
    ((source, target, num_slots),) = made
    assert source != target
    assert num_slots == 27 % BLOCK


def test_what_was_copied_away_can_be_copied_back(make_runner):
    steps = Steps(make_runner())
    expected = steps.run(PROMPT)[0]
    other = PROMPT[::-1]
    steps.run(other)
    own, others = (table_of(steps, tokens) for tokens in (PROMPT, other))
    spare = [block for block in range(NUM_BLOCKS) if block not in {*own, *others}][: len(own) - 1]
    steps.runner.copy_blocks([(a, b, BLOCK) for a, b in zip(own, spare, strict=False)])
    steps.runner.copy_blocks([(a, b, BLOCK) for a, b in zip(others, own[: len(spare)], strict=False)])
    steps.runner.copy_blocks([(a, b, BLOCK) for a, b in zip(spare, own, strict=False)])
    assert close(steps.run(PROMPT)[0], expected)


def test_what_was_saved_is_what_a_block_held(make_runner):
    steps = Steps(make_runner())
    expected = steps.run(PROMPT)[0]
    own = table_of(steps, PROMPT)[:-1]  # the last one is a copy for who would go on with it
    saved = steps.runner.save(own).result()
    assert saved.shape == (len(own), steps.runner.bytes_per_block)
    assert saved.dtype == np.uint8
    lease = steps.cache.acquire([90] * BLOCK * len(own))
    target = lease.block_table.tolist()
    steps.runner.load(target, saved)
    assert np.array_equal(steps.runner.save(target).result(), saved)
    lease.release()
    steps.runner.load(own, saved[::-1].copy())
    assert np.array_equal(steps.runner.save(own[::-1]).result(), saved)
    steps.runner.load(own, [row.tobytes() for row in saved])
    assert close(steps.run(PROMPT)[0], expected)


def test_data_of_another_size_is_not_loaded(make_runner):
    steps = Steps(make_runner())
    expected = steps.run(PROMPT)[0]
    own = table_of(steps, PROMPT)[:-1]
    saved = steps.runner.save(own).result()
    for data in (saved[:-1], saved[:, :-8], [*saved[1:], b""]):
        with pytest.raises(ValueError, match="K/V"):
            steps.runner.load(own, data)
    assert close(steps.run(PROMPT)[0], expected)


def table_of(steps: Steps, tokens: list[int]) -> list[int]:
    """The blocks that hold the cached tokens."""
    lease = steps.cache.acquire(tokens)
    blocks = np.asarray(lease.block_table).tolist()
    lease.release()
    return blocks


def test_an_engine_stands_on_any_runner(make_runner):
    runner: Any = make_runner()
    engine = engine_on_runner(
        EngineConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK, max_num_batched_tokens=BUDGET),
        runner,
        ServedModel(tokenizer=None, max_model_len=64),
    )
    engine.runner.warm_up()
    answers = []
    for _ in ("cold", "hot"):
        engine.add_request(PROMPT, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        while engine.has_work:
            finished = engine.step().finished
            engine.check()
        answers.append(finished[0])
    assert [output.num_cached_tokens for output in answers] == [0, len(PROMPT) - 1]
    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
    summary = summarize(engine, StartupPhases())
    assert summary.kv_tokens == NUM_BLOCKS * BLOCK
    assert summary.kv_bytes == NUM_BLOCKS * runner.bytes_per_block
    assert summary.sampling == {"temperature": 1.0}
    assert summary.sampling_source == "radixkv; the model recommends none"
