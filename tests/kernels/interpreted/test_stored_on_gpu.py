# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints by the path of a GPU, interpreted: numbers, bytes, tokens, bits, launches."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as written
import torch
from hand_made_steps import BLOCK, NUM_BLOCKS, HandMade
from kernel_count import kernels_by_module
from nightly import by_day
from quantised_formats import FORMATS
from safetensors.torch import load_file, save_file
from test_fused_gpu_layers import (
    MAX_KERNELS,
    batch_of,
    cold_and_hot,
    entry,
    expected,
    make_runner,
    recorded,
    some_tokens,
)
from tiny_adapters import peft_model, plain_model, save_adapter
from tiny_models import save_tiny_model
from torch import nn

from radixkv.engine.config import EngineConfig
from radixkv.model.attention.latent_attention import Latents
from radixkv.model.batch_invariance import fix_rows
from radixkv.model.cuda_graphs import StepGraphs
from radixkv.model.decoder_layers import WholeExperts
from radixkv.model.device_paths import rewrite_layers
from radixkv.model.gpu_layers.experts import GpuExperts
from radixkv.model.gpu_layers.fused_layers import FusedGpuLayer
from radixkv.model.gpu_layers.products import TiledProduct
from radixkv.model.gpu_layers.state_layers import FusedHeads
from radixkv.model.gpu_layers.stored_modules import StoredLinear, Target
from radixkv.model.gpu_layers.weight_tiles import tiled
from radixkv.model.loading.loader import LoadedModel, load_model
from radixkv.model.loading.stored_forms.found_weights import FoundWeights
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.loading.stored_forms.readers import READERS
from radixkv.model.loading.weight_files import weight_files
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.model.stored_weights.stored_weight import ScaleGroupCut, StoredWeight
from radixkv_kernels.states import StateSpec
from radixkv_kernels.triton.stored_product import multiply_stored

SMALL = {"quant_method": "fp8", "weight_block_size": [16, 16]}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 32}
#: Formats with blocks of inputs that end elsewhere than at 32.
CUT = ("fp8-uneven-blocks",)


#: Formats whose layers multiply inputs by scales of their own, which no kernel does.
SMOOTHED = ("modelopt-awq", "modelopt-smoothed")
TILED = [name for name in FORMATS if name not in SMOOTHED]


def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    config = EngineConfig(model=str(folder), device="cpu", dtype=dtype, attention_backend="triton")
    return load_model(config, show_progress=False)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return save_tiny_model(folder, "llama", num_attention_heads=2, **SIZES)


def stored_folder(original: Path, path: Path, name: str) -> tuple[Path, Path]:
    """A folder in a format, and one with the numbers that its codes stand for."""
    folder, plain = (
        Path(shutil.copytree(original, path / each / "tiny-llama")) for each in ("stored", "plain")
    )
    write, settings = FORMATS[name]
    written.quantise(folder, write, settings, plain=plain)
    return folder, plain


def read(folder: Path, name: str) -> FoundWeights:
    settings = FORMATS[name][1]
    method = settings.get("quant_method", "mlx")
    if method == "bitsandbytes":
        method += "_4bit" if settings.get("load_in_4bit") else "_8bit"
    return READERS[method](MappedTensors(weight_files(folder)), settings)


@pytest.mark.parametrize("name", TILED)
def test_tiles_stand_for_the_numbers_of_codes(original: Path, tmp_path: Path, name: str) -> None:
    """And take no more memory than codes, scales and zero points do."""
    folder, _ = stored_folder(original, tmp_path, name)
    found = read(folder, name)
    for key in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        weight: Any = found.weights[key]
        tiles = tiled(weight)
        assert tiles is not None
        torch.testing.assert_close(tiles.numbers(), weight.dequantized(), rtol=3e-7, atol=0)
        assert tiles.nbytes < 0.6 * tiles.out_features * tiles.in_features * 2
        x = torch.randn(3, tiles.in_features)
        got = multiply_stored(x, tiles)
        wanted = x.double() @ weight.dequantized().double().t()
        assert (got.double() - wanted).abs().max() <= 3e-6 * wanted.abs().max()
        narrow = multiply_stored(x.bfloat16(), tiles).double()
        assert (narrow - wanted).abs().max() <= 1.2e-2 * wanted.abs().max()


