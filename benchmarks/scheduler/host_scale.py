# SPDX-License-Identifier: Apache-2.0
"""What the host does in a step when very much is going on: no model, only the engine's own work.

    python -m benchmarks.host_scale [--steps N] [--json FILE] [--skip-growth]

**A step.** The real engine over a runner that computes nothing and returns random logits at once; 1,000
requests decode, 10,000 wait, and the cache holds a million blocks (16 million tokens). The situations:

    full        every sequence slot is taken: nobody ends, nobody is admitted
    churn       four requests end in every step (250 tokens each, on average), and four waiting ones with
                cached prefixes are admitted for them
    ahead       as full, each step launched before the one before it is waited for, as on a GPU
    arrivals    as ahead, and one request after the other comes with a prompt of 4,096 new tokens, of which
                each step computes 512
    penalty     as ahead, each request with a repetition penalty

Printed per part, in milliseconds of the thread's CPU time, as median and 95th percentile over the steps:

    schedule   scheduler, prefix cache and batch building: what the target of 2 ms is for. Leases that end,
               and the bookkeeping after the model has run, are counted here too
    sampling   one token for each of 1,000 rows of COLUMNS logits: what a GPU would compute takes next to
               nothing here, so what is left is the host's work of launching it
    output     stop conditions, deltas, results
    gap        how long the device stands idle before a step: from the end of the steps launched so far to
               the launch of this one. The device is a clock beside the host's (`Device`): a step takes
               DEVICE_MS there from when it is free, and the host waits for its tokens. Also as a mean, since
               most steps of `arrivals` have none

**Growth.** The cost per token of a lookup, of an admission (acquire, commit, release) and of a decode step,
with 10^3 to 10^6 blocks cached: flat, if it does not depend on how much is cached.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

import radixkv.engine.step_pipeline
from benchmarks.figures import write_figures
from radixkv import PrefixCache
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.engine.served_model import ServedModel
from radixkv.observe.advisor import Advisor
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch

BLOCK = 16
VOCABULARY = 1024
FAMILY_TOKENS = 1600  # a cached prompt: 100 blocks
OWN_TOKENS = 40  # of a request after a cached prompt, at most
ENDLESS = 100_000
TARGET_MS = 2.0
SITUATIONS = ("full", "churn", "ahead", "arrivals", "penalty")
#: Tokens of a new prompt, and of its chunks.
ARRIVING, CHUNK = 4096, 512
#: Columns of the logits: those of the vocabulary's first tokens.
COLUMNS = 64
#: What a step takes on the device: an 8B model in bfloat16 on an H200 takes 26 ms for 256 rows (estimated).
DEVICE_MS = 15.0


class Device:
    """A device beside the host, as two clocks in nanoseconds; nothing sleeps.

    The host's clock is the CPU time of its thread and the time that it has waited for the device.
    """

    def __init__(self, step_ms: float = DEVICE_MS) -> None:
        self._step_ns = int(step_ms * 1e6)
        self._waited = 0
        self._free_at: int | None = None
        self.gaps_ns: list[int] = []

    def _now(self) -> int:
        return time.thread_time_ns() + self._waited

    def launch(self) -> int:
        """Launch a step; return when it ends."""
        now = self._now()
        free_at = now if self._free_at is None else self._free_at
        self.gaps_ns.append(max(0, now - free_at))
        self._free_at = max(now, free_at) + self._step_ns
        return self._free_at

    def wait(self, until: int) -> None:
        """Let the host wait until a time of its clock; no wait if that is over."""
        self._waited += max(0, until - self._now())


class RandomRunner:
    """Stands where the model runner stands: random logits, drawn once.

    Attributes:
        device: where its steps are launched.
        ends_at: when the last one launched ends there.
    """

    backend_name = dtype_name = device_name = "none"
    failure = None

    def __init__(self, max_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.rand(max_rows, COLUMNS, generator=generator)
        self.device, self.ends_at = Device(), 0

    def on_failure(self, call: Callable[[], None]) -> None:
        """It never fails."""

    def execute(self, batch: Batch) -> torch.Tensor:
        self.ends_at = self.device.launch()
        return self.logits[: len(batch.logit_rows)]

    def close(self) -> None:
        pass


class Stopwatch:
    """Adds up the thread's CPU time of the calls that it wraps, and of nothing inside another one."""

    def __init__(self) -> None:
        self.elapsed: dict[str, int] = {}
        self._depth = 0

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed as a piece of `part`."""

        def timed(*args: Any, **keywords: Any) -> Any:
            if self._depth:
                return function(*args, **keywords)
            self._depth = 1
            start = time.thread_time_ns()
            try:
                return function(*args, **keywords)
            finally:
                self.elapsed[part] = self.elapsed.get(part, 0) + time.thread_time_ns() - start
                self._depth = 0

        return timed

    def take(self) -> dict[str, int]:
        """Nanoseconds per part since the last call."""
        elapsed, self.elapsed = self.elapsed, {}
        return elapsed


class _Patched(AbstractContextManager[None]):
    """The sampler of a step, timed; its tokens are there when the runner's device has computed the step."""

    def __init__(self, watch: Stopwatch, runner: RandomRunner) -> None:
        original = self._original = radixkv.engine.step_pipeline.Sampling

        class Timed(original):  # type: ignore[valid-type,misc]
            def __init__(self, *args: Any, **keywords: Any) -> None:
                self._ends_at = runner.ends_at
                super().__init__(*args, **keywords)

            def runs(self) -> Any:
                runner.device.wait(self._ends_at)
                return super().runs()

        self._timed = watch.wrap("sampling", Timed)

    def __enter__(self) -> None:
        radixkv.engine.step_pipeline.Sampling = self._timed  # type: ignore[assignment,misc]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        radixkv.engine.step_pipeline.Sampling = self._original  # type: ignore[misc]


