# SPDX-License-Identifier: Apache-2.0
"""Freed windows over the Triton backend, interpreted: transformers' tokens from small pools, replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_language_model import run_all
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from radixkv.engine.config import EngineConfig
from radixkv.engine.served_model import ServedModel
from radixkv.entrypoints.builder import engine_on_runner
from radixkv.model.cuda_graphs import StepGraphs
from radixkv.model.loading.loader import load_model
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.sampling.sampling_params import SamplingParams
from radixkv_kernels.states import StateSpec

ROWS, LENGTH = 48, 160


def run_again(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands for CUDA's capture: the result keeps its place, and a replay takes no arguments."""
    result = step().clone()
    return lambda: result.copy_(step()), result  # type: ignore[return-value]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "lfm3"])
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Prompts that go on from one another's windows, and states, more than the pools hold."""
    save_tiny_model(tmp_path, family, sliding_window=20)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    loaded = load_model(EngineConfig(model=str(tmp_path), device="cpu"), show_progress=False)
    layout = loaded.attention.freeing_windows().layout(30, 8, loaded.dtype, loaded.device, None)
    states = None
    if loaded.attention.states:
        states = StateSpec(loaded.attention.states, num_slots=5, num_rings=2, keeps_values=True)
    limits = StepLimits(ROWS, 2, LENGTH)
    runner = ModelRunner(loaded, layout.with_blocks(30, 50), limits, backend="triton", states=states)
    assert runner.windows is not None
    for tensor in runner.kv.tensors():  # padded rows may attend to K/V that nobody wrote
        tensor.view(torch.uint8).zero_()
    config = EngineConfig(max_num_batched_tokens=ROWS, max_num_seqs=2, speculation="off", block_size=8)
    engine = engine_on_runner(config, runner, ServedModel(tokenizer=None, max_model_len=LENGTH))
    runner.graphs = StepGraphs(
        runner.model,
        runner.kv,
        runner.backend,
        max_rows=ROWS,
        record=run_again,
        states=runner.states,
        windows=runner.windows,
    )
    tokens = np.random.default_rng(1).integers(3, VOCAB_SIZE, 150).tolist()
    prompts = [tokens[:130], [*tokens[:100], 5, 6], tokens[:135]]
    hits = []
    for prompt in [*prompts, tokens[40:140][::-1], prompts[0]]:
        name = engine.add_request(prompt, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        output = run_all(engine)[name]
        hits.append(output.num_cached_tokens)
        answer = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
        assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()
    engine.check()
    assert hits[2] >= 128
    assert engine.cache.stats.evicted_blocks > 0
    assert runner.graphs.replayed
