# SPDX-License-Identifier: Apache-2.0
"""Architectures with mixed heads, latents, chunks or attention of their own, against transformers.

Greedy tokens cold, hot, beside others, and after the cache was too small for all, are those of transformers'
eager attention without any cache. RADIXKV_ALL_SHAPES=1 tests those that differ little from others, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import by_day
from tiny_configs import SHAPES, VOCAB_SIZE, tiny_config
from tiny_models import save_random_model, save_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from radixkv import LLM, SamplingParams
from radixkv.errors import ConfigError, InvalidRequestError, ModelLoadError
from radixkv.model.runner import ModelRunner

LIKE_OTHERS = (
    "gemma3n",
    "laguna",
    "deepseek-v2",
    "glm-dsa",
    "glm4-lite",
    "youtu",
    "axk1",
    "nemotron",
    "phimoe",
    "hunyuan",
    "hunyuan-moe",
    "ministral3",
    "gemma4-moe",
    "minicpm3",
    "mistral4",
    "gptj",
    "stablelm",
    "gemma4-shared",
    "falcon-alibi",
)
NAMES = [name for name in SHAPES if name not in LIKE_OTHERS or "RADIXKV_ALL_SHAPES" in os.environ]
#: Numbers that a token takes in all layers: window and full layers, shared ones once; latents as they are.
NUMBERS = {
    "gemma4": 2 * 2 * (16 + 16) + 2 * (32 + 32),
    "gemma4-shared": 2 * (16 + 16) + 2 * (32 + 32),
    "mimo": (2 * 2 + 2 * 4) * (24 + 16),
    "deepseek-v3": 3 * (32 + 8),
    "glm4-lite": 3 * (512 + 64),
    "longcat": 2 * (32 + 8),
    "odd-heads": 4 * 2 * (16 + 16),
}
ANSWER = 6


def make_llm(folder: Path, **options: Any) -> LLM:
    limits = {"num_blocks": 24, "block_size": 8, "max_num_batched_tokens": 24, "max_model_len": 64}
    return LLM(model=str(folder), device="cpu", **limits | options)


def generate(llm: LLM, *prompts: Sequence[int]) -> list[list[int]]:
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(list(prompts), greedy, progress=False)]


def some_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


@torch.inference_mode()
def expected(model: Any, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(ANSWER):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1:]
        ids = torch.cat([ids, logits.argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def reference(folder: Path) -> Any:
    kind = AutoModelForImageTextToText if "mistral4" in str(folder) else AutoModelForCausalLM
    attention = "sdpa" if "falcon-alibi" in str(folder) else "eager"  # eager adds the biases twice
    return kind.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", by_day(NAMES, "gemma4", "deepseek-v3", "bloom"))
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(tmp_path / name, name)
    first, other = some_tokens(37, 1), some_tokens(21, 2)
    branch = first[:26] + other[:6]
    prompts = [first, other, branch]
    model = reference(folder)
    wanted = [expected(model, prompt) for prompt in prompts]
    llm = make_llm(folder)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    if name in NUMBERS:
        assert runner.spec.bytes_per_slot == 4 * NUMBERS[name]
        stored = sum(tensor.nbytes for tensor in runner.kv.tensors())
        assert stored == 24 * 8 * 4 * NUMBERS[name]
    assert [generate(llm, prompt)[0] for prompt in prompts] == wanted  # the third is hot
    assert generate(llm, *prompts) == wanted
    assert llm.engine.cache.stats.hit_tokens > 0
    for seed in range(3, 8):  # more than the pool holds
        generate(llm, some_tokens(50, seed))
    assert llm.engine.cache.stats.evicted_blocks > 0
    assert generate(llm, *prompts) == wanted
    llm.engine.cache.check()


def test_text_half_of_a_model_that_sees_images(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "gemma4", text_config=tiny_config("gemma4").to_dict(), vision_config=vision, audio_config=None
    )
    folder = save_random_model(tmp_path / "gemma4", config)
    prompt = some_tokens(30, 1)
    llm = make_llm(folder)
    wanted = [expected(reference(folder), prompt)]
    assert generate(llm, prompt) == wanted
    assert generate(llm, prompt) == wanted
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidRequestError, match="takes text only, and no part of the type 'image_url'"):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}])
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.spec.bytes_per_slot == 4 * NUMBERS["gemma4"]


@pytest.mark.nightly
def test_narrow_caches_hold_latents(tmp_path: Path) -> None:
    llm = make_llm(save_tiny_model(tmp_path / "model", "deepseek-v3"), kv_cache_dtype="int8")
    prompt = some_tokens(30, 1)
    cold = generate(llm, prompt)
    assert generate(llm, prompt) == cold
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.spec.bytes_per_slot == NUMBERS["deepseek-v3"] + 3 * 4  # a byte each, and a scale a layer


def test_narrow_caches_of_linear_biases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"int8 would round away the positions .*ALiBi.*auto"):
        make_llm(save_tiny_model(tmp_path / "model", "bloom"), kv_cache_dtype="int8")


@pytest.mark.nightly
def test_deterministic_latents_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    llm = make_llm(save_tiny_model(tmp_path / "model", "minicpm3"), deterministic=True)
    params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True, logprobs=2)

    def logprobs(*prompts: Sequence[int]) -> list[Any]:
        return [out.outputs[0].logprobs for out in llm.generate(list(prompts), params, progress=False)]

    prompt, others = some_tokens(30, 1), [some_tokens(n, n) for n in (5, 17)]
    alone = logprobs(prompt)[0]
    assert logprobs(others[0], prompt, others[1])[1] == alone


@pytest.mark.nightly
def test_sparse_attention_is_served_where_it_is_dense(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "deepseek-v32", index_topk=48)
    with pytest.raises(ModelLoadError, match=r"attends to 48 chosen tokens .* --max-model-len 48"):
        make_llm(folder)
    prompt = some_tokens(30, 1)
    assert generate(make_llm(folder, max_model_len=48), prompt) == [expected(reference(folder), prompt)]


def test_chunks_need_whole_blocks(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama4", attention_chunk_size=20)
    with pytest.raises(ConfigError, match="chunks of 20 tokens needs a block size that divides them, not 8"):
        make_llm(folder)


@pytest.mark.nightly
@pytest.mark.usefixtures("trapped_folder")
def test_processes_of_layers_of_several_shapes_that_free_windows(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "gemma4", num_global_key_value_heads=2)
    prompts = [some_tokens(37, 1), some_tokens(21, 2)]
    model = reference(folder)
    wanted = [expected(model, prompt) for prompt in prompts]
    llm = make_llm(folder, tensor_parallel=2, threads=1, window_memory=1 << 20)
    assert llm.engine.runner.windows is not None
    assert generate(llm, *prompts) == wanted
    assert generate(llm, *prompts) == wanted
    llm.engine.check()
    llm.close()


@pytest.mark.nightly
def test_ranks_need_a_head_in_every_layer(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"2 is more than the 1 KV heads of .* in every layer; use at most 1"
    ):
        make_llm(save_tiny_model(tmp_path / "gemma", "gemma4"), tensor_parallel=2)
