# SPDX-License-Identifier: Apache-2.0
"""Small pools over the interpreted kernels: preemption, guesses, tenants, aborts, tiers and a restart.

The traffic is that of `tests/engine/fuzz_small_pools.py --interpreted`, which runs it for as long as wanted.
Each night has a seed of its own; RADIXKV_SEED gives another night's.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pool_traffic
import pytest
from interpreted_models import KINDS, InterpretedModel

SEED = int(os.environ.get("RADIXKV_SEED", int(time.time()) // 86_400))


@pytest.mark.nightly
@pytest.mark.injects_faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    print(f"RADIXKV_SEED={SEED}")
    model, random = InterpretedModel(kind, tmp_path / "model"), np.random.default_rng(SEED)
    names = ("controls", "ahead", "quotas", "agents")
    wanted = {name: bool(random.random() < 0.5) for name in names}
    outcome = pool_traffic.Outcome()
    for _ in range(2):  # the second engine finds what the first has left on the disk
        outcome.add(pool_traffic.run(SEED, 4, folder=tmp_path / "tier", interpreted=model, **wanted))
    outcome.add(pool_traffic.run(SEED + 1, 4, faults=True, tier=True, interpreted=model))
    assert outcome.requests == 12
    assert model.num_checked
    assert model.num_near < 0.1 * model.num_checked


def test_a_wrong_token_is_noticed(tmp_path: Path) -> None:
    model, noticed = InterpretedModel("dense", tmp_path), 0
    for token in (5, 6):  # one of them is not the most likely one
        try:
            model.check(list(range(1, 30)), [token], ended=False)
        except AssertionError:
            noticed += 1
    assert noticed
