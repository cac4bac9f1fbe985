# SPDX-License-Identifier: Apache-2.0
"""Settings for the tests of kernels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Draw the same numbers in each test, whichever tests ran before it in the process."""
    torch.manual_seed(0)
