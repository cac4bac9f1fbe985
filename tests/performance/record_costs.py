# SPDX-License-Identifier: Apache-2.0
"""Measure the hot paths and write what `test_hot_paths` holds them to.

    python tests/performance/record_costs.py          # prints old and new costs
    python tests/performance/record_costs.py --write  # and writes costs.json

Write it after a change that makes a path cheaper, so that the gain is held, or after one that makes it slower
for a good reason, which belongs into the commit's message.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch
from hot_paths import PATHS
from measuring import count_work, relative_time

COSTS = Path(__file__).with_name("costs.json")


def measure() -> dict[str, dict[str, float]]:
    """The costs of each path; the times are the smallest of five measurements."""
    torch.set_num_threads(1)
    costs = {}
    for name, path in PATHS.items():
        run = path.make()
        work = count_work(run)
        relative = min(relative_time(run, path.repeats) for _ in range(5))
        costs[name] = {
            "instructions": work.instructions,
            "c_calls": work.c_calls,
            "relative_time": round(relative, 3),
        }
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write costs.json")
    write = parser.parse_args().write
    old = json.loads(COSTS.read_text(encoding="utf-8"))["paths"] if COSTS.exists() else {}
    costs = measure()
    for name, row in costs.items():
        before = old.get(name, {})
        print(name)
        for what, value in row.items():
            print(f"  {what:14s} {before.get(what, '-'):>10} -> {value:>10}")
    if write:
        text = json.dumps({"python": platform.python_version(), "paths": costs}, indent=2)
        COSTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
