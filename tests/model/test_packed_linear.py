# SPDX-License-Identifier: Apache-2.0
"""Packed weights: chosen by a rule, so that two starts compute the same, with any number of threads."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nightly import by_day
from test_fused_layers import DenseStep, tiny
from tiny_models import save_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

pytest.importorskip("numba")

from radixkv import LLM, SamplingParams
from radixkv.model.cpu_layers.fused_layers import FusedLayer
from radixkv.model.cpu_layers.packed_linear import PackedLinear
from radixkv.model.cpu_layers.rewrite import has_vector_kernels, pack_layers
from radixkv.model.step_context import call_model

needs_vectors = pytest.mark.skipif(not has_vector_kernels(), reason="no fused multiply-adds here")


@needs_vectors
@pytest.mark.parametrize("slow_half", [0, 1])
def test_no_timing_decides(slow_half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of two ways a busy machine makes look slow, the same layers are packed."""
    calls = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(calls) // 2 % 2 == slow_half))
    model = tiny("qwen3", head_dim=8)
    assert pack_layers(model)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    llama = tiny("llama")
    assert pack_layers(llama)
    assert sum(isinstance(module, FusedLayer) for module in llama.modules()) == 2


def test_other_dtypes_stay_as_they_are() -> None:
    model = tiny("llama").to(torch.float64)
    assert not pack_layers(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@needs_vectors
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)])
def test_narrow_models_keep_their_weights_and_compute_in_float32(dtype: torch.dtype) -> None:
    model = tiny("llama").to(dtype)
    exact = copy.deepcopy(model).float()
    assert pack_layers(model)
    assert sum(isinstance(module, FusedLayer) for module in model.modules()) == 2
    assert model.model.embed_tokens.weight.dtype == dtype
    ids, positions = torch.arange(5, 45)[None], torch.arange(40)[None]
    with torch.inference_mode():
        expected = exact(input_ids=ids, position_ids=positions, use_cache=False).logits
        got = call_model(model, ids[0], positions[0], None, DenseStep())[None]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@needs_vectors
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "bfloat16"),
        pytest.param("qwen3", "float16", marks=pytest.mark.nightly),
        pytest.param("gemma2", "bfloat16", marks=pytest.mark.nightly),
        pytest.param("gpt-neox", "float16", marks=pytest.mark.nightly),
    ],
)
def test_narrow_models_are_closer_to_the_exact_result_than_transformers(
    tmp_path: Path, family: str, dtype: str
) -> None:
    """Hot and cold, alone and in company, with K/V of the same dtype."""
    folder = save_tiny_model(tmp_path / family, family)
    native = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    ids = list(range(5, 65))
    with torch.inference_mode():
        rounded = native(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
        exact = native.float()(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    llm = LLM(str(folder), device="cpu", num_blocks=64, max_model_len=256, dtype=dtype, deterministic=True)
    assert llm.engine.runner.dtype_name == dtype
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    outputs = llm.generate([ids, ids[:30], list(range(90, 170))], params)
    got = torch.tensor([entry.chosen.logprob for entry in outputs[0].prompt_logprobs[1:]])
    rows, columns = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
    error = float((got - exact[rows, columns]).abs().mean())
    assert error < 0.75 * float((rounded - exact)[rows, columns].abs().mean())
    alone = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    hot = llm.generate([ids], alone)[0]
    assert hot.num_cached_tokens == len(ids) - 1
    assert hot.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert hot.outputs[0].logprobs == outputs[0].outputs[0].logprobs


@needs_vectors
def test_models_of_fused_experts_are_left_in_their_dtype(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "moe", "mixtral")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert not pack_layers(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.fixture
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_vectors
@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize(
    ("family", "quantization"),
    by_day([("llama", None), ("llama", "int8"), ("gemma2", None)], ("llama", None)),
)
def test_threads_change_no_bit(tmp_path: Path, family: str, quantization: str | None) -> None:
    """A busy machine makes the engine compute with fewer threads: slower, and the same."""
    folder = save_tiny_model(tmp_path / family, family, hidden_size=256, intermediate_size=512)
    options = {"quantization": quantization, "enable_prefix_caching": False}
    llm = LLM(str(folder), device="cpu", num_blocks=64, max_model_len=256, **options)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=6, ignore_eos=True, logprobs=3)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs = llm.generate([list(range(3, 180)), [7, 8, 9]], params)
        found.append([(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs])
    assert found[0] == found[1] == found[2]
