# SPDX-License-Identifier: Apache-2.0
"""From the command to the first token, and the memory at rest.

    python -m benchmarks.startup [--repeats N] [--json FILE] [-- SERVE ARGUMENTS]

Starts `radixkv serve` several times and prints medians: the phases that the server itself states, the time
until it is ready and until the first token of a first request has come, and its memory once that request has
ended (RSS; PSS, where pages of files that others map too count in part; and the peak of RSS). The first start
is not counted: it fetches and converts the model's files where they are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from radixkv.cli.bench.server_process import started_process
from radixkv.cli.bench.workloads import served_model

TARGET_S = 15.0


def first_token_s(url: str) -> float:
    """Seconds from sending a request to its first token."""
    body = {"model": served_model(url), "prompt": "The capital of France", "max_tokens": 4, "stream": True}
    start = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data:") and '"text"' in line:
                return time.perf_counter() - start
    raise SystemExit("the server closed the stream without a token")


def memory(process: psutil.Process) -> dict[str, float]:
    """MiB: RSS, PSS and the peak of RSS, as far as the system tells them."""
    found = {"rss": process.memory_info().rss / 1024**2}
    with contextlib.suppress(psutil.Error, AttributeError):
        found["pss"] = process.memory_full_info().pss / 1024**2
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM"))
        found["peak_rss"] = int(peak.split()[1]) / 1024
    return found


def measure_start(arguments: list[str]) -> dict[str, Any]:
    """One start."""
    start = time.perf_counter()
    with started_process(arguments) as server:
        ready = time.perf_counter() - start
        first = first_token_s(server.url)
        banner = "\n".join(server.read_until("  try it"))
        phases = re.search(r"started +in [\d.]+ s: (.+)", banner)
        assert phases is not None, banner
        return {
            "ready_s": ready,
            "first_token_s": ready + first,
            "phases_s": {
                name: float(seconds)
                for name, seconds in (part.rsplit(" ", 1) for part in phases[1].split(", "))
            },
            "memory_mib": memory(psutil.Process(server.pid)),
        }


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure."""
    merged: dict[str, Any] = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        merged[name] = medians(values) if isinstance(value, dict) else statistics.median(values)
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="starts (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("server", nargs="*", help="further arguments of `radixkv serve`, after --")
    arguments = parser.parse_args()
    measure_start(arguments.server)  # fetches what is missing
    result = medians([measure_start(arguments.server) for _ in range(arguments.repeats)])
    table = Table(title=f"A second start (target: first token within {TARGET_S:g} s)")
    table.add_column("what")
    table.add_column("median", justify="right")
    for name, seconds in result["phases_s"].items():
        table.add_row(f"  {name}", f"{seconds:.1f} s")
    table.add_row("ready", f"{result['ready_s']:.1f} s")
    table.add_row("first token", f"{result['first_token_s']:.1f} s")
    for name, mib in result["memory_mib"].items():
        table.add_row(f"memory, {name.replace('_', ' ')}", f"{mib:,.0f} MiB")
    Console().print(table)
    write_figures(arguments.json, "startup", result)


if __name__ == "__main__":
    main()