def products_of(model: nn.Module) -> list[TiledProduct]:
    return [each for each in model.modules() if isinstance(each, TiledProduct)]


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all products and experts of layers, in whatever form."""
    layers: Any = model.get_submodule("model.layers")
    total = sum(each.nbytes for each in products_of(layers))
    total += sum(
        each.gate_up.nbytes + each.down.nbytes for each in layers.modules() if isinstance(each, GpuExperts)
    )
    return total + sum(each.nbytes for name, each in layers.named_parameters() if "proj" in name)


@pytest.mark.parametrize("name", by_day(TILED, "fp8-blocks", "gptq-act-order", "nvfp4", "mlx-4"))
def test_models_are_those_of_the_numbers(original: Path, tmp_path: Path, name: str) -> None:
    """Cold and hot, from as many kernels as a plain model, with no copy of any weight in another form."""
    folder, plain = stored_folder(original, tmp_path, name)
    loaded = load(folder)
    size = sum(each.numel() for key, each in load_file(plain / "model.safetensors").items() if "_proj" in key)
    runner = make_runner(loaded)
    assert sum(isinstance(module, FusedGpuLayer) for module in runner.model.modules()) == 1
    assert len(products_of(runner.model.get_submodule("model.layers"))) == 4
    assert stored_bytes(runner.model) < 1.3 * size
    with kernels_by_module(runner.model.model.layers) as launched:
        logits = cold_and_hot(runner)
    for got, wanted in zip(logits, expected(plain), strict=True):
        assert (got - wanted).abs().max().item() < 1e-4
    products = 4 if "stored_product_kernel" in launched[0] else 0
    assert products
    for layer in launched:
        assert layer.total() <= MAX_KERNELS, layer


@pytest.mark.parametrize("name", by_day(SMOOTHED, "modelopt-awq"))
def test_smoothed_layers_are_expanded(original: Path, tmp_path: Path, name: str) -> None:
    folder, plain = stored_folder(original, tmp_path, name)
    runner = make_runner(load(folder))
    assert not products_of(runner.model.get_submodule("model.layers"))
    for got, wanted in zip(cold_and_hot(runner), expected(plain), strict=True):
        assert (got - wanted).abs().max().item() < 1e-4


@pytest.mark.parametrize("family", by_day(("gpt-oss", "mixtral", "deepseek-v3"), "gpt-oss"))
def test_experts_stay_as_they_are_stored(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "stored", family)
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    if family == "gpt-oss":
        written.quantise_gpt_oss(folder, plain=plain)
    else:
        written.quantise(folder, partial(written.block_fp8, block=16), SMALL, plain=plain, bare="")
    loaded = load(folder)
    experts = [each for each in loaded.model.modules() if isinstance(each, GpuExperts)]
    assert experts
    for each in experts:
        assert not list(each.parameters())
        numbers = each.num_experts * (each.gate_up.out_features + each.down.in_features)
        numbers *= each.gate_up.in_features
        bits = 8 * (each.gate_up.codes.nbytes + each.down.codes.nbytes) / numbers
        assert bits < (6 if family == "gpt-oss" else 12)
    latents = [each for each in loaded.model.modules() if isinstance(each, Latents)]
    assert len(latents) == (loaded.hf_config.num_hidden_layers if "deepseek" in family else 0)
    runner = make_runner(loaded)
    for got, wanted in zip(cold_and_hot(runner), expected(plain), strict=True):
        assert (got - wanted).abs().max().item() < 2e-4


@pytest.mark.parametrize("family", by_day(("qwen3_5_text", "qwen3_next", "nemotron_h"), "qwen3_5_text"))
def test_products_of_states_stay_as_they_are_stored(family: str, tmp_path: Path) -> None:
    """Joined where they are one form, their outputs in the kernels' order."""
    folder = save_tiny_model(tmp_path / "stored", family)
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    written.quantise(folder, partial(written.block_fp8, block=16), SMALL, plain=plain, bare="")
    logits = []
    for each in (load(folder), load_model(EngineConfig(model=str(plain), device="cpu"), show_progress=False)):
        spec = each.attention.layout(NUM_BLOCKS, BLOCK, each.dtype, each.device, None)
        states = StateSpec(each.attention.states, num_slots=4, num_rings=2, keeps_values=True)
        runner = ModelRunner(each, spec, StepLimits(14, 2, 14), backend="triton", states=states)
        for tensor in runner.kv.tensors():
            tensor.view(torch.uint8).zero_()
        if not logits:
            heads = [part for part in runner.model.modules() if isinstance(part, FusedHeads)]
            assert heads
            assert all(isinstance(product, TiledProduct) for part in heads for product in part.products)
        one = HandMade(runner, list(range(5, 19)))
        logits.append(torch.cat([one.run([11]), one.run([12, 14])]))
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", by_day(TILED, "awq"))
def test_rows_alone_are_rows_of_a_batch(original: Path, tmp_path: Path, name: str) -> None:
    """Bit for bit in deterministic mode, also of products whose forms differ."""
    folder, _ = stored_folder(original, tmp_path, name)
    loaded = load(folder)
    rewrite_layers(loaded.model, None, "triton")
    fix_rows(loaded.model)
    for product in products_of(loaded.model):
        x = torch.randn(40, product.in_features)
        assert torch.equal(product(x)[17:18], product(x[17:18]))


