# SPDX-License-Identifier: Apache-2.0
"""Prompts for the tests of order, and how soon they are served."""

from __future__ import annotations

import numpy as np
from paged_language_model import VOCAB

from radixkv.sampling.sampling_params import SamplingParams

ONE = SamplingParams(temperature=0.0, max_tokens=1)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def steps_until(engine, request_id: str, most: int = 1000) -> int:
    """Steps until the request's first token."""
    for step in range(1, most + 1):
        if any(delta.request_id == request_id and delta.token_ids for delta in engine.step().deltas):
            return step
    raise AssertionError(f"{request_id} got no token in {most} steps")
