# SPDX-License-Identifier: Apache-2.0
"""Models that free the K/V of windows: greedy tokens are those of transformers' eager attention, whatever was
resumed, replayed, evicted or preempted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import by_day
from tiny_adapters import greedy, peft_model, save_adapter
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from radixkv import LLM, SamplingParams
from radixkv.cache.states.window_pool import WindowSpec
from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.beam_search import BeamSearchParams
from radixkv.errors import ConfigError
from radixkv.model.attention.attention_shape import AttentionShape
from radixkv.model.cuda_graphs import StepGraphs, row_sizes
from radixkv.model.memory.kv_memory import ModelShape, size_kv_cache
from radixkv.model.memory.window_memory import bytes_of_request
from radixkv.model.runner import ModelRunner
from radixkv_kernels import KVGroup

ANSWER = 4
WINDOW = 20


def make_llm(folder: Path, **options: Any) -> LLM:
    limits: dict[str, Any] = {
        "num_blocks": 96,
        "block_size": 8,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 4,
        "threads": 1,
        "warm_up": "off",
    }
    limits |= {"max_model_len": 256, "window_memory": 1 << 22, "speculation": "off"}
    return LLM(model=str(folder), device="cpu", **limits | options)


def ask(llm: LLM, *prompts: Sequence[int]) -> tuple[list[list[int]], int]:
    """The answers, and how many prompt tokens were cached."""
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    outs = llm.generate(list(prompts), greedy, progress=False)
    llm.engine.check()
    return [list(out.outputs[0].token_ids) for out in outs], sum(out.num_cached_tokens for out in outs)


def some_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


class Reference:
    """transformers' own answers, without a cache."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int]) -> list[int]:
        if tuple(prompt) not in self._known:
            ids = torch.tensor([list(prompt)])
            for _ in range(ANSWER):
                logits = self._model(input_ids=ids, use_cache=False).logits[:, -1:]
                ids = torch.cat([ids, logits.argmax(-1)], 1)
            self._known[tuple(prompt)] = ids[0, len(prompt) :].tolist()
        return self._known[tuple(prompt)]


@pytest.fixture(
    scope="module", params=by_day(["gemma3", "lfm3", "gpt-oss", "gemma4-shared"], "gemma3", "lfm3")
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("model") / request.param
    save_tiny_model(folder, request.param, sliding_window=WINDOW)
    return folder, Reference(folder)


def test_answers_are_those_of_transformers(model: tuple[Path, Reference]) -> None:
    folder, wanted = model
    first, other = some_tokens(150, 1), some_tokens(70, 2)
    llm = make_llm(folder)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.windows is not None
    assert runner.windows.spec.tokens == WINDOW
    turn = first + wanted(first) + some_tokens(40, 3)
    branch = first[:140] + other[:20]
    assert ask(llm, first) == ([wanted(first)], 0)
    assert ask(llm, other) == ([wanted(other)], 0)
    assert ask(llm, first) == ([wanted(first)], 128)
    assert ask(llm, turn) == ([wanted(turn)], 128)
    assert ask(llm, branch) == ([wanted(branch)], 128)
    texts = [first, other, branch, turn]
    assert ask(llm, *texts)[0] == [wanted(text) for text in texts]
    for seed in range(4, 9):  # more than the pools hold
        ask(llm, some_tokens(200, seed))
    assert ask(llm, *texts)[0] == [wanted(text) for text in texts]
    stats = llm.engine.cache.stats
    assert stats.evicted_blocks > 0
    llm.engine.cache.reset()
    assert llm.engine.cache.stats.free_window_blocks == stats.window_blocks > 0


@pytest.mark.parametrize("model", by_day(["gemma3", "gpt-oss", "gemma4-shared"], "gemma3"), indirect=True)
def test_steps_are_replayed(model: tuple[Path, Reference]) -> None:
    """As on a GPU, by a capture that runs the step again: cold prompts, hits, decodes side by side."""
    folder, wanted = model
    llm = make_llm(folder, warm_up="quick")  # which clears the memory that recorded steps read
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)

    def run_again(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
        result = step().clone()
        return lambda: result.copy_(step()), result

    runner.graphs = graphs = StepGraphs(
        runner.model, runner.kv, runner.backend, max_rows=48, record=run_again, windows=runner.windows
    )
    assert list(graphs.capture())[-1] == 1.0
    texts = [some_tokens(150, 1), some_tokens(150, 1)[:100] + [5, 6] * 20, some_tokens(90, 6)]
    before = llm.engine.stats().steps
    for _ in range(2):
        assert ask(llm, *texts)[0] == [wanted(text) for text in texts]
    assert graphs.replayed == llm.engine.stats().steps - before
    assert graphs.captured == len(row_sizes(48))


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 50, "max_num_seqs": 3},
        pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.nightly),
        pytest.param({"speculation": "auto"}, marks=pytest.mark.nightly),
        {"enable_prefix_caching": False, "warm_up": "quick"},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_settings_go_together(model: tuple[Path, Reference], options: dict[str, Any]) -> None:
    folder, wanted = model
    llm = make_llm(folder, **options)
    texts = [some_tokens(150, 1), some_tokens(150, 1)[:100] + [5, 6] * 20, some_tokens(150, 6)]
    for _ in range(2):
        answers, _ = ask(llm, *texts)
        if "kv_cache_dtype" not in options:
            assert answers == [wanted(text) for text in texts]


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
@pytest.mark.nightly
def test_adapters_have_windows_of_their_own(model: tuple[Path, Reference], tmp_path: Path) -> None:
    folder, wanted = model
    adapted = {name: peft_model(folder, seed, r=4) for seed, name in enumerate("ab")}
    paths = {name: save_adapter(each, tmp_path / name) for name, each in adapted.items()}
    prompt = some_tokens(150, 1)
    right = {name: greedy(each, prompt, ANSWER) for name, each in adapted.items()} | {"": wanted(prompt)}
    assert len({tuple(answer) for answer in right.values()}) == 3
    params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    llm = make_llm(folder, lora=tuple(f"{name}={path}" for name, path in paths.items()))
    for cached in (0, 128):
        ids = {llm.engine.add_request(prompt, params, lora=name): name for name in ("b", "", "a")}
        outs = []
        while len(outs) < len(ids):
            outs += llm.engine.step().finished
        llm.engine.check()
        for out in outs:
            assert list(out.outputs[0].token_ids) == right[ids[out.request_id]]
            assert out.num_cached_tokens == cached


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
@pytest.mark.nightly
def test_samples_and_beams_are_those_of_whole_windows(model: tuple[Path, Reference]) -> None:
    prompts = [some_tokens(125, 1), some_tokens(60, 2)]
    found = []
    for memory in (1 << 22, 0):
        llm = make_llm(model[0], window_memory=memory, num_blocks=200)
        beams = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, n=3, ignore_eos=True)
        samples = llm.generate(prompts, params, progress=False)
        llm.engine.check()
        found.append([[list(one.token_ids) for one in out.outputs] for out in (*beams, *samples)])
    assert found[0] == found[1]


