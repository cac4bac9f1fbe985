# SPDX-License-Identifier: Apache-2.0
"""radixkv beside other engines on this machine: the workloads of `benchmarks.serving`, the same model.

Each peer is installed from the package registry into an environment of its own in the user's cache folder.
Rounds interleave: each round, every setting gets a fresh server and the same prompts, one setting after the
other (with --together: workload by workload), so that a slow machine slows all of them. Printed are
medians over the rounds, the ratios of radixkv's wall times to each peer's, prompt tokens computed (not served
from a cache), memory of the process tree (proportional set size), and the share of greedy answers whose text
equals radixkv's float32 answer. W1 warm and what follows run on the server that ran W1 cold.

    python -m benchmarks.compare --peers vllm,llamacpp,transformers
    python -m benchmarks.compare --peers vllm --workloads "W1 cold,W1 warm" --rounds 5 --json results.json
    python -m benchmarks.compare --peers llamacpp --gguf model.Q4_K_M.gguf --rounds 1
    python -m benchmarks.compare --peers llamacpp --llama-server llama.cpp/build/bin/llama-server
    python -m benchmarks.compare --list
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.peers import hf_transformers, llama_cpp, vllm_cpu
from benchmarks.peers.engines import Peer, Places, Setting, radixkv_settings, threads
from benchmarks.peers.environment import PeerUnavailable
from benchmarks.peers.process import RunningServer
from radixkv.cli.bench.server_process import machine
from radixkv.cli.bench.workloads import WORKLOADS, Result, run_workloads, served_model
from radixkv.engine.config import EMBEDDED_MODEL
from radixkv.model.loading.embedded_model import fetch_gguf, find_embedded, prepare_embedded
from radixkv.model.loading.model_cache import cache_home

PEERS: dict[str, Callable[[Places], Peer]] = {
    "vllm": vllm_cpu.prepare,
    "llamacpp": llama_cpp.prepare,
    "transformers": hf_transformers.prepare,
}
#: Whose answers are compared with: the first that runs.
BASELINES = ("radixkv float32", "radixkv packed")


@dataclass
class Run:
    """One setting in one round, on one fresh server."""

    setting: str
    round: int
    start_s: float
    idle_bytes: int
    peak_bytes: int
    results: dict[str, Result]
    load_average: float


@dataclass
class Comparison:
    """Everything measured so far; written after every run, so that an interrupted comparison is not lost."""

    settings: list[Setting]
    runs: list[Run] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def of(self, setting: str) -> list[Run]:
        return [run for run in self.runs if run.setting == setting]

    def agreement(self, run: Run, workload: str) -> float | None:
        """Share of a workload's answers with the same text as radixkv's answers of that round."""
        bases = (own for name in BASELINES for own in self.of(name))
        base = next((own for own in bases if own.round == run.round), None)
        if base is None or workload not in base.results or workload not in run.results:
            return None
        pairs = zip(base.results[workload].answers, run.results[workload].answers, strict=True)
        return statistics.mean(ours.text == theirs.text for ours, theirs in pairs)

    def figures(self, setting: str, workload: str) -> dict[str, float] | None:
        """Medians over the rounds that finished this workload."""
        runs = [run for run in self.of(setting) if workload in run.results]
        if not runs:
            return None
        each = [run.results[workload].figures() for run in runs]
        medians = {key: statistics.median(one[key] for one in each) for key in each[0]}
        medians["computed_tokens"] = medians["prompt_tokens"] - medians["cached_tokens"]
        for ours in (own for own in self.settings if own.engine == "radixkv"):
            if (ratio := self.ratio(ours.name, setting, workload)) is not None:
                medians[f"{ours.name} / this"] = ratio
        agreements = [share for run in runs if (share := self.agreement(run, workload)) is not None]
        if agreements:
            medians["same_answers"] = statistics.mean(agreements)
        return medians

    def ratio(self, ours: str, theirs: str, workload: str) -> float | None:
        """Median over the rounds that both finished: wall time of `ours` over that of `theirs`."""
        walls = [
            {run.round: run.results[workload].wall for run in self.of(name) if workload in run.results}
            for name in (ours, theirs)
        ]
        common = walls[0].keys() & walls[1].keys()
        return statistics.median(walls[0][i] / walls[1][i] for i in common) if common else None

    def memory(self, setting: str) -> dict[str, float]:
        runs = self.of(setting)
        return {
            "start_s": statistics.median(run.start_s for run in runs),
            "idle_bytes": statistics.median(run.idle_bytes for run in runs),
            "peak_bytes": max(run.peak_bytes for run in runs),
        }


def measure(
    setting: Setting, server: RunningServer, run: Run, seed: int, chosen: Sequence[str], timeout: float
) -> None:
    """Run workloads on a setting's server and add their results to `run`."""
    model = served_model(server.url)
    run.results |= asyncio.run(run_workloads(server.url, model, seed, chosen, timeout))
    run.peak_bytes = server.peak_bytes


