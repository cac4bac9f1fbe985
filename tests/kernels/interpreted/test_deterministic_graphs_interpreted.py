# SPDX-License-Identifier: Apache-2.0
"""Deterministic mode over the Triton backend, interpreted: replayed steps have the bits of eager ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_language_model import run_all
from tiny_configs import VOCAB_SIZE
from tiny_models import save_tiny_model

from radixkv.engine.config import EngineConfig
from radixkv.engine.served_model import ServedModel
from radixkv.entrypoints.builder import engine_on_runner
from radixkv.model.cuda_graphs import StepGraphs
from radixkv.model.loading.loader import load_model
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.sampling.sampling_params import SamplingParams
from radixkv_kernels.states import GRID, StateSpec

ROWS, LENGTH = 32, 128


def run_again(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands for CUDA's capture: the result keeps its place, and a replay takes no arguments."""
    result = step().clone()
    return lambda: result.copy_(step()), result  # type: ignore[return-value]


def logprobs_of(folder: Path, *, replays: bool) -> list[float]:
    """Of tokens of three requests at once, then of one of them again."""
    loaded = load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32"), show_progress=False)
    layout = loaded.attention.layout(40, 8, loaded.dtype, loaded.device, None)
    states, shapes = None, loaded.attention.states
    if shapes:
        states = StateSpec(shapes, num_slots=6, num_rings=3, keeps_values=True)
    limits = StepLimits(ROWS, 3, LENGTH)
    runner = ModelRunner(loaded, layout, limits, backend="triton", deterministic=True, states=states)
    for tensor in runner.kv.tensors():  # padded rows may attend to K/V that nobody wrote
        tensor.view(torch.uint8).zero_()
    config = EngineConfig(max_num_batched_tokens=ROWS, max_num_seqs=3, speculation="off", block_size=8)
    engine = engine_on_runner(config, runner, ServedModel(tokenizer=None, max_model_len=LENGTH))
    if replays:
        runner.graphs = StepGraphs(
            runner.model,
            runner.kv,
            runner.backend,
            max_rows=ROWS,
            row_multiple=runner.row_multiple,
            record=run_again,
            states=runner.states,
        )
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, VOCAB_SIZE, 20 + 23 * i).tolist() for i in range(3)]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1)
    found, hits = [], []
    for asked in (prompts, prompts[2:]):
        names = [engine.add_request(prompt, params) for prompt in asked]
        outputs = run_all(engine)
        for name in names:
            assert outputs[name].error is None
            hits.append(outputs[name].num_cached_tokens)
            found += [token.chosen.logprob for token in outputs[name].outputs[0].logprobs]
    if replays:
        assert runner.graphs is not None
        assert runner.graphs.replayed
    assert hits[-1] >= GRID
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_5_text", "mamba2", "mamba"])
def test_replayed_steps_have_the_bits_of_eager_ones(family: str, tmp_path: Path) -> None:
    """A state is resumed at the grid's first point, which a decode passes, too."""
    save_tiny_model(tmp_path, family)
    eager = logprobs_of(tmp_path, replays=False)
    assert eager == logprobs_of(tmp_path, replays=True)
    assert eager[6:9] == eager[9:]  # beside others, alone with a hit
