# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints under pressure: tenants, preemptions, ended requests, guesses, ranks, tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
from nightly import by_day
from stored_crossings import cross, write_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.mark.parametrize("seed", by_day(range(60), 2, 5, 6))
def test_answers_are_those_of_the_numbers(base: Path, tmp_path: Path, seed: int) -> None:
    cross(seed, base, tmp_path)
