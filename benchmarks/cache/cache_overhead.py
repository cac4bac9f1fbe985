# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache costs where nothing is shared: the workload W3 with it and without it.

    python -m benchmarks.cache_overhead [--rounds N] [--json FILE]

16 prompts of 256 random tokens, 32 output tokens each, 8 at a time, in process on the embedded model: two
engines over the same weights, one of them with `enable_prefix_caching=False`. Every round gives both the same
new prompts, in turns, each first in every other round. The K/V memory is written once before, and from the
third round on the cache is full, so that it evicts. Printed are

    wall, CPU      medians over the rounds, and the median of the rounds' ratios (with over without)
    bookkeeping    CPU time of scheduler, prefix cache and batch building; what it takes more with the cache,
                   as a share of the wall time: this is the overhead (target: under 1 %), and it can be told
                   from the noise of the model's own time, which is larger
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from benchmarks.host_scale import Stopwatch
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.entrypoints.builder import engine_for_model
from radixkv.model.loading.loader import load_model
from radixkv.model.runner import ModelRunner
from radixkv.sampling.sampling_params import SamplingParams

REQUESTS, PROMPT, OUTPUT, AT_ONCE = 16, 256, 32, 8
NUM_BLOCKS = 640  # a round takes 288
TARGET = 0.01
SIDES = ("with", "without")


def run_w3(engine: Engine, watch: Stopwatch, prompts: list[list[int]]) -> dict[str, float]:
    """Seconds of one pass: wall, CPU of the process, and CPU of the bookkeeping."""
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    watch.take()
    wall, cpu = time.perf_counter(), time.process_time()
    for prompt in prompts:
        engine.add_request(prompt, params)
    while engine.has_work:
        engine.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": wall, "cpu_s": cpu, "bookkeeping_s": watch.take()["schedule"] / 1e9}


def make_sides() -> tuple[dict[str, tuple[Engine, Stopwatch]], int]:
    """Both engines over one model, with their stopwatches; and the size of the vocabulary."""
    config = {
        side: EngineConfig(
            num_blocks=NUM_BLOCKS, max_num_seqs=AT_ONCE, enable_prefix_caching=side == "with", seed=0
        )
        for side in SIDES
    }
    loaded = load_model(config["with"])
    sides = {}
    for side in SIDES:
        engine, watch = engine_for_model(config[side], loaded), Stopwatch()
        assert isinstance(engine.runner, ModelRunner)
        for tensor in engine.runner.kv.tensors():  # or the first use of each page would count
            tensor.zero_()
        for name in ("schedule", "complete", "finish"):
            setattr(engine.scheduler, name, watch.wrap("schedule", getattr(engine.scheduler, name)))
        sides[side] = engine, watch
    return sides, loaded.vocab_size


def measure(rounds: int) -> list[dict[str, dict[str, float]]]:
    """The figures of each round by side; a round before the first one is thrown away."""
    sides, vocabulary = make_sides()
    rng = np.random.default_rng(0)
    results = []
    for number in range(rounds + 1):
        prompts = rng.integers(10, vocabulary, (REQUESTS, PROMPT)).tolist()
        order = SIDES if number % 2 else SIDES[::-1]
        found = {side: run_w3(*sides[side], prompts) for side in order}
        if number:
            results.append(found)
    return results


def summarize(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians, ratios, and the overhead."""
    figures: dict[str, Any] = {}
    for name in ("wall_s", "cpu_s", "bookkeeping_s"):
        figures[name] = {side: statistics.median(row[side][name] for row in rounds) for side in SIDES}
        figures[name]["ratio"] = statistics.median(row["with"][name] / row["without"][name] for row in rounds)
    more = [row["with"]["bookkeeping_s"] - row["without"]["bookkeeping_s"] for row in rounds]
    figures["overhead"] = statistics.median(more) / figures["wall_s"]["without"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6, help="rounds that count (default 6)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    rounds = measure(arguments.rounds)
    figures = summarize(rounds)
    table = Table(title="W3, nothing shared, in process")
    for column in ("", "with cache", "without", "with / without"):
        table.add_column(column, justify="right" if column else "left")
    for name, unit, scale in (("wall_s", "s", 1), ("cpu_s", "s", 1), ("bookkeeping_s", "ms", 1000)):
        row = figures[name]
        label = f"{name.removesuffix('_s')}, {unit}"
        table.add_row(label, *(f"{scale * row[side]:.2f}" for side in SIDES), f"{row['ratio']:.3f}")
    Console().print(table)
    print(f"overhead of the cache: {figures['overhead']:.2%} of the wall time (target: under {TARGET:.0%})")
    write_figures(arguments.json, "cache_overhead", {**figures, "rounds": rounds})


if __name__ == "__main__":
    main()
