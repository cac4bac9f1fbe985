# SPDX-License-Identifier: Apache-2.0
"""Blocks of GGUF files by the path of a GPU, interpreted: numbers, bytes, tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import (
    EXPERT_ARCHITECTURES,
    random_blocks,
    read_model,
    write_family_gguf,
    write_llama_gguf,
)
from gguf_hybrid_files import HYBRIDS, make_hybrid, write_hybrid
from nightly import by_day
from test_fused_gpu_layers import FIRST, SECOND, SHARED, cold_and_hot, make_runner
from torch import nn

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.attention.attention_hook import PlainCausalStep
from radixkv.model.gpu_layers.experts import GpuExperts
from radixkv.model.gpu_layers.fused_layers import FusedGpuLayer
from radixkv.model.gpu_layers.products import TiledProduct
from radixkv.model.gpu_layers.stored_modules import StoredLinear, Target, TiledEmbedding
from radixkv.model.gpu_layers.weight_tiles import tiled
from radixkv.model.loading.loader import LoadedModel, load_model
from radixkv.model.loading.model_source import ModelSource
from radixkv.model.loading.pretrained import Pretrained
from radixkv.model.step_context import call_model
from radixkv.model.stored_weights.block_weight import BlockWeight
from radixkv.model.stored_weights.stored_weight import ScaleGroupCut
from radixkv_kernels.cpu.linear.block_formats import FORMATS
from radixkv_kernels.triton.stored_product import multiply_stored

ROWS, WIDTH = 40, 512
#: Formats of a file as llama.cpp mixes them, and of one with fewer inputs.
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "rest": "Q4_K"}
SMALL = {"attn_v": "Q8_0", "ffn_down": "Q5_0", "token_embd": "Q8_0", "rest": "Q4_0"}


def block_weight(number: int) -> BlockWeight:
    blocks = torch.from_numpy(random_blocks(number, ROWS, WIDTH, seed=number))
    return BlockWeight(blocks, gguf.GGMLQuantizationType(number))


@pytest.mark.parametrize("number", FORMATS)
def test_tiles_stand_for_the_numbers_of_blocks(number: int) -> None:
    """And take as much memory, but for scales of 6 bits, which become bytes."""
    weight = block_weight(number)
    tiles = tiled(weight)
    assert tiles is not None
    assert torch.equal(tiles.numbers(), weight.dequantized())
    assert tiles.nbytes <= 1.04 * weight.nbytes
    torch.manual_seed(0)
    x = torch.randn(3, WIDTH)
    wanted = x.double() @ weight.dequantized().double().t()
    assert (multiply_stored(x, tiles).double() - wanted).abs().max() <= 3e-6 * wanted.abs().max()
    narrow = multiply_stored(x.bfloat16(), tiles).double()
    assert (narrow - wanted).abs().max() <= 1.2e-2 * wanted.abs().max()


def test_shares_of_ranks() -> None:
    product = StoredLinear([block_weight(12)], None, Target(torch.device("cpu"), torch.float32))
    x = torch.randn(2, WIDTH)
    wanted = product(x)
    assert torch.equal(product.of_outputs([range(5, 9)])(x), wanted[:, 5:9])
    halves = [product.of_inputs(own, has_bias=False)(x[:, own.start : own.stop]) for own in HALVES]
    assert torch.allclose(sum(halves), wanted, atol=1e-5)
    with pytest.raises(ScaleGroupCut, match="multiples of 256"):
        product.of_inputs(range(128), has_bias=False)


HALVES = (range(256), range(256, 512))


def load(path: Path, **options: Any) -> LoadedModel:
    config = EngineConfig(model=str(path), device="cpu", **options)
    return load_model(config, show_progress=False)


@pytest.mark.parametrize(("hidden", "experts"), by_day(((64, 0), (256, 0), (256, 3)), (64, 0)))
def test_models_of_mixed_blocks(tmp_path: Path, hidden: int, experts: int) -> None:
    """The tokens of the dequantised model, cold and hot; no weight in another form, the embedding shared."""
    kinds = MIXED if hidden == 256 else SMALL
    path = write_llama_gguf(tmp_path / "tiny.gguf", kinds, hidden=hidden, layers=1, experts=experts)
    loaded = load(path, attention_backend="triton", dtype="float32")
    model = loaded.model
    embedded, output = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedded, TiledEmbedding)
    assert embedded.stored.codes is output.weights[0].codes
    assert not [each for each in model.modules() if type(each) is nn.Linear]
    runner = make_runner(loaded)
    assert sum(isinstance(each, FusedGpuLayer) for each in runner.model.modules()) == 1
    assert sum(isinstance(each, GpuExperts) for each in runner.model.modules()) == bool(experts)
    merged = next(each for each in runner.model.modules() if isinstance(each, FusedGpuLayer)).attention.merged
    assert isinstance(merged, TiledProduct)
    assert len(merged.weights) == 2  # queries and keys; values are in other blocks
    shared, first, second = (logits_of(path, each, tiles=False) for each in (SHARED, FIRST, SECOND))
    wanted = [shared[:8], shared[8:], first[8:], second]
    for got, one in zip(cold_and_hot(runner), wanted, strict=True):
        assert (got - one).abs().max().item() < 1e-4


TOKENS = [5, 90, 17, 23, 4, 4, 61, 100, 12]


@torch.inference_mode()
def logits_of(path: Path, tokens: list[int], *, tiles: bool) -> torch.Tensor:
    """Of a file's model with its blocks as they are, or dequantised."""
    if tiles:
        files = Pretrained(ModelSource(path.stem, path.parent, path.name))
        cpu = torch.device("cpu")
        model = files.block_model(files.config(), False, dtype=torch.float32, device=cpu)
        assert any(isinstance(each, TiledProduct) for each in model.modules())
    else:
        model = read_model(path, torch.float32)
    positions = torch.arange(len(tokens))
    return call_model(model, torch.tensor(tokens), positions, None, PlainCausalStep(positions))


