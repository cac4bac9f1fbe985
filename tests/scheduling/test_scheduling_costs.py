# SPDX-License-Identifier: Apache-2.0
"""What a step costs the scheduler itself, in calls of its own functions: linear in the requests."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_language_model import VOCAB, PagedHashModel, make_engine

import radixkv.scheduling.scheduler
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch

ROOM = str(Path(radixkv.scheduling.scheduler.__file__).parent)


class SameTokenRunner(PagedHashModel):
    """Every row gets the same token."""

    num_blocks, block_size = 20_000, 8

    def execute(self, batch: Batch) -> torch.Tensor:
        return torch.arange(VOCAB, dtype=torch.float32).repeat(len(batch.logit_rows), 1)


def calls_of_worst_step(count: int, prompts: list[list[int]], follow: bool) -> int:
    """Python calls of functions in radixkv/scheduling, in the step that makes most of them."""
    engine, _ = make_engine(
        budget=8192, model=SameTokenRunner(20_000, 8), max_num_seqs=2 * count, max_model_len=400
    )
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    calls = worst = 0

    def count_call(frame, event, argument):
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(ROOM):
            calls += 1

    for prompt in prompts:
        engine.add_request(prompt, params)
    for step in range(12):
        if follow and step == 4:  # prompts that go on with what all of the others have generated
            for request in engine.scheduler.running:
                engine.add_request([*request.tokens().tolist(), 7], params)
        calls = 0
        sys.setprofile(count_call)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        worst = max(worst, calls)
    assert engine.stats().num_rebuilds == 0
    return worst


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_a_step_is_linear_in_the_requests_equal_prompts_or_not(equal, follow):
    def prompts(count: int) -> list[list[int]]:
        first = np.random.default_rng(0).integers(1, VOCAB, 45).tolist()
        return [first if equal else [*first, i % 90 + 1, i // 90 + 1] for i in range(count)]

    few = calls_of_worst_step(24, prompts(24), follow)
    many = calls_of_worst_step(96, prompts(96), follow)
    assert many <= 4 * few * 1.3 + 200
