# SPDX-License-Identifier: Apache-2.0
"""Stored forms of weights: each is served as the table says, or refused by name before weights are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_loader import load, logits_of, refusal
from tiny_models import save_tiny_model

from radixkv import LLM, AsyncEngine
from radixkv.engine.config import EngineConfig
from radixkv.errors import ModelLoadError

Tensors = dict[str, torch.Tensor]
TOKENS = list(range(5, 30))
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose linear layers have whole blocks of 128 x 128."""
    changes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return save_tiny_model(folder, "llama", num_attention_heads=2, **changes)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny-llama"))


def describe(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def quantise(folder: Path, store: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]) -> None:
    """Store each product's weight as `store` has it: what follows the layer's name -> tensor."""
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix("weight")
        parts = {"weight": tensor} if "proj" not in name else store(tensor)
        tensors |= {stem + rest: part.contiguous() for rest, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def scaled(weight: torch.Tensor, scale: str = "weight_scale", **more: torch.Tensor) -> Tensors:
    size = weight.abs().amax() / 448
    return {"weight": (weight / size).to(FP8), scale: size, **more}


def blocks(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    parts = weight.view(rows // 128, 128, columns // 128, 128)
    sizes = parts.abs().amax(dim=(1, 3)) / 448
    return {
        "weight": (parts / sizes[:, None, :, None]).reshape(rows, columns).to(FP8),
        "weight_scale_inv": sizes,
    }


def packed(weight: torch.Tensor, **more: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        "scales": torch.ones(columns // 64, rows),
        **more,
    }


def nvfp4(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        "weight": torch.zeros(rows, columns // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(rows, columns // 16).to(FP8),
        "weight_scale_2": torch.tensor(1.0),
    }


def zeros(kind: torch.dtype) -> torch.Tensor:
    return torch.zeros(4, 4, dtype=kind)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MLX = {"group_size": 64, "bits": 4}
#: Description in config.json, stored weights -> what the refusal says.
REFUSED: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Tensors] | None, str]] = {
    "modelopt-svd": (
        {"quantization_config": {**MODELOPT, "quant_algo": "NVFP4_SVD"}},
        nvfp4,
        "ModelOpt NVFP4_SVD",
    ),
    "nvfp4-undeclared": ({}, nvfp4, "ModelOpt NVFP4"),
    "modelopt-nested": (
        {"text_config": {"quantization_config": {**MODELOPT, "quant_algo": "NVFP4_SVD"}}},
        None,
        "text_config.quantization_",
    ),
    "in-a-part": ({"vision_config": {"quantization_config": BLOCK_FP8}}, None, "vision_config.quantization_"),
    "fp8-undeclared": ({}, scaled, "14 tensors, the first is model.layers.0.mlp.down_proj.weight_scale"),
    "fp8-without-scales": ({}, lambda w: {"weight": w.to(FP8)}, "without a scale"),
    "fp8-with-half-its-scales": (
        {"quantization_config": BLOCK_FP8},
        lambda w: {"weight": w.to(FP8)},
        "without a",
    ),
    "block-fp8-undeclared": ({}, blocks, "FP8 with a scale for each block"),
    "block-size": (
        {"quantization_config": {**BLOCK_FP8, "weight_block_size": [128]}},
        blocks,
        "expected two numbers",
    ),
    "fp8-other-scales": ({"quantization_config": {"quant_method": "fp8"}}, scaled, "names FP8 alone"),
    "compressed-undeclared": (
        {},
        lambda w: {"weight_packed": zeros(torch.int32), "weight_scale": w[:, :1]},
        "as compressed-tensors",
    ),
    "awq-gemv": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
        packed,
        "AWQ, 4 bits",
    ),
    "awq-3": ({"quantization_config": {"quant_method": "awq", "bits": 3}}, packed, "codes are of 3 bits"),
    "gptq-5": ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, packed, "GPTQ, 5 bits"),
    "gptq-dynamic": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {".*up": {"bits": 5}}}},
        packed,
        "of some layers, its codes are of 5 bits",
    ),
    "auto-round-other": (
        {"quantization_config": {"quant_method": "auto-round", "bits": 4, "packing_format": "tpu"}},
        packed,
        "its packing_format is 'tpu'",
    ),
    "auto-round-floats": (
        {
            "quantization_config": {
                "quant_method": "auto-round",
                "bits": 6,
                "data_type": "mx_fp",
                "packing_format": "auto_round:llm_compressor",
            }
        },
        None,
        "its codes are mx_fp of 6 bits",
    ),
    "gptq-undeclared": ({}, lambda w: packed(w, g_idx=torch.zeros(8, dtype=torch.int32)), "as GPTQ"),
    "awq-undeclared": ({}, packed, "as AWQ or GPTQ"),
    "torchao-undeclared": (
        {},
        lambda w: {"_weight_qdata": w.to(torch.int8), "_weight_scale": w[:, 0]},
        "torchao",
    ),
    "mlx-mode": (
        {"quantization_config": {**MLX, "mode": "mxfp6"}, "quantization": MLX},
        lambda w: {"weight": zeros(torch.uint32), "scales": w[:, :1], "biases": w[:, :1]},
        "of the mode 'mxfp6'",
    ),
    "mlx-undeclared": ({}, lambda w: {"weight": w, "scales": w[:, :1], "biases": w[:, :1]}, "as MLX"),
    "bitsandbytes-undeclared": (
        {},
        lambda w: {"weight": w.to(torch.uint8), "weight.absmax": w[:, 0]},
        "as bitsandbytes",
    ),
    "integers-undeclared": ({}, lambda w: {"weight": w.to(torch.int8)}, "whole numbers"),
    "unknown": ({"quantization_config": {"quant_method": "tomorrow's"}}, None, "does not know (tomorrow's)"),
    "no-method": ({"quantization_config": {"wbits": 4}}, None, "no quant_method, but wbits"),
    "old-key": ({"compression_config": MODELOPT}, None, "ModelOpt FP8 (compression_config)"),
    "two-forms": (
        {"quantization_config": {"quant_method": "mxfp4"}, "text_config": {"quantization_config": BLOCK_FP8}},
        None,
        "names several forms (fp8, mxfp4)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_before_weights_are_read(
    folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_, **__: pytest.fail("read"))
    description, store, expected = REFUSED[case]
    describe(folder, **description)
    if store is not None:
        quantise(folder, store)
    message = refusal(folder)
    assert expected in message
    assert "in bfloat16 or float16, or a GGUF file" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "description", [{"quantization": {"quant_algo": "W4A8"}}, {"quant_algo": "NVFP4_SVD"}, {}]
)
def test_a_description_of_modelopts_in_its_own_file(folder: Path, description: dict[str, Any]) -> None:
    (folder / "hf_quant_config.json").write_text(json.dumps(description))
    assert "ModelOpt" in refusal(folder)