def test_layers_of_several_forms_are_fused(original: Path, tmp_path: Path) -> None:
    """A plain key product between a query product in codes and a value product in others."""
    folder, plain = (Path(shutil.copytree(original, tmp_path / each)) for each in ("stored", "plain"))
    settings = written.groups("float", "channel")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    settings["config_groups"]["group_1"] = {"targets": ["re:.*v_proj"], "weights": weights}
    turns = iter([False] * 6 + [True])  # values come last

    def write(weight: torch.Tensor) -> written.Stored:
        return (written.int8 if next(turns) else written.channel_fp8)(weight)

    written.quantise(folder, write, {**settings, "format": "mixed-precision"}, plain=plain)
    key = "model.layers.0.self_attn.k_proj.weight"
    for each in (folder, plain):
        tensors = load_file(each / "model.safetensors")
        tensors.pop(f"{key}_scale", None)
        tensors[key] = load_file(original / "model.safetensors")[key]
        save_file(tensors, each / "model.safetensors", metadata={"format": "pt"})
    runner = make_runner(load(folder))
    (layer,) = [each for each in runner.model.modules() if isinstance(each, FusedGpuLayer)]
    assert isinstance(layer.attention.merged, TiledProduct)
    assert len(layer.attention.merged.weights) == 3
    for got, wanted in zip(cold_and_hot(runner), expected(plain), strict=True):
        assert (got - wanted).abs().max().item() < 1e-4


@pytest.mark.parametrize("name", by_day(TILED, "fp8-blocks", "gptq-act-order", "packed-4-zeros"))
def test_shares_of_ranks(original: Path, tmp_path: Path, name: str) -> None:
    """Outputs and inputs of a rank, with their scales; a block that is cut is refused by its size."""
    folder, _ = stored_folder(original, tmp_path, name)
    found = read(folder, name).weights["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(found, StoredWeight)
    target = Target(torch.device("cpu"), torch.float32)
    whole = StoredLinear([found], torch.randn(found.out_features), target)
    x = torch.randn(3, whole.in_features)
    wanted = whole(x)
    spans = [range(8, 24), range(48, 56)]
    assert torch.allclose(
        whole.of_outputs(spans)(x), torch.cat([wanted[:, 8:24], wanted[:, 48:56]], 1), atol=1e-5
    )
    halves = (range(32), range(32, 96))
    if name in CUT:
        with pytest.raises(ScaleGroupCut, match="split"):
            whole.of_inputs(halves[0], has_bias=True)
        return
    parts = [whole.of_inputs(own, has_bias=own.start == 0) for own in halves]
    total = sum(part(x[:, own.start : own.stop]) for part, own in zip(parts, halves, strict=True))
    assert torch.allclose(total, wanted, atol=1e-4)


@pytest.mark.nightly
@torch.no_grad()
def test_experts_of_ranks(tmp_path: Path) -> None:
    """Whole experts on each; results of two ranks add up to those of one."""
    folder = save_tiny_model(tmp_path / "stored", "gpt-oss")
    written.quantise_gpt_oss(folder, plain=Path(shutil.copytree(folder, tmp_path / "plain")))
    ranks = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", attention_backend="triton", tensor_parallel=2
    )
    model = load_model(ranks, show_progress=False).model
    whole = next(each for each in model.modules() if isinstance(each, WholeExperts))
    x = torch.randn(5, load(folder).hf_config.hidden_size)
    ids, weights = torch.stack([torch.randperm(whole.num_experts)[:2] for _ in range(5)]), torch.rand(5, 2)
    half = whole.num_experts // 2
    parts = [whole.of_experts(own) for own in (range(half), range(half, whole.num_experts))]
    total = sum(part.packed()(x, ids, weights) for part in parts)
    torch.testing.assert_close(total, whole.packed()(x, ids, weights), rtol=0, atol=1e-5)


@pytest.mark.nightly
@torch.no_grad()
def test_adapters_and_graphs(original: Path, tmp_path: Path) -> None:
    """An adapter's rows and the base's in one step, eagerly and recorded."""
    folder, plain = stored_folder(original, tmp_path, "awq")
    adapted = peft_model(plain, 1)
    runner = make_runner(load(folder), max_lora_rank=8)
    assert runner.adapters is not None
    adapter, _ = runner.adapters.read(save_adapter(adapted, tmp_path / "adapter"), 8)
    graphs = StepGraphs(
        runner.model, runner.kv, runner.backend, max_rows=12, record=recorded, adapters=runner.adapters
    )
    tokens = [some_tokens(4, row) for row in range(2)]
    models = (adapted, plain_model(plain))
    wanted = [
        model(torch.tensor([own]), use_cache=False).logits[0]
        for model, own in zip(models, tokens, strict=True)
    ]
    batch = batch_of(*((own, 0, len(own), [row]) for row, own in enumerate(tokens)))
    batch.entries.extend(entry(each) for each in (adapter, None))
    for runner.graphs in (None, *[graphs] * 4):
        torch.testing.assert_close(runner.execute(batch), torch.cat(wanted), rtol=1e-4, atol=1e-4)
    assert graphs.replayed >= 1
