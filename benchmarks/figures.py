# SPDX-License-Identifier: Apache-2.0
"""What the `--json FILE` of every benchmark writes: its figures, its name, the date and the machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from radixkv.cli.bench.server_process import machine


def write_figures(path: Path | str | None, benchmark: str, figures: dict[str, Any]) -> None:
    """Write a result; without a path nothing happens. What `figures` says of the machine itself, stands."""
    if path is None:
        return
    about = {"benchmark": benchmark, "date": time.strftime("%Y-%m-%d"), "machine": machine()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(about | figures, indent=2) + "\n", encoding="utf-8")
