# SPDX-License-Identifier: Apache-2.0
"""What speculation brings to radixkv and to vLLM, on the same prompts.

    python -m benchmarks.speculation_peers [--rounds N] [--workloads ...] [--json FILE]

Five servers side by side over the embedded model in float32: radixkv with `--speculation off` and `auto`, and
vLLM's CPU build (installed as in `benchmarks.compare`) without speculation, with `ngram` and with `suffix`
(settings of vLLM's documentation; `suffix` needs the package arctic-inference). They take turns with the
prompts of `benchmarks.speculation_workloads` over HTTP: greedy, streaming, alone and eight at once.

No prompt comes twice: neither radixkv's nor vLLM's memory of earlier answers is forgotten, and each has
seen the same. Before its turn each prompt is asked for one token, so that every engine finds it in its prefix
cache. Printed are decode tokens per second, from the moment when all answers of a turn have begun to its end:
medians over the turns, the median of each turn's ratio to the same engine without speculation (also by CPU
time), and the share of guesses that were accepted, as the servers count (vLLM also past an answer's end).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from benchmarks.peers import vllm_cpu
from benchmarks.peers.engines import Places, start_radixkv, threads
from benchmarks.peers.environment import PeerUnavailable
from benchmarks.peers.process import RunningServer
from benchmarks.speculation_workloads import SCHEMA, WORKLOADS, prompts
from radixkv import EngineConfig
from radixkv.cli.bench.workloads import served_model
from radixkv.engine.config import EMBEDDED_MODEL
from radixkv.model.loading.embedded_model import find_embedded, prepare_embedded
from radixkv.model.loading.loader import load_tokenizer
from radixkv.model.loading.model_cache import cache_home

SUFFIX_PACKAGE = "arctic-inference==0.1.1"
_SPECULATION: dict[str, dict[str, Any] | None] = {
    "vLLM off": None,
    "vLLM ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "vLLM suffix": {"method": "suffix", "num_speculative_tokens": 32},
}
_BASE = {"radixkv auto": "radixkv off", "vLLM ngram": "vLLM off", "vLLM suffix": "vLLM off"}
_NO_WHITESPACE = json.dumps({"backend": "guidance", "disable_any_whitespace": True})


@dataclass
class Streamed:
    """One answer: its text as it came (seconds, piece), and its length in tokens."""

    pieces: list[tuple[float, str]]
    tokens: int

    def text(self, until: float = float("inf")) -> str:
        return "".join(piece for at, piece in self.pieces if at <= until)


def body(workload: str, max_tokens: int) -> dict[str, Any]:
    """The fields of a request besides its prompt and model."""
    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    if workload == "JSON with schema":
        fields["structured_outputs"] = {"json": SCHEMA}
    else:
        fields["ignore_eos"] = True
    return fields


async def stream(http: httpx.AsyncClient, fields: dict[str, Any]) -> Streamed:
    answer = Streamed([], 0)
    async with http.stream("POST", "/v1/completions", json=fields) as response:
        if response.status_code != 200:
            raise PeerUnavailable(f"HTTP {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                answer.pieces.append((time.perf_counter(), event["choices"][0]["text"]))
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
    return answer


async def ask_all(url: str, model: str, asked: list[list[int]], fields: dict[str, Any]) -> list[Streamed]:
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:
        return await asyncio.gather(*(stream(http, {**fields, "model": model, "prompt": p}) for p in asked))


def guesses(url: str) -> tuple[int, int]:
    """Tokens drafted and accepted so far, from the server's counters."""
    counters = httpx.get(f"{url}/metrics", trust_env=False).text
    found = []
    for name in ("draft_tokens_total", "accepted_tokens_total"):
        values = re.findall(rf"(?m)^\w*[:_]spec_decode_(?:num_)?{name}(?:{{.*}})? ([\d.e+]+)$", counters)
        found.append(int(sum(map(float, values))))
    return found[0], found[1]


def cpu_seconds(server: RunningServer) -> float:
    """CPU time that a server's processes have used."""
    root = psutil.Process(server.process.pid)
    every = [root, *root.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in every)


