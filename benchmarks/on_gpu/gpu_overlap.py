# SPDX-License-Identifier: Apache-2.0
"""Measure the hidden part of the host's work: decode steps, one by one and launched ahead.

The same requests to two engines, one after the other in this process. `gap_ms` is the time in a step for
which the device has nothing to do, as far as the host can see: from a step's tokens to the next launch.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts import Report
from benchmarks.gpu_steps import SHAPES, TOY_SHAPES, engine_config, loaded_model, random_model
from benchmarks.paged_bench import BLOCK, Sizes
from radixkv import LLM, SamplingParams
from radixkv.entrypoints.builder import engine_for_model


def overlap(sizes: Sizes, report: Report) -> None:
    """Milliseconds a step, and of these without a step on the device; in float32 with the same tokens."""
    name, shape = next(iter((TOY_SHAPES if sizes.small else SHAPES).items()))
    device, vocab_size = sizes.device, shape[1]["vocab_size"]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    requests, length, output = (3, 20, 24) if sizes.small else (64, 256, 96)
    answers: dict[bool, int] = {}
    for looks_ahead in (False, True):
        config = engine_config(
            device,
            num_blocks=3 * requests * (length + output + BLOCK) // BLOCK,
            max_num_seqs=requests,
            max_model_len=length + output + BLOCK,
            speculation="off",
            async_scheduling=looks_ahead,
        )
        engine = engine_for_model(config, loaded_model(random_model(shape, device, dtype), name))
        engine.runner.warm_up(thorough=device.type == "cuda")
        llm = LLM.from_engine(engine)
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        results: list[Any] = []
        for seed in range(2):  # the first warms up
            before, started = engine.stats(), time.perf_counter()
            prompts = np.random.default_rng(seed).integers(3, vocab_size, (requests, length)).tolist()
            results = llm.generate(prompts, params)
            seconds, after = time.perf_counter() - started, engine.stats()
        tokens = np.array([result.outputs[0].token_ids for result in results], np.int64)
        answers[looks_ahead] = zlib.crc32(tokens.tobytes())
        steps = after.steps - before.steps
        report(
            load=f"{name}, {requests} decodes, {'launched ahead' if looks_ahead else 'one by one'}",
            ms=seconds / steps * 1e3,
            gap_ms=(after.gap_time_s - before.gap_time_s) / steps * 1e3,
            steps=steps,
            steps_ahead=after.steps_ahead - before.steps_ahead,
        )
        llm.close()
        # Two models do not fit.
        del llm, engine
    if dtype == torch.float32:
        report(check="the same tokens", ok=len(set(answers.values())) == 1)
