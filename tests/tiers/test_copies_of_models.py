# SPDX-License-Identifier: Apache-2.0
"""Real models whose states or windows are copied to tiers while steps write over them: the same bits."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from fuzz_model_copies import Models, fuzz, run_for


def test_answers_over_what_is_being_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Short convolutions; `fuzz_model_copies.py` goes on."""
    caplog.set_level(logging.CRITICAL, logger="radixkv")
    counts = fuzz(1, Models("lfm2", tmp_path), tmp_path / "tier", num_requests=5, restarts=1)
    assert counts["compared"] >= 3
    assert counts["saved_states"]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "mamba2", "gemma3"])
def test_answers_over_what_is_being_copied_for_minutes(family: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="radixkv")
    counts = run_for(120, 0, family)
    assert counts["compared"]
    assert counts["overtaken"], "no step wrote to a place that was being copied"
    assert counts["loaded_states"]