def decode(
    tokenizer: Any, server: RunningServer, asked: list[list[int]], workload: str, max_tokens: int
) -> dict[str, Any]:
    """One turn of one server.

    Raises:
        PeerUnavailable: it refused.
    """
    url, model = server.url, served_model(server.url)
    asyncio.run(ask_all(url, model, asked, body("", 1)))
    before_turn, cpu = guesses(url), cpu_seconds(server)
    answers = asyncio.run(ask_all(url, model, asked, body(workload, max_tokens)))
    cpu = cpu_seconds(server) - cpu
    drafted, accepted = (now - then for now, then in zip(guesses(url), before_turn, strict=True))
    began = max(answer.pieces[0][0] for answer in answers)
    ended = max(answer.pieces[-1][0] for answer in answers)
    before = sum(len(tokenizer.encode(answer.text(began))) for answer in answers)
    tokens = sum(answer.tokens for answer in answers) - before
    return {
        "tokens_per_s": tokens / max(ended - began, 1e-9),
        "tokens_per_cpu_s": sum(answer.tokens for answer in answers) / cpu,
        "tokens": sum(answer.tokens for answer in answers),
        "drafted": drafted,
        "accepted": accepted,
        "texts": [answer.text() for answer in answers],
    }


def settings(places: Places, failures: dict[str, str], num_threads: int) -> dict[str, Callable[[], Any]]:
    """How to start each server that can be had; why not goes to `failures`."""

    def radixkv(mode: str) -> Callable[[], Any]:
        return lambda: start_radixkv(
            places, "--speculation", mode, "--threads", str(num_threads), log=f"radixkv_{mode}.log"
        )

    found = {f"radixkv {mode}": radixkv(mode) for mode in ("off", "auto")}
    try:
        environment = vllm_cpu.install(places)
    except PeerUnavailable as error:
        failures["vLLM"] = str(error)
        return found

    def vllm(name: str, config: dict[str, Any] | None) -> Callable[[], Any]:
        options = ["--structured-outputs-config", _NO_WHITESPACE]
        options += ["--speculative-config", json.dumps(config)] if config else []
        log = name.lower().replace(" ", "_") + ".log"
        return lambda: vllm_cpu.start(
            environment, places, *options, log=log, kv_cache_gib=1, num_threads=num_threads
        )

    for name, config in _SPECULATION.items():
        try:
            if name == "vLLM suffix":
                environment.add(SUFFIX_PACKAGE, timeout=places.install_timeout)
        except PeerUnavailable as error:
            failures[name] = str(error)
        else:
            found[name] = vllm(name, config)
    failures.setdefault("versions", json.dumps(vllm_cpu.versions(environment)))
    return found


def started(
    factories: dict[str, Callable[[], Any]], stack: contextlib.ExitStack, failures: dict[str, str]
) -> dict[str, RunningServer]:
    """The servers, started at the same time; the stack ends them."""
    servers = {}
    contexts = {name: start() for name, start in factories.items()}
    with ThreadPoolExecutor(len(contexts)) as pool:
        entered = {name: pool.submit(context.__enter__) for name, context in contexts.items()}
    for name, future in entered.items():
        try:
            servers[name] = future.result()
        except PeerUnavailable as error:
            failures[name] = str(error)
            print(f"[{name}] {error}", flush=True)
        else:
            stack.push(contexts[name])
            servers[name].stop_watching()  # of its memory, which costs some of the machine
    return servers


