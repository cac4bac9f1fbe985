# SPDX-License-Identifier: Apache-2.0
"""How near are the times to first token that `radixkv simulate` predicts to those of the engine?

    python -m benchmarks.simulated_ttft [--model NAME] [--requests N] [--traces DIR] [--json FILE]

For each trace the cost of steps is fitted as `fit --check` of `benchmarks.cluster_simulator` does it; then
the trace arrives at the real engine in real time, and at a simulated one. Nothing is fitted to the trace's
requests.

Target: p50 and p90 of the predicted times within 20 % of the measured ones.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster_simulator.fit_command import fit_and_check
from benchmarks.cluster_simulator.reference_step import WallClock
from benchmarks.figures import write_figures
from benchmarks.token_prompts import scaled
from benchmarks.traces import traces_folder
from radixkv.cli.replay.readers import ReadOptions, read_trace
from radixkv.engine.config import EMBEDDED_MODEL, EngineConfig
from radixkv.entrypoints.builder import build_engine

TARGET = 0.2
MAX_MODEL_LEN, NUM_BLOCKS, MAX_ANSWER = 4096, 2000, 64


@dataclass(frozen=True, slots=True)
class Case:
    """A trace at a load.

    Attributes:
        block_size: tokens that stand for a block of the trace, for a small model.
        speed: of the arrivals; 1: as recorded.
    """

    trace: str
    block_size: int
    speed: float


CASES = (
    Case("chat_bytes64.jsonl.gz", 4, 1.0),
    Case("chat_bytes64.jsonl.gz", 4, 2.5),
    Case("mooncake_conversation.jsonl.gz", 4, 0.5),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--requests", type=int, default=40, help="of each trace")
    parser.add_argument("--traces", type=Path, default=traces_folder())
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if not options.traces.is_dir():
        raise SystemExit(f"no recorded traces in {options.traces}: name their folder by --traces")
    engine = build_engine(
        EngineConfig(
            model=options.model,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=NUM_BLOCKS,
            speculation="off",
            async_scheduling=False,  # each step is measured by itself
            seed=0,
        )
    )
    console = Console()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        trace = read_trace(options.traces / case.trace, ReadOptions(limit=options.requests))
        arriving = scaled(trace, case.block_size, engine.limits.max_model_len, MAX_ANSWER)
        found = fit_and_check(engine, WallClock(), arriving, case.speed, console)
        ratios = {name: pair["predicted"] / pair["measured"] for name, pair in found["check"].items()}
        rows.append(
            {
                "trace": trace.name,
                "block_size": case.block_size,
                "speed": case.speed,
                "ratios": ratios,
                **{key: found[key] for key in ("check", "slowdown", "cost")},
            }
        )
        write_figures(
            options.json,
            "simulated_ttft",
            {"model": options.model, "requests": options.requests, "target": TARGET, "rows": rows},
        )


if __name__ == "__main__":
    main()
