# SPDX-License-Identifier: Apache-2.0
"""Whole models with fused layers, their Triton kernels interpreted, against transformers' own layers."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_count import kernels_by_module
from nightly import by_day
from tiny_adapters import peft_model, plain_model, save_adapter
from tiny_configs import VOCAB_SIZE
from tiny_models import save_random_model, save_tiny_model
from tiny_vision_models import save_tiny_vision_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from radixkv.engine.config import EngineConfig
from radixkv.model import rewritten_model, traced_layers
from radixkv.model.attention.expanded_latents import make_expansion
from radixkv.model.attention.query_scale import QueryScale
from radixkv.model.cuda_graphs import StepGraphs
from radixkv.model.decoder_layers import find_norm
from radixkv.model.gpu_layers.experts import GpuExperts, GpuRouter
from radixkv.model.gpu_layers.fused_layers import FusedGpuLayer, FusedNorm, fuse_layers
from radixkv.model.loading.loader import LoadedModel, load_model
from radixkv.model.parallel.over_ranks import SummedOverRanks
from radixkv.model.rewritten_model import reached_tensors
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.scheduling.batch import Batch

BLOCK = 8
#: Kernels of a layer: norm, product, rotary and write, attention (two and a merge), product, add and norm,
#: product, activation, product, add.
MAX_KERNELS = 14
#: Family -> what its tiny model changes.
_TWO_LAYERS = {"num_hidden_layers": 2}
_TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "llama_4_scaling_beta": 0.5, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
FUSED: dict[str, dict[str, Any]] = {
    "llama": {**_TWO_LAYERS, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "qwen2-window": _TWO_LAYERS,
    "qwen3": _TWO_LAYERS,
    "mistral-window": _TWO_LAYERS,
    "phi3": {
        **_TWO_LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "smollm3": {**_TWO_LAYERS, "no_rope_layer_interval": 2},
    "granite": _TWO_LAYERS,
    "gemma": _TWO_LAYERS,
    "gemma2": _TWO_KINDS,
    "gemma3": _TWO_KINDS,
    "mixtral": _TWO_LAYERS,
    "qwen3-moe": _TWO_LAYERS,
    "qwen2-moe-window": {**_TWO_LAYERS, "max_window_layers": 1},
    "gpt-oss": _TWO_KINDS,
    "seed-oss": _TWO_LAYERS,
    "ministral": _TWO_KINDS,
    "cwm": _TWO_KINDS,
    "arcee": _TWO_LAYERS,
    "dots1": {**_TWO_LAYERS, "layer_types": ["full_attention"] * 2},
    # Known by what they compute:
    "olmo2": _TWO_LAYERS,
    "cohere2": _TWO_KINDS,
    "gemma4": _TWO_KINDS,
    "stablelm": _TWO_LAYERS,
    "phi": _TWO_LAYERS,
    "starcoder2": _TWO_LAYERS,
    "nemotron": _TWO_LAYERS,
    # Latents, absorbed:
    "deepseek-v3": _TWO_LAYERS,
    "deepseek-v2": {**_TWO_LAYERS, "q_lora_rank": None},
    "deepseek-v32": _TWO_LAYERS,
    "glm-dsa": _TWO_LAYERS,
    "glm4-lite": _TWO_LAYERS,
    "minicpm3": _TWO_LAYERS,
    "youtu": _TWO_LAYERS,
    "axk1": _TWO_LAYERS,
    "mistral4": {**_TWO_LAYERS, "rope_parameters": {**_YARN, "original_max_position_embeddings": 4}},
    # Norms behind the rotary embedding, queries that grow, chunks, experts with scaled inputs:
    "hunyuan": {**_TWO_LAYERS, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24},
    "hunyuan-moe": {**_TWO_LAYERS, "num_attention_heads": 6, "num_key_value_heads": 2},
    "llama4": {
        **_TWO_LAYERS, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2, "attention_chunk_size": 16, "head_dim": 24,
    },
    "ministral3": {
        **_TWO_LAYERS, "head_dim": 24, "rope_parameters": {**_YARN, "original_max_position_embeddings": 4},
    },
    # Experts beside the MLP:
    "gemma4-moe": _TWO_KINDS,
}  # fmt: skip
FUSED_BY_DAY = ("llama", "cohere2", "deepseek-v3")
LATENTS = ("deepseek-v3", "deepseek-v2", "deepseek-v32", "glm-dsa", "glm4-lite", "minicpm3", "youtu", "axk1")
LATENTS += ("mistral4",)
#: Kernels that a family's layers have more: experts, inputs of each layer, an activation in parts.
MORE_KERNELS = dict.fromkeys(("qwen3-moe", "qwen2-moe-window", "mixtral", "gpt-oss", "dots1"), 9)
MORE_KERNELS |= {"gemma4": 5, "phi": 6, "llama4": 8, "hunyuan-moe": 7, "gemma4-moe": 10, "mistral4": 11}
MORE_KERNELS |= {"minicpm3": 4, "youtu": 4, "axk1": 13}  # norm, queries up, folding and unfolding
MORE_KERNELS |= dict.fromkeys(("deepseek-v3", "deepseek-v2", "deepseek-v32", "glm-dsa", "glm4-lite"), 9)

#: They differ little from others: tested where RADIXKV_ALL_TILES is set.
LIKE_OTHERS = (
    *("stablelm", "starcoder2", "nemotron"),
    *("glm-dsa", "youtu", "axk1"),
    *("qwen2-window", "gemma", "qwen3-moe", "qwen2-moe-window"),
    *("seed-oss", "ministral", "cwm", "arcee", "dots1"),
)
TESTED = [family for family in FUSED if family not in LIKE_OTHERS or "RADIXKV_ALL_TILES" in os.environ]

#: Models that see, with layers of these families.
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_vl")


def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), device="cpu", dtype=dtype), show_progress=False)


def make_runner(loaded: LoadedModel, quantization: str | None = None, **options: Any) -> ModelRunner:
    spec = loaded.attention.layout(32, BLOCK, loaded.dtype, loaded.device, quantization)
    runner = ModelRunner(loaded, spec, StepLimits(64, 4, 64), backend="triton", **options)
    for tensor in runner.kv.tensors():
        tensor.view(torch.uint8).zero_()
    return runner


def batch_of(*rows: tuple[list[int], int, int, list[int]]) -> Batch:
    """Tokens [start, end) of each (tokens, start, end, block table)."""
    counts = [end - start for _, start, end, _ in rows]
    positions = np.concatenate([np.arange(start, end) for _, start, end, _ in rows])
    slots = [
        table[p // BLOCK] * BLOCK + p % BLOCK for _, start, end, table in rows for p in range(start, end)
    ]
    return Batch(
        entries=[],
        token_ids=np.concatenate([np.asarray(tokens[start:end]) for tokens, start, end, _ in rows]),
        positions=positions,
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        context_lengths=np.asarray([end for _, _, end, _ in rows], dtype=np.int32),
        block_tables=[np.asarray(table, dtype=np.int32) for *_, table in rows],
        write_slots=np.asarray(slots, dtype=np.int64),
        write_rows=None,
        logit_rows=np.arange(sum(counts)),
        copy_groups=[],
    )


def some_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


SHARED = some_tokens(9, 1)
FIRST = SHARED[:8] + some_tokens(4, 2)
SECOND = some_tokens(2, 3)


def cold_and_hot(runner: ModelRunner) -> list[torch.Tensor]:
    """A prompt; then its first decode, another prompt that hits its first block, and a cold one."""
    prompt = runner.execute(batch_of((SHARED, 0, 8, [5]))).clone()
    mixed = runner.execute(batch_of((SHARED, 8, 9, [5, 9]), (FIRST, 8, 12, [5, 7]), (SECOND, 0, 2, [1])))
    return [prompt, *mixed.split([1, 4, 2])]


@torch.inference_mode()
def expected(folder: Path, kind: Any = AutoModelForCausalLM) -> list[torch.Tensor]:
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    shared, first, second = (
        model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in (SHARED, FIRST, SECOND)
    )
    return [shared[:8], shared[8:], first[8:], second]


@pytest.mark.parametrize(
    "family",
    [
        family if family in FUSED_BY_DAY else pytest.param(family, marks=pytest.mark.nightly)
        for family in TESTED
    ],
)
def test_logits_and_kernels(family: str, tmp_path: Path) -> None:
    """transformers' logits, cold and hot, from few kernels."""
    folder = save_tiny_model(tmp_path, family, **FUSED[family])
    runner = make_runner(load(folder))
    assert sum(isinstance(module, FusedGpuLayer) for module in runner.model.modules()) == 2
    with kernels_by_module(runner.model.model.layers) as launched:
        logits = cold_and_hot(runner)
    kind = AutoModelForImageTextToText if family == "mistral4" else AutoModelForCausalLM
    for got, wanted in zip(logits, expected(folder, kind), strict=True):
        assert (got - wanted).abs().max().item() < (2e-5 if family in LATENTS else 1e-4)
    assert len(launched) == 4
    for layer in launched:
        assert layer.total() <= MAX_KERNELS + MORE_KERNELS.get(family, 0), layer
        assert layer["attention_kernel"] >= 1
        assert layer["rotate_write_kernel"] + layer["write_kernel"] + layer["latent_write_kernel"] == 1


