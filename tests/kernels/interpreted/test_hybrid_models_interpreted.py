# SPDX-License-Identifier: Apache-2.0
"""Whole models with states over the Triton backends, interpreted: transformers' logits, in pieces and from a
kept state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made_steps import BLOCK, NUM_BLOCKS, HandMade
from paged_language_model import run_all
from tiny_configs import HYBRID_FAMILIES
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from radixkv.engine.config import EngineConfig
from radixkv.engine.served_model import ServedModel
from radixkv.entrypoints.builder import engine_on_runner
from radixkv.model.cuda_graphs import StepGraphs
from radixkv.model.loading.loader import load_model
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.speculation.step_costs import StepCosts
from radixkv_kernels.states import GRID, StateSpec

LENGTH = GRID + 4
# One family by day, the others by night.
FAMILIES = [
    family if family == "lfm2" else pytest.param(family, marks=pytest.mark.nightly)
    for family in HYBRID_FAMILIES
]


def interpreted_runner(model: Path, length: int) -> ModelRunner:
    loaded = load_model(EngineConfig(model=str(model), device="cpu"), show_progress=False)
    spec = loaded.attention.layout(NUM_BLOCKS, BLOCK, loaded.dtype, loaded.device, None)
    states = StateSpec(loaded.attention.states, num_slots=4, num_rings=2, keeps_values=True)
    return ModelRunner(loaded, spec, StepLimits(length, 2, length), backend="triton", states=states)


def run_again(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands for CUDA's capture: the result keeps its place, and a replay takes no arguments."""
    result = step().clone()
    return lambda: result.copy_(step()), result  # type: ignore[return-value]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, model_type)
    tokens = np.random.default_rng(0).integers(3, 320, LENGTH).tolist()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        positions = torch.arange(LENGTH)[None]
        expected = reference(
            input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False
        ).logits[0]
    runner = interpreted_runner(tmp_path, LENGTH)
    for tensor in runner.kv.tensors():
        tensor.view(torch.uint8).zero_()
    pieces = HandMade(runner, tokens).run([GRID - 2, LENGTH - 1, LENGTH], saves={GRID: 2})
    torch.testing.assert_close(pieces, expected, rtol=0, atol=1e-3)
    runner.states.load([3], list(runner.states.save([2]).result()))
    resumed = HandMade(runner, tokens, base=GRID, slot=3).run([LENGTH])
    # Rows by their ring, or in a chunk: sums in another order, of operands of 16 bits.
    torch.testing.assert_close(resumed, pieces[GRID:], rtol=0, atol=4e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text", "mamba2", "mamba", "kimi_linear"])
def test_an_engine_gives_the_same_answers_from_its_states(model_type: str, tmp_path: Path) -> None:
    """Models of five kinds of state: two requests at once, cold and hot, with guesses, in steps that could be
    replayed as CUDA graphs."""
    save_tiny_model(tmp_path, model_type)
    runner = interpreted_runner(tmp_path, 2 * GRID)
    config = EngineConfig(max_num_batched_tokens=GRID + 12, max_num_seqs=2, speculation="auto")
    model = ServedModel(tokenizer=None, max_model_len=2 * GRID)
    engine = engine_on_runner(config, runner, model, step_costs=StepCosts.of_backend("triton"))
    for tensor in runner.kv.tensors():  # padded rows may attend to K/V that nobody wrote
        tensor.view(torch.uint8).zero_()
    runner.graphs = StepGraphs(
        runner.model, runner.kv, runner.backend, max_rows=GRID + 12, record=run_again, states=runner.states
    )
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = np.random.default_rng(1).integers(3, 320, 8).tolist() * 9
    prompts = [tokens[: GRID + 4], [*tokens[: GRID + 1], 5, 6]]
    for expected_hit in (0, GRID):
        names = [
            engine.add_request(prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
            for prompt in prompts
        ]
        outputs = run_all(engine)
        for name, prompt in zip(names, prompts, strict=True):
            answer = list(outputs[name].outputs[0].token_ids)
            text = torch.tensor([prompt + answer[:-1]])
            with torch.inference_mode():
                logits = reference(
                    input_ids=text, position_ids=torch.arange(text.shape[1])[None], use_cache=False
                ).logits[0]
            assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()
            assert outputs[name].num_cached_tokens >= expected_hit
    engine.check()
    assert runner.graphs.replayed
    assert engine.stats().speculation.num_draft_tokens
