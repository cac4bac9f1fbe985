# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies that depend on the length: each request has its own, whatever runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from radixkv import LLM, AsyncEngine, SamplingParams
from radixkv.cache.keys import Owner
from radixkv.scheduling.request import Request

ORIGINAL = 64
ANSWER = 6
KINDS = ("dynamic", "longrope")


def rope(kind: str, head_size: int = 16) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0}
    if kind == "dynamic":
        settings["factor"] = 4.0
    else:
        half = head_size // 2
        settings |= {"original_max_position_embeddings": ORIGINAL}
        settings |= {"short_factor": [1.1] * half, "long_factor": [4.0 + i for i in range(half)]}
    return settings


def save(folder: Path, kind: str) -> Path:
    if kind == "dynamic":
        return save_tiny_model(folder, "llama", rope_parameters=rope(kind), max_position_embeddings=ORIGINAL)
    return save_tiny_model(
        folder,
        "phi3",
        rope_parameters=rope(kind),
        max_position_embeddings=256,
        original_max_position_embeddings=ORIGINAL,
    )


class Reference:
    """transformers' own answers to a request alone, without a cache."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], count: int = ANSWER) -> list[int]:
        ids = torch.tensor([list(prompt)])
        for _ in range(count):
            length, before = ids.shape[1], 1
            while length > ORIGINAL and before < length:
                before = max(ORIGINAL, before) * 2
            # transformers keeps the frequencies of the longest sequence since the last short one.
            self._model(input_ids=torch.ones(1, 1, dtype=torch.long), use_cache=False)
            self._model(input_ids=torch.ones(1, before, dtype=torch.long), use_cache=False)
            logits = self._model(input_ids=ids, use_cache=False).logits[:, -1:]
            ids = torch.cat([ids, logits.argmax(-1)], 1)
        return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


LIMITS: dict[str, Any] = {
    "device": "cpu",
    "num_blocks": 128,
    "block_size": 8,
    "max_num_batched_tokens": 48,
    "max_model_len": 200,
    "threads": 1,
    "warm_up": "off",
}


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), **LIMITS) as llm:
        yield llm


def some_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def ask(llm: LLM, *prompts: Sequence[int], count: int = ANSWER, **options: Any) -> list[Any]:
    greedy = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    outs = llm.generate(list(prompts), greedy, progress=False, **options)
    llm.engine.check()
    return outs


def tokens_of(outs: list[Any]) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in outs]


def test_each_request_has_the_frequencies_of_its_own_length(llm: LLM, reference: Reference) -> None:
    """Short and long ones in one batch, in chunks; again on cached blocks."""
    text = some_tokens(190, 1)
    prompts = [text[:20], text[:190], text[:30], text[:100], text[:150], text[:65], some_tokens(40, 2)]
    expected = [reference(prompt) for prompt in prompts]
    assert tokens_of(ask(llm, *prompts)) == expected
    again = ask(llm, *prompts)
    assert tokens_of(again) == expected
    assert all(out.num_cached_tokens >= len(out.prompt_token_ids) // 8 * 8 - 8 for out in again)


def test_answer_that_grows_into_the_next_class(llm: LLM, reference: Reference) -> None:
    """It is computed again there; the streams of those beside it do not change."""
    prompts = [some_tokens(ORIGINAL - 3, 3), some_tokens(ORIGINAL, 4), some_tokens(2 * ORIGINAL - 2, 5)]
    outs = ask(llm, *prompts, some_tokens(20, 6))
    assert tokens_of(outs) == [reference(prompt) for prompt in [*prompts, some_tokens(20, 6)]]
    assert [out.num_preemptions for out in outs[:2]] == [1, 1]
    assert outs[3].num_preemptions == 0


def test_turn_beyond_a_length_says_why_it_missed(llm: LLM, reference: Reference) -> None:
    first = some_tokens(40, 7)
    [answer] = tokens_of(ask(llm, first, namespace=("alice", "s")))
    turn = first + answer + some_tokens(30, 8)
    assert llm.explain(turn, ("alice", "s")).reason == "length"
    [out] = ask(llm, turn, namespace=("alice", "s"))
    assert tokens_of([out]) == [reference(turn)]
    assert (out.num_cached_tokens, out.cache_report.reason) == (0, "length")
    assert "for other lengths" in out.cache_report.detail
    assert llm.explain(turn, ("bob", "s")).reason == "first_seen", "told to the owner alone"
    [out] = ask(llm, turn + some_tokens(5, 9), namespace=("alice", "s"))
    assert out.num_cached_tokens >= len(turn)


def test_samples_and_guesses_end_at_the_border(llm: LLM, reference: Reference) -> None:
    """Forks move each by itself; guesses reach no further than the class."""
    prompt = some_tokens(10, 10) * 6
    out = llm.generate(
        [prompt],
        SamplingParams(max_tokens=12, n=3, temperature=1e-4, seed=3, ignore_eos=True),
        progress=False,
    )[0]
    llm.engine.check()
    expected = reference(prompt, 12)
    assert [list(sample.token_ids) for sample in out.outputs] == [expected] * 3


def test_other_paths(folder: Path, reference: Reference) -> None:
    """Few blocks (preemption, eviction), deterministic mode, steps planned ahead: the same tokens."""
    prompts = [some_tokens(count, count) for count in (58, 90, 30, 126)]
    expected = [reference(prompt, 10) for prompt in prompts]
    for options in (
        {"num_blocks": 26, "deterministic": True, "async_scheduling": True, "speculation": "off"},
        {"num_blocks": 26, "enable_prefix_caching": False},
    ):
        with LLM(model=str(folder), **LIMITS | options) as llm:
            assert tokens_of(ask(llm, *prompts, count=10)) == expected, options


def test_the_calls_of_the_cache_find_each_length(llm: LLM) -> None:
    async def check() -> None:
        engine = AsyncEngine(llm.engine)
        prompt, owner = some_tokens(80, 11), Owner("carol")
        params = SamplingParams(max_tokens=1, temperature=0)
        await engine.generate(Request(prompt, params, tenant="carol"))
        assert await engine.cache.match(prompt, owner) == 80
        assert await engine.cache.match(prompt[:40], owner) == 0, "cached for longer prompts only"
        pin = await engine.cache.pin(prompt, owner)
        assert pin is not None
        assert await engine.cache.unpin_id(pin.id, owner)
        shared = some_tokens(16, 12)
        assert await engine.cache.publish(shared) == 16
        for tail in (prompt[:60], prompt[:20]):
            await engine.generate(Request(shared + tail, params, tenant="carol"))
            assert await engine.cache.match(shared + tail, Owner("dave")) == 16
        assert await engine.cache.unpublish(shared)
        await engine.close()

    asyncio.run(check())
