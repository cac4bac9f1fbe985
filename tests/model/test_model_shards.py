# SPDX-License-Identifier: Apache-2.0
"""A model on several ranks computes what it computes on one: every architecture, odd numbers of heads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_language_model import run_all
from rank_threads import engine_on_ranks
from tiny_configs import FAMILIES, HYBRID_FAMILIES, SHAPES, SHARED_FAMILIES
from tiny_models import save_tiny_model

from radixkv.errors import ConfigError
from radixkv.model.cuda_graphs import StepGraphs, row_sizes
from radixkv.model.parallel.commands import decode_batch, encode_batch
from radixkv.model.parallel.shard_model import SPLIT_MODEL_TYPES, Share
from radixkv.model.runner import ModelRunner
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch, BatchStates, StateSave

PROMPT = [(17 * i) % 300 + 3 for i in range(45)]
#: One family of each architecture, with a window where there is one.
SPLIT = {kind: family for family, (kind, _) in FAMILIES.items() if kind in SPLIT_MODEL_TYPES}
#: Plain, with biases, with experts, with normed heads, and in parallel blocks.
BY_DAY = ("llama", "qwen3-moe")
NIGHTLY_SHAPES = (
    "llama4",
    "stablelm",
    "nemotron",
    "phimoe",
    "hunyuan-moe",
    "deepseek-v32",
    "glm-dsa",
    "mimo",
    "gemma4-shared",
    "gemma3n",
    "laguna",
    "odd-heads",
    "deepseek-v2",
    "glm4-lite",
    "minicpm3",
    "youtu",
    "axk1",
    "mistral4",
)
#: Nine query heads that share three KV heads: they can't be halved.
ODD = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}


def odd_model(folder: Path, family: str) -> Path:
    shape: dict[str, Any] = dict(ODD)
    kind, extra = FAMILIES[family]
    if extra.get("num_key_value_heads") == 4 or kind == "phi":  # as many as query heads
        shape = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80}
    return save_tiny_model(folder, family, **shape)


def prompt_logprobs(engine: Any) -> np.ndarray[Any, Any]:
    """Log probabilities of the prompt's tokens."""
    engine.add_request(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0), request_id="one")
    (output,) = run_all(engine).values()
    assert output.error is None, output
    return np.array([token.chosen.logprob for token in output.prompt_logprobs[1:]])


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each in BY_DAY else pytest.mark.nightly) for each in SPLIT.values()],
)
def test_every_architecture(family: str, tmp_path: Path) -> None:
    model = odd_model(tmp_path, family)
    alone = engine_on_ranks(model, 1)
    together = engine_on_ranks(model, 2)
    try:
        difference = np.abs(prompt_logprobs(alone) - prompt_logprobs(together)).max()
        assert difference < 1e-4
    finally:
        together.close()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.nightly),
        pytest.param({"kv_cache_dtype": "fp8_e4m3"}, marks=pytest.mark.nightly),
        pytest.param({"deterministic": True}, marks=pytest.mark.nightly),
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.nightly),
        {"quantization": "int8"},
    ],
    ids=str,
)
def test_what_stores_and_computes(options: dict[str, Any], tmp_path: Path) -> None:
    model = odd_model(tmp_path, "llama")
    alone = engine_on_ranks(model, 1, **options)
    together = engine_on_ranks(model, 3, **options)
    try:
        difference = np.abs(prompt_logprobs(alone) - prompt_logprobs(together)).max()
        # int8 weights have scales of each rank's own activations, bfloat16 sums of its own.
        exact = not {"quantization", "dtype"} & set(options)
        assert difference < (0.01 if exact else 0.5)
    finally:
        together.close()


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_deterministic_logits_do_not_depend_on_the_cache(num_ranks: int, tmp_path: Path) -> None:
    engine = engine_on_ranks(odd_model(tmp_path, "llama"), num_ranks, deterministic=True)
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)
    try:
        found = []
        for prompt in (PROMPT, PROMPT, PROMPT[:20], PROMPT):
            name = engine.add_request(prompt, params)
            engine.add_request(PROMPT[7:], params)
            first = run_all(engine)[name].outputs[0]
            if prompt is PROMPT:
                found.append([token.chosen.logprob for token in first.logprobs])
        assert found[0] == found[1] == found[2]
    finally:
        engine.close()


