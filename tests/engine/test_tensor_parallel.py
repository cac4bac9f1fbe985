# SPDX-License-Identifier: Apache-2.0
"""An engine on several ranks gives what one on one rank gives, whatever else is going on.

`RADIXKV_TENSOR_PARALLEL_SEEDS` tries more.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_threads import engine_on_ranks
from tiny_models import save_tiny_model

from radixkv.engine.engine import Engine
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin
from radixkv_kernels import PagedKV

SEEDS = int(os.environ.get("RADIXKV_TENSOR_PARALLEL_SEEDS", "1"))
BLOCK = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "num_hidden_layers": 2}
    return save_tiny_model(tmp_path_factory.mktemp("ranks"), "llama", **shape)


def some_request(rng: random.Random) -> tuple[list[int], SamplingParams, dict[str, Any]]:
    """Prompts that share beginnings, and everything that can be asked for; how it is handed in."""
    beginning = [3 + 7 * i % 250 for i in range(rng.choice([0, 8, 21, 48]))]
    prompt = beginning + [rng.randrange(3, 250) for _ in range(rng.randrange(1, 24))]
    options: dict[str, Any] = {"max_tokens": rng.randrange(1, 14), "temperature": 0.0, "ignore_eos": True}
    kind = rng.randrange(8)
    if kind == 0:
        options |= {"n": 3, "temperature": 0.8, "seed": rng.randrange(1000)}
    elif kind == 1:
        options |= {"prompt_logprobs": 1, "logprobs": 2}
    elif kind == 2:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    elif kind == 3:
        prompt = (prompt[:6] * 6)[:40]  # something to guess from
        options["max_tokens"] = 24
    elif kind == 4:
        options |= {"structured": {"regex": "(yes|no|perhaps)( [a-z]{2,9})*"}, "ignore_eos": False}
    elif kind == 5:
        options |= {"bad_words": [[7], [9, 11]], "min_tokens": 2, "logit_bias": {30: 2.0}, "logprobs": 1}
    handed: dict[str, Any] = {"namespace": rng.choice(["", "", "one", ("two", "salt")])}
    if rng.random() < 0.2:
        handed["pins"] = [PrefixPin(rng.randrange(1, len(prompt) + 1), 60.0)]
    if rng.random() < 0.1:
        handed["keep_tokens"] = rng.randrange(len(prompt))
    return prompt, SamplingParams(**options), handed


def answers(engine: Engine, seed: int) -> list[list[list[int]]]:
    """Tokens of all samples of all requests that are not aborted, in their order."""
    rng = random.Random(seed)
    names, aborted, outputs = [], set(), {}
    for _ in range(rng.randrange(3, 7)):
        for _ in range(rng.randrange(1, 4)):
            prompt, params, handed = some_request(rng)
            names.append(engine.add_request(prompt, params, **handed))
        if rng.random() < 0.3:
            aborted.add(names[-1])
            engine.abort(names[-1])
        if rng.random() < 0.2:
            engine.cache.reset()
        for _ in range(rng.randrange(12)):
            outputs |= {output.request_id: output for output in engine.step().finished}
            engine.check()
    while len(outputs) < len(names):
        engine.wait()
        outputs |= {output.request_id: output for output in engine.step().finished}
        engine.check()
    if not engine.config.kv_tier:  # else what is being saved is held
        assert engine.cache.stats.held_blocks == engine.cache.stats.pinned_blocks
    kept = [outputs[name] for name in names if name not in aborted]
    assert [output.error for output in kept] == [None] * len(kept)
    return [[list(sample.token_ids) for sample in output.outputs] for output in kept]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_same_answers(model: Path, tmp_path: Path, seed: int) -> None:
    """With few blocks, steps ahead, guesses, tiers and restarts of the engine in between."""
    rng = random.Random(-seed)
    options = {
        "num_blocks": rng.choice([16, 24, 64]),
        "async_scheduling": rng.random() < 0.5,
        "speculation": rng.choice(["auto", "off"]),
        "max_num_batched_tokens": rng.choice([24, 512]),
        "kv_cache_dtype": rng.choice(["auto", "auto", "int8", "fp8_e4m3", "fp8_e5m2"]),
        "deterministic": rng.random() < 0.2,
        **rng.choice([{}, {}, {"quantization": "int8"}, {"dtype": "bfloat16"}]),
    }
    alone = engine_on_ranks(model, 1, **options)
    expected = [answers(alone, seed), answers(alone, seed + 1000)]
    tiers = (
        (f"host:{rng.choice([1, 64])}MiB", f"disk:{tmp_path},max=64MiB") if seed % 3 else ()
    )  # the first does without
    num_ranks, found = 2 + seed % 2, []
    for part in (seed, seed + 1000):
        together = engine_on_ranks(model, num_ranks, kv_tier=tiers, **options)
        found.append(answers(together, part))
        together.close()
    assert found == expected


@pytest.mark.nightly
def test_blocks_come_back_from_a_tier(model: Path, tmp_path: Path) -> None:
    """Of the ranks' own number alone: another number finds nothing of them."""
    prompt, params = list(range(3, 63)), SamplingParams(max_tokens=4, temperature=0.0)
    cached = []
    for num_ranks in (2, 2, 3, 1):
        engine = engine_on_ranks(model, num_ranks, kv_tier=(f"disk:{tmp_path},max=64MiB",))
        engine.add_request(prompt, params)
        finished: list[Any] = []
        while not finished:
            engine.wait()
            finished = engine.step().finished
        cached.append(finished[0].num_cached_tokens)
        engine.close()
    assert cached[1] >= 48
    assert cached[0] == cached[2] == cached[3] == 0


