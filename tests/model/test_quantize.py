# SPDX-License-Identifier: Apache-2.0
"""`radixkv quantize`: models out of folders of safetensors, served from the file it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_model

from radixkv.cli.quantize_command import quantize
from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError, ModelLoadError
from radixkv.model.attention_hook import PlainCausalStep
from radixkv.model.loading.loader import LoadedModel, load_model
from radixkv.model.quantize.block_rounding import Rounding
from radixkv.model.step_context import call_model

TOKENS = [5, 90, 17, 230, 4, 4, 61, 300, 12, 8, 77, 150]
#: Settings without a name in GGUF, as their readers expect them.
_AS_GGUF_HAS_IT = {"query_pre_attn_scalar": 32, "layer_types": None}
TEXT = "<|im_start|>user\nSaid 12 <think> Grüße  twice<|im_end|>"


def load(path: Path, **options: object) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), device="cpu", **options), show_progress=False)  # type: ignore[arg-type]


@torch.inference_mode()
def logits_of(loaded: LoadedModel) -> torch.Tensor:
    positions = torch.arange(len(TOKENS))
    step = PlainCausalStep(positions)
    return call_model(loaded.model, torch.tensor(TOKENS), positions, None, step).float()


@pytest.mark.parametrize(
    ("family", "recipe", "most"),
    [("llama", "Q8_0", 0.05), ("qwen2", "Q4_0", 0.5), ("gemma2", "Q8_0", 0.05)],
)
def test_a_folder_becomes_a_file_that_is_served(
    family: str, recipe: str, most: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = _AS_GGUF_HAS_IT if family == "gemma2" else {"unk_token_id": 0}
    folder = save_tiny_model(tmp_path / "folder", family, **changes)
    file = tmp_path / "model.gguf"
    quantize(str(folder), recipe, file)
    assert str(file) in capsys.readouterr().out
    original, found = load(folder), load(file, gguf="float32")
    expected, dequantised = logits_of(original), logits_of(found)
    assert float((dequantised - expected).norm() / expected.norm()) < most
    packed = logits_of(load(file, gguf="packed"))
    assert float((packed - dequantised).norm() / dequantised.norm()) < 0.1
    assert found.tokenizer.encode(TEXT) == original.tokenizer.encode(TEXT)
    message = [{"role": "user", "content": "Grüße"}]
    assert found.tokenizer.apply_chat_template(message) == original.tokenizer.apply_chat_template(message)
    assert found.eos_token_ids == original.eos_token_ids
    with pytest.raises(ConfigError, match="exists"):
        quantize(str(folder), recipe, file)


def test_what_gguf_has_no_name_for_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "biased", "llama", attention_bias=True)
    with pytest.raises(ModelLoadError, match=r"would not get back attention_bias \(True\)"):
        quantize(str(folder), "Q8_0", tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match="is a olmo2 model"):
        quantize(str(save_tiny_model(tmp_path / "other", "olmo2")), "Q8_0", tmp_path / "model.gguf")
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
    assert rounding.kind("blk.1.attn_norm.weight", (64,)).name == "F32"