def test_every_part_of_a_split_model_is_looked_at(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    tensors["model.layers.1.self_attn.q_proj.qzeros"] = torch.zeros(3)
    weight_map = {}
    for part, chosen in (("a", names[:3]), ("b", sorted(tensors.keys() - set(names[:3])))):
        save_file({name: tensors[name] for name in chosen}, folder / f"{part}.safetensors")
        weight_map |= dict.fromkeys(chosen, f"{part}.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model.layers.1.self_attn.q_proj.qzeros" in refusal(folder)


def test_scales_that_no_layer_reads(folder: Path) -> None:
    """By a name that no form of the table has: seen once the model is there."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.row_scaling"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "1 tensors that no layer reads (first: model.layers.0.mlp.up_proj.row_scaling)" in refusal(folder)


def test_further_layers_and_plain_tensors_are_no_stored_form(folder: Path, original: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.7.mtp.hidden_scale"] = torch.ones(3)
    tensors["vision_tower.logit_scale"] = torch.ones(())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["model.layers.0.self_attn.masks"] = torch.ones(4, 4, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folder, quantization_config=None, quantization={})
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')
    assert torch.equal(logits_of(load(folder), TOKENS), logits_of(load(original), TOKENS))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"format": "nvfp4-pack-quantized"}, "as compressed-tensors (nvfp4-pack-quantized)"),
        ({"config_groups": {"a": {"format": "marlin-24"}}}, "of its variants"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "of its variants"),
        ({"format": "int-quantized"}, "has no config_groups"),
        ({"config_groups": {"a": {"weights": {"num_bits": 2}}}}, "of 2 bits"),
        ({"config_groups": {"a": {}}, "quantization_status": "frozen"}, "'frozen'"),
        ({"config_groups": {"a": {}}, "transform_config": {"config_groups": {"b": {}}}}, "transformed"),
        (
            {
                "config_groups": {"a": {}},
                "transform_config": {
                    "config_groups": {
                        "R1": {"apply": [{"location": "weight_output"}]},
                        "R4": {"apply": [{"location": "input"}, {"location": "weight_input"}]},
                    }
                },
            },
            "transformed at run time (transform_config: R4)",
        ),
        ({"config_groups": {"a": {}}, "transform_config": {"config_groups": [1]}}, "transformed"),
    ],
)
def test_variants_of_compressed_tensors(folder: Path, settings: dict[str, Any], expected: str) -> None:
    describe(folder, quantization_config={"quant_method": "compressed-tensors", **settings})
    assert expected in refusal(folder)


@pytest.mark.parametrize(
    "start", [LLM, lambda model, **rest: AsyncEngine.from_config(EngineConfig(model, **rest))]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_entry_refuses(folder: Path, start: Callable[..., Any], num_ranks: int) -> None:
    quantise(folder, nvfp4)
    describe(folder, quantization_config={**MODELOPT, "quant_algo": "NVFP4_SVD"})
    with pytest.raises(ModelLoadError, match="as ModelOpt NVFP4_SVD"):
        start(str(folder), tensor_parallel=num_ranks)