def test_what_is_saved_is_what_is_loaded(model: Path) -> None:
    """Bit by bit, into other blocks; a save that was stopped does not disturb the next."""
    engine = engine_on_ranks(model, 3)
    runner = engine.runner
    try:
        engine.add_request(list(range(3, 70)), SamplingParams(max_tokens=1))
        while engine.has_work:
            engine.step()
        saved = runner.save([0, 1, 2]).result().copy()
        assert saved.shape == (3, runner.bytes_per_block)
        assert len(np.unique(saved[0])) > 50
        runner.save([3, 4]).stop()
        runner.load([40, 41, 42], list(saved))
        assert np.array_equal(runner.save([42, 40, 41]).result(), saved[[2, 0, 1]])
        runner.copy_blocks([(41, 50, BLOCK)])
        assert np.array_equal(runner.save([50]).result()[0], saved[1])
        with pytest.raises(ValueError, match="bytes each"):
            runner.load([1], [saved[0][:-1]])
    finally:
        engine.close()


def test_steps_and_saves_do_not_wait_for_a_save(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no rank can read its blocks, a second save begins, one is stopped, and a request is answered."""
    may_read = threading.Event()
    make_reader = PagedKV.block_reader

    def slow_reader(kv: PagedKV) -> Any:
        read = make_reader(kv)

        def wait_and_read(*arguments: Any) -> None:
            assert may_read.wait(60)
            read(*arguments)

        return wait_and_read

    monkeypatch.setattr(PagedKV, "block_reader", slow_reader)
    engine = engine_on_ranks(model, 2)
    runner = engine.runner
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    try:
        engine.add_request(list(range(3, 40)), params)
        while engine.has_work:
            engine.step()
        saves = [runner.save([0, 1, 2]), runner.save([2, 1]), runner.save([3, 2]), runner.save([2])]
        saves[2].stop()
        engine.add_request(list(range(100, 140)), params)
        while engine.has_work:
            engine.step()
        assert not saves[0].done()
        may_read.set()
        first, second, third, last = (save.result(60) for save in saves)
        assert np.array_equal(first[[2, 1]], second)
        assert len(third) == 0
        assert np.array_equal(second[:1], last)
    finally:
        may_read.set()
        engine.close()
