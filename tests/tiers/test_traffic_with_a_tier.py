# SPDX-License-Identifier: Apache-2.0
"""Answers are the same with a tier, whatever it does; `fuzz_small_pools.py --tier` goes on."""

from __future__ import annotations

import pytest
from pool_traffic import run


@pytest.mark.parametrize("constant", [False, True], ids=["chained", "few identities"])
def test_traffic(constant, monkeypatch):
    if constant:  # many blocks share one
        monkeypatch.setattr(
            "radixkv.cache.block_identity.xxhash.xxh3_128_digest", lambda data: bytes([sum(data) % 3]) * 16
        )
    outcome = run(2 if constant else 4, 15, tier=True, check_every=3)
    assert outcome.saved_blocks
    assert outcome.loaded_blocks or constant
    assert outcome.failed_loads


@pytest.mark.nightly
def test_traffic_over_a_host_and_a_disk_tier(tmp_path):
    """The same traffic again finds on the disk what the first left there."""
    folder = tmp_path / "kv"
    first, second = run(3, 15, folder=folder, check_every=3), run(3, 15, folder=folder, check_every=3)
    assert first.saved_blocks
    assert second.loaded_blocks
