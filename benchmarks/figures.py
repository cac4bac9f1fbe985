# SPDX-License-Identifier: Apache-2.0
"""Write the `--json FILE` of a benchmark: its figures, its name, the date and the machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from radixkv.cli.bench.server_process import machine


def write_figures(path: Path | str | None, benchmark: str, figures: dict[str, Any]) -> None:
    """Write a result, if there is a path; a machine in `figures` takes the place of this one."""
    if path is None:
        return
    about = {"benchmark": benchmark, "date": time.strftime("%Y-%m-%d"), "machine": machine()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(about | figures, indent=2) + "\n", encoding="utf-8")
