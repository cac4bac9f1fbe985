# SPDX-License-Identifier: Apache-2.0
"""Int8 weights and quantised K/V in the engine: close to float32, and the same cold, hot and in company."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_fused_layers import DenseStep, tiny
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from radixkv import LLM, SamplingParams
from radixkv.errors import ConfigError
from radixkv.model.cpu_layers.quantized_linear import QuantizedLinear, quantize_weight
from radixkv.model.cpu_layers.rewrite import has_int8_products, quantize_layers
from radixkv.model.runner import ModelRunner
from radixkv.model.step_context import call_model
from radixkv_kernels import PagedKV

NARROW = ["int8", "fp8_e4m3", "fp8_e5m2"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
needs_int8_products = pytest.mark.skipif(not has_int8_products(), reason="neither VNNI nor AVX2 here")


def row_kernels() -> list[Any]:
    """What `QuantizedLinear` can work with here: torch's operators, and int8 dot products."""
    if not has_int8_products():
        return [None]
    from radixkv_kernels.cpu.linear.int8_rows import Int8Rows

    return [None, Int8Rows()]


@pytest.mark.parametrize("rows", row_kernels(), ids=lambda rows: "torch" if rows is None else "dot products")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 70), (3, 70), (40, 70)])
def test_linear_layer_is_within_the_error_of_rounding(rows: Any, bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(70, 33, bias=bias)
    inputs = torch.randn(shape)
    out = QuantizedLinear(linear, rows)(inputs)
    exact = linear.double()(inputs.double())
    assert out.shape == exact.shape
    assert out.dtype == torch.float32
    # Half a step of an input for each weight, and half a step of a weight for each input; 70 of them.
    steps = inputs.double().abs().amax(-1, keepdim=True) / 127
    weight_steps = linear.weight.abs().amax(1) / 127
    sizes = inputs.double().abs().sum(-1, keepdim=True)
    limit = 0.51 * (steps * linear.weight.abs().sum(1) + sizes * weight_steps)
    limit += 70 * 0.26 * steps * weight_steps
    assert torch.all((out - exact).abs() <= limit)


def test_weights_are_within_half_a_step_and_zero_rows_stay_zero() -> None:
    weight = torch.randn(5, 9)
    weight[2] = 0
    quantized, scales = quantize_weight(weight)
    assert torch.all((quantized * scales[:, None] - weight).abs() <= 0.501 * scales[:, None])
    assert torch.all(quantized[2] == 0)


@needs_int8_products
@pytest.mark.parametrize("num_tokens", [1, 7, 130])
@pytest.mark.parametrize(
    "options", [{}, {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 1, "head_dim": 24}]
)
def test_fused_layers_compute_what_the_single_ones_do(num_tokens: int, options: dict[str, Any]) -> None:
    from radixkv.model.cpu_layers.int8_layers import Int8Layer
    from radixkv_kernels.cpu.linear.int8_rows import Int8Rows

    model = tiny("llama", hidden_size=96, **options)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 97, num_tokens))[None]
    positions = torch.arange(num_tokens)[None]
    single, fused, rows = copy.deepcopy(model), copy.deepcopy(model), Int8Rows()
    for parent in list(single.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, QuantizedLinear(child, rows))
    quantize_layers(fused)
    assert sum(isinstance(module, Int8Layer) for module in fused.modules()) == 2
    assert not any(isinstance(module, nn.Linear) for module in fused.modules())
    with torch.inference_mode():
        exact = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        expected = single(input_ids=ids, position_ids=positions, use_cache=False).logits
        got = call_model(fused, ids[0], positions[0], None, DenseStep())[None]
    size = float(exact.square().mean().sqrt())
    # The two round the same numbers; a last-bit difference before rounding may move single values by a step.
    assert float((got - expected).square().mean().sqrt()) < 0.01 * size
    assert float((got - exact).square().mean().sqrt()) < 0.1 * size


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        quantize_layers(nn.Linear(4, 4).to(torch.bfloat16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("quantized") / "llama", "llama")


def make_llm(folder: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {"num_blocks": 64, "max_model_len": 256, "block_size": 16, **options}
    return LLM(str(folder), device="cpu", **settings)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE - 20, length).tolist()


def outcome(output: Any) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """An answer's tokens, and the likeliest tokens of each step with their exact log probabilities."""
    own = output.outputs[0]
    tops = [[(t.token_id, t.logprob) for t in entry.top] for entry in own.logprobs]
    return own.token_ids, tops


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate(prompts, params, progress=False)


def assert_nothing_held(llm: LLM) -> None:
    llm.engine.check()
    assert llm.engine.cache.stats.held_blocks == 0


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype"),
    [
        pytest.param("int8", "auto", marks=pytest.mark.nightly),
        ("int8", "int8"),
        ("fp8", "auto"),
        pytest.param(None, "int8", marks=pytest.mark.nightly),
        pytest.param(None, "fp8_e4m3", marks=pytest.mark.nightly),
        pytest.param(None, "fp8_e5m2", marks=pytest.mark.nightly),
    ],
)
def test_cold_hot_chunked_and_in_company_are_the_same_to_the_bit(
    folder: Path, quantization: str | None, kv_cache_dtype: str
) -> None:
    options = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype, "deterministic": True}
    llm = make_llm(folder, **options)
    # The second prompt ends inside a block of the first; the third leaves it inside a block.
    prompts = [prompt(1, 75), prompt(1, 75)[:43], prompt(1, 75)[:53] + prompt(2, 20), prompt(3, 30)]
    cold = []
    for p in prompts:
        llm.engine.cache.reset()
        cold.append(outcome(answers(llm, [p])[0]))
    llm.engine.cache.reset()
    together = answers(llm, prompts)
    assert [outcome(o) for o in together] == cold
    hot = answers(llm, prompts)
    assert [o.num_cached_tokens for o in hot] == [len(p) - 1 for p in prompts]
    assert [outcome(o) for o in hot] == cold
    chunked = make_llm(folder, max_num_batched_tokens=24, **options)
    assert [outcome(o) for o in answers(chunked, prompts)] == cold
    assert_nothing_held(llm)


