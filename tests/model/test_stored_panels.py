# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints multiplied as they are stored, on a CPU, held to the models of their numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as written
import torch
from nightly import by_day
from safetensors.torch import load_file, save_file
from test_gguf_blocks import Step, deviation, round_rows
from test_model_loader import load, logits_of
from test_stored_checkpoints import FORMATS
from tiny_models import save_tiny_model

pytest.importorskip("numba")
from radixkv.model.cpu_layers.block_experts import BlockExperts
from radixkv.model.cpu_layers.block_layers import BlockLayer, fuse_block_layers
from radixkv.model.cpu_layers.block_linear import BlockLinear
from radixkv.model.cpu_layers.packed_linear import PackedLinear
from radixkv.model.step_context import call_model
from radixkv_kernels.cpu.linear.block_method import methods

if not methods():
    pytest.skip("neither VNNI nor AVX2", allow_module_level=True)

TOKENS = list(range(5, 30))
#: Formats that have no blocks, or not with these sizes.
PLAIN = ("fp8-uneven-blocks", "modelopt-awq", "modelopt-smoothed")
BY_DAY = ("awq", "nf4", "mlx-4", "gptq-act-order", "packed-4", "packed-8-zeros", "nvfp4", "fp8-blocks")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 32}
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny-llama", "llama", num_attention_heads=2, **sizes
    )


def pair(original: Path, place: Path, name: str) -> tuple[Path, Path]:
    """Folders of a model in a format and of its numbers."""
    folder, plain = (Path(shutil.copytree(original, place / each)) for each in ("stored", "plain"))
    written.quantise(folder, *FORMATS[name], plain=plain)
    return folder, plain


@torch.inference_mode()
def rounded_logits(folder: Path, products: dict[str, Any]) -> torch.Tensor:
    """Logits with inputs as the products round them: to int8 rows, in the order in which they take them, or
    to bfloat16."""
    loaded = load(folder, dtype="float32")
    for path, product in products.items():
        if getattr(product.product, "row_dtype", None) == torch.bfloat16:
            loaded.model.get_submodule(path).register_forward_pre_hook(
                lambda _, inputs: (inputs[0].bfloat16().float(),)
            )
            continue
        order = product.product.order
        order = torch.arange(product.in_features) if order is None else order.long()

        def rounded(_: Any, inputs: Any, order: torch.Tensor = order) -> tuple[torch.Tensor]:
            return (round_rows(inputs[0][..., order])[..., order.argsort()],)

        loaded.model.get_submodule(path).register_forward_pre_hook(rounded)
    return logits_of(loaded, TOKENS)


@pytest.mark.parametrize("name", by_day([each for each in FORMATS if each not in PLAIN], *BY_DAY))
def test_they_compute_what_the_model_of_their_numbers_does(original: Path, tmp_path: Path, name: str) -> None:
    folder, plain = pair(original, tmp_path, name)
    loaded = load(folder)
    assert loaded.dtype == torch.float32
    products = {path: each for path, each in loaded.model.named_modules() if path.endswith("_proj")}
    assert all(isinstance(each, BlockLinear) for each in products.values())
    assert isinstance(loaded.model.lm_head, PackedLinear)
    expected = rounded_logits(plain, products)
    found = logits_of(loaded, TOKENS)
    assert deviation(found, expected) < 1e-2
    assert torch.equal(logits_of(load(folder), TOKENS), found)
    assert fuse_block_layers(loaded.model) == 1
    assert isinstance(loaded.model.model.layers[0], BlockLayer)
    positions = torch.arange(len(TOKENS))
    with torch.inference_mode():
        fused = call_model(loaded.model, torch.tensor(TOKENS), positions, None, Step(positions))
    assert deviation(fused, expected) < 1e-2


@pytest.mark.parametrize("name", PLAIN)
def test_forms_without_blocks_become_bfloat16(
    original: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, plain = pair(original, tmp_path, name)
    with caplog.at_level("WARNING", "radixkv"):
        loaded = load(folder)
    assert "no kernel reads them, so they are expanded to bfloat16: 7 of " in caplog.text
    products = [each for path, each in loaded.model.named_modules() if path.endswith("_proj")]
    assert all(isinstance(each, PackedLinear) for each in products)
    assert deviation(logits_of(loaded, TOKENS), logits_of(load(plain, dtype="float32"), TOKENS)) < 1e-2


def quantise_experts(folder: Path, plain: Path, write: written.Writer, settings: dict[str, object]) -> None:
    """Store experts one by one, as checkpoints of mixtures have them."""
    tensors = load_file(folder / "model.safetensors")
    apart = {}
    for name, tensor in tensors.items():
        head, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for number, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                apart[f"{head}.{number}.gate_proj.weight"], apart[f"{head}.{number}.up_proj.weight"] = (
                    gate,
                    up,
                )
        elif leaf == "down_proj" and tensor.ndim == 3:
            apart |= {f"{head}.{number}.down_proj.weight": each for number, each in enumerate(tensor)}
        else:
            apart[name] = tensor
    apart = {name: tensor.contiguous() for name, tensor in apart.items()}
    for each in (folder, plain):
        save_file(apart, each / "model.safetensors", metadata={"format": "pt"})
    written.quantise(folder, write, settings, plain=plain)


@pytest.mark.parametrize("name", by_day(("awq", "nvfp4", "packed-4", "fp8-blocks"), "nvfp4"))
def test_experts(tmp_path: Path, name: str) -> None:
    original = save_tiny_model(
        tmp_path / "tiny", "qwen3-moe", hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1
    )
    folder, plain = (Path(shutil.copytree(original, tmp_path / each)) for each in ("stored", "plain"))
    quantise_experts(folder, plain, *FORMATS[name])
    check_experts(folder, plain)


def check_experts(folder: Path, plain: Path) -> None:
    """Hold a layer's experts to those of the model of their numbers, and a row to itself alone."""
    source = torch.Generator().manual_seed(0)
    states, weights = torch.randn(9, 64, generator=source), torch.rand(9, 2, generator=source)
    indices = torch.randint(0, 4, (9, 2), generator=source)
    own = load(folder).model.model.layers[0].mlp.experts
    assert isinstance(own, BlockExperts)
    numbers = load(plain, dtype="float32").model.model.layers[0].mlp.experts
    with torch.inference_mode():
        found, expected = own(states, indices, weights), numbers(states, indices, weights)
        assert deviation(found, expected) < 3e-2
        assert torch.equal(own(states[:1], indices[:1], weights[:1])[0], found[0])


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    original = save_tiny_model(tmp_path / "tiny", "gpt-oss", hidden_size=64, intermediate_size=64)
    folder, plain = (Path(shutil.copytree(original, tmp_path / each)) for each in ("stored", "plain"))
    written.quantise_gpt_oss(folder, plain=plain)
    check_experts(folder, plain)
    expanded = load(folder, dtype="float32")
    assert torch.equal(logits_of(expanded, TOKENS), logits_of(load(plain, dtype="float32"), TOKENS))
