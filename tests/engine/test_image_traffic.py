# SPDX-License-Identifier: Apache-2.0
"""Images where other things go wrong: small pools, failing towers, tenants, samples and beams.

`tests/engine/fuzz_small_pools.py --images` runs thousands of such requests.
"""

from __future__ import annotations

from typing import Any

import pool_traffic
import pytest
from paged_language_model import make_engine, run_all
from pool_traffic import Outcome, SeeingParrot
from seeing_hash_model import HashImages, check_nothing_is_left, encode_layer_by_layer

from radixkv.engine.engine import Engine
from radixkv.entrypoints.beam_search import BeamSearchParams
from radixkv.entrypoints.llm import LLM
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
KEPT = 10**6


def seeing_engine(
    images: HashImages, *, max_bytes: int = KEPT, num_blocks: int = 64, **options: Any
) -> tuple[Engine, SeeingParrot]:
    model = SeeingParrot(num_blocks, 8)
    model.see(images, max_bytes)
    engine, _ = make_engine(model=model, num_blocks=num_blocks, image_processor=images, **options)
    return engine, model


def test_pictures_in_small_pools_with_towers_that_fail() -> None:
    total = Outcome()
    total.add(pool_traffic.run(4, 24, images=True, agents=True, quotas=True, check_every=4))
    total.add(pool_traffic.run(7, 16, images=True, states=True, check_every=4))
    assert total.encoded > 20
    assert min(total.broken, total.preemptions, total.aborted, total.partial_hits) > 0
    assert len(total.namespaces) == 3


@pytest.mark.injects_faults
def test_pictures_with_failing_steps_launched_ahead_over_a_tier() -> None:
    total = pool_traffic.run(1, 25, images=True, faults=True, tier=True, ahead=True, check_every=4)
    assert min(total.steps_ahead, total.encoded, total.saved_blocks) > 0


@pytest.mark.injects_faults
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_a_broken_picture_beside_one_that_is_dropped_for_room_ends_its_request_alone(
    prompt_logprobs: int | None,
) -> None:
    """Neither waiting for the one again, nor a first chunk that comes through, lets it go round for ever."""
    images = HashImages(3, True)
    images.broken.add(images.pictures[2].digest)
    engine, model = seeing_engine(images, max_bytes=1, budget=16)
    params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    names = []
    for parts in ([0, 1, 2], [0, 1]):
        prompt, shown = images.place([1, 2, 3, *(images.pictures[at] for at in parts), 4])
        names.append(engine.add_request(prompt, params, images=shown))
    outputs = run_all(engine, max_steps=500)
    bad, good = (outputs[name] for name in names)
    assert bad.error_code == "step_failed"
    assert "can't be encoded" in bad.error
    assert len(good.outputs[0].token_ids) == 4
    check_nothing_is_left(engine, 1)
    assert not model.violations


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_tenant_learns_nothing_of_anothers_pictures(is_kept: bool) -> None:
    """Steps, usage and the reason of the miss are the same whether another tenant has shown the picture."""
    seen = []
    for other_shows in (0, 1):
        images = HashImages(5, True)
        engine, _ = seeing_engine(images, max_bytes=KEPT if is_kept else 1)
        encode_layer_by_layer(engine)
        for namespace, at in (("ada", other_shows), ("bob", 1), ("bob", 1)):
            prompt, shown = images.place([1, 2, images.pictures[at], 3])
            request = Request(prompt, GREEDY, images=shown, namespace=namespace)
            engine.add(request)
            num_encoded = engine.stats().images.encoded  # type: ignore[union-attr]
            output = run_all(engine)[request.request_id]
            now_encoded = engine.stats().images.encoded  # type: ignore[union-attr]
        seen.append((output.num_cached_tokens, output.cache_report.reason, now_encoded - num_encoded))
        check_nothing_is_left(engine, KEPT if is_kept else 1)
    assert seen[0] == seen[1]


def test_background_requests_with_pictures_give_way_and_go_on() -> None:
    images = HashImages(6, True)
    engine, model = seeing_engine(images, num_blocks=24, max_num_seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected: dict[str, list[int]] = {}
    alone, _ = seeing_engine(images, num_blocks=200, enable_prefix_caching=False)
    for at in range(8):
        prompt, shown = images.place([9, images.pictures[at], 4, images.pictures[(at + 3) % 8], at + 1])
        same = alone.add_request(prompt, params, images=shown)
        answer = run_all(alone, check=False)[same].outputs[0].token_ids
        name = engine.add_request(prompt, params, images=shown, background=at < 4)
        expected[name] = list(answer)
        if at == 3:
            for _ in range(6):
                engine.step()
    outputs = run_all(engine)
    assert {name: list(outputs[name].outputs[0].token_ids) for name in expected} == expected
    assert engine.stats().num_preemptions
    check_nothing_is_left(engine, KEPT)
    assert not model.violations


def test_beams_and_samples_of_prompts_with_pictures() -> None:
    images = HashImages(2, False)
    one, two = images.pictures[:2]
    parts: list[Any] = [[1, 2, one, 3, two], [1, 2, one, 3]]
    prompts = [
        {"prompt_token_ids": each, "multi_modal_data": {"image": [one, two][: len(each) - 3]}}
        for each in ([1, 2, 0, 3, 0], [1, 2, 0, 3])
    ]

    found = []
    for num_blocks, max_bytes in ((30, 1), (300, KEPT)):
        engine, model = seeing_engine(images, num_blocks=num_blocks, max_bytes=max_bytes)
        llm = LLM.from_engine(engine)
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))  # type: ignore[arg-type]
        found.append([[beam.token_ids for beam in output.outputs] for output in outputs])
        params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True)
        found[-1] += [[each.token_ids for each in output.outputs] for output in llm.generate(prompts, params)]  # type: ignore[arg-type]
        assert outputs[0].prompt_token_ids == images.place(parts[0])[0]
        assert not model.violations
        check_nothing_is_left(engine, max_bytes)
    assert found[0] == found[1]
