# SPDX-License-Identifier: Apache-2.0
"""Whole models with states over the Triton backends, interpreted: transformers' logits, in pieces and from a
kept state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made_steps import BLOCK, NUM_BLOCKS, HandMade
from hybrid_models import HYBRID_FAMILIES, save_hybrid_model
from transformers import AutoModelForCausalLM

from radixkv.engine.config import EngineConfig
from radixkv.model.loading.loader import load_model
from radixkv.model.runner import ModelRunner
from radixkv_kernels.states import GRID, StateSpec

LENGTH = GRID + 4
# One family by day, the others by night.
FAMILIES = [
    family if family == "lfm2" else pytest.param(family, marks=pytest.mark.nightly)
    for family in HYBRID_FAMILIES
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    save_hybrid_model(tmp_path, model_type)
    tokens = np.random.default_rng(0).integers(3, 320, LENGTH).tolist()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        positions = torch.arange(LENGTH)[None]
        expected = reference(
            input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False
        ).logits[0]
    loaded = load_model(EngineConfig(model=str(tmp_path), device="cpu"), show_progress=False)
    spec = loaded.attention.layout(NUM_BLOCKS, BLOCK, loaded.dtype, loaded.device, None)
    limits = {"max_num_tokens": LENGTH, "max_num_seqs": 2, "max_model_len": LENGTH}
    states = StateSpec(loaded.attention.states, num_slots=4, num_rings=2)
    runner = ModelRunner(loaded, spec, backend="triton", states=states, **limits)
    for tensor in runner.kv.tensors():
        tensor.view(torch.uint8).zero_()
    pieces = HandMade(runner, tokens).run([GRID - 2, LENGTH - 1, LENGTH], saves={GRID: 2})
    torch.testing.assert_close(pieces, expected, rtol=0, atol=1e-3)
    runner.load_states([3], list(runner.save_states([2]).result()))
    resumed = HandMade(runner, tokens, base=GRID, slot=3).run([LENGTH])
    torch.testing.assert_close(resumed, pieces[GRID:], rtol=0, atol=2e-4)