#: Families whose layers have something that others have not.
OF_THEIR_OWN = ("llama4", "hunyuan", "hunyuan-moe", "ministral3", "mistral4", "gemma4-moe")


@pytest.mark.parametrize("family", by_day(OF_THEIR_OWN, "llama4"))
def test_pieces_hits_and_decodes_together(family: str, tmp_path: Path) -> None:
    """A prompt in three pieces, another one behind its first two blocks, then decodes of both in one step."""
    folder = save_tiny_model(tmp_path, family, **FUSED[family])
    runner = make_runner(load(folder))
    assert sum(isinstance(module, FusedGpuLayer) for module in runner.model.modules()) == 2
    one, table = some_tokens(27, 5), [1, 2, 3, 4]
    two, hit = one[:16] + some_tokens(6, 6), [1, 2, 7]
    got = [runner.execute(batch_of((one, *span, table))).clone() for span in ((0, 5), (5, 18), (18, 26))]
    got.append(runner.execute(batch_of((two, 16, 21, hit))).clone())
    got.append(runner.execute(batch_of((two, 21, 22, hit), (one, 26, 27, table))).clone())
    kind = AutoModelForImageTextToText if family == "mistral4" else AutoModelForCausalLM
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        first, second = (model(torch.tensor([each]), use_cache=False).logits[0] for each in (one, two))
    wanted = torch.cat([first[:26], second[16:], first[26:]])
    assert (torch.cat(got) - wanted).abs().max().item() < 1e-4


