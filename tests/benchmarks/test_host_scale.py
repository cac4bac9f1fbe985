# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the host's work runs on the engine as it is, in a small size."""

from __future__ import annotations

import pytest

from benchmarks import host_scale


@pytest.mark.parametrize("situation", host_scale.SITUATIONS)
@pytest.mark.nightly
def test_steps_are_measured(situation: str) -> None:
    found = host_scale.measure_steps(
        situation, num_cached=500, num_running=8, num_waiting=16, num_steps=4, policy="prefix"
    )
    assert 4 <= found["running"] <= 8
    assert found["cached_blocks"] >= 500
    assert 0.0 <= found["steps_ahead"] <= 1.0
    assert set(found["parts_ms"]) == {"schedule", "sampling", "output", "whole step", "gap"}


@pytest.mark.nightly
def test_steps_without_work_are_measured() -> None:
    """In a churn that nobody waits for, all requests end: such steps sample nothing."""
    found = host_scale.measure_steps(
        "churn", num_cached=100, num_running=8, num_waiting=0, num_steps=8, policy="prefix"
    )
    assert found["running"] <= 8
