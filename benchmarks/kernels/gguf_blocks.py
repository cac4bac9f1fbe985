# SPDX-License-Identifier: Apache-2.0
"""A GGUF file served from its blocks and as float32: time of steps, memory, start.

Each way has a process of its own that starts, computes a prompt, and says what it took; then both run the
same steps in one process, in turns: decodes of 1 and 8 sequences, a prompt of 512 tokens. Medians of the
steps' times and of their ratios to float32's of the same turn. One thread, and the clock is CPU time, so that
other programs disturb less. A second start is measured: the first one compiles.

    python -m benchmarks.gguf_blocks FILE.gguf ... [--rounds N] [--no-float32] [--json FILE]

`--no-float32` for models that do not fit in memory as float32.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cpu_products import make_batch
from benchmarks.figures import write_figures
from radixkv import LLM

#: Name -> (sequences, new tokens of each, tokens before them).
STEPS = {"decode, 1 sequence": (1, 1, 64), "decode, 8 sequences": (8, 1, 64), "prompt of 512": (1, 512, 0)}
WAYS = ("packed", "float32")


def runner(file: str, way: str) -> Any:
    """The runner of an engine with a file's weights kept in one of `WAYS`."""
    return LLM(
        file, device="cpu", gguf=way, num_blocks=128, block_size=16, max_model_len=2048,
        max_num_batched_tokens=2048, speculation="off", threads=1,
    ).engine.runner  # fmt: skip


def _vocabulary(one: Any) -> int:
    return min(4000, int(one.model.config.get_text_config().vocab_size))


def start_here(file: str, way: str) -> dict[str, float]:
    """CPU seconds until ready and peak gigabytes of this process, which must be a fresh one."""
    engine = runner(file, way)
    ready = time.process_time()
    engine.execute(make_batch(*STEPS["prompt of 512"], _vocabulary(engine)))
    return {"start_s": ready, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def start(file: str, way: str) -> dict[str, float]:
    """`start_here` in a second process of its own, after one that compiles."""
    command = [sys.executable, "-m", "benchmarks.gguf_blocks", file, "--here", way]
    for _ in range(2):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def steps(file: str, ways: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each step in each way, in turns."""
    runners = {way: runner(file, way) for way in ways}
    figures: dict[str, dict[str, float]] = {}
    for step, shape in STEPS.items():
        batch = make_batch(*shape, _vocabulary(runners[ways[0]]))
        times: dict[str, list[float]] = {way: [] for way in ways}
        turns = rounds if shape[1] == 1 else max(1, rounds // 3)
        for turn in range(turns + 1):  # the first one is not counted
            for way, one in runners.items():
                began = time.thread_time()
                one.execute(batch)
                if turn:
                    times[way].append(1000 * (time.thread_time() - began))
        figures[step] = {way: statistics.median(own) for way, own in times.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=9, help="turns of a decode (default 9)")
    parser.add_argument("--no-float32", action="store_true", help="measure the blocks alone")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--here", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(start_here(args.files[0], args.here)))
        return
    ways = ["packed"] if args.no_float32 else list(WAYS)
    results: list[dict[str, Any]] = []
    for file in args.files:
        own: dict[str, Any] = {
            "file": Path(file).name,
            "gb": Path(file).stat().st_size / 1e9,
            "starts": {way: start(file, way) for way in ways},
            "steps": steps(file, ways, args.rounds),
        }
        results.append(own)
        table = Table("", *ways, title=f"{own['file']}, {own['gb']:.2f} GB")
        table.add_row("start, s of CPU", *(f"{own['starts'][way]['start_s']:.1f}" for way in ways))
        table.add_row("peak memory, GB", *(f"{own['starts'][way]['peak_gb']:.2f}" for way in ways))
        for step, times in own["steps"].items():
            table.add_row(f"{step}, ms", *(f"{times[way]:.1f}" for way in ways))
        Console(width=90).print(table)
    write_figures(args.json, "gguf_blocks", {"results": results})


if __name__ == "__main__":
    main()
