# SPDX-License-Identifier: Apache-2.0
"""What do block events (`--kv-events`) cost the engine's thread?

    python -m benchmarks.kv_events_cost [--model NAME] [--steps N] [--rounds N] [--json FILE]

Two engines, one that publishes its events and one that does not, are given the same prompts in
a pool that is too small for them, so that blocks are stored and evicted all the time. Their steps alternate,
and each is measured in CPU time of the engine's thread, on one processor: other work on the machine, and the
publisher's own thread, do not count. Two models:

    none       the host alone: steps without any model, the worst case
    --model    a real one, by default the embedded

Target: the CPU time of steps with events is at most 1.02 times that without, with a model.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from benchmarks.host_scale import VOCABULARY, RandomRunner
from radixkv import PrefixCache
from radixkv.cluster.events.open_events import open_events
from radixkv.engine.config import EMBEDDED_MODEL, EngineConfig
from radixkv.engine.engine import Engine
from radixkv.engine.served_model import ServedModel
from radixkv.entrypoints.builder import build_engine
from radixkv.sampling.sampling_params import SamplingParams

TARGET = 1.02
BLOCK, NUM_BLOCKS, RUNNING = 16, 512, 8
HEAD_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 128, 48, 12
ADDRESS = "tcp://127.0.0.1:0"


def bare_engine(address: str | None) -> Engine:
    """An engine whose model takes no time."""
    events = open_events(address)
    return Engine(
        EngineConfig(
            block_size=BLOCK, max_num_batched_tokens=512, max_num_seqs=RUNNING, speculation="off", seed=0
        ),
        RandomRunner(RUNNING * 4),
        PrefixCache(NUM_BLOCKS, BLOCK),
        ServedModel(tokenizer=None, max_model_len=1024, vocab_size=VOCABULARY),
        hooks=[] if events is None else [events],
    )


def model_engine(model: str, address: str | None) -> Engine:
    """An engine with a model, on one thread."""
    return build_engine(
        EngineConfig(
            model=model,
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=512,
            max_model_len=1024,
            threads=1,
            speculation="off",
            kv_events=address,
            seed=0,
        )
    )


class Load:
    """The same prompts for every engine: some heads, each with something of its own after it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._rng = np.random.default_rng(0)
        self._heads = [self._text(HEAD_TOKENS) for _ in range(24)]
        self.seconds: list[float] = []

    def _text(self, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self._rng.integers(5, VOCABULARY, count, dtype=np.int32)

    def step(self) -> None:
        """A step, and before it as many prompts as there is room for."""
        engine = self.engine
        while engine.scheduler.num_running + engine.scheduler.num_waiting < RUNNING:
            head = self._heads[int(self._rng.integers(len(self._heads)))]
            answer = int(self._rng.integers(1, 2 * ANSWER_TOKENS))
            engine.add_request(
                np.concatenate([head, self._text(OWN_TOKENS)]),
                SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True),
            )
        began = time.thread_time_ns()
        engine.step()
        self.seconds.append(1e-9 * (time.thread_time_ns() - began))


def measure(make: Callable[[str | None], Engine], num_steps: int) -> dict[str, float]:
    """Microseconds of a step with and without events, and blocks that are told of in one."""
    plain, telling = make(None), make(ADDRESS)
    with closing(plain), closing(telling):
        off, on = Load(plain), Load(telling)
        for load in (off, on):
            for _ in range(num_steps // 4):  # until the pool is full
                load.step()
            load.seconds.clear()
        before = _told(telling)
        gc.collect()
        gc.freeze()
        for number in range(num_steps):
            for load in (off, on) if number % 2 else (on, off):
                load.step()
        gc.unfreeze()
        told = _told(telling) - before
    return {
        "without_us": 1e6 * statistics.fmean(off.seconds),
        "with_us": 1e6 * statistics.fmean(on.seconds),
        "ratio": sum(on.seconds) / sum(off.seconds),
        "blocks_per_step": told / num_steps,
    }


def _told(engine: Engine) -> int:
    counts = engine.stats().events
    assert counts is not None
    if counts.dropped_blocks:
        raise SystemExit("events were dropped: the figures would be too good")
    return counts.blocks + counts.waiting_blocks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--steps", type=int, default=400, help="with a model; without, ten times as many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()

    def with_model(address: str | None) -> Engine:
        return model_engine(options.model, address)

    rows = {}
    for name, make, steps in (
        ("none", bare_engine, 10 * options.steps),
        (options.model, with_model, options.steps),
    ):
        rounds = [measure(make, steps) for _ in range(options.rounds)]
        rows[name] = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
        rows[name]["ratios"] = [row["ratio"] for row in rounds]  # type: ignore[assignment]
    table = Table(title="CPU time of a step on the engine's thread", title_justify="left")
    for column in ("model", "without events (us)", "with (us)", "ratio", "blocks told a step"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, row in rows.items():
        cells = (f"{row['without_us']:,.0f}", f"{row['with_us']:,.0f}", f"{row['ratio']:.4f}")
        table.add_row(name, *cells, f"{row['blocks_per_step']:.1f}")
    Console().print(table)
    write_figures(options.json, "kv_events_cost", {"target": TARGET, "steps": options.steps, "rows": rows})


if __name__ == "__main__":
    main()
