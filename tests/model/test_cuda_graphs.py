# SPDX-License-Identifier: Apache-2.0
"""Recorded steps without a GPU: a capture that replays by running the step again on the same static buffers.

What is not in here is CUDA's own recording; that launches may be replayed with other plans is tested with
the kernels (`test_recorded_launches_replay_with_other_plans`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nightly import by_day
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model
from tiny_vision_models import save_tiny_vision_model, shown, template_ids, words

from radixkv import LLM, SamplingParams
from radixkv.model.cuda_graphs import CudaRecorder, StepGraphs, max_padded_rows, qualifies, row_sizes
from radixkv.model.runner import ModelRunner
from radixkv.model.warm_up import idle_batch
from radixkv.scheduling.batch import Batch


def run_again(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands for CUDA's capture: the result keeps its place, and a replay takes no arguments."""
    result = step().clone()
    return lambda: result.copy_(step()), result  # type: ignore[return-value]


def make_llm(folder: Path, speculation: str = "off", **options: Any) -> LLM:
    settings = {"num_blocks": 256, "block_size": 8, "max_num_seqs": 6, "max_model_len": 200} | options
    return LLM(str(folder), device="cpu", speculation=speculation, **settings)


def graphs_of(llm: LLM, **options: Any) -> StepGraphs:
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    runner.graphs = StepGraphs(
        runner.model,
        runner.kv,
        runner.backend,
        **{"record": run_again, "max_rows": 6, "states": runner.states} | options,
    )
    return runner.graphs


