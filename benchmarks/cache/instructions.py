# SPDX-License-Identifier: Apache-2.0
"""How many machine instructions do match, insert, evict and schedule take, in this checkout and another one?

    python -m benchmarks.instructions [--beside CHECKOUT] [--json FILE]

Times on a shared machine differ by more than a few per cent from run to run; counts of instructions do not.
valgrind counts those of a whole process (50 times slower), with the garbage collector off and fixed hashes.
Each figure is the difference of two runs that differ in one thing alone: how often it is done.

    match      one more lookup of a prompt of 2,560 tokens, 2,048 of them cached
    insert     encode, match, acquire, commit and release the prompt
    evict      evict what an insert added, 64 blocks at a time
    schedule   plan and complete a step of 1,000 running requests, while 10,000 wait

The other checkout needs the same classes (`PrefixCache`, `Scheduler`, `Request`, `Sequence`).
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

SHARED, PROMPTS, OWN, BLOCK = 2048, 50, 512, 16
INSERTED = 200  # prompts; the first 50 bring the shared parts
ROUNDS = 6  # starts of Python differ by a few million instructions: a difference spans many operations
RUNNING, WAITING, STEPS = 1_000, 10_000, 10


def cache_work(rounds: int, matches: int, evicts: bool) -> None:
    """Insert the prompts into a new cache in each round, each looked up `matches` times."""
    from radixkv import PrefixCache  # of the checkout that is counted, as all imports of these functions

    rng = np.random.default_rng(0)
    shared = [rng.integers(0, 32_000, SHARED).tolist() for _ in range(PROMPTS)]
    prompts = [shared[i % PROMPTS] + rng.integers(0, 32_000, OWN).tolist() for i in range(INSERTED)]
    for _ in range(rounds):
        cache = PrefixCache(INSERTED * OWN // BLOCK + PROMPTS * SHARED // BLOCK + 1000, BLOCK)
        for prompt in prompts:
            key = cache.encode(prompt)
            for _ in range(matches):
                match = cache.match(key)
            lease = cache.acquire(key, match=match)
            lease.commit(lease.num_tokens)
            lease.release()
        while evicts and cache.stats.cached_blocks:
            cache.evict(2 * OWN // BLOCK)


def schedule_work(steps: int) -> None:
    """Plan and complete `steps` decode steps of `RUNNING` requests while `WAITING` others wait."""
    # Of the checkout that is counted.
    from radixkv import PrefixCache, SamplingParams
    from radixkv.scheduling.batch import Batch
    from radixkv.scheduling.request import Request
    from radixkv.scheduling.scheduler import Scheduler

    try:
        from radixkv.scheduling.sequence import Sequence
    except ImportError:  # a checkout from before that name
        from radixkv.scheduling.sequence_state import SequenceState as Sequence  # type: ignore[no-redef]

    rng = np.random.default_rng(0)
    cache, settings = PrefixCache(60_000, BLOCK), {"max_num_batched_tokens": 8192, "max_num_seqs": RUNNING}
    try:
        from radixkv.engine.config import SchedulerConfig
    except ImportError:  # a checkout from before that class
        scheduler = Scheduler(cache, **settings)  # type: ignore[arg-type]
    else:
        scheduler = Scheduler(cache, SchedulerConfig(**settings))  # type: ignore[arg-type]
    families = [rng.integers(0, 32_000, 256) for _ in range(8)]

    def add(index: int, own: int, most: int) -> None:
        prompt = np.concatenate([families[index % 8], rng.integers(0, 32_000, own)])
        params = SamplingParams(max_tokens=most)
        scheduler.add(Sequence(Request(prompt, params, request_id=str(index))))

    def step() -> Batch:
        batch = scheduler.schedule().batch
        assert batch is not None
        scheduler.complete(batch)
        for entry in batch.entries:
            if entry.samples:
                entry.request.append(7)
        return batch

    for index in range(RUNNING):
        add(index, 64, 100_000)
    while scheduler.waiting:
        step()
    for index in range(RUNNING, RUNNING + WAITING):
        add(index, 256, 16)
    for _ in range(3 + steps):
        batch = step()
    assert len(batch.entries) == RUNNING
    assert len(scheduler.waiting) == WAITING


def count_instructions(checkout: Path, *work: object) -> int:
    """Run one piece of work on a checkout's code under valgrind; return the process's instructions."""
    path = os.pathsep.join(str(checkout / part) for part in ("", "kernels", "server"))
    command = [
        "valgrind",
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        sys.executable,
        __file__,
        "--work",
    ]
    done = subprocess.run(
        [*command, *map(str, work)],
        env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        raise SystemExit(f"the work failed in {checkout}:\n{done.stderr[-2000:]}")
    return int(found[1])


def figures(checkout: Path) -> dict[str, float]:
    """Thousands of instructions of each operation in one checkout."""

    def count(*work: int, kind: str = "cache") -> int:
        return count_instructions(checkout, kind, *work)

    one, all_rounds = count(1, 1, 0), count(ROUNDS, 1, 0)
    inserted = (ROUNDS - 1) * INSERTED
    sums = {
        "match": (count(ROUNDS, 11, 0) - all_rounds) / (10 * ROUNDS * INSERTED),
        "insert": (all_rounds - one) / inserted,
        "evict": (count(ROUNDS, 1, 1) - all_rounds) / (ROUNDS * INSERTED),
        "schedule": (count(3 * STEPS, kind="schedule") - count(STEPS, kind="schedule")) / (2 * STEPS),
    }
    return {name: total / 1000 for name, total in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout of radixkv")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        gc.disable()
        kind, *numbers = arguments.work
        if kind == "cache":
            cache_work(int(numbers[0]), int(numbers[1]), numbers[2] == "1")
        else:
            schedule_work(int(numbers[0]))
        return
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed; it counts the instructions (apt-get install valgrind)")

    from benchmarks.figures import write_figures  # not there for the processes that are counted

    here = figures(Path(__file__).parents[2])
    for name, count in here.items():
        print(f"{name:10}{count:10,.1f} thousand instructions", flush=True)
    there = figures(arguments.beside.resolve()) if arguments.beside else {}
    for name, count in there.items():
        print(f"{name:10}{count:10,.1f} in {arguments.beside}, ratio {here[name] / count:.3f}")
    write_figures(arguments.json, "instructions", {"thousands": here, "beside": there})


if __name__ == "__main__":
    main()
