# SPDX-License-Identifier: Apache-2.0
"""What do LoRA adapters cost a step, a swap, and a turn of an activated adapter?

    python -m benchmarks.adapters [--rounds N] [--rank R] [--threads N] [--json FILE]

Steps: decodes of 1 and 8 requests with 200 tokens of context, with adapters on all linear layers of attention
and MLP and without, and mixed. The batches of all cases are recorded once; then the runner computes them in
turn, so that a busy machine slows all alike. Printed are medians, and medians of the ratios to the base's
step of the same number of rows in the same round.

Swaps: `--adapters` adapters are registered and 8 of them in memory; a thread asks for one after the other, so
that each is read from its file, while the engine's thread goes on with steps of a request of the base.

Turns: time to the first token of a warm turn on a conversation of 6,000 tokens, by the base, and by an
activated adapter that begins behind it, in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from benchmarks.figures import write_figures
from radixkv import LLM, SamplingParams
from radixkv.scheduling.batch import Batch

CONTEXT, CONVERSATION, TURN = 200, 6000, 40
IN_MEMORY = 8
INVOCATION = [1001, 1002, 1003]
#: case -> adapters of its rows; "": the base
CASES: dict[str, list[str]] = {
    "1 row": [""],
    "1 row, adapter": ["0"],
    "8 rows": [""] * 8,
    "8 rows of one adapter": ["0"] * 8,
    "8 rows of 8 adapters": [str(number) for number in range(8)],
    "4 rows of one adapter, 4 without": ["0"] * 4 + [""] * 4,
    "1 row with an adapter, 7 without": ["0"] + [""] * 7,
}
#: largest cost over the base's step that is wanted
WANTED = {"1 row, adapter": 0.10, "8 rows of one adapter": 0.08, "8 rows of 8 adapters": 0.45}


def tokens(seed: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(2000, 40_000, count).tolist()
    return found


class Folders:
    """Folders of adapters with random matrices on a base, as PEFT writes them."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, int]], rank: int) -> None:
        self._folder, self._rank = folder, rank
        random = np.random.default_rng(0)
        self._tensors: dict[str, Any] = {}
        for path, (inputs, outputs) in shapes.items():
            for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                values = 0.02 * random.standard_normal(shape, dtype=np.float32)
                self._tensors[f"base_model.model.{path}.{part}.weight"] = values
        self._targets = sorted({path.rpartition(".")[2] for path in shapes})

    def write(self, name: str, number: int, **more: Any) -> Path:
        """Write an adapter; each number is one of its own."""
        folder = self._folder / name
        folder.mkdir()
        config = {"peft_type": "LORA", "r": self._rank, "lora_alpha": 16, "target_modules": self._targets}
        (folder / "adapter_config.json").write_text(json.dumps(config | more))
        first = next(iter(self._tensors))
        own = self._tensors[first] + np.float32(0.001 * number)
        save_file(self._tensors | {first: own}, folder / "adapter_model.safetensors")
        return folder


def kept(batch: Batch) -> Batch:
    """A batch that stays as it is when the next step is built."""
    arrays: dict[str, Any] = {
        name: value.copy()
        for name in Batch.__slots__
        if isinstance(value := getattr(batch, name), np.ndarray)
    }
    tables = [table.copy() for table in batch.block_tables]
    return replace(batch, entries=list(batch.entries), block_tables=tables, copy_groups=[], **arrays)


def record(llm: LLM, adapters: Sequence[str]) -> Batch:
    """The batch of a step that decodes a token of a request of each adapter."""
    engine, seen = llm.engine, []
    execute = engine.runner.execute

    def noted(batch: Batch) -> Any:
        seen.append(kept(batch))
        return execute(batch)

    endless = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for number, name in enumerate(adapters):
        engine.add_request(tokens(number, CONTEXT), endless, lora=name)
    engine.runner.execute = noted  # type: ignore[method-assign]
    try:
        while not seen or seen[-1].num_tokens != len(adapters) or len(seen[-1].entries) != len(adapters):
            engine.step()
    finally:
        engine.runner.execute = execute  # type: ignore[method-assign]
    for group in engine.requests:
        engine.abort(group.request_id)
    return seen[-1]


