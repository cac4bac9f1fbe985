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

ROWS = 32


def run_again(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands for CUDA's capture: the result keeps its place, and a replay takes no arguments."""
    result = step().clone()
    return lambda: result.copy_(step()), result  # type: ignore[return-value]


def logprobs_of(folder: Path, *, replays: bool) -> list[float]:
    """Of tokens of three requests at once, then of one of them again."""
    loaded = load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32"), show_progress=False)
    layout = loaded.attention.layout(40, 8, loaded.dtype, loaded.device, None)
    runner = ModelRunner(loaded, layout, StepLimits(ROWS, 3, 64), backend="triton", deterministic=True)
    for tensor in runner.kv.tensors():  # padded rows may attend to K/V that nobody wrote
        tensor.view(torch.uint8).zero_()
    config = EngineConfig(max_num_batched_tokens=ROWS, max_num_seqs=3, speculation="off", block_size=8)
    engine = engine_on_runner(config, runner, ServedModel(tokenizer=None, max_model_len=64))
    if replays:
        runner.graphs = StepGraphs(
            runner.model,
            runner.kv,
            runner.backend,
            max_rows=ROWS,
            row_multiple=runner.row_multiple,
            record=run_again,
        )
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, VOCAB_SIZE, 20 + 9 * i).tolist() for i in range(3)]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1)
    found = []
    for asked in (prompts, prompts[1:2]):
        names = [engine.add_request(prompt, params) for prompt in asked]
        outputs = run_all(engine)
        for name in names:
            assert outputs[name].error is None
            found += [token.chosen.logprob for token in outputs[name].outputs[0].logprobs]
    if replays:
        assert runner.graphs is not None
        assert runner.graphs.replayed
    return found


@pytest.mark.nightly
def test_replayed_steps_have_the_bits_of_eager_ones(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    eager = logprobs_of(tmp_path, replays=False)
    assert eager == logprobs_of(tmp_path, replays=True)
    assert eager[3:6] == eager[9:]  # beside others, alone with a hit
