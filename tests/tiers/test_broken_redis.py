# SPDX-License-Identifier: Apache-2.0
"""Answers are the same whatever a Redis does; `fuzz_small_pools.py --redis` goes on."""

from __future__ import annotations

import logging

import pytest
from broken_redis import run_over_redis


@pytest.mark.parametrize(("seed", "elsewhere"), [(1, False), (2, True)], ids=["one process", "two"])
def test_traffic_over_a_redis_that_fails(seed, elsewhere, monkeypatch):
    monkeypatch.setattr(logging.getLogger("radixkv"), "disabled", True)
    outcome = run_over_redis(seed, 40, elsewhere=elsewhere)
    assert outcome.answers
