# SPDX-License-Identifier: Apache-2.0
"""What tiers below the cache bring: hit rate, time to first token, throughput, by the working set.

    conversations    take turns on an engine whose cache holds two of them; each turn adds some tokens. The
                     working set is 1, 3 and 10 times the cache. The first turns fill the tiers, the second
                     are measured
    a trace          recorded conversations of many turns, in the order in which they came, a recorded block
                     of 64 bytes as a few tokens; from `--traces FOLDER` or $RADIXKV_TRACES, else left out
    nothing shared   prompts that have no prefix in common, several without a pause: what a tier costs that
                     is of no use. Blocks that were offered to it, saved, dropped and loaded are counted

One engine has no tier, one a disk, one a Redis (left out where redis-server is missing); with `--peers`, vLLM
and vLLM with LMCache stand beside them, behind HTTP, except on the trace. They answer each prompt one after
the other, whose turn is first changes, so that they meet the same machine.

    python -m benchmarks.tiers
    python -m benchmarks.tiers --peers vllm,lmcache --json tiers.json
    python -m benchmarks.tiers --sizes 1,3 --trace-requests 0
    python -m benchmarks.tiers --quick
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.figures import write_figures
from benchmarks.tier_contestants import BLOCK_COUNTS, Contestant, contestants
from benchmarks.traces import traces_folder
from radixkv.cli.replay.readers import read_trace
from radixkv.engine.config import EMBEDDED_MODEL

TRACE = "chat_bytes64.jsonl.gz"
# Prompts that follow each other without a pause where nothing is shared.
GROUP = 4


@contextlib.contextmanager
def redis_url(folder: Path) -> Iterator[str | None]:
    """A Redis on a socket; None: there is no redis-server."""
    if shutil.which("redis-server") is None:
        yield None
        return
    socket = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            if server.poll() is not None:
                raise SystemExit("redis-server ended at once")
            time.sleep(0.05)
        yield f"unix://{socket}"
    finally:
        server.terminate()
        server.wait()


class Texts:
    """Token ids by chance.

    Args:
        max_token: they are below it.
    """

    def __init__(self, seed: int, max_token: int) -> None:
        self._random = random.Random(seed)
        self._max_token = max_token

    def text(self, length: int) -> list[int]:
        return [self._random.randrange(10, self._max_token) for _ in range(length)]


def turn_order(engines: Sequence[Contestant], number: int) -> list[Contestant]:
    """Whose turn is first changes."""
    first = number % len(engines)
    return [*engines[first:], *engines[:first]]


def take_turns(engines: Sequence[Contestant], prompts: Sequence[list[int]], what: str) -> list[list[int]]:
    """Each prompt by all of them; the answers, in which those of ours must agree."""
    answers = []
    for i, prompt in enumerate(track(prompts, what, transient=True)):
        given = []
        for engine in turn_order(engines, i):
            given.append(engine.ask(prompt).tokens)
            engine.engine.finish_saves()
        own = [tokens for tokens in given if tokens]
        if any(tokens != own[0] for tokens in own):
            raise SystemExit(f"{what}: engines with and without tiers answer differently")
        answers.append(own[0])
    return answers


def clear(engines: Sequence[Contestant]) -> None:
    for engine in engines:
        engine.clear()


def figures_of(engines: Sequence[Contestant]) -> dict[str, Any]:
    return {engine.name: engine.figures() for engine in engines}


def conversations(engines: Sequence[Contestant], texts: Texts, size: int, args: Any) -> dict[str, Any]:
    """Two turns of conversations of which the cache holds one in `size`; the second is measured."""
    count = max(1, round(size * args.num_blocks * 16 / args.context))
    chats = [texts.text(args.context) for _ in range(count)]
    answers = take_turns(engines, chats, f"{size}x, first turns")
    clear(engines)
    second = [[*chat, *answer, *texts.text(args.turn)] for chat, answer in zip(chats, answers, strict=True)]
    take_turns(engines, second, f"{size}x, second turns")
    return figures_of(engines)


def nothing_shared(
    engines: Sequence[Contestant], texts: Texts, num_tokens: int, count: int
) -> dict[str, Any]:
    """Prompts without a pause, a group by each engine in turn; what goes on afterwards is off the clock."""
    clear(engines)
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    groups = [[texts.text(num_tokens) for _ in range(GROUP)] for _ in range(max(1, count // GROUP))]
    for number, prompts in enumerate(track(groups, f"nothing shared, {num_tokens}", transient=True)):
        for engine in turn_order(engines, number):
            start = time.perf_counter()
            for prompt in prompts:
                engine.ask(prompt)
            seconds[engine.name].append(time.perf_counter() - start)
            engine.engine.finish_saves()
    figures = figures_of(engines)
    for engine in engines:
        if engine.without is not None:
            pairs = zip(seconds[engine.without], seconds[engine.name], strict=True)
            figures[engine.name]["throughput_over_without"] = statistics.median(a / b for a, b in pairs)
    return figures


def trace_prompts(folder: Path, count: int, block_tokens: int, max_token: int) -> list[list[int]]:
    """The first prompts of the trace, each recorded block as so many tokens."""
    trace = read_trace(folder / TRACE)
    prompts = []
    for number in range(min(count, trace.num_requests)):
        blocks = trace.block_ids[trace.offsets[number] : trace.offsets[number + 1]]
        prompts.append(
            [token for block in blocks for token in Texts(int(block), max_token).text(block_tokens)]
        )
    return prompts


def measure(args: argparse.Namespace, folder: Path, url: str | None) -> dict[str, Any]:
    """All figures."""
    texts = Texts(args.seed, args.max_token)

    def tiers(name: str, long: int) -> dict[str, str]:
        found = {"disk": f"disk:{folder / name},max=4GiB,long={long}"}
        return found if url is None else found | {"redis": f"{url},long={long}"}

    pool_tokens = args.num_blocks * 16
    figures: dict[str, Any] = {"pool_tokens": pool_tokens, "context_tokens": args.context}
    long = min(args.context, 512)  # conversations are saved at their first turn
    with contestants(args.model, pool_tokens, tiers("conversations", long), args.peers) as engines:
        take_turns(engines, [texts.text(args.context // 2)], "warming up")
        clear(engines)
        figures["sizes"] = {f"{size}x": conversations(engines, texts, size, args) for size in args.sizes}
        figures["nothing_shared"] = {
            f"{num_tokens} tokens": nothing_shared(engines, texts, num_tokens, args.unshared)
            for num_tokens in args.unshared_tokens
        }
    prompts = trace_prompts(args.traces, args.trace_requests, args.block_tokens, args.max_token)
    if prompts:
        longest = max(map(len, prompts)) + 16
        pool_tokens = -(-max(longest, args.num_blocks * 16) // 16) * 16
        with contestants(args.model, pool_tokens, tiers("trace", 512), ()) as engines:
            take_turns(engines, [texts.text(args.context // 2)], "warming up")
            clear(engines)
            take_turns(engines, prompts, "a trace")
            about = {"name": TRACE.split(".")[0], "requests": len(prompts), "pool_tokens": pool_tokens}
            tokens = {"block_tokens": args.block_tokens, "prompt_tokens": sum(map(len, prompts))}
            figures["trace"] = {**about, **tokens, "engines": figures_of(engines)}
    return figures


def show(figures: dict[str, Any]) -> None:
    """A table for people."""
    heads = ("workload", "engine", "hit rate", "TTFT p50", "TTFT p95", "prompt tokens/s", "of without")
    table = Table(*heads, *(name.removesuffix("_blocks") for name in BLOCK_COUNTS))
    rows = {**figures["sizes"]}
    rows |= {f"nothing shared, {tokens}": found for tokens, found in figures["nothing_shared"].items()}
    if "trace" in figures:
        rows[figures["trace"]["name"]] = figures["trace"]["engines"]
    for workload, by_engine in rows.items():
        for engine, found in by_engine.items():
            ratio = found.get("throughput_over_without")
            table.add_row(
                workload,
                engine,
                f"{found['hit_rate']:.1%}",
                f"{found['ttft_p50_s']:.3f} s",
                f"{found['ttft_p95_s']:.3f} s",
                f"{found['prompt_tokens_per_s']:,.0f}",
                "" if ratio is None else f"{ratio:.1%}",
                *(str(found.get(name, "")) for name in BLOCK_COUNTS),
            )
    Console(width=140).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--sizes", default="1,3,10", help="working sets, as multiples of the cache")
    parser.add_argument("--num-blocks", type=int, default=40, help="of the cache, 16 tokens each")
    parser.add_argument("--context", type=int, default=320, help="tokens of a conversation's first turn")
    parser.add_argument("--turn", type=int, default=32, help="tokens that the second turn adds")
    parser.add_argument("--unshared", type=int, default=24, help="prompts that share nothing")
    parser.add_argument("--unshared-tokens", default="192,600", help="tokens of each of them")
    parser.add_argument("--traces", type=Path, default=traces_folder(), help="folder of recorded traces")
    parser.add_argument("--trace-requests", type=int, default=80, help="of the trace; 0: leave it out")
    parser.add_argument("--block-tokens", type=int, default=4, help="tokens of a recorded block")
    parser.add_argument("--peers", default="", help="of vllm and lmcache; installed where they are missing")
    parser.add_argument("--max-token", type=int, default=40_000, help="token ids are below it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small cache and few prompts: does it work?")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.quick:
        args.sizes, args.num_blocks, args.context, args.turn = "1,3", 32, 240, 16
        args.unshared, args.unshared_tokens, args.trace_requests = 4, "64", min(args.trace_requests, 6)
    args.sizes = [int(size) for size in args.sizes.split(",") if size]
    args.unshared_tokens = [int(tokens) for tokens in args.unshared_tokens.split(",") if tokens]
    args.peers = [peer for peer in args.peers.split(",") if peer]
    if unknown := set(args.peers) - {"vllm", "lmcache"}:
        parser.error(f"--peers: {', '.join(sorted(unknown))} is not known; give vllm, lmcache or both")
    if args.trace_requests and not (args.traces / TRACE).exists():
        print(f"no {TRACE} in {args.traces}: no trace is measured (set RADIXKV_TRACES)")
        args.trace_requests = 0
    with tempfile.TemporaryDirectory(prefix="tiers") as folder, redis_url(Path(folder)) as url:
        figures = measure(args, Path(folder), url)
    show(figures)
    write_figures(args.json, "tiers", figures)


if __name__ == "__main__":
    main()
