# SPDX-License-Identifier: Apache-2.0
"""Where recorded traces are: in the folder that RADIXKV_TRACES names, or beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def traces_folder() -> Path:
    """The folder of the recorded traces, which need not be there."""
    named = os.environ.get("RADIXKV_TRACES")
    return Path(named) if named else REPOSITORY.parent / "shared" / "traces"
