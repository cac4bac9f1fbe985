# SPDX-License-Identifier: Apache-2.0
"""The tiny Llama that many tests of loading use, and a copy that a test may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the tiny model once; no test changes it."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """Make a copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny-llama"))
