# SPDX-License-Identifier: Apache-2.0
"""Families that see: answers and logprobs through the cache against transformers' own eager model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nightly import by_day
from transformers import AutoConfig

pytest.importorskip("numba")
pytest.importorskip("PIL")

from tiny_vision_models import TINY_VISION_MODELS, Parts, template_ids, words
from vision_trials import COUNT, ONE, SMALL, TWO, Trial, answers, dialogues, num_encoded, prompt

from radixkv import SamplingParams
from radixkv.errors import ConfigError
from radixkv.model.vision.families import family_of, reason_without_sight
from radixkv.model.vision.vision_model import has_image_settings


@pytest.fixture(scope="module", params=by_day(TINY_VISION_MODELS, "qwen2_5_vl", "qwen3_vl", "qwen3_5"))
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return Trial(request.param, tmp_path_factory.mktemp(request.param))


def test_cold_hot_and_next_turns_are_those_of_transformers(trial: Trial) -> None:
    with trial.llm() as llm:
        for parts in dialogues(trial):
            expected = trial.expected(parts)
            assert answers(llm, parts, parts) == [expected] * 2
            assert answers(llm, parts) == [expected]
        assert num_encoded(llm) == 3


def test_a_batch_encodes_each_image_once(trial: Trial) -> None:
    parts = dialogues(trial)
    with trial.llm() as llm:
        assert answers(llm, *parts) == [trial.expected(each) for each in parts]
        assert num_encoded(llm) == 3


def test_chunks_may_cut_images(trial: Trial) -> None:
    parts = dialogues(trial)
    with trial.llm(max_num_batched_tokens=16) as llm:
        assert answers(llm, *parts[:4]) == [trial.expected(each) for each in parts[:4]]
        assert num_encoded(llm) == 3


def test_an_image_within_a_hit_is_not_encoded_and_another_one_misses(trial: Trial) -> None:
    begin = trial.begin
    with trial.llm() as llm:
        answers(llm, [begin, ONE, words(2, 80)])
        llm.engine.runner.images.cache.clear()  # type: ignore[attr-defined]
        sampling = SamplingParams(temperature=0, max_tokens=1)
        (again,) = llm.generate([prompt([begin, ONE, words(2, 80), words(3, 8)])], sampling)
        assert again.num_cached_tokens > len(begin) + 1 + trial.processor.num_tokens(ONE.width, ONE.height)
        assert num_encoded(llm) == 1
        (other,) = llm.generate([prompt([begin, TWO, words(2, 80)])], sampling)
        ids = trial.processor.place(*template_ids([begin, TWO]))[0]
        assert other.num_cached_tokens <= next(at for at, token in enumerate(ids) if token >= 2**30)
        assert num_encoded(llm) == 2


def test_a_small_pool_preempts_and_still_answers_right(trial: Trial) -> None:
    parts = dialogues(trial)[:4]
    processor = trial.processor
    lengths = [len(processor.place(*template_ids(each))[0]) + COUNT for each in parts]
    with trial.llm(num_blocks=-(-max(lengths) // 16) + 4, max_num_seqs=3, max_model_len=None) as llm:
        assert answers(llm, *parts, *parts) == [trial.expected(each) for each in parts] * 2


def test_guesses_and_int8_and_logprobs(trial: Trial) -> None:
    parts = dialogues(trial)
    with trial.llm(speculation="auto") as llm:
        for _ in range(2):
            assert answers(llm, *parts) == [trial.expected(each) for each in parts]
        logits = trial.reference.logits(parts[3])
        named = logits.log_softmax(-1)
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=5, prompt_logprobs=2)
        (output,) = llm.generate([prompt(parts[3])], sampling)
        assert output.outputs[0].logprobs is not None
        for top in output.outputs[0].logprobs[0].top:
            assert top.logprob == pytest.approx(float(named[-1, top.token_id]), abs=1e-3)
        assert output.prompt_logprobs is not None
        ids = output.prompt_token_ids
        assert len(output.prompt_logprobs) == len(ids)
        for at, entry in enumerate(output.prompt_logprobs):
            assert (entry is None) == (at == 0 or ids[at] >= 2**30)
            if entry is not None:
                expected = float(named[at - 1, ids[at]])
                assert entry.chosen.logprob == pytest.approx(expected, abs=1e-3)


def test_int8_keys_and_values(trial: Trial) -> None:
    parts = dialogues(trial)[3]
    with trial.llm(kv_cache_dtype="int8") as llm:
        cold = answers(llm, parts)
        assert answers(llm, parts) == cold


def test_a_restart_finds_images_on_the_disk(trial: Trial, tmp_path: Path) -> None:
    parts: Parts = [trial.begin, ONE, words(2, 80), SMALL, words(4, 70)]
    tier = f"disk:{tmp_path},8m"
    with trial.llm(kv_tier=tier) as llm:
        assert answers(llm, parts) == [trial.expected(parts)]
    with trial.llm(kv_tier=tier) as llm:
        assert answers(llm, parts) == [trial.expected(parts)]
        assert num_encoded(llm) == 0


def test_deterministic_bits_do_not_depend_on_hits_chunks_or_batches(trial: Trial) -> None:
    if trial.kind in ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "llama4", "lfm3_vl"):
        with pytest.raises(ConfigError, match="deterministic"):
            trial.llm(deterministic=True)
        return
    parts = dialogues(trial)

    def bits(output: Any) -> list[tuple[int, float]]:
        return [(each.chosen.token_id, each.chosen.logprob) for each in output.outputs[0].logprobs]

    sampling = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
    with trial.llm(deterministic=True) as llm:
        alone = [bits(llm.generate([prompt(each)], sampling)[0]) for each in parts]
        assert [bits(llm.generate([prompt(each)], sampling)[0]) for each in parts] == alone
    with trial.llm(deterministic=True, max_num_batched_tokens=24) as llm:
        together = llm.generate([prompt(each) for each in parts], sampling)
        assert [bits(each) for each in together] == alone


def test_a_model_without_sight_says_why(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    sees = {"llava": "", "gemma3": "", "paligemma": "no prefix", "cohere2_vision": "torchvision"}
    for kind, why in sees.items():
        config = AutoConfig.for_model(kind)
        assert has_image_settings(config, tmp_path) is not bool(why)
        assert why in reason_without_sight(config)
    assert (
        family_of(AutoConfig.for_model("llava", vision_config={"model_type": "pixtral"})) == "llava pixtral"
    )
    assert family_of(AutoConfig.for_model("llava")) == "llava"
    assert not reason_without_sight(AutoConfig.for_model("llama"))
