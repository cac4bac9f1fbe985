# SPDX-License-Identifier: Apache-2.0
"""Images whose tokens see each other (Gemma 3): no chunk parts them, and a hit may end inside of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("numba")
pytest.importorskip("PIL")

from tiny_vision_models import Parts, template_ids, words
from vision_trials import COUNT, ONE, SMALL, TWO, Trial, answers, num_encoded, prompt

from radixkv import SamplingParams
from radixkv.images.placed_image import PlacedImage, chunk_end


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return Trial("gemma3", tmp_path_factory.mktemp("gemma3"))


def place_of(trial: Trial, parts: Parts) -> tuple[int, int]:
    """Return the first position and the end of the tokens of a prompt's first image."""
    image = trial.processor.place(*template_ids(parts))[1][0]
    ((first, end),) = image.together
    return image.start + first, image.start + end


def test_a_chunk_ends_before_or_behind_tokens_that_see_each_other() -> None:
    one = PlacedImage(ONE, b"", start=10, length=8, between=(0, 7), together=((1, 7),))
    two = PlacedImage(TWO, b"", start=20, length=9, between=(4,), together=((0, 4), (5, 9)))
    causal = PlacedImage(TWO, b"", start=40, length=9)
    for start, end, expected in [
        *((0, 9, 9), (0, 10, 10), (0, 11, 11), (0, 12, 11), (0, 16, 11), (0, 17, 17), (0, 18, 18)),
        *((11, 12, 17), (11, 17, 17), (13, 15, 17), (13, 18, 18)),
        *((0, 21, 20), (20, 21, 24), (20, 26, 25), (25, 26, 29), (22, 24, 24), (22, 25, 25), (0, 45, 45)),
    ]:
        assert chunk_end([one, two, causal], start, end) == expected, (start, end)


def test_a_budget_smaller_than_an_image(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside decodes: each step has at most an image more than its budget, and every request comes on."""
    parts: list[Parts] = [
        [words(9, 5)],
        [trial.begin, ONE, words(2, 9)],
        [ONE, SMALL, words(5, 3), ONE],
        [words(8, 40), TWO, ONE, words(3, 3)],
    ]
    with trial.llm(max_num_batched_tokens=8, max_num_seqs=4) as llm:
        runner: Any = llm.engine.runner
        sizes: list[int] = []
        execute = runner.execute
        monkeypatch.setattr(
            runner, "execute", lambda batch: (sizes.append(batch.num_tokens), execute(batch))[1]
        )
        assert answers(llm, *parts) == [trial.expected(each) for each in parts]
        assert num_encoded(llm) == 3
    assert 36 <= max(sizes) < 8 + 36


def test_a_hit_may_end_inside_of_an_image(trial: Trial) -> None:
    """What is cached of it was computed with all of it: the rest is computed in one step."""
    parts: Parts = [trial.begin, ONE, words(2, 9)]
    first, end = place_of(trial, parts)
    expected = trial.expected(parts)
    with trial.llm(max_num_batched_tokens=16) as llm:
        assert answers(llm, parts) == [expected]
        ids = trial.processor.place(*template_ids(parts))[0]
        while llm.engine.cache.match(ids).num_tokens >= end:
            assert llm.engine.cache.evict(1)
        assert first < llm.engine.cache.match(ids).num_tokens < end
        (output,) = llm.generate(
            [prompt(parts)], SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
        )
        assert list(output.outputs[0].token_ids) == expected
        assert first < output.num_cached_tokens < end


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("gemma4", marks=pytest.mark.nightly)])
def test_windows_that_are_freed(trial: Trial, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Checkpoints inside of an image, chunks, hits, other images, and a small pool of windows."""
    if kind != "gemma3":
        trial = Trial(kind, tmp_path_factory.mktemp(kind))
    begin = words(6, 50)
    parts: list[Parts] = [
        [begin, ONE, words(2, 40)],
        [begin, ONE, words(2, 40), words(3, 12), SMALL, words(4, 5)],
        [begin, TWO, words(2, 9)],
        [ONE, words(2, 9), ONE, TWO],
    ]
    options: dict[str, Any] = {"window_memory": 1 << 22, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    with trial.llm(**options) as llm:
        assert llm.engine.runner.windows is not None
        for each in parts:
            assert answers(llm, each) == [trial.expected(each)]
            assert answers(llm, each) == [trial.expected(each)]
        llm.engine.cache.reset()
        assert answers(llm, *parts, *parts) == [trial.expected(each) for each in parts] * 2


def test_an_image_is_seen_whole(trial: Trial) -> None:
    """Logits are those of transformers' mask for images, and far from those of a causal one."""
    parts: Parts = [trial.begin, ONE, words(2, 9)]
    seen = trial.reference.logits(parts)[-1].log_softmax(-1)
    causal = trial.reference.logits(parts, is_causal=True)[-1].log_softmax(-1)
    with trial.llm() as llm:
        (output,) = llm.generate([prompt(parts)], SamplingParams(temperature=0, max_tokens=1, logprobs=5))
        assert output.outputs[0].logprobs is not None
        for top in output.outputs[0].logprobs[0].top:
            assert top.logprob == pytest.approx(float(seen[top.token_id]), abs=1e-3)
    assert float((seen - causal).abs().max()) > 0.05
