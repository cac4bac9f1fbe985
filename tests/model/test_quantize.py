# SPDX-License-Identifier: Apache-2.0
"""`radixkv quantize`: models out of folders of safetensors, served from the file it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import CONVERTED, write_converted
from gguf_hybrid_files import HYBRIDS, make_hybrid, write_hybrid
from tiny_models import byte_level_tokenizer, save_tiny_model
from transformers import AutoConfig

from radixkv.cli.quantize_command import quantize
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError, ModelLoadError
from radixkv.model.attention_hook import PlainCausalStep
from radixkv.model.loading.loader import LoadedModel, load_model
from radixkv.model.quantize.block_rounding import Rounding
from radixkv.model.quantize.gguf_writing import write_quantized
from radixkv.model.step_context import call_model

TOKENS = [5, 90, 17, 230, 4, 4, 61, 300, 12, 8, 77, 150]
#: Settings without a name in GGUF, as their readers expect them.
_AS_GGUF_HAS_IT: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32, "layer_types": None},
    "gpt-oss": {"layer_types": None},
    "qwen3-moe": {"norm_topk_prob": True},
}
#: Cases that are written as Llama here, or by the tests as files of another version.
_OTHERWISE = ("exaone", "granitemoe with one for all", "internlm2", "xverse")
_BY_DAY = ("deepseek2", "granitehybrid", "qwen35")
TEXT = "<|im_start|>user\nSaid 12 <think> Grüße  twice<|im_end|>"


def load(path: Path, **options: object) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), device="cpu", **options), show_progress=False)  # type: ignore[arg-type]


@torch.inference_mode()
def logits_of(loaded: LoadedModel) -> torch.Tensor:
    positions = torch.arange(len(TOKENS))
    step = PlainCausalStep(positions)
    return call_model(loaded.model, torch.tensor(TOKENS), positions, None, step).float()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The median of the tokens', since rounding may send single ones to other experts."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.mark.parametrize(
    ("family", "recipe", "most"),
    [
        ("llama-rope-scaled", "Q8_0", 0.05),
        ("qwen2", "Q4_0", 0.5),
        ("gemma2", "Q8_0", 0.05),
        ("mixtral", "Q8_0", 0.05),
        *(
            pytest.param(family, "Q8_0", 0.06, marks=pytest.mark.nightly)
            for family in ("gpt-oss", "phi3", "qwen3-moe", "olmo2")
        ),
    ],
)
def test_a_folder_becomes_a_file_that_is_served(
    family: str, recipe: str, most: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = _AS_GGUF_HAS_IT.get(family, {"unk_token_id": 0})
    folder = save_tiny_model(tmp_path / "folder", family, **changes)
    file = tmp_path / "model.gguf"
    quantize(str(folder), recipe, file)
    assert str(file) in capsys.readouterr().out
    original, found = load(folder), load(file, gguf="float32")
    expected, dequantised = logits_of(original), logits_of(found)
    assert error(dequantised, expected) < most
    packed = logits_of(load(file, gguf="packed"))
    assert error(packed, dequantised) < 0.1
    assert found.tokenizer.encode(TEXT) == original.tokenizer.encode(TEXT)
    message = [{"role": "user", "content": "Grüße"}]
    assert found.tokenizer.apply_chat_template(message) == original.tokenizer.apply_chat_template(message)
    assert found.eos_token_ids == original.eos_token_ids
    with pytest.raises(ConfigError, match="exists"):
        quantize(str(folder), recipe, file)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in _BY_DAY else pytest.mark.nightly)
        for case in (*CONVERTED, *HYBRIDS)
        if case not in _OTHERWISE and not case.startswith("gemma4")  # which is not written
    ],
)
def test_a_file_has_the_tensors_of_llama_cpp_s_conversion(case: str, tmp_path: Path) -> None:
    """Names, shapes and values of a writer that shares nothing with `radixkv quantize`."""
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    if case in HYBRIDS:
        model = make_hybrid(case)
        write_hybrid(tmp_path / "expected.gguf", case, model, ("Q8_0",))
    else:
        model = write_converted(tmp_path / "expected.gguf", case)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    write_quantized(folder, "Q8_0", file, show_progress=False)
    expected, found = (gguf.GGUFReader(str(path)) for path in (tmp_path / "expected.gguf", file))
    assert found.get_field("general.architecture").contents() == case.split()[0]
    by_name = {tensor.name: tensor for tensor in found.tensors}
    assert by_name.keys() == {tensor.name for tensor in expected.tensors}
    for tensor in expected.tensors:
        own = by_name[tensor.name]
        assert own.shape.tolist() == tensor.shape.tolist(), tensor.name
        wanted, values = (gguf.dequantize(each.data, each.tensor_type) for each in (tensor, own))
        assert np.abs(values - wanted).max() <= 0.01 * np.abs(wanted).max(), tensor.name


def test_what_gguf_has_no_name_for_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "biased", "llama", attention_bias=True)
    with pytest.raises(ModelLoadError, match=r"would not get back attention_bias \(True\)"):
        quantize(str(folder), "Q8_0", tmp_path / "model.gguf")
    AutoConfig.for_model("gptj").save_pretrained(tmp_path / "other")
    with pytest.raises(ModelLoadError, match=r"is a gptj model, which .* known are .*qwen3_moe"):
        write_quantized(tmp_path / "other", "Q8_0", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_recipes_choose_formats_by_name_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        Rounding("Q3_K", 8)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install xllamacpp"):
        Rounding("Q4_K", 8)
    monkeypatch.setattr("radixkv.model.quantize.block_rounding._llama_cpp", lambda: object())
    rounding = Rounding("Q4_K", 8)
    kinds = [rounding.kind(f"blk.{layer}.ffn_down.weight", (64, 512)).name for layer in range(8)]
    assert kinds == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert rounding.kind("output.weight", (64, 512)).name == "Q6_K"
    assert rounding.kind("blk.1.attn_q.weight", (64, 96)).name == "Q8_0"
    assert rounding.kind("blk.1.attn_q.weight", (64, 90)).name == "F16"
    assert rounding.kind("blk.1.ffn_down_exps.weight", (4, 64, 512)).name == "Q4_K"
    assert rounding.kind("blk.1.ssm_out.weight", (64, 256)).name == "Q4_K"
    for name, shape in {
        "attn_norm.weight": (64,), "ffn_gate_inp.weight": (4, 256), "ssm_conv1d.weight": (64, 32),
        "ssm_a": (8, 1),
    }.items():  # fmt: skip
        assert rounding.kind(f"blk.1.{name}", shape).name == "F32"
