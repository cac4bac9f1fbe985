# SPDX-License-Identifier: Apache-2.0
"""Architectures of GGUF files that radixkv reads itself, held to the models that the files were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import CONVERTED, EXPERT_ARCHITECTURES, read_model, write_converted
from gguf_hybrid_files import HYBRIDS
from tiny_models import finish_gguf

from radixkv.engine.config import EngineConfig
from radixkv.errors import ModelLoadError
from radixkv.model.attention.attention_hook import PlainCausalStep
from radixkv.model.loading.gguf_architectures import ARCHITECTURES
from radixkv.model.loading.gguf_configs import config_of
from radixkv.model.loading.gguf_file import open_gguf
from radixkv.model.loading.loader import load_model
from radixkv.model.step_context import call_model

pytest.importorskip("numba")
from radixkv.model.cpu_layers.block_linear import BlockLinear
from radixkv_kernels.cpu.linear.block_method import methods

if not methods():
    pytest.skip("neither VNNI nor AVX2", allow_module_level=True)

BY_DAY = (
    "command-r",
    "deepseek2",
    "gemma4 with experts",
    "gemma4 with shared keys",
    "glm4",
    "granitemoe",
    "mistral3",
    "olmoe",
    "phi2",
)
TOKENS = torch.tensor([5, 90, 17, 23, 4, 4, 61, 100, 12, 8, 77, 15, 99, 3])


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    positions = torch.arange(len(TOKENS))
    return call_model(model, TOKENS, positions, None, PlainCausalStep(positions))


def test_every_architecture_of_the_table_is_tested() -> None:
    cases = (*CONVERTED, *HYBRIDS, *EXPERT_ARCHITECTURES)
    assert {case.split()[0] for case in cases} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in BY_DAY else pytest.mark.nightly) for case in CONVERTED]
)
@torch.inference_mode()
def test_a_file_computes_what_its_model_does(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_converted(path, case)
    expected = model(TOKENS[None], use_cache=False).logits[0]
    plain = read_model(path, torch.float32)
    assert (logits_of(plain) - expected).abs().max() < 1e-4 * expected.abs().max()
    packed = read_model(path)
    if not case.startswith(("gpt2", "falcon")):  # whose products are of other classes
        assert sum(isinstance(module, BlockLinear) for module in packed.modules()) > 8
    # More layers, and queries that nothing scales, which attend more sharply.
    most = 0.06 if case.startswith(("gemma3", "gemma4")) else 0.04
    assert (logits_of(packed) - expected).norm() < most * expected.norm()


@pytest.mark.parametrize("architecture", ["deci", "gemma3n", "plamo2"])
def test_what_can_t_be_read_is_named_with_what_can(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(64)
    finish_gguf(writer)
    expected = (
        f"of the architecture {architecture}, which can't be read from GGUF. These can: .*granite.*olmo2"
    )
    with pytest.raises(ModelLoadError, match=expected):
        load_model(EngineConfig(model=str(path), device="cpu"), show_progress=False)


def test_long_rope_s_factors_are_read_and_checked(tmp_path: Path) -> None:
    def write(count: int) -> Path:
        path = tmp_path / f"{count}.gguf"
        writer = gguf.GGUFWriter(str(path), "phi3")
        for size in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
            getattr(writer, f"add_{size}")(64)
        writer.add_head_count(4)
        writer.add_head_count_kv(4)
        writer.add_vocab_size(64)
        writer.add_rope_dimension_count(16)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_attn_factors(1.19)
        for name, value in (("short", 1), ("long", 4)):
            factors = np.full(count, value, np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
        finish_gguf(writer)
        return path

    rotary = config_of(open_gguf(write(8))).rope_parameters
    assert rotary["rope_type"] == "longrope"
    assert rotary["short_factor"] == [1.0] * 8
    assert rotary["long_factor"] == [4.0] * 8
    assert rotary["original_max_position_embeddings"] == 32
    assert rotary["attention_factor"] == pytest.approx(1.19)
    with pytest.raises(ModelLoadError, match="has 7 values; LongRoPE divides 8 frequencies"):
        config_of(open_gguf(write(7)))
