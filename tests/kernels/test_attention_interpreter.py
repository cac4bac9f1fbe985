# SPDX-License-Identifier: Apache-2.0
"""Runs the files of the folder `interpreted` in a process of their own, with TRITON_INTERPRET=1 (see its
conftest)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
#: By day a minute and a half of one core, which ten others may want, too; by night hundreds of tests.
TIMEOUT_S = 1700 if "RADIXKV_NIGHTLY" not in os.environ else 4 * 3600


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the folder is collected directly")
@pytest.mark.timeout(TIMEOUT_S + 40)
def test_triton_source_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-v", str(FOLDER), "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    # A run that collected nothing, or not all, would pass as well.
    for file in FOLDER.glob("test_*.py"):
        assert file.name in result.stdout
    assert " passed" in result.stdout