def test_models_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gptj, which --tensor-parallel can't split; .*llama"):
        engine_on_ranks(save_tiny_model(tmp_path / "a", "gptj"), 2)
    with pytest.raises(ConfigError, match=r"--tensor-parallel 3 is more than the 2 KV heads .* at most 2"):
        engine_on_ranks(save_tiny_model(tmp_path / "b", "llama"), 3)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each, marks=() if each == "lfm2" else pytest.mark.nightly)
        for each in sorted(HYBRID_FAMILIES.keys() & SPLIT_MODEL_TYPES)
    ],
)
def test_states_are_the_same_on_every_rank(model_type: str, tmp_path: Path) -> None:
    """Answers are one rank's, cold, hot, and from states that were saved, lost and loaded."""
    pytest.importorskip("numba")
    model = save_tiny_model(tmp_path, model_type)
    alone, together = (
        engine_on_ranks(model, num_ranks, num_blocks=32, max_num_seqs=2, max_num_batched_tokens=96)
        for num_ranks in (1, 2)
    )
    try:
        expected = hybrid_answer(alone, 0)
        hybrid_answer(together, 0, expected)
        hybrid_answer(together, 128, expected)
        runner, slots = together.runner, [checkpoint.slot for checkpoint in together.cache.states or ()]
        saved = runner.states.save(slots).result()
        runner.states.load(slots, list(np.zeros_like(saved)))
        assert hybrid_answer(together, 128) != expected
        runner.states.load(slots, list(saved))
        hybrid_answer(together, 128, expected)
    finally:
        together.close()


def hybrid_answer(engine: Any, num_cached_tokens: int, expected: list[float] | None = None) -> list[float]:
    """Log probabilities of an answer to a prompt of 135 tokens."""
    engine.add_request(PROMPT * 3, SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, ignore_eos=True))
    (output,) = run_all(engine).values()
    assert output.error is None, output
    assert output.num_cached_tokens == num_cached_tokens
    found = [token.chosen.logprob for token in output.outputs[0].logprobs]
    assert expected is None or np.allclose(found, expected, atol=1e-4)
    return found


@given(st.integers(1, 8), st.integers(0, 5000))
def test_shares_are_parts_of_the_whole(size: int, count: int) -> None:
    for parts in (
        [Share(rank, size).heads(count) for rank in range(size)],
        [Share(rank, size).columns(count) for rank in range(size)],
    ):
        assert [item for part in parts for item in part] == list(range(count))
        if count >= size:
            assert all(parts)
        assert len(parts[0]) == max(map(len, parts))


@given(st.data())
def test_batches_arrive_as_they_were_sent(data: st.DataObject) -> None:
    numbers = st.integers(-1, 2**40)
    lengths = data.draw(st.lists(st.integers(1, 5), max_size=5))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_tokens, count = int(starts[-1]), len(lengths)
    slots = data.draw(st.lists(numbers, max_size=9))
    copy = st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 8))

    def ints(size: int) -> np.ndarray[Any, Any]:
        return np.array(data.draw(st.lists(numbers, min_size=size, max_size=size)), np.int64)

    states = None
    if data.draw(st.booleans()):
        states = BatchStates.empty(count)
        states.base_slots[:], states.target_positions[:] = np.arange(count) - 1, ints(count)
        states.saves = [StateSave(row, 64 * row, row + 1) for row in range(count // 2)]
    batch = Batch(
        entries=[],
        states=states,
        token_ids=ints(num_tokens),
        positions=ints(num_tokens),
        query_starts=starts,
        context_lengths=np.arange(count, dtype=np.int32),
        block_tables=[np.arange(length, dtype=np.int32) for length in lengths],
        write_slots=np.array(slots, np.int64),
        write_rows=ints(len(slots)) if data.draw(st.booleans()) else None,
        logit_rows=ints(count),
        copy_groups=data.draw(st.lists(st.lists(copy, min_size=1, max_size=3), max_size=3)),
        fed_tokens=torch.zeros(num_tokens) if data.draw(st.booleans()) else None,
    )
    found, is_fed, rest = decode_batch(np.concatenate([encode_batch(batch)[1:], [7, 9]]))
    assert is_fed == (batch.fed_tokens is not None)
    assert rest.tolist() == [7, 9]
    assert found.copy_groups == batch.copy_groups
    assert (found.write_rows is None) == (batch.write_rows is None)
    for name in ("token_ids", "positions", "query_starts", "context_lengths", "write_slots", "logit_rows"):
        sent, arrived = getattr(batch, name), getattr(found, name)
        assert arrived.dtype == sent.dtype
        assert np.array_equal(arrived, sent)
    assert (found.states is None) == (states is None)
    if states is not None and found.states is not None:
        assert found.states.saves == states.saves
        for name in ("base_slots", "base_positions", "ring_rows", "target_slots", "target_positions"):
            assert np.array_equal(getattr(found.states, name), getattr(states, name))
    assert len(found.block_tables) == count
    for sent, arrived in zip(batch.block_tables, found.block_tables, strict=True):
        assert arrived.dtype == np.int32
        assert np.array_equal(arrived, sent)


def test_the_guide_names_every_architecture() -> None:
    guide = Path(__file__).parents[2] / "docs" / "tensor_parallel.md"
    (listed,) = re.findall(
        r"These architectures can be split: (.*?)\. Any other", guide.read_text(), re.DOTALL
    )
    assert set(re.findall(r"`(\w+)`", listed)) == set(SPLIT_MODEL_TYPES)
    tried = {kind for kind, _ in (*FAMILIES.values(), *SHAPES.values())}
    seeing = {
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "paddleocr_vl",
    }
    tried |= SHARED_FAMILIES.keys() | HYBRID_FAMILIES.keys() | {f"{kind}_text" for kind in seeing}
    assert set(SPLIT_MODEL_TYPES) <= tried


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3",
        "minimax_m2",  # with norms of all heads together
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ("gemma4", *NIGHTLY_SHAPES, *sorted(SHARED_FAMILIES.keys() - {"minimax_m2"}))
        ),
    ],
)
def test_layers_that_differ_in_heads_latents_and_norms(name: str, tmp_path: Path) -> None:
    changes = {"num_global_key_value_heads": 2} if name == "gemma4" else {}
    model = save_tiny_model(tmp_path / "model", name, **changes)
    # As many tokens as a sparse attention chooses.
    alone, together = (engine_on_ranks(model, num_ranks, max_model_len=256) for num_ranks in (1, 2))
    try:
        assert np.abs(prompt_logprobs(alone) - prompt_logprobs(together)).max() < 1e-4
        hot = prompt_logprobs(together)
        assert np.abs(prompt_logprobs(alone) - hot).max() < 1e-4
    finally:
        together.close()


