# SPDX-License-Identifier: Apache-2.0
"""Decoder layers with states, interpreted: few launches, transformers' logits, bits that no batch changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_made_steps import BLOCK, NUM_BLOCKS, HandMade
from kernel_count import kernels_by_module
from nightly import by_day
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from radixkv.engine.config import EngineConfig
from radixkv.model.cuda_graphs import StepGraphs
from radixkv.model.gpu_layers.state_layers import FusedHeads, FusedShortConv, FusedStateLayer
from radixkv.model.loading.loader import load_model
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv_kernels.states import StateSpec

LENGTH = 14
#: Launches of a layer with a gated MLP, and of what is between its norm and its residual.
MAX_LAUNCHES, MAX_HEADS = 14, 8
#: Families with a gated MLP, or none, in every layer.
DENSE = ("qwen3_5_text", "olmo_hybrid", "nemotron_h", "bamba", "lfm2", "lfm3")
#: Family -> launches more than that: a decay for each channel takes two kernels, low ranks two products.
FAMILIES: dict[str, int] = {
    **dict.fromkeys((*DENSE, "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid"), 0),
    "kimi_linear": 4,
    "bailing_hybrid": 2,
}


def make_runner(folder: Path, **options: Any) -> ModelRunner:
    loaded = load_model(EngineConfig(model=str(folder), device="cpu"), show_progress=False)
    spec = loaded.attention.layout(NUM_BLOCKS, BLOCK, loaded.dtype, loaded.device, None)
    states = StateSpec(loaded.attention.states, num_slots=4, num_rings=2, keeps_values=True)
    runner = ModelRunner(
        loaded, spec, StepLimits(LENGTH, 2, LENGTH), backend="triton", states=states, **options
    )
    for tensor in runner.kv.tensors():
        tensor.view(torch.uint8).zero_()
    return runner


#: Falcon-H1's factors, of which a tiny model has none.
MULTIPLIERS = {
    "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.6, "key_multiplier": 0.7,
    "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [0.6, 1.4], "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24,
}  # fmt: skip
#: Family -> changes of its tiny model, most launches of a layer in a graph, layers with states.
BESIDE_OTHERS: dict[str, tuple[dict[str, Any], int, int]] = {
    "falcon_h1": (MULTIPLIERS, 22, 3),
    "zamba2": ({"num_attention_heads": 4}, 11, 4),
}


@pytest.mark.parametrize("family", by_day(BESIDE_OTHERS, "falcon_h1"))
def test_states_beside_attention(family: str, tmp_path: Path) -> None:
    """Falcon-H1's heads that attend beside those with states, and Zamba 2's shared block before them."""
    changes, most, count = BESIDE_OTHERS[family]
    save_tiny_model(tmp_path, family, **changes)
    runner = make_runner(tmp_path)
    layers = [each for each in runner.model.modules() if isinstance(each, FusedStateLayer)]
    assert len(layers) == count
    tokens = np.random.default_rng(2).integers(3, 320, LENGTH).tolist()
    one = HandMade(runner, tokens)
    logits = []
    with kernels_by_module(layers) as launched:
        logits.append(one.run([LENGTH - 4, LENGTH - 3]))
        runner.graphs = StepGraphs(
            runner.model, runner.kv, runner.backend, max_rows=LENGTH, record=run_again, states=runner.states
        )
        logits += [one.run([LENGTH - 1]), one.run([LENGTH])]
    for each in launched[1:]:  # the first layer's copies of the plan are the step's
        assert each.total() <= most, each
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        wanted = reference(
            input_ids=torch.tensor([tokens]), position_ids=torch.arange(LENGTH)[None], use_cache=False
        ).logits[0]
    torch.testing.assert_close(torch.cat(logits), wanted, rtol=0, atol=1e-3)


def run_again(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    result = step().clone()
    return lambda: result.copy_(step()), result  # type: ignore[return-value]


@pytest.mark.parametrize("family", by_day(FAMILIES, "qwen3_5_text"))
def test_a_layer_launches_few_kernels(family: str, tmp_path: Path) -> None:
    """A piece of a prompt, a decode, and both as a graph has them, which foresees chunks in every step."""
    save_tiny_model(tmp_path, family)
    runner = make_runner(tmp_path)
    layers = [each for each in runner.model.modules() if isinstance(each, FusedStateLayer)]
    heads = [each for each in runner.model.modules() if isinstance(each, FusedHeads | FusedShortConv)]
    assert len(layers) == len(heads) > 0
    tokens = np.random.default_rng(0).integers(3, 320, LENGTH).tolist()
    one = HandMade(runner, tokens)
    logits = []
    with kernels_by_module(layers) as launched, kernels_by_module(heads) as between:
        logits.append(one.run([LENGTH - 4, LENGTH - 3]))
        runner.graphs = StepGraphs(
            runner.model, runner.kv, runner.backend, max_rows=LENGTH, record=run_again, states=runner.states
        )
        # A graph's logits are there until the next step.
        logits += [one.run([LENGTH - 1]), one.run([LENGTH])]
    assert len(launched) == len(between) >= 4 * len(layers)
    for whole, part in zip(launched, between, strict=True):
        assert part.total() <= MAX_HEADS + FAMILIES[family], part
        assert part["conv_kernel"] == part["leave_kernel"] + part["keep_kernel"] == 1, part
        assert family not in DENSE or whole.total() <= MAX_LAUNCHES, whole
    decode = between[len(layers)]
    assert decode["ring_kernel"] == decode["leave_kernel"]
    assert not decode["state_kernel"]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        wanted = reference(
            input_ids=torch.tensor([tokens]), position_ids=torch.arange(LENGTH)[None], use_cache=False
        ).logits[0]
    torch.testing.assert_close(torch.cat(logits), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", by_day(("qwen3_5_text", "olmo_hybrid", "nemotron_h"), "qwen3_5_text"))
def test_rows_have_the_bits_of_a_cold_prompt_alone(family: str, tmp_path: Path) -> None:
    """Deterministic mode: in pieces and decodes, the logits of one prefill, bit for bit."""
    save_tiny_model(tmp_path, family)
    runner = make_runner(tmp_path, deterministic=True)
    tokens = np.random.default_rng(1).integers(3, 320, LENGTH).tolist()
    whole = HandMade(runner, tokens).run([LENGTH])
    pieces = HandMade(runner, tokens).run([3, 4, 9, LENGTH])
    assert torch.equal(whole, pieces)