def summary(turns: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the turns of one workload at one batch size."""
    figures: dict[str, Any] = {}
    for name in turns[0]:
        own = [turn[name] for turn in turns if name in turn]
        figures[name] = {"tokens_per_s": round(statistics.median(one["tokens_per_s"] for one in own), 1)}
        base = _BASE.get(name)
        if base is None:
            continue
        pairs = [(turn[name], turn[base]) for turn in turns if name in turn and base in turn]
        if pairs:
            ratios = [on["tokens_per_s"] / off["tokens_per_s"] for on, off in pairs]
            by_cpu = [on["tokens_per_cpu_s"] / off["tokens_per_cpu_s"] for on, off in pairs]
            drafted, accepted = (sum(on[key] for on, _ in pairs) for key in ("drafted", "accepted"))
            same = [a == b for on, off in pairs for a, b in zip(on["texts"], off["texts"], strict=True)]
            figures[name] |= {
                "ratio": round(statistics.median(ratios), 2),
                "cpu_ratio": round(statistics.median(by_cpu), 2),
                "ratios": [round(ratio, 2) for ratio in ratios],
                "accepted": round(accepted / max(1, drafted), 2),
                "same_texts": f"{sum(same)} of {len(same)}",
            }
    return figures


def measure(
    servers: dict[str, RunningServer], args: argparse.Namespace, keep: Callable[[str, Any], None]
) -> None:
    """All workloads; `keep` gets the figures of each as soon as they are known."""
    tokenizer = load_tokenizer(EngineConfig())
    # The first answers pay for kernels being compiled.
    for name, server in servers.items():
        for workload in args.workloads:
            decode(tokenizer, server, prompts(tokenizer, workload)[5:6], workload, 24)
        if max(args.batches) > 1:
            decode(tokenizer, server, prompts(tokenizer, args.workloads[0])[6:8], args.workloads[0], 12)
        print(f"{name} is warm", flush=True)
    for batch in args.batches:
        for workload in args.workloads:
            load = os.getloadavg()[0]
            found = [
                turns_of(tokenizer, servers, workload, batch, turn, args.tokens)
                for turn in range(args.rounds if batch == 1 else max(1, min(2, args.rounds // 2)))
            ]
            keep(f"{workload}, batch {batch}", {"load_average_before": round(load, 2), **summary(found)})


def turns_of(
    tokenizer: Any, servers: dict[str, RunningServer], workload: str, batch: int, turn: int, tokens: int
) -> dict[str, dict[str, Any]]:
    """One turn of every server, with prompts that none has seen."""
    fresh = prompts(tokenizer, workload)[turn : turn + 1] if batch == 1 else ()
    asked = fresh or prompts(tokenizer, workload, 1 + turn)
    limit = tokens if batch == 1 else tokens // 2
    names = sorted(servers, reverse=turn % 2 == 1)
    return {name: decode(tokenizer, servers[name], asked, workload, limit) for name in names}


def show(figures: dict[str, Any]) -> None:
    table = Table(title="Decode tokens/s, and times those without speculation")
    names = list(dict.fromkeys(name for one in figures["workloads"].values() for name in one if " " in name))
    for column in ("workload", *names):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for workload, one in figures["workloads"].items():
        cells = []
        for name in names:
            f = one.get(name)
            cells.append("-" if f is None else _cell(f))
        table.add_row(workload, *cells)
    Console(width=140).print(table)


def _cell(figures: dict[str, Any]) -> str:
    rate = f"{figures['tokens_per_s']:.1f}"
    if "ratio" not in figures:
        return rate
    return f"{rate} ({figures['ratio']:.2f}, by CPU time {figures['cpu_ratio']:.2f})"


def main() -> None:
    # Ended from outside, it still ends the servers that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="turns alone (at most 5); half as many, 1 or 2, with eight at once",
    )
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8], choices=(1, 8))
    parser.add_argument("--tokens", type=int, default=128, help="of an answer alone; half with eight at once")
    parser.add_argument("--threads", type=int, default=threads(), help="CPU threads of each server")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--install-timeout", type=float, default=1800, metavar="S")
    parser.add_argument("--start-timeout", type=float, default=300, metavar="S")
    args = parser.parse_args()

    embedded = find_embedded(EMBEDDED_MODEL)
    assert embedded is not None
    logs = cache_home() / "peers" / "logs"
    places = Places(prepare_embedded(embedded), Path(), logs, args.install_timeout, args.start_timeout)
    failures: dict[str, str] = {}
    figures: dict[str, Any] = {
        "threads": args.threads,
        "settings": _SPECULATION,
        "failures": failures,
        "workloads": {},
    }

    def keep(name: str, found: Any) -> None:
        figures["workloads"][name] = found
        print(name, json.dumps(found), flush=True)
        write_figures(args.json, "speculation_peers", figures)

    with contextlib.ExitStack() as stack:
        servers = started(settings(places, failures, args.threads), stack, failures)
        figures["versions"] = json.loads(failures.pop("versions", "{}"))
        measure(servers, args, keep)
    show(figures)


if __name__ == "__main__":
    main()