@pytest.mark.parametrize("case", by_day(HYBRIDS, "qwen35"))
def test_files_of_hybrid_models(case: str, tmp_path: Path) -> None:
    """Products whose inputs or outputs a file has in another order."""
    path = tmp_path / "model.gguf"
    write_hybrid(path, case, make_hybrid(case), ("Q8_0", "Q4_0"))
    got, wanted = (logits_of(path, TOKENS, tiles=tiles) for tiles in (True, False))
    # The median, since another order of sums may send single tokens another way through experts.
    assert ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", EXPERT_ARCHITECTURES)
def test_files_of_experts(architecture: str, tmp_path: Path) -> None:
    """Gates and ups apart, with biases and gpt-oss's gate."""
    kinds = {"ffn_gate_inp": "F32", "rest": "Q8_0"}
    kinds |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4")
    path = write_family_gguf(tmp_path / "model.gguf", architecture, kinds, EXPERT_ARCHITECTURES[architecture])
    got, wanted = (logits_of(path, TOKENS, tiles=tiles) for tiles in (True, False))
    assert ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() < 1e-4


def test_blocks_without_a_kernel_are_expanded_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_llama_gguf(tmp_path / "tiny.gguf", {"ffn_up": "TQ2_0", "rest": "Q8_0"}, layers=1)
    config = EngineConfig(model=str(path), device="cpu", attention_backend="triton", dtype="float32")
    model = load_model(config, show_progress=True).model
    assert "Rounded to float32, since no kernel multiplies them: 1 of TQ2_0." in capsys.readouterr().err
    assert [name for name, each in model.named_modules() if type(each) is nn.Linear] == [
        "model.layers.0.mlp.up_proj"
    ]


def test_packed_contradicts_quantization(tmp_path: Path) -> None:
    path = write_llama_gguf(tmp_path / "tiny.gguf", {"rest": "Q8_0"}, layers=1)
    with pytest.raises(ConfigError, match="quantization"):
        load(path, attention_backend="triton", gguf="packed", quantization="int8")