@pytest.mark.parametrize(
    "family",
    by_day(("mimo", "minimax"), "mimo"),
)
def test_norms_of_other_families_are_known_by_their_results(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, family)
    loaded = load(folder)

    def plain() -> list[Any]:
        norms = [each for each in loaded.model.modules() if type(each).__name__.endswith("RMSNorm")]
        return [each for each in norms if getattr(each, "weight", None) is not None]

    before = plain()
    assert before
    fuse_layers(loaded.model)
    assert not plain()
    assert sum(isinstance(each, FusedNorm) for each in loaded.model.modules()) == len(before)
    rows = torch.randn(3, 2, len(before[0].weight), generator=torch.Generator().manual_seed(1))
    fused = next(each for each in loaded.model.modules() if isinstance(each, FusedNorm))
    assert (fused(rows) - before[0](rows)).abs().max().item() < 1e-5


def test_what_is_like_a_norm_by_its_name_alone_stays() -> None:
    class OtherRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.weight * states / (states.norm(dim=-1, keepdim=True) + self.eps)

    assert find_norm(OtherRMSNorm(), torch.float32) is None
    assert find_norm(torch.nn.LayerNorm(16), torch.float32) is None


@pytest.mark.parametrize("kind", by_day(SEEING, SEEING[-1]))
def test_models_that_see_are_fused(kind: str, tmp_path: Path) -> None:
    """The layers that read text and images; towers stay transformers'."""
    runner = make_runner(load(save_tiny_vision_model(tmp_path, kind)))
    layers = runner.model.model.language_model.layers
    assert all(isinstance(layer, FusedGpuLayer) for layer in layers)
    for got, wanted in zip(
        cold_and_hot(runner), expected(tmp_path, AutoModelForImageTextToText), strict=True
    ):
        assert (got - wanted).abs().max().item() < 1e-4


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        pytest.param("bfloat16", None, marks=pytest.mark.nightly),
        pytest.param("bfloat16", "fp8_e4m3", marks=pytest.mark.nightly),
        pytest.param("float16", "int8", marks=pytest.mark.nightly),
    ],
)
def test_narrow_types_round_as_transformers_does(
    dtype: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of layers that are not fused, and their cache: but for the order of sums in products."""
    folder = save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    fused = make_runner(load(folder, dtype), quantization)
    monkeypatch.setattr(rewritten_model, "rewrite_layers", lambda *_: None)
    plain = make_runner(load(folder, dtype), quantization)
    assert not any(isinstance(module, FusedGpuLayer) for module in plain.model.modules())
    with kernels_by_module(plain.model.model.layers) as launched:
        wanted = cold_and_hot(plain)
    assert launched[0].total() > 2 * MAX_KERNELS
    tolerance = 0.02 if dtype == "bfloat16" else 0.005
    for got, one in zip(cold_and_hot(fused), wanted, strict=True):
        assert (got - one).abs().max().item() < tolerance * float(one.abs().max())
    for layer in range(2):
        for got, one in zip(
            *(runner.kv.read(layer, np.array([5, 9]), 9) for runner in (fused, plain)), strict=True
        ):
            assert (got - one).abs().max().item() < 2 * tolerance * float(one.abs().max())


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_deterministic_rows_do_not_depend_on_the_batch(family: str, tmp_path: Path) -> None:
    """Bit for bit: a prompt at once or in parts, a decode alone or beside others."""
    folder = save_tiny_model(tmp_path, family, num_hidden_layers=2)
    runner = make_runner(load(folder), deterministic=True)
    prompt, decode, hit, cold = (one.clone() for one in cold_and_hot(runner))
    parts = [runner.execute(batch_of((SHARED, i, i + 3, [11, 12]))).clone() for i in (0, 3, 6)]
    whole = torch.cat(parts)
    assert torch.equal(whole[:8], prompt)
    assert torch.equal(whole[8:], decode)
    assert torch.equal(runner.execute(batch_of((FIRST, 0, 12, [20, 21])))[8:], hit)
    assert torch.equal(runner.execute(batch_of((SECOND, 0, 2, [22]))), cold)


@pytest.mark.nightly
def test_long_chunks_of_latents_are_expanded(tmp_path: Path) -> None:
    """A prompt of 100 tokens, whose heads are expanded, beside a decode of latents, in fused layers."""
    folder = save_tiny_model(
        tmp_path, "deepseek-v3", num_hidden_layers=2, kv_lora_rank=64, qk_rope_head_dim=16
    )
    loaded = load(folder)
    spec = loaded.attention.layout(32, BLOCK, loaded.dtype, loaded.device)
    runner = ModelRunner(loaded, spec, StepLimits(128, 4, 128), backend="triton")
    for tensor in runner.kv.tensors():
        tensor.zero_()
    prompt = some_tokens(100, 4)
    runner.execute(batch_of((SHARED, 0, 8, [20])))
    table = list(range(13))
    got = runner.execute(batch_of((prompt, 0, 100, table), (SHARED, 8, 9, [20, 21])))
    expansion = make_expansion(runner.model, "triton", 128)
    assert expansion is not None
    assert expansion.pays(100, 100)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0]
    assert (got - torch.cat([wanted, expected(folder)[1]])).abs().max().item() < 1e-4


def recorded(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands for CUDA's capture."""
    result = step().clone()

    def replay() -> None:
        result.copy_(step())

    return replay, result


def test_a_replayed_step_equals_an_eager_one(tmp_path: Path) -> None:
    """Padded rows write nothing; what a recorded step allocates is its own."""
    runner = make_runner(load(save_tiny_model(tmp_path, "llama", num_hidden_layers=2)))
    tokens = [some_tokens(9, seed) for seed in range(3)]
    tables = [[2 * r, 2 * r + 1] for r in range(3)]
    runner.execute(batch_of(*((tokens[r], 0, 6, tables[r]) for r in range(3))))
    decode = batch_of(*((tokens[r], 6, 7, tables[r]) for r in range(3)))
    wanted = runner.execute(decode).clone()
    stored = [tensor.clone() for tensor in runner.kv.tensors()]

    graphs = StepGraphs(runner.model, runner.kv, runner.backend, max_rows=8, record=recorded)
    with torch.inference_mode():
        for _ in range(4):
            plan = runner.backend.plan(decode.query_starts, decode.context_lengths, decode.block_tables)
            got = graphs.run(decode, plan)
            assert got is not None
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert graphs.replayed > 0
    for before, after in zip(stored, runner.kv.tensors(), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", by_day(["llama", "gemma4", "qwen3-moe"], "gemma4"))
def test_weights_are_written_over_those_that_recorded_steps_know(family: str, tmp_path: Path) -> None:
    """At their addresses, all of them."""
    folders = [save_tiny_model(tmp_path / str(seed), family, seed, **FUSED[family]) for seed in (0, 1)]
    runner = make_runner(load(folders[0]))
    addresses = [tensor.data_ptr() for tensor in reached_tensors(runner.model)]
    other = runner.rewrite(load(folders[1]))
    runner.exchange(other)
    found = reached_tensors(runner.model)
    assert [tensor.data_ptr() for tensor in found] == addresses
    assert all(torch.equal(a, b) for a, b in zip(found, reached_tensors(other.model), strict=True))
    learned: Any = runner.model.get_output_embeddings().weight
    assert torch.equal(learned, load(folders[1]).model.get_output_embeddings().weight)


def test_padded_rows_of_a_replayed_step_have_no_experts(tmp_path: Path) -> None:
    """Five rows in a step recorded for six; the same step eagerly."""
    runner = make_runner(load(save_tiny_model(tmp_path, "qwen3-moe", num_hidden_layers=1)))
    mixed = batch_of((SHARED, 0, 3, [0, 1]), (FIRST, 0, 2, [2, 3]))
    wanted = runner.execute(mixed).clone()
    routes: list[torch.Tensor] = []
    for module in runner.model.modules():
        if isinstance(module, GpuRouter):
            module.register_forward_hook(lambda _, __, result: routes.append(result[2].clone()))
    graphs = StepGraphs(runner.model, runner.kv, runner.backend, max_rows=6, record=recorded)
    with torch.inference_mode():
        for _ in range(3):
            plan = runner.backend.plan(mixed.query_starts, mixed.context_lengths, mixed.block_tables)
            got = graphs.run(mixed, plan)
            assert got is not None
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert graphs.replayed > 0
    assert routes
    assert all((ids[:5] >= 0).all() and (ids[5:] == -1).all() and len(ids) == 6 for ids in routes)


@pytest.mark.nightly
def test_deterministic_experts_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3-moe", num_hidden_layers=1)
    runner = make_runner(load(folder), deterministic=True)
    whole = runner.execute(batch_of((SHARED, 0, 8, [5]), (SECOND, 0, 2, [1]))).clone()
    parts = [runner.execute(batch_of((SHARED, i, i + 4, [11]))).clone() for i in (0, 4)]
    assert torch.equal(torch.cat(parts), whole[:8])


@pytest.mark.parametrize("family", by_day(("qwen3-moe", "qwen3"), "qwen3-moe"))
def test_weights_made_at_load_answer_nearly_the_same(family: str, tmp_path: Path) -> None:
    """fp8 in fused layers and experts: its rounding, 6 % of a weight at most, and no more."""
    folder = save_tiny_model(tmp_path, family, num_hidden_layers=1)
    logits = []
    for weights in (None, "fp8"):
        loaded = load(folder)
        spec = loaded.attention.layout(32, BLOCK, loaded.dtype, loaded.device)
        runner = ModelRunner(loaded, spec, StepLimits(64, 4, 64), backend="triton", quantization=weights)
        logits.append(runner.execute(batch_of((SHARED, 0, 8, [5]))).clone())
    plain, rounded = logits
    assert not torch.equal(plain, rounded)
    assert (rounded - plain).abs().mean() < 0.1 * plain.abs().mean()


def entry(adapter: Any) -> Any:
    """An entry of a batch as far as adapters go."""
    return SimpleNamespace(request=SimpleNamespace(request=SimpleNamespace(adapter=adapter, adapter_from=0)))


#: Family -> products that two adapters change; None: all.
ADAPTED: dict[str, tuple[list[str] | None, list[str]]] = {
    "llama": (None, ["k_proj", "down_proj"]),
    "deepseek-v3": (
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
        ["kv_a_proj_with_mqa", "o_proj"],
    ),
    "deepseek-v2": (["q_proj", "kv_a_proj_with_mqa", "o_proj"], ["q_proj"]),
    "llama4": (["q_proj", "k_proj", "v_proj", "o_proj"], ["v_proj"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_answer_as_peft(family: str, tmp_path: Path) -> None:
    """Rows of two adapters and of the base in one step, eagerly and recorded; slots are taken anew."""
    base = save_tiny_model(tmp_path / family, family, **FUSED[family] | {"num_hidden_layers": 2})
    every, some = ADAPTED[family]
    options: dict[str, dict[str, Any]] = {"a": {}, "b": {"r": 3, "target_modules": some}}
    if every is not None:
        options["a"]["target_modules"] = every
    models = {name: peft_model(base, seed, **each) for seed, (name, each) in enumerate(options.items())}
    runner = make_runner(load(base), max_lora_rank=8)
    assert runner.adapters is not None
    adapters: dict[str, Any] = {"": None}
    for name, model in models.items():
        adapters[name], _ = runner.adapters.read(save_adapter(model, tmp_path / name), 8)
    tokens = [some_tokens(3 + r, r) for r in range(3)]
    graphs = StepGraphs(
        runner.model, runner.kv, runner.backend, max_rows=12, record=recorded, adapters=runner.adapters
    )
    models[""] = plain_model(base)
    for names in (("b", "", "a"), ("a", "b", "b")):
        with torch.inference_mode():
            wanted = torch.cat(
                [
                    models[n](torch.tensor([own]), use_cache=False).logits[0]
                    for n, own in zip(names, tokens, strict=True)
                ]
            )
        batch = batch_of(*((own, 0, len(own), [r]) for r, own in enumerate(tokens)))
        batch.entries.extend(entry(adapters[name]) for name in names)
        for runner.graphs in (None, graphs, graphs):
            torch.testing.assert_close(runner.execute(batch), wanted, rtol=1e-4, atol=1e-4)
    assert graphs.replayed >= 2


#: Name -> what its tiny model changes.
SHAPES: dict[str, dict[str, Any]] = {"gemma4": _TWO_KINDS, "deepseek-v3": _TWO_LAYERS}
if "RADIXKV_ALL_TILES" in os.environ:
    SHAPES |= {"mimo": _TWO_KINDS, "llama4": {}, "bloom": {}}


@pytest.mark.parametrize("name", by_day(SHAPES))
def test_layers_of_several_shapes_and_latents(name: str, tmp_path: Path) -> None:
    """A step of several groups of layers runs eagerly and recorded."""
    folder = save_tiny_model(tmp_path, name, **SHAPES[name])
    runner = make_runner(load(folder))
    wanted = expected(folder)
    for got, one in zip(cold_and_hot(runner), wanted, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-3, atol=1e-3)
    graphs = StepGraphs(runner.model, runner.kv, runner.backend, max_rows=4, record=recorded)
    decode = batch_of((SHARED, 8, 9, [5, 9]))
    with torch.inference_mode():
        for _ in range(3):
            plan = runner.backend.plan(decode.query_starts, decode.context_lengths, decode.block_tables)
            got = graphs.run(decode, plan)
            assert got is not None
            torch.testing.assert_close(got, wanted[1], rtol=1e-3, atol=1e-3)
    assert graphs.replayed > 0


@pytest.mark.parametrize("family", by_day(["gpt-neox", "falcon", "mimo"], "gpt-neox"))
def test_other_families_keep_their_layers_and_attention(family: str, tmp_path: Path) -> None:
    model = load(save_tiny_model(tmp_path, family)).model

    def others() -> list[type]:
        names = ("Layer", "Attention")
        return [type(module) for module in model.modules() if type(module).__name__.endswith(names)]

    before = others()
    assert fuse_layers(model) == 0
    assert others() == before


#: Family with states or another attention -> how many of its layers are fused.
ATTENDING = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2", "bamba", "bailing_hybrid"), 1),
    "gemma4-shared": 0,
}


@pytest.mark.parametrize("family", by_day(ATTENDING, "qwen3_next"))
def test_attention_layers_of_hybrids_are_fused(family: str, tmp_path: Path) -> None:
    """And none whose keys another layer reads."""
    model = load(save_tiny_model(tmp_path, family)).model
    assert fuse_layers(model) == ATTENDING[family]
    assert fuse_layers(model) == 0


def test_a_layer_that_computes_something_else_stays(tmp_path: Path) -> None:
    """The modules of one that is fused, another sum."""
    model = load(save_tiny_model(tmp_path, "cohere2", **_TWO_KINDS)).model
    layer = model.model.layers[1]
    whole = layer.forward

    def forward(hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        return hidden_states + 1.1 * (whole(hidden_states, **options) - hidden_states)

    layer.forward = forward
    assert fuse_layers(model) == 1
    assert model.model.layers[1] is layer


class OtherRank:
    """Stands for a communicator: another rank finds nothing in the first layer."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def smallest(self, number: int) -> int:
        self.asked.append(number)
        return 0 if len(self.asked) == 1 else number

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_ranks_fuse_the_same_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A layer that another rank's trace does not describe stays on all of them, untried."""
    model = load(save_tiny_model(tmp_path, "olmo2", num_hidden_layers=2)).model
    first, rank = model.model.layers[0], OtherRank()
    for layer in model.model.layers:
        layer.self_attn.o_proj = SummedOverRanks(layer.self_attn.o_proj, rank)  # type: ignore[arg-type]
    assert fuse_layers(model) == 1
    assert model.model.layers[0] is first
    assert rank.asked == [1, 1, 1]  # of the second: it is described, and confirmed
    assert "another rank's trace shows something else" in caplog.text


def test_a_model_that_cannot_be_traced_keeps_its_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so; its routed experts are replaced all the same."""
    model = load(save_tiny_model(tmp_path, "phimoe", num_hidden_layers=2)).model
    layers = list(model.model.layers)

    def refuse(*_: Any) -> None:
        raise ValueError("no such input")

    hook = model.register_forward_pre_hook(refuse)
    assert fuse_layers(model) == 0
    hook.remove()
    assert list(model.model.layers) == layers
    assert "not fused: tracing them failed (ValueError: no such input)" in caplog.text
    assert any(isinstance(module, GpuExperts) for module in model.modules())


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_weights_that_were_merged_are_given_back(family: str, tmp_path: Path) -> None:
    """By whichever way a layer was described."""
    model = load(save_tiny_model(tmp_path, family, num_hidden_layers=2)).model
    products = [
        weakref.ref(module)
        for name, module in model.model.layers.named_modules()
        if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    ]
    assert fuse_layers(model) == 2
    gc.collect()
    assert [each() for each in products] == [None] * 10


def test_queries_scaled_from_some_position_on_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ministral 3 within its original length is like Mistral; beyond it, its queries grow."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "ministral3", vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        rope_parameters=rope, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model = load(save_random_model(tmp_path, config)).model
    assert fuse_layers(model) == 1
    assert model.model.layers[0].attention.parts.query_scale == QueryScale(0.1, 64.0, 0.0, True)
    monkeypatch.setattr(traced_layers, "query_scales", lambda module: [])
    assert fuse_layers(load(tmp_path).model) == 0
    config.rope_parameters["llama_4_scaling_beta"] = 0.0
    assert fuse_layers(load(save_random_model(tmp_path, config)).model) == 1


def test_layers_are_fused_once(tmp_path: Path) -> None:
    """The weights are packed where they are, and keep their values."""
    folder = save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    model = load(folder).model
    products = [model.model.layers[0].self_attn.get_submodule(f"{name}_proj").weight for name in "qkv"]
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert fuse_layers(model) == 2
    assert torch.equal(model.model.layers[0].attention.merged.weight, torch.cat(products))
    layers = list(model.model.layers)
    assert fuse_layers(model) == 0
    assert list(model.model.layers) == layers
    assert sum(parameter.nbytes for parameter in model.parameters()) <= size
