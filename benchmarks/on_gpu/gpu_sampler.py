# SPDX-License-Identifier: Apache-2.0
"""Tokens drawn from a vocabulary of 128,256: those of the host's code, and milliseconds."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.gpu_machine import read_rate
from benchmarks.gpu_parts import Report
from benchmarks.gpu_steps import timed
from benchmarks.paged_bench import Sizes
from radixkv.sampling.sampler import sample, sample_runs
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


#: Share of tokens that must be the host's: a number next to a token's edge may fall on its other side.
_EQUAL = 0.98


def requests_of(kind: str, count: int) -> list[Request]:
    """Requests with seeds of their own that sample in one way."""
    params, prompt = SamplingParams(**KINDS[kind]), list(range(64))
    return [Request(params, SamplingState(params, seed, prompt, ())) for seed in range(count)]


def logits_of(count: int, sizes: Sizes) -> torch.Tensor:
    """Rows as sharp as a chat model's."""
    torch.manual_seed(0)
    return 3 * torch.randn(count, 600 if sizes.small else 128256, device=sizes.device)


def numbers(sizes: Sizes, report: Report) -> None:
    """The kernel's tokens beside those that the CPU's code chooses from the same logits."""
    count = 3 if sizes.small else 128
    logits = logits_of(count, sizes)
    for kind in KINDS:
        rows, drafts = range(count), [()] * count
        chosen = sample_runs(logits, rows, requests_of(kind, count), drafts, by_kernel=True)
        wanted = sample_runs(logits.cpu(), rows, requests_of(kind, count), drafts, by_kernel=False)
        equal = [one[0].token_id == other[0].token_id for one, other in zip(chosen, wanted, strict=True)]
        share = sum(equal) / count
        report(sampling=kind, equal=share, ok=share == 1 if kind == "greedy" else share >= _EQUAL)


def sampler(sizes: Sizes, report: Report) -> None:
    """Times by kind of sampling and number of rows, beside one reading of the logits."""
    read = read_rate(sizes)
    for count in (1, 2) if sizes.small else (1, 32, 256):
        logits = logits_of(count, sizes)
        if sizes.device.type == "cuda":
            logits = logits.bfloat16()
        for kind in KINDS:
            requests, rows = requests_of(kind, count), range(count)
            milliseconds = timed(
                lambda q=requests, x=logits, r=rows: sample(x, r, q), sizes.device, sizes.rounds
            )
            once = logits.nbytes / read * 1e3
            report(rows=count, sampling=kind, ms=milliseconds, **{"over one reading": milliseconds / once})