@pytest.mark.parametrize(
    "kv_cache_dtype", ["int8", *(pytest.param(name, marks=pytest.mark.nightly) for name in NARROW[1:])]
)
def test_narrow_kv_survives_preemption_and_eviction(folder: Path, kv_cache_dtype: str) -> None:
    prompts = [prompt(i, 20 + 3 * i) for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    results = []
    for num_blocks, max_model_len in ((64, 256), (9, 128)):
        llm = make_llm(
            folder,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            kv_cache_dtype=kv_cache_dtype,
            deterministic=True,
        )
        rounds = [answers(llm, prompts, params) for _ in range(2)]
        results.append([[o.outputs[0].token_ids for o in own] for own in rounds])
        assert_nothing_held(llm)
    assert results[0] == results[1]
    assert llm.engine.stats().num_preemptions > 0
    assert llm.engine.cache.stats.evicted_blocks > 0


def test_narrow_kv_holds_several_times_the_tokens(folder: Path) -> None:
    memory = 1 << 20
    tokens = {}
    narrow = NARROW if "RADIXKV_NIGHTLY" in os.environ else NARROW[:1]
    for name in ("auto", *narrow):
        runner = make_llm(
            folder, num_blocks=None, kv_cache_memory=memory, max_model_len=64, kv_cache_dtype=name
        ).engine.runner
        assert isinstance(runner, ModelRunner)
        assert sum(t.nbytes for t in runner.kv.tensors()) <= memory
        tokens[name] = runner.spec.num_blocks * runner.spec.block_size
    # Per head and token: D bytes and one float32 scale, in place of 4 D bytes; this model's heads are small.
    assert isinstance(runner.kv, PagedKV)
    size = runner.kv.spec.head_size
    for name in narrow:
        assert tokens[name] == pytest.approx(tokens["auto"] * 4 * size / (size + 4), rel=0.01)


@needs_int8_products
def test_fp8_weights_made_at_load_are_those_of_e4m3(tmp_path: Path) -> None:
    """Logprobs of a model whose weights were rounded by hand; layers of the Llama shape are fused."""
    where = save_tiny_model(tmp_path / "plain", "llama")
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    with torch.no_grad():
        for module in model.modules():
            if type(module) is nn.Linear:
                scale = module.weight.abs().amax(1, keepdim=True) / 448
                rounded = (module.weight / scale).to(torch.float8_e4m3fn).float() * scale
                module.weight = nn.Parameter(rounded)  # a tied embedding stays as it is
    llm = make_llm(where, quantization="fp8")
    kinds = {type(module).__name__ for module in llm.engine.runner.model.modules()}
    assert "BlockLayer" in kinds
    tokens = prompt(5, 60)
    with torch.inference_mode():
        wanted = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    got = answers(llm, [tokens], params)[0].prompt_logprobs
    differences = [abs(got[i].chosen.logprob - wanted[i - 1, tokens[i]].item()) for i in range(1, 60)]
    assert max(differences) < 0.02 * (wanted.max() - wanted.min()).item()


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma2", "phi"))]
)
@pytest.mark.parametrize("kv_cache_dtype", [pytest.param("auto", marks=pytest.mark.nightly), "int8"])
def test_families_without_fused_layers_run_with_int8_weights(
    tmp_path: Path, family: str, kv_cache_dtype: str
) -> None:
    where = save_tiny_model(tmp_path / family, family)
    exact, narrow = make_llm(where), make_llm(where, quantization="int8", kv_cache_dtype=kv_cache_dtype)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    wanted, got = (answers(llm, [prompt(5, 60)], params)[0].prompt_logprobs for llm in (exact, narrow))
    differences = [abs(a.chosen.logprob - b.chosen.logprob) for a, b in zip(wanted[1:], got[1:], strict=True)]
    assert np.mean(differences) < 0.1


@pytest.mark.nightly
def test_perplexity_and_next_tokens_of_the_embedded_model() -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "data" / "text.txt").read_text(encoding="utf-8")
    scores = {}
    for name in (None, "int8"):
        llm = LLM(num_blocks=64, max_model_len=512, quantization=name, kv_cache_dtype=name or "auto")
        ids = llm.tokenizer.encode(text)[:256]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        entries = llm.generate([ids], params, progress=False)[0].prompt_logprobs[1:]
        scores[name] = (
            [entry.top[0].token_id for entry in entries],
            float(np.mean([entry.chosen.logprob for entry in entries])),
        )
    same = np.mean([a == b for a, b in zip(scores[None][0], scores["int8"][0], strict=True)])
    assert same > (0.85 if has_int8_products() else 0.75)
    assert scores["int8"][1] > scores[None][1] - 0.05
