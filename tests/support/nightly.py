# SPDX-License-Identifier: Apache-2.0
"""Parameters of tests: a few by day, all of them by night (see the marker `nightly`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def by_day(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """All values, of which only the chosen ones are tested by day; each choice must be among the values.

    A tuple has a value for each of several parameters.
    """
    found = list(values)
    missing = [choice for choice in chosen if choice not in found]
    assert not missing, f"not among the values: {missing}"

    def by_night(value: Any) -> Any:
        parts = value if isinstance(value, tuple) else (value,)
        return pytest.param(*parts, marks=pytest.mark.nightly)

    return [value if value in chosen else by_night(value) for value in found]


def tried(count: int) -> int:
    """Examples of hypothesis: `count` by night, half of them by day."""
    return count if "RADIXKV_NIGHTLY" in os.environ else (count + 1) // 2