def test_windows_come_back_from_a_tier(model: tuple[Path, Reference], tmp_path: Path) -> None:
    folder, wanted = model
    prompt, short = some_tokens(150, 1), some_tokens(70, 2)
    options = {"kv_tier": f"disk:{tmp_path},max=1GiB,long=0"}
    with make_llm(folder, **options) as llm:
        ask(llm, prompt, short)
    with make_llm(folder, **options) as llm:
        for text, cached in ((prompt, 128), (short, 64), (prompt[:140] + short, 128)):
            assert ask(llm, text) == ([wanted(text)], cached)
        counts = llm.engine.stats().transfers
        assert counts is not None
        assert counts.failed_loads == 0


def test_deterministic_mode_gives_the_same_bits(tmp_path: Path) -> None:
    llm = make_llm(save_tiny_model(tmp_path / "model", "gemma3", sliding_window=WINDOW), deterministic=True)
    prompt = some_tokens(150, 1)
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=5, ignore_eos=True)

    def bits(*prompts: list[int]) -> tuple[str, int]:
        out = llm.generate(list(prompts), params, progress=False)[0]
        return repr(out.outputs[0].logprobs), out.num_cached_tokens

    cold, found = bits(prompt)
    assert not found
    assert bits(prompt, some_tokens(90, 2)) == (cold, 128)


#: Layers with a window and without: (number, KV heads, head size); the window; most share of the bytes.
LARGE = {
    "Gemma 3 27B": ((52, 16, 128), (10, 16, 128), 1024, 0.30),
    "GPT-OSS 20B": ((12, 8, 64), (12, 8, 64), 128, 0.55),
    "Gemma 4 26B-A4B": ((25, 8, 256), (5, 2, 512), 1024, 0.25),
    "LFM3 1.7B": ((5, 4, 128), (6, 4, 128), 256, 0.6),
}


@pytest.mark.parametrize("name", LARGE)
def test_long_requests_take_a_part_of_the_memory(name: str) -> None:
    local, full, window, most = LARGE[name]
    groups, first = [], 0
    for count, heads, size in (local, full):
        groups.append(KVGroup(tuple(range(first, first + count)), 2 * heads, heads, size, size))
        first += count
    attention = AttentionShape(tuple(groups), {}, windows=dict.fromkeys(range(local[0]), window))
    shape = ModelShape(attention, torch.bfloat16, torch.device("cpu"), 131_072)
    config = EngineConfig("any", kv_cache_memory=64 << 30, max_model_len=32_768)
    layout, _, _ = size_kv_cache(config, shape, step_tokens=512)
    assert layout.window == window
    spec = WindowSpec(window, layout.num_window_blocks, 512, layout.bytes_per_window_block)
    taken, whole = bytes_of_request(layout, spec, 32_768)
    assert whole == 32_768 * 4 * (local[0] * local[1] * local[2] + full[0] * full[1] * full[2])
    assert taken <= most * whole
    assert spec.max_requests(16) >= 16
    stored = layout.num_blocks * layout.bytes_per_block
    assert stored + layout.num_window_blocks * spec.block_bytes <= 64 << 30
    assert stored >= 2 / 3 * (64 << 30) - layout.bytes_per_block
    assert size_kv_cache(replace(config, window_memory=0), shape)[0].window is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"block_size": 128}, "--block-size that divides 64"),
        ({"window_memory": 1000}, "one request needs"),
    ],
)
def test_what_frees_no_windows(options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture) -> None:
    groups = (KVGroup((0, 1), 4, 2, 16, 16),)
    attention = AttentionShape(groups, {}, windows={0: 512})
    shape = ModelShape(attention, torch.float32, torch.device("cpu"), 131_072)
    config = EngineConfig("any", **{"kv_cache_memory": 1 << 30, "window_memory": 1 << 28} | options)
    with pytest.raises(ConfigError, match=why):
        size_kv_cache(config, shape, step_tokens=512)
    if "window_memory" not in options:
        caplog.set_level(logging.INFO, logger="radixkv")
        layout, _, _ = size_kv_cache(replace(config, window_memory=None), shape, step_tokens=512)
        assert layout.window is None
        assert why in caplog.text
