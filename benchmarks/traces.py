# SPDX-License-Identifier: Apache-2.0
"""Folder of recorded traces: the one that RADIXKV_TRACES names, or one beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def traces_folder() -> Path:
    """Return the folder of the recorded traces, which may be missing."""
    named = os.environ.get("RADIXKV_TRACES")
    return Path(named) if named else REPOSITORY.parent / "shared" / "traces"