def opened(setting: Setting, number: int, server: RunningServer) -> Run:
    """The record of a server that has just started."""
    load = machine()["load_average"][0]
    return Run(setting.name, number, server.start_s, server.idle_bytes, server.peak_bytes, {}, load)


def prepare(names: Sequence[str], places: Places, wanted: Sequence[str] | None) -> Comparison:
    """Install the peers; those that can't be are noted as failures."""
    comparison = Comparison(radixkv_settings(places))
    for name in names:
        try:
            peer = PEERS[name](places)
        except PeerUnavailable as error:
            comparison.failures[name] = str(error)
            print(f"[{name}] unavailable: {error}", flush=True)
        else:
            comparison.settings += peer.settings
            comparison.versions[name] = peer.versions
    if wanted is not None:
        unknown = set(wanted) - {setting.name for setting in comparison.settings}
        if unknown and not comparison.failures:
            known = "; ".join(setting.name for setting in comparison.settings)
            raise SystemExit(f"unknown setting {'; '.join(sorted(unknown))}; known: {known}")
        comparison.settings = [setting for setting in comparison.settings if setting.name in wanted]
    return comparison


def compare(comparison: Comparison, args: argparse.Namespace, chosen: Sequence[str]) -> None:
    """All rounds; a setting that fails is noted and left out from then on."""
    for number in range(args.rounds):
        if args.together:
            groups, parts = [comparison.settings], [[workload] for workload in chosen]
        else:
            groups, parts = [[setting] for setting in comparison.settings], [list(chosen)]
        for group in groups:
            _run_group(comparison, group, number, parts, args)
            if args.json:
                write(comparison, args.json, chosen)


def _run_group(
    comparison: Comparison,
    group: Sequence[Setting],
    number: int,
    parts: Sequence[Sequence[str]],
    args: argparse.Namespace,
) -> None:
    """Start a fresh server of each setting, then let them take turns, part after part."""
    with contextlib.ExitStack() as stack:
        started: list[tuple[Setting, RunningServer, Run]] = []
        for setting in group:
            if setting.name in comparison.failures:
                continue
            with _noting(comparison, setting, number):
                server = stack.enter_context(setting.start())
                started.append((setting, server, opened(setting, number, server)))
                comparison.runs.append(started[-1][2])
        for part in parts:
            for setting, server, run in started:
                if setting.name in comparison.failures:
                    continue
                with _noting(comparison, setting, number):
                    measure(setting, server, run, args.seed + number, part, args.workload_timeout)
                    walls = ", ".join(f"{k} {run.results[k].wall:.1f} s" for k in part if k in run.results)
                    print(f"round {number + 1}, {setting.name}: {walls}", flush=True)
                    if missing := [name for name in part if name not in run.results]:
                        raise PeerUnavailable(f"{missing[0]}: no end within {args.workload_timeout:.0f} s")


@contextlib.contextmanager
def _noting(comparison: Comparison, setting: Setting, number: int) -> Iterator[None]:
    """Note it when a setting fails in here."""
    try:
        yield
    except (PeerUnavailable, SystemExit, OSError, httpx.HTTPError) as error:
        reason = f"round {number + 1}: {type(error).__name__}: {error}"
        comparison.failures[setting.name] = reason
        print(f"[{setting.name}] {reason}", flush=True)


