# SPDX-License-Identifier: Apache-2.0
"""Models that see on two ranks: rank 0 encodes, and answers are those of transformers on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nightly import by_day
from paged_language_model import run_all
from rank_threads import engine_on_ranks
from tiny_vision_models import TINY_VISION_MODELS, Parts, template_ids
from vision_trials import COUNT, Trial, answers, dialogues

from radixkv import SamplingParams
from radixkv.engine.engine import Engine
from radixkv.model.parallel.shared_images import share_images, take_images
from radixkv.model.vision.encoder_cache import Encoding
from radixkv.model.vision.step_images import StepImages
from radixkv_kernels import Ahead

pytest.importorskip("numba")
pytest.importorskip("PIL")


@pytest.fixture(scope="module", params=by_day(TINY_VISION_MODELS, "qwen3_vl", "gemma3"))
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Deep rows and a grid by day; tokens that see each other."""
    return Trial(request.param, tmp_path_factory.mktemp(request.param.replace(" ", "_")))


def on_ranks(trial: Trial, **options: Any) -> Engine:
    options = {"max_model_len": 512, "num_blocks": 128, "warm_up": "off", **options}
    return engine_on_ranks(trial.folder, 2, **options)


@pytest.fixture(scope="module")
def engine(trial: Trial) -> Iterator[Engine]:
    engine = on_ranks(trial)
    yield engine
    engine.close()


def tokens(engine: Engine, trial: Trial, *several: Parts) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    names = []
    for parts in several:
        ids, images = trial.processor.place(*template_ids(parts))
        names.append(engine.add_request(ids, sampling, images=images))
    outputs = run_all(engine)
    assert [outputs[name].error for name in names] == [None] * len(names)
    engine.check()
    return [list(outputs[name].outputs[0].token_ids) for name in names]


def test_cold_hot_next_turns_and_batches(trial: Trial, engine: Engine) -> None:
    several = dialogues(trial)
    for parts in several:
        assert tokens(engine, trial, parts) == tokens(engine, trial, parts) == [trial.expected(parts)]
    assert engine.runner.images is not None
    assert engine.runner.images.num_encoded == 3
    engine.cache.reset()
    assert tokens(engine, trial, *several) == [trial.expected(parts) for parts in several]


def test_chunks_cut_images_and_a_small_pool_preempts(trial: Trial) -> None:
    several = dialogues(trial)[:4]
    lengths = [len(trial.processor.place(*template_ids(each))[0]) + COUNT for each in several]
    options = {"num_blocks": -(-max(lengths) // 8) + 6, "max_model_len": None, "max_num_seqs": 3}
    engine = on_ranks(trial, max_num_batched_tokens=16, **options)
    try:
        assert tokens(engine, trial, *several, *several) == [trial.expected(each) for each in several] * 2
    finally:
        engine.close()


def test_an_image_that_cannot_be_encoded_fails_its_request_alone(
    trial: Trial, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_image = dialogues(trial)[0]
    runner = engine.runner
    assert runner.images is not None
    engine.cache.reset()
    runner.images.cache.clear()  # type: ignore[attr-defined]

    def fail(prepared: Any) -> Encoding:
        raise RuntimeError("no tower")

    with monkeypatch.context() as patched:
        patched.setattr(runner.images.vision, "encode", fail)  # type: ignore[attr-defined]
        ids, images = trial.processor.place(*template_ids(with_image))
        name = engine.add_request(ids, SamplingParams(max_tokens=2), images=images)
        assert "no tower" in str(run_all(engine)[name].error)
    assert tokens(engine, trial, with_image) == [trial.expected(with_image)]


class _OtherEnd:
    """Hands what rank 0 has on, as a broadcast does."""

    device = torch.device("cpu")

    def __init__(self, sent: list[torch.Tensor]) -> None:
        self._sent = sent

    def take_first(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self._sent.pop(0))


@pytest.mark.parametrize("num_deep", [0, 2])
@pytest.mark.parametrize("has_rope", [False, True])
@pytest.mark.parametrize("in_windows_only", [None, False, True])
def test_images_arrive_as_they_were_sent(num_deep: int, has_rope: bool, in_windows_only: bool | None) -> None:
    generator = torch.Generator().manual_seed(0)
    encodings = [
        (Encoding(numbers[0], tuple(numbers[1:])), 1, 3)
        for numbers in torch.randn(2, 1 + num_deep, 4, 6, generator=generator)
    ]
    shown = StepImages(rows=[np.array([1, 2]), np.array([5, 6])], encodings=encodings)
    shown.rope = np.arange(21).reshape(3, 7) if has_rope else None
    if in_windows_only is not None:
        shown.ahead = Ahead(np.arange(7, dtype=np.int32), in_windows_only)
    words, encoding = share_images(shown, torch.float32)
    assert encoding is not None
    other: Any = _OtherEnd([encoding.rows, *encoding.deep])
    found = take_images(words, 7, torch.float32, other)
    assert found is not None
    assert np.concatenate(found.rows).tolist() == [1, 2, 5, 6]
    mine, theirs = found.joined(torch.float32), shown.joined(torch.float32)
    assert torch.equal(mine.rows, theirs.rows)
    assert all(map(torch.equal, mine.deep, theirs.deep))
    assert len(mine.deep) == num_deep
    assert (found.rope is None) == (shown.rope is None)
    if found.rope is not None and shown.rope is not None:
        assert np.array_equal(found.rope, shown.rope)
    assert (found.ahead is None) == (shown.ahead is None)
    if found.ahead is not None and shown.ahead is not None:
        assert found.ahead.counts.dtype == np.int32
        assert np.array_equal(found.ahead.counts, shown.ahead.counts)
        assert found.ahead.in_windows_only == shown.ahead.in_windows_only


def test_a_step_behind_images_and_one_without_any() -> None:
    other: Any = _OtherEnd([])
    words, encoding = share_images(StepImages(rope=np.arange(6).reshape(3, 2)), torch.float32)
    assert encoding is None
    found = take_images(words, 2, torch.float32, other)
    assert found is not None
    assert found.is_text
    assert share_images(None, torch.float32)[0].size == 0
    assert take_images(np.zeros(0, np.int64), 2, torch.float32, other) is None


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma4", "qwen3_5"])
@pytest.mark.parametrize(
    "options",
    [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}, {"speculation": "auto"}],
    ids=str,
)
def test_other_types_and_guesses_answer_as_one_rank_does(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    trial = Trial(kind, tmp_path)
    options = {"max_model_len": 512, "num_blocks": 128, "warm_up": "off", **options}
    alone, together = (engine_on_ranks(trial.folder, ranks, **options) for ranks in (1, 2))
    try:
        for parts in dialogues(trial)[:4]:
            expected = tokens(alone, trial, parts)
            assert [tokens(together, trial, parts) for _ in range(2)] == [expected] * 2
    finally:
        together.close()


@pytest.mark.nightly
def test_processes_answer_as_one_rank_does(tmp_path: Path) -> None:
    trial = Trial("qwen2_5_vl", tmp_path)
    with trial.llm(tensor_parallel=2, threads=1) as llm:
        for parts in dialogues(trial):
            assert answers(llm, parts, parts) == [trial.expected(parts)] * 2
