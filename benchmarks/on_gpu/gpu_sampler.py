# SPDX-License-Identifier: Apache-2.0
"""Milliseconds to draw one token for each row of a vocabulary of 128,256."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.gpu_parts import Report
from benchmarks.gpu_steps import timed
from benchmarks.paged_bench import Sizes
from radixkv.sampling.sampler import sample
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.sampling.sampling_state import SamplingState

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k and top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_p": {"temperature": 0.6, "top_p": 0.9},
    "repetition penalty": {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05},
}


@dataclasses.dataclass
class Request:
    """Fields of a request that the sampler reads."""

    params: SamplingParams
    sampling_state: SamplingState


def sampler(sizes: Sizes, report: Report) -> None:
    """Rows as sharp as a chat model's, by kind of sampling and number of rows."""
    vocabulary = 600 if sizes.small else 128256
    dtype = torch.float32 if sizes.device.type == "cpu" else torch.bfloat16
    for count in (1, 2) if sizes.small else (1, 32, 256):
        torch.manual_seed(0)
        logits = 3 * torch.randn(count, vocabulary, device=sizes.device, dtype=dtype)
        prompt = list(range(64))
        for name, options in KINDS.items():
            params = SamplingParams(**options)
            requests = [Request(params, SamplingState(params, seed, prompt, ())) for seed in range(count)]
            rows = range(count)
            milliseconds = timed(
                lambda q=requests, x=logits, r=rows: sample(x, r, q), sizes.device, sizes.rounds
            )
            report(rows=count, sampling=name, ms=milliseconds)