def write(comparison: Comparison, path: Path, chosen: Sequence[str]) -> None:
    """All figures as JSON."""
    settings = {}
    for setting in comparison.settings:
        if not comparison.of(setting.name):
            continue
        settings[setting.name] = {
            "precision": setting.precision,
            **comparison.memory(setting.name),
            "workloads": {name: comparison.figures(setting.name, name) for name in chosen},
        }
    result = {
        "benchmark": "compare",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {**machine(), "threads": threads()},
        "versions": {
            "radixkv": {name: version(name) for name in ("radixkv", "torch", "transformers")},
            **comparison.versions,
        },
        "failures": comparison.failures,
        "medians": settings,
        "runs": [
            {
                "setting": run.setting,
                "round": run.round,
                "load_average_before": run.load_average,
                "start_s": run.start_s,
                "idle_bytes": run.idle_bytes,
                "peak_bytes": run.peak_bytes,
                "workloads": {
                    name: {**result.figures(), "same_answers": comparison.agreement(run, name)}
                    for name, result in run.results.items()
                },
            }
            for run in comparison.runs
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def show(comparison: Comparison, chosen: Sequence[str]) -> None:
    console = Console(width=140)
    own = [setting.name for setting in comparison.settings if setting.engine == "radixkv"]
    columns = ["", "wall s", *(f"{name} / this" for name in own), "out tok/s", "TTFT p50 s", "p95 s"]
    columns += ["ITL p50 ms", "computed", "same"]
    for workload in chosen:
        table = Table(title=f"{workload}, medians")
        for column in columns:
            table.add_column(column, justify="right" if column else "left")
        for setting in comparison.settings:
            f = comparison.figures(setting.name, workload)
            if f is None:
                table.add_row(setting.name, "-", comparison.failures.get(setting.name, "not run")[:40])
                continue
            ratios = [f.get(f"{name} / this") for name in own]
            table.add_row(
                setting.name,
                f"{f['wall_s']:.1f}",
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                f"{f['output_tokens_per_s']:.1f}",
                f"{f['ttft_p50_s']:.2f}",
                f"{f['ttft_p95_s']:.2f}",
                f"{f['itl_p50_s'] * 1000:.1f}",
                f"{f['computed_tokens']:,.0f} / {f['prompt_tokens']:,.0f}",
                f"{f['same_answers']:.0%}" if "same_answers" in f else "",
            )
        console.print(table)
    table = Table(title="Start and memory")
    for column in ("", "start s", "at rest MB", "peak MB"):
        table.add_column(column, justify="right" if column else "left")
    for setting in comparison.settings:
        if comparison.of(setting.name):
            m = comparison.memory(setting.name)
            row = (f"{m['start_s']:.1f}", f"{m['idle_bytes'] / 1e6:,.0f}", f"{m['peak_bytes'] / 1e6:,.0f}")
            table.add_row(setting.name, *row)
    console.print(table)
    for name, reason in comparison.failures.items():
        console.print(f"{name}: {reason}", markup=False)
    about: dict[str, Any] = machine()
    console.print(f"{about['processor']}, {about['cpus']} CPUs, {platform.system()}; {comparison.versions}")


def main() -> None:
    # Ended from outside, it still ends the servers that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="which, separated by commas (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are shown (default 3)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which, separated by commas")
    parser.add_argument("--settings", help="only these settings, separated by semicolons (see --list)")
    parser.add_argument(
        "--together",
        action="store_true",
        help="keep the servers of a round side by side and change over after each workload: for machines "
        "whose load varies; needs memory for all of them",
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="serve this file's blocks beside llama.cpp, in place of the model",
    )
    parser.add_argument(
        "--llama-server",
        type=Path,
        metavar="PROGRAM",
        help="measure the llama.cpp of this program, compiled for this processor, in place of the wheel",
    )
    parser.add_argument("--list", action="store_true", help="set the peers up, list their settings and stop")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round's prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here after every run")
    parser.add_argument("--install-timeout", type=float, default=1800, metavar="S")
    parser.add_argument("--start-timeout", type=float, default=300, metavar="S")
    parser.add_argument("--workload-timeout", type=float, default=600, metavar="S")
    args = parser.parse_args()
    names = [name.strip() for name in args.peers.split(",") if name.strip()]
    if unknown := set(names) - set(PEERS):
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    chosen = [name.strip() for name in args.workloads.split(",")]
    if unknown := set(chosen) - set(WORKLOADS):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; known: {', '.join(WORKLOADS)}")
    wanted = [name.strip() for name in args.settings.split(";")] if args.settings else None

    if args.gguf is not None and (names != ["llamacpp"] or not args.gguf.is_file()):
        parser.error("--gguf takes a file, and --peers llamacpp: other engines do not read it")

    embedded = find_embedded(EMBEDDED_MODEL)
    assert embedded is not None
    places = Places(
        model_folder=args.gguf or prepare_embedded(embedded),
        gguf=args.gguf or fetch_gguf(embedded),
        logs=cache_home() / "peers" / "logs",
        install_timeout=args.install_timeout,
        start_timeout=args.start_timeout,
        only_gguf=args.gguf is not None,
        llama_server=args.llama_server,
    )
    comparison = prepare(names, places, wanted)
    if args.list:
        for setting in comparison.settings:
            print(f"{setting.name} ({setting.precision})")
        return
    compare(comparison, args, chosen)
    show(comparison, chosen)


if __name__ == "__main__":
    main()