@pytest.mark.nightly
def test_every_rank_records_and_replays_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sums inside, by a capture that runs the step again; all steps were recorded at the start."""
    model = odd_model(tmp_path, "llama")
    options: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 128}
    alone = engine_on_ranks(model, 1, **options)
    runners: list[ModelRunner] = []
    make = ModelRunner.__init__

    def noted(own: ModelRunner, *args: Any, **settings: Any) -> None:
        make(own, *args, **settings)
        runners.append(own)

    monkeypatch.setattr(ModelRunner, "__init__", noted)
    together = engine_on_ranks(model, 2, **options)

    def run_again(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
        result = step().clone()
        return lambda: result.copy_(step()), result

    try:
        for runner in runners:
            runner.graphs = StepGraphs(runner.model, runner.kv, runner.backend, max_rows=24, record=run_again)
        together.runner.warm_up()
        before = together.stats().steps
        np.testing.assert_allclose(prompt_logprobs(together), prompt_logprobs(alone), atol=1e-4)
        steps = together.stats().steps - before
        graphs = [runner.graphs for runner in runners if runner.graphs is not None]
        assert [each.captured for each in graphs] == [len(row_sizes(24))] * 2
        assert [each.replayed for each in graphs] == [steps] * 2
    finally:
        together.close()


@pytest.mark.nightly
def test_windows_are_freed_on_every_rank(tmp_path: Path) -> None:
    """Answers are one rank's, cold, hot, and from kept windows that were saved, lost and loaded."""
    model = save_tiny_model(tmp_path, "gpt-oss", sliding_window=20)
    options: dict[str, Any] = {
        "num_blocks": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 48,
        "max_model_len": 256,
        "window_memory": 1 << 22,
    }
    alone, together = (engine_on_ranks(model, num_ranks, **options) for num_ranks in (1, 2))
    try:
        own, runner = alone.runner.windows.spec, together.runner
        assert runner.windows.spec == own
        expected = hybrid_answer(alone, 0)
        hybrid_answer(together, 0, expected)
        hybrid_answer(together, 128, expected)
        blocks = range(own.num_blocks)
        saved = runner.windows.save(blocks).result()
        runner.windows.load(blocks, list(np.zeros_like(saved)))
        assert hybrid_answer(together, 128) != expected
        runner.windows.load(blocks, list(saved))
        hybrid_answer(together, 128, expected)
        together.check()
    finally:
        together.close()
