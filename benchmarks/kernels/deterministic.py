# SPDX-License-Identifier: Apache-2.0
"""What does --deterministic cost?

    python -m benchmarks.deterministic [--rounds N] [--json FILE]

Two engines over the embedded model, one with `deterministic` and one without, run the same step in turn: a
decode of 1 and of 8 requests with 500 tokens of context each, and a prompt chunk of 512 tokens. Printed are
medians of a model call and their ratio, on over off; the turns alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from radixkv import EngineConfig, SamplingParams
from radixkv.engine.engine import Engine
from radixkv.entrypoints.builder import build_engine

CONTEXT = 500
CASES = {"decode, batch 1": 1, "decode, batch 8": 8, "prompt of 512 tokens": 0}


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 40_000, count).tolist()


def run_step(engine: Engine) -> float:
    """One step; seconds of its model call."""
    before = engine.stats().model_time_s
    engine.step()
    return engine.stats().model_time_s - before


def prepare(engine: Engine, num_decodes: int, seed: int) -> None:
    """Leave nothing running but `num_decodes` requests that decode."""
    for group in engine.requests:
        engine.abort(group.request_id)
    endless = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    for i in range(num_decodes):
        engine.add_request(tokens(1000 * seed + i, CONTEXT), endless)
    while any(r.num_output_tokens == 0 for r in (*engine.scheduler.waiting, *engine.scheduler.running)):
        engine.step()


def measure(engines: dict[str, Engine], num_decodes: int, rounds: int) -> dict[str, float]:
    """Median seconds of a model call per engine."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        prepare(engine, num_decodes, seed=1)
    for i in range(rounds + 1):
        for name, engine in engines.items():
            if num_decodes == 0:
                engine.add_request(tokens(5000 + i, 512), SamplingParams(temperature=0.0, max_tokens=1))
            spent = run_step(engine)
            if i:  # the first turn warms up
                times[name].append(spent)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="model calls per case and engine")
    parser.add_argument("--threads", type=int, help="torch threads; default: all physical cores")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    engines = {}
    for name in ("off", "on"):
        config = EngineConfig(
            num_blocks=1024,
            max_num_batched_tokens=512,
            threads=arguments.threads,
            deterministic=name == "on",
        )
        engines[name] = build_engine(config)
    table = Table(title="Cost of --deterministic, embedded model")
    for column in ("step", "off", "on", "on / off"):
        table.add_column(column, justify="left" if column == "step" else "right")
    figures: dict[str, Any] = {}
    for case, num_decodes in CASES.items():
        found = measure(engines, num_decodes, arguments.rounds)
        ratio = found["on"] / found["off"]
        figures[case] = {"off_s": found["off"], "on_s": found["on"], "ratio": ratio}
        table.add_row(case, f"{found['off'] * 1e3:.1f} ms", f"{found['on'] * 1e3:.1f} ms", f"{ratio:.2f}")
    Console().print(table)
    about = {"threads": torch.get_num_threads(), "cases": figures}
    write_figures(arguments.json, "deterministic", about)


if __name__ == "__main__":
    main()
