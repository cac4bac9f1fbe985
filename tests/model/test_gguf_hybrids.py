# SPDX-License-Identifier: Apache-2.0
"""GGUF files of models with state layers, held to the models that the files were made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from radixkv.model.attention.attention_hook import PlainCausalStep
from radixkv.model.step_context import call_model

pytest.importorskip("numba")
from gguf_files import read_model
from gguf_hybrid_files import HYBRIDS, make_hybrid, write_hybrid

from radixkv_kernels.cpu.linear.block_method import methods

if not methods():
    pytest.skip("neither VNNI nor AVX2", allow_module_level=True)

BY_DAY = ("qwen35",)
TOKENS = torch.tensor([5, 90, 17, 23, 4, 4, 61, 100, 12, 8, 77, 15, 99, 3])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in BY_DAY else pytest.mark.nightly) for case in HYBRIDS]
)
@torch.inference_mode()
def test_a_hybrid_s_file_computes_what_its_model_does(case: str, tmp_path: Path) -> None:
    model, positions = make_hybrid(case), torch.arange(len(TOKENS))
    expected = model(TOKENS[None], use_cache=False).logits[0]

    def logits(name: str, dtype: torch.dtype | None, *kinds: str) -> torch.Tensor:
        path = tmp_path / name
        if not path.exists():
            write_hybrid(path, case, model, kinds)
        return call_model(read_model(path, dtype), TOKENS, positions, None, PlainCausalStep(positions))

    plain = logits("plain.gguf", torch.float32, "F32")
    assert (plain - expected).abs().max() < 1e-4 * expected.abs().max()
    rounded = logits("blocks.gguf", torch.float32, "Q8_0", "Q4_0")
    packed = logits("blocks.gguf", None)
    # The median, since rounding may send single tokens another way through experts.
    assert ((packed - rounded).norm(dim=-1) / rounded.norm(dim=-1)).median() < 0.15