def time_steps(llm: LLM, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of the runner's step, by case and round."""
    batches = {case: record(llm, adapters) for case, adapters in CASES.items()}
    times: dict[str, list[float]] = {case: [] for case in CASES}
    gc.collect()
    for number in range(rounds + 3):
        for case, batch in batches.items():
            began = clock()
            llm.engine.runner.execute(batch)
            if number >= 3:
                times[case].append(clock() - began)
    return times


def time_swaps(
    llm: LLM, names: Sequence[str], seconds: float, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of reads of adapters, and of the engine's steps without and beside them."""
    found: dict[str, list[float]] = {"swaps": [], "steps without": [], "steps beside": []}
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for name in names:
                assert not llm.adapters.in_memory(name)
                began = clock()
                llm.adapters.acquire(name)
                found["swaps"].append(clock() - began)
                if done.wait(0.02):
                    return

    endless = SamplingParams(temperature=0.0, max_tokens=7000, ignore_eos=True)
    llm.engine.add_request(tokens(90, CONTEXT), endless)
    for _ in range(10):
        llm.engine.step()
    swapper = threading.Thread(target=swap)
    for where in ("steps without", "steps beside"):
        if where == "steps beside":
            swapper.start()
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            began = clock()
            llm.engine.step()
            found[where].append(clock() - began)
    done.set()
    swapper.join()
    for group in llm.engine.requests:
        llm.engine.abort(group.request_id)
    return found


def time_turns(llm: LLM, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds to the first token of turns on a conversation that the base has answered."""
    conversation = tokens(99, CONVERSATION)
    times: dict[str, list[float]] = {"base": [], "judge": []}
    first = SamplingParams(temperature=0.0, max_tokens=1)

    def ask(prompt: list[int], lora: str) -> Any:
        own = llm.engine.add_request(prompt, first, lora=lora)
        while True:
            for output in llm.engine.step().finished:
                if output.request_id == own:  # not of an aborted request
                    return output

    ask(conversation, "")
    for number in range(rounds + 2):
        for name in times:
            turn = [*INVOCATION, *tokens(10_000 + number, TURN)]
            turn[-1] += len(name)  # nothing of it is found
            began = clock()
            output = ask([*conversation, *turn], "" if name == "base" else name)
            spent = clock() - began
            assert output.num_cached_tokens >= CONVERSATION, output.num_cached_tokens
            if number >= 2:
                times[name].append(spent)
        llm.engine.cache.check()
    return times


def ratio(some: Sequence[float], base: Sequence[float]) -> float:
    """The median of what the rounds say."""
    return statistics.median(a / b for a, b in zip(some, base, strict=True))


def show_steps(times: dict[str, list[float]]) -> dict[str, Any]:
    table = Table(title="Steps, embedded model")
    for column in ("step", "median", "over the base", "wanted"):
        table.add_column(column, justify="left" if column == "step" else "right")
    figures: dict[str, Any] = {}
    for case, seconds in times.items():
        base = times["1 row" if len(CASES[case]) == 1 else "8 rows"]
        cost, median = ratio(seconds, base) - 1, statistics.median(seconds)
        wanted = f"{WANTED[case]:+.0%}" if case in WANTED else ""
        table.add_row(case, f"{median * 1e3:.1f} ms", f"{cost:+.1%}" if any(CASES[case]) else "", wanted)
        figures[case] = {"median_s": median, "cost": cost}
    Console().print(table)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60, help="steps of each case; 0: leave them out")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--adapters", type=int, default=100, help="adapters of the swaps; 0: leave them out")
    parser.add_argument("--turns", type=int, default=15, help="turns of each; 0: leave them out")
    parser.add_argument("--threads", type=int, help="torch threads; default: all physical cores")
    parser.add_argument("--quantization", choices=("int8",), help="of the base's weights")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU time, on a busy machine; needs --threads 1"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time needs --threads 1: other threads wait for work by spinning")
    clock = time.thread_time if options.cpu_time else time.perf_counter
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            lora_dir=folder,
            max_loras=IN_MEMORY,
            num_blocks=1200,
            threads=options.threads,
            quantization=options.quantization,
            speculation="off",
            async_scheduling=False,
        )
        with llm:
            runner: Any = llm.engine.runner
            folders = Folders(Path(folder), runner.adapters.shapes, options.rank)
            for number in range(IN_MEMORY):
                llm.adapters.load(str(number), str(folders.write(str(number), number)))
            if options.rounds:
                figures["steps"] = show_steps(time_steps(llm, options.rounds, clock))
            if options.turns:
                more = {"alora_invocation_tokens": INVOCATION}
                llm.adapters.load("judge", str(folders.write("judge", -1, **more)))
                turns = time_turns(llm, options.turns, clock)
                medians = {name: statistics.median(seconds) for name, seconds in turns.items()}
                cost = ratio(turns["judge"], turns["base"])
                print(
                    f"first token of a warm turn on {CONVERSATION:,} tokens: base "
                    f"{medians['base'] * 1e3:.0f} ms, activated adapter {medians['judge'] * 1e3:.0f} ms, "
                    f"{cost:.2f} of the base's (wanted: at most 1.2)"
                )
                figures["turns"] = {"base_s": medians["base"], "activated_s": medians["judge"], "ratio": cost}
            if options.adapters:
                names = [f"swap-{number}" for number in range(options.adapters)]
                written = [folders.write(name, 100 + number) for number, name in enumerate(names)]
                time.sleep(2.5)  # files as new as their reading are digested at each reading
                for name, path in zip(names, written, strict=True):
                    llm.adapters.load(name, str(path))
                swaps = time_swaps(llm, names[:-IN_MEMORY], 10, clock)
                figures["swaps"] = {"adapters": options.adapters, "in_memory": IN_MEMORY}
                for what, seconds in swaps.items():
                    median, worst = statistics.median(seconds), sorted(seconds)[int(0.99 * len(seconds))]
                    print(f"{what}: {len(seconds)}, median {median * 1e3:.1f} ms, p99 {worst * 1e3:.1f} ms")
                    figures["swaps"][what] = {"median_s": median, "p99_s": worst, "longest_s": max(seconds)}
    write_figures(
        options.json,
        "adapters",
        {"threads": torch.get_num_threads(), "rank": options.rank, "cpu_time": options.cpu_time} | figures,
    )


if __name__ == "__main__":
    main()