def generate(llm: LLM, longer: int = 1) -> list[list[int]]:
    """Six requests of different lengths, so that batches of every size decode; two share a prefix."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, VOCAB_SIZE, 40).tolist()
    prompts = [rng.integers(3, VOCAB_SIZE, 3 + 9 * n).tolist() for n in range(6)]
    prompts[0] = [*common, 5]
    prompts[3] = [*common, 6]
    each = [
        SamplingParams(max_tokens=longer * (6 + 5 * n), temperature=0.0, ignore_eos=True) for n in range(6)
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, each)]


@pytest.mark.parametrize("family", by_day(["llama", "gemma2", "gpt-oss"], "llama"))
def test_replayed_steps_give_the_tokens_of_eager_ones(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / family, family)
    expected = generate(make_llm(folder))
    llm = make_llm(folder)
    graphs = graphs_of(llm)
    assert generate(llm) == expected
    # 31 tokens of the longest request, at sizes 6 (of 5 and 6), 4, 3, 2 and 1, most of them replayed.
    assert 4 <= graphs.captured <= 6
    assert graphs.replayed >= 20


@pytest.mark.parametrize("kind", by_day(["qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3"], "qwen3_vl"))
def test_steps_behind_images_are_replayed(kind: str, tmp_path: Path) -> None:
    """Only steps with rows of images run eagerly; decodes behind them read their rotary positions."""
    pytest.importorskip("PIL")
    folder = save_tiny_vision_model(tmp_path / kind, kind)
    prompts: list[Any] = []
    for parts in ([words(1, 9), shown(1), words(2, 3)], [shown(2), words(3, 4), shown(1)], [words(4, 5)]):
        ids, images = template_ids(parts)
        data = {"multi_modal_data": {"image": images}} if images else {}
        prompts.append({"prompt_token_ids": ids, **data})
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    expected = answers(make_llm(folder))
    llm = make_llm(folder)
    vision = llm.engine.runner.images.vision  # type: ignore[union-attr]
    graphs = graphs_of(llm, has_grid=vision.family.has_grid)
    assert list(graphs.capture())[-1] == 1.0
    captured, before = graphs.captured, llm.engine.stats().steps
    assert answers(llm) == expected
    assert graphs.captured == captured
    assert graphs.replayed >= llm.engine.stats().steps - before - 3 > 15
    replayed, before = graphs.replayed, llm.engine.stats().steps
    assert answers(llm) == expected, "hits behind the images: no step has rows of one"
    if not kind.startswith("qwen3_5"):  # states are resumed from a checkpoint before them
        assert graphs.replayed - replayed == llm.engine.stats().steps - before


@pytest.mark.parametrize("speculation", [pytest.param("off", marks=pytest.mark.nightly), "auto"])
def test_all_that_is_served_was_recorded_at_the_start(speculation: str, tmp_path: Path) -> None:
    """Prompts in chunks beside decodes, prefix hits, drafts: no step is run eagerly or recorded later."""
    folder = save_tiny_model(tmp_path / "llama", "llama")
    expected = generate(make_llm(folder), 4)
    llm = make_llm(folder, speculation, max_num_batched_tokens=100)
    graphs = graphs_of(llm, max_rows=max_padded_rows(100, 6))
    done = list(graphs.capture())
    assert done == sorted(done)
    assert done[-1] == 1.0
    captured = graphs.captured
    assert captured == len(row_sizes(100)) == 15
    eager = llm.engine.stats().steps
    for _ in range(3):  # requests that come again are known whole: their steps have drafts
        assert generate(llm, 4) == expected
    assert graphs.captured == captured
    assert graphs.replayed == llm.engine.stats().steps - eager
    if speculation == "auto":
        assert llm.engine.stats().speculation.num_accepted_tokens > 100


@pytest.mark.parametrize("family", by_day(["lfm2", "qwen3_5_text"], "lfm2"))
def test_steps_with_states_are_replayed(family: str, tmp_path: Path) -> None:
    """Cold, from checkpoints, and where requests are preempted: three keys for each number of rows."""
    folder = save_tiny_model(tmp_path / family, family)
    expected = generate(make_llm(folder), 3)
    llm = make_llm(folder, num_blocks=60, max_num_batched_tokens=70)
    graphs = graphs_of(llm, max_rows=max_padded_rows(70, 6))
    assert list(graphs.capture())[-1] == 1.0
    assert graphs.captured == 2 * len(row_sizes(70))
    captured, eager = graphs.captured, llm.engine.stats().steps
    for _ in range(2):
        assert generate(llm, 3) == expected
        llm.engine.check()
    assert graphs.captured == captured
    assert graphs.replayed == llm.engine.stats().steps - eager


def test_steps_of_prompts_replayed_in_a_pool_with_hardly_enough_blocks(tmp_path: Path) -> None:
    """Copies of partial blocks, rows that are not written, preempted requests: padding writes to nobody."""
    folder = save_tiny_model(tmp_path / "llama", "llama")
    expected = generate(make_llm(folder), 2)
    llm = make_llm(folder, num_blocks=26, max_num_batched_tokens=20)
    graphs = graphs_of(llm, max_rows=20)
    list(graphs.capture())
    for _ in range(2):
        assert generate(llm, 2) == expected
        llm.engine.check()
    assert graphs.captured == len(row_sizes(20))
    assert graphs.replayed > 40


def test_deterministic_steps_are_replayed_in_multiples_of_rows(tmp_path: Path) -> None:
    assert row_sizes(100, 16) == [16, 32, 48, 64, 80, 96]
    assert row_sizes(20, 16) == [16]
    folder = save_tiny_model(tmp_path / "llama", "llama")
    expected = generate(make_llm(folder, deterministic=True))
    llm = make_llm(folder, deterministic=True, max_num_batched_tokens=64)
    graphs = graphs_of(llm, max_rows=64, row_multiple=16)
    list(graphs.capture())
    assert graphs.captured == 4
    before = llm.engine.stats().steps
    assert generate(llm) == expected
    assert graphs.replayed == llm.engine.stats().steps - before


def test_rows_worth_recording() -> None:
    assert max_padded_rows(8192, 6) == 512
    assert max_padded_rows(8192, 1000) == 1000
    assert max_padded_rows(100, 6) == 100
    assert row_sizes(1) == [1]
    assert row_sizes(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    sizes = row_sizes(1000)
    assert sizes[-3:] == [896, 960, 1000]
    assert len(row_sizes(512)) == 24
    assert all(later <= 4 / 3 * size for size, later in itertools.pairwise(sizes) if size > 48)


@pytest.mark.nightly
def test_few_graphs_are_kept(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "llama", "llama")
    llm = make_llm(folder)
    graphs = graphs_of(llm, max_graphs=1)
    expected = generate(llm)
    assert graphs.captured > 1
    assert "1 graphs" in repr(graphs)
    assert generate(make_llm(folder)) == expected


def test_a_model_that_cannot_be_captured_runs_eagerly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(step: Callable[[], torch.Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    folder = save_tiny_model(tmp_path / "llama", "llama")
    llm = make_llm(folder)
    graphs = graphs_of(llm, record=refuse)
    with caplog.at_level(logging.WARNING):
        tokens = generate(llm)
    assert tokens == generate(make_llm(folder))
    assert not graphs.enabled
    assert caplog.text.count("not permitted") == 1


def test_steps_that_write_a_row_twice_are_not_recorded() -> None:
    def batch(**changes: Any) -> Batch:
        return dataclasses.replace(idle_batch([1, 1], [4, 5], 2, 8), **changes)

    assert qualifies(batch())
    assert qualifies(batch(logit_rows=np.array([1], np.int64)))
    # The first row's K/V is there already; then it goes to two slots.
    assert qualifies(batch(write_slots=np.array([12]), write_rows=np.array([1])))
    assert not qualifies(batch(write_slots=np.array([3, 12, 20]), write_rows=np.array([0, 1, 1])))
    assert not qualifies(idle_batch([], [], 2, 8))


@pytest.mark.nightly
def test_all_graphs_write_their_logits_to_one_place(tmp_path: Path) -> None:
    llm = make_llm(save_tiny_model(tmp_path / "llama", "llama"))
    places = set()

    def capture(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        result = step()
        places.add(result.data_ptr())
        return lambda: result.copy_(step()), result  # type: ignore[return-value]

    graphs = graphs_of(llm, record=capture)
    generate(llm)
    assert graphs.captured > 2
    assert len(places) == 1


class FakeGraph:
    """A CUDA graph whose capture fails at its end, too, once something in it has failed."""

    broken = False

    def capture_begin(self, **options: Any) -> None:
        self.open = True

    def capture_end(self) -> None:
        self.open = False
        if FakeGraph.broken:
            raise RuntimeError("the capture is broken")

    def replay(self) -> None:
        assert not self.open


class FakeStream:
    def wait_stream(self, other: Any) -> None:
        pass


def test_a_capture_that_fails_leaves_no_stream_current(monkeypatch: pytest.MonkeyPatch) -> None:
    main = FakeStream()
    current = [main]

    @contextlib.contextmanager
    def stream(own: FakeStream) -> Iterator[None]:
        current.append(own)
        try:
            yield
        finally:
            current.pop()

    for name, value in (
        ("graph_pool_handle", object),
        ("synchronize", lambda: None),
        ("CUDAGraph", FakeGraph),
        ("Stream", FakeStream),
        ("stream", stream),
        ("current_stream", lambda: current[-1]),
        ("empty_cache", lambda: pytest.fail("memory goes back to the driver at a capture")),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    capture = CudaRecorder()

    def fail() -> torch.Tensor:
        FakeGraph.broken = True
        assert current[-1] is not main
        raise ValueError("waits for the device")

    with pytest.raises(ValueError, match="waits for the device"):
        capture(fail)
    assert current == [main]
    FakeGraph.broken = False
    replay, result = capture(lambda: torch.ones(2))
    assert current == [main]
    assert result.sum() == 2
    replay()


@pytest.mark.nightly
def test_a_thorough_warm_up_runs_every_kind_of_step_and_shows_what_it_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU, where kernels are compiled at their first launch: chunk, split decodes, copies, rows."""
    folder = save_tiny_model(tmp_path / "llama", "llama")
    llm = make_llm(folder, max_num_batched_tokens=100)
    graphs = graphs_of(llm, max_rows=max_padded_rows(100, 6))
    runner = llm.engine.runner
    steps: list[Batch] = []
    execute = ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", lambda own, batch: steps.append(batch) or execute(own, batch))
    runner.warm_up(thorough=False)
    assert [batch.num_tokens for batch in steps] == [16]
    assert graphs.captured == 0
    steps.clear()
    runner.warm_up(thorough=True)
    assert graphs.captured == 15
    assert "Recording steps" in capsys.readouterr().err
    expected = generate(make_llm(folder), 2)
    assert generate(llm, 2) == expected