def fill(cache: PrefixCache, num_blocks: int, rng: np.random.Generator) -> list[npt.NDArray[np.int32]]:
    """Cache prompts of FAMILY_TOKENS tokens until they take `num_blocks` blocks; returns the prompts."""
    families = []
    for _ in range(max(1, num_blocks * BLOCK // FAMILY_TOKENS)):
        tokens = rng.integers(1, VOCABULARY, FAMILY_TOKENS, dtype=np.int32)
        lease = cache.acquire(tokens)
        lease.commit(FAMILY_TOKENS)
        lease.release()
        families.append(tokens)
    return families


def make_engine(
    num_cached: int,
    num_running: int,
    policy: str,
    rng: np.random.Generator,
    runner: RandomRunner | None = None,
    **options: Any,
) -> tuple[Engine, list[npt.NDArray[np.int32]]]:
    """An engine of `num_running` sequence slots; its cache holds `num_cached` blocks, with room for more.

    Args:
        runner: None: one of its own.
        options: further settings of its `EngineConfig`.
    """
    room = (num_running * (FAMILY_TOKENS + OWN_TOKENS + 1024) + 2 * ARRIVING) // BLOCK
    settings: dict[str, Any] = {"max_num_batched_tokens": num_running + 8192, **options}
    config = EngineConfig(
        block_size=BLOCK,
        max_num_seqs=num_running,
        max_queue=1_000_000,
        scheduling_policy=policy,
        speculation="off",  # random tokens can't be guessed
        seed=0,
        **settings,
    )
    cache = PrefixCache(num_cached + room, BLOCK, observer=Advisor(BLOCK))
    engine = Engine(
        config,
        runner or RandomRunner(2 * num_running),  # type: ignore[arg-type]
        cache,
        ServedModel(
            tokenizer=None,
            max_model_len=ENDLESS + FAMILY_TOKENS + OWN_TOKENS,
            vocab_size=VOCABULARY,
        ),
    )
    return engine, fill(cache, num_cached, rng)


def add(
    engine: Engine, families: list[npt.NDArray[np.int32]], max_tokens: int, rng: Any, **options: Any
) -> None:
    """Queue a request that begins with a cached prompt; `options` are further ones of its sampling."""
    own = rng.integers(1, VOCABULARY, int(rng.integers(8, OWN_TOKENS + 1)), dtype=np.int32)
    prompt = np.concatenate([families[int(rng.integers(len(families)))], own])
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)
    engine.add_request(prompt.tolist(), params)


def arrive(engine: Engine, rng: Any) -> None:
    """Queue a request with a long prompt that is new, for one token."""
    prompt = rng.integers(1, VOCABULARY, ARRIVING, dtype=np.int32)
    engine.add_request(prompt.tolist(), SamplingParams(max_tokens=1, temperature=0.0))


def measure_steps(
    situation: str,
    *,
    num_cached: int,
    num_running: int,
    num_waiting: int,
    num_steps: int,
    policy: str,
    ending: int = 4,
) -> dict[str, Any]:
    """CPU milliseconds of the parts of a step; see the module's text."""
    rng = np.random.default_rng(0)
    churn, arrivals = situation == "churn", situation == "arrivals"
    options: dict[str, Any] = {"async_scheduling": not churn and situation != "full"}
    if arrivals:
        options["max_num_batched_tokens"] = num_running - 1 + CHUNK
    runner = RandomRunner(2 * num_running)
    engine, families = make_engine(num_cached, num_running, policy, rng, runner, **options)
    asked = {"repetition_penalty": 1.1} if situation == "penalty" else {}
    for i in range(num_running - arrivals):
        # In a churn the first ones end `ending` a step, and so do those that replace them.
        add(engine, families, 64 + i // ending if churn else ENDLESS, rng, **asked)
    while engine.scheduler.num_waiting:
        engine.step()
    for _ in range(0 if arrivals else num_waiting):
        add(engine, families, max(1, num_running // ending) if churn else ENDLESS, rng)
    for _ in range(40):  # the requests come to lie at different places in their blocks
        engine.step()
    if churn:
        while not engine.step().finished:
            pass
    watch = Stopwatch()
    for name in ("schedule", "schedule_ahead", "complete", "finish", "update_rows"):
        setattr(engine.scheduler, name, watch.wrap("schedule", getattr(engine.scheduler, name)))
    parts: dict[str, list[float]] = {"schedule": [], "sampling": [], "output": [], "whole step": []}
    sizes = []
    gc.collect()
    gc.freeze()  # the million blocks are no garbage; a server would not see a full collection in a step
    before = engine.stats()
    with _Patched(watch, runner):
        engine.step()  # what ran ahead before knew no device
        runner.device.gaps_ns.clear()
        watch.take()
        for _ in range(num_steps):
            if arrivals and len(engine.requests) < num_running:
                arrive(engine, rng)
            start = time.thread_time_ns()
            engine.step()
            whole = time.thread_time_ns() - start
            elapsed = watch.take()
            sizes.append(engine.scheduler.num_running)
            # A step whose requests have all ended samples nothing, and plans nothing where it ran ahead.
            known = {name: elapsed.get(name, 0) / 1e6 for name in ("schedule", "sampling")}
            for name, ms in known.items():
                parts[name].append(ms)
            parts["output"].append(whole / 1e6 - sum(known.values()))
            parts["whole step"].append(whole / 1e6)
    gc.unfreeze()
    after = engine.stats()
    engine.check()
    parts["gap"] = [ns / 1e6 for ns in runner.device.gaps_ns] or [0.0]
    return {
        "running": statistics.median(sizes),
        "waiting": engine.scheduler.num_waiting,
        "steps_ahead": (after.steps_ahead - before.steps_ahead) / (after.steps - before.steps),
        "cached_blocks": engine.cache.stats.cached_blocks + engine.cache.stats.held_blocks,
        "parts_ms": {
            name: {
                "median": statistics.median(values),
                "mean": statistics.fmean(values),
                "p95": sorted(values)[int(0.95 * len(values))],
            }
            for name, values in parts.items()
        },
    }


class _Filled:
    """An engine over so many cached blocks, in which 256 requests decode."""

    def __init__(self, num_cached: int) -> None:
        self.rng = np.random.default_rng(1)
        self.engine, self.families = make_engine(num_cached, 256, "prefix", self.rng)
        for _ in range(256):
            add(self.engine, self.families, ENDLESS, self.rng)
        while self.engine.scheduler.num_waiting:
            self.engine.step()
        self.watch = Stopwatch()
        for name in ("schedule", "complete"):
            setattr(
                self.engine.scheduler, name, self.watch.wrap("schedule", getattr(self.engine.scheduler, name))
            )

    def sample(self) -> dict[str, float]:
        """Nanoseconds of CPU time per token of one lookup, one admission, and 16 steps of 256 decodes."""
        cache = self.engine.cache
        own = self.rng.integers(1, VOCABULARY, OWN_TOKENS, dtype=np.int32)
        prompt = np.concatenate([self.families[int(self.rng.integers(len(self.families)))], own])
        start = time.thread_time_ns()
        cache.match(prompt)
        looked_up = time.thread_time_ns()
        lease = cache.acquire(prompt)
        lease.commit(len(prompt))
        lease.release(discard=True)
        admitted = time.thread_time_ns()
        for _ in range(BLOCK):  # all places in a block
            self.engine.step()
        return {
            "lookup": (looked_up - start) / len(prompt),
            "admission": (admitted - looked_up) / len(prompt),
            "decode": self.watch.take()["schedule"] / BLOCK / 256,
        }


def measure_growth(sizes: list[int], repeats: int = 60) -> dict[str, dict[str, float]]:
    """Medians by the number of cached blocks; the sizes take turns, so that noise meets all of them."""
    filled = {size: _Filled(size) for size in sizes}
    gc.collect()
    gc.freeze()
    samples: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size, one in filled.items():
            samples[size].append(one.sample())
    gc.unfreeze()
    return {
        str(size): {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for size, rows in samples.items()
    }


def steps_table(figures: dict[str, Any]) -> Table:
    table = Table(title=f"CPU time of a step without a model, ms (target: schedule under {TARGET_MS:g})")
    columns = ("situation", "running", "waiting", "ahead", "cached blocks", "part", "median", "mean", "p95")
    for column in columns:
        table.add_column(column, justify="left" if column in ("situation", "part") else "right")
    for name, row in figures.items():
        for i, (part, values) in enumerate(row["parts_ms"].items()):
            blocks, ahead = f"{row['cached_blocks']:,}", f"{row['steps_ahead']:.0%}"
            about = (name, f"{row['running']:,.0f}", f"{row['waiting']:,}", ahead, blocks)
            lead = about if i == 0 else ("",) * len(about)
            ms = (f"{values[figure]:.2f}" for figure in ("median", "mean", "p95"))
            table.add_row(*lead, part, *ms)
    return table


def growth_table(figures: dict[str, dict[str, float]]) -> Table:
    table = Table(title="CPU nanoseconds per token by the number of cached blocks")
    table.add_column("cached blocks", justify="right")
    for name in ("lookup", "admission", "decode"):
        table.add_column(name, justify="right")
    for cached, row in figures.items():
        table.add_row(f"{int(cached):,}", *(f"{row[name]:.1f}" for name in ("lookup", "admission", "decode")))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--cached", type=int, default=1_000_000, help="cached blocks (default 1,000,000)")
    parser.add_argument("--steps", type=int, default=200, help="steps measured (default 200)")
    parser.add_argument("--policy", default="prefix", help="order of admission (default prefix)")
    parser.add_argument("--situation", choices=SITUATIONS, action="append", help="default: all")
    parser.add_argument("--skip-growth", action="store_true", help="only the step")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for one another in a small product are no work of the host
    console = Console()
    steps: dict[str, Any] = {}
    for situation in arguments.situation or SITUATIONS:
        with _profiled(arguments.profile):
            steps[situation] = measure_steps(
                situation,
                num_cached=arguments.cached,
                num_running=arguments.running,
                num_waiting=arguments.waiting,
                num_steps=arguments.steps,
                policy=arguments.policy,
            )
    console.print(steps_table(steps))
    growth: dict[str, dict[str, float]] = {}
    if not arguments.skip_growth:
        growth = measure_growth([10**n for n in range(3, 10) if 10**n <= arguments.cached])
        console.print(growth_table(growth))
    figures = {"policy": arguments.policy, "steps": steps, "ns_per_token": growth}
    write_figures(arguments.json, "host_scale", figures)


def _profiled(on: bool) -> AbstractContextManager[Any]:
    """cProfile around the block, sorted by own time, if `on`."""
    if not on:
        return nullcontext()

    class Printed(cProfile.Profile):
        def __exit__(self, *details: object) -> None:
            super().__exit__(*details)
            self.print_stats("tottime")

    return Printed()


if __name__ == "__main__":
    main()
