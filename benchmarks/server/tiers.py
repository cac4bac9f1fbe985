"""What tiers below the cache bring: hit rate, time to first token, throughput, by the working set.

Conversations take turns on an engine whose K/V cache holds two of them; each turn adds some tokens. The
working set is 1, 3 and 10 times the cache. One engine has no tier, one a disk, one a Redis (left out where
redis-server is missing); they answer each turn one after the other, so that they meet the same machine. Every
conversation's first turn fills the tiers, the second is measured. Then prompts that share nothing: what
a tier costs that is of no use: the median, over the prompts, of how much longer it took an engine with it.

    python -m benchmarks.tiers
    python -m benchmarks.tiers --sizes 1,3 --json tiers.json
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
from radixkv.config import EMBEDDED_MODEL
from radixkv.llm import LLM
from radixkv.request import RequestOutput, SamplingParams

OUTPUT_TOKENS = 4


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


class Contestant:
    """An engine, and what it was measured to do."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name, self.llm = name, llm
        self.clear()

    def clear(self) -> None:
        self.ttfts: list[float] = []
        self.prompt_tokens = self.cached_tokens = 0
        self.times: list[float] = []

    def ask(self, prompt: Sequence[int]) -> list[int]:
        """Answer, and do what is left to do for the tier, both on the clock."""
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        start = time.perf_counter()
        output: RequestOutput = self.llm.generate([list(prompt)], params)[0]
        self.times.append(time.perf_counter() - start)
        assert output.times is not None
        assert output.times.first_token is not None
        self.ttfts.append(output.times.first_token)
        self.prompt_tokens += len(prompt)
        self.cached_tokens += output.num_cached_tokens
        return list(output.outputs[0].token_ids)

    def settle(self) -> None:
        """Between turns a server's loop goes on with copies that have ended."""
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            if self.llm.engine.has_work:
                self.llm.engine.step()
            time.sleep(0.002)

    def figures(self) -> dict[str, Any]:
        ordered = sorted(self.ttfts)
        return {
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "ttft_p50_s": statistics.median(ordered),
            "ttft_p95_s": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
            "prompt_tokens_per_s": self.prompt_tokens / sum(self.times),
        }


def take_turns(contestants: Sequence[Contestant], prompts: Sequence[list[int]], what: str) -> list[list[int]]:
    """Each prompt by all of them, whose turn is first changes; the answers, which must agree."""
    answers = []
    for i, prompt in enumerate(track(prompts, what, transient=True)):
        turn = [*contestants[i % len(contestants) :], *contestants[: i % len(contestants)]]
        given = []
        for contestant in turn:
            given.append(contestant.ask(prompt))
            contestant.settle()
        if any(answer != given[0] for answer in given):
            raise SystemExit(f"{what}: engines with and without tiers answer differently")
        answers.append(given[0])
    return answers


def measure(args: argparse.Namespace, folder: Path, url: str | None) -> dict[str, Any]:
    """All figures."""
    source = random.Random(args.seed)
    long = min(args.context, 512)  # conversations are saved at their first turn
    tiers: dict[str, tuple[str, ...]] = {"none": (), "disk": (f"disk:{folder / 'kv'},max=4GiB,long={long}",)}
    if url is not None:
        tiers["redis"] = (f"{url},long={long}",)
    pool_tokens = args.num_blocks * 16
    options: dict[str, Any] = {
        "num_blocks": args.num_blocks,
        "speculation": "off",
        "max_model_len": pool_tokens,
    }
    with contextlib.ExitStack() as stack:
        contestants = [
            Contestant(
                name, stack.enter_context(LLM(args.model, **options, **({"kv_tier": tier} if tier else {})))
            )
            for name, tier in tiers.items()
        ]

        def text(length: int) -> list[int]:
            return [source.randrange(10, args.max_token) for _ in range(length)]

        take_turns(contestants, [text(args.context // 2)], "warming up")
        sizes: dict[str, Any] = {}
        for size in args.sizes:
            chats = [text(args.context) for _ in range(max(1, round(size * pool_tokens / args.context)))]
            first = take_turns(contestants, chats, f"{size}x, first turns")
            for contestant in contestants:
                contestant.clear()
            second = [[*chat, *answer, *text(args.turn)] for chat, answer in zip(chats, first, strict=True)]
            take_turns(contestants, second, f"{size}x, second turns")
            sizes[f"{size}x"] = {contestant.name: contestant.figures() for contestant in contestants}
            for contestant in contestants:
                contestant.clear()
        take_turns(contestants, [text(args.unshared_tokens) for _ in range(args.unshared)], "nothing shared")
        unshared = {contestant.name: contestant.figures() for contestant in contestants}
        for contestant in contestants:
            pairs = zip(contestants[0].times, contestant.times, strict=True)
            unshared[contestant.name]["throughput_over_none"] = statistics.median(
                [without / own for without, own in pairs]
            )
    return {
        "pool_tokens": pool_tokens,
        "context_tokens": args.context,
        "sizes": sizes,
        "nothing_shared": unshared,
    }


def show(figures: dict[str, Any]) -> None:
    """A table for people."""
    table = Table("working set", "tier", "hit rate", "TTFT p50", "TTFT p95", "prompt tokens/s")
    for size, by_tier in [*figures["sizes"].items(), ("nothing shared", figures["nothing_shared"])]:
        for tier, found in by_tier.items():
            table.add_row(
                size,
                tier,
                f"{found['hit_rate']:.1%}",
                f"{found['ttft_p50_s']:.3f} s",
                f"{found['ttft_p95_s']:.3f} s",
                f"{found['prompt_tokens_per_s']:,.0f}",
            )
    console = Console()
    console.print(table)
    for tier, found in figures["nothing_shared"].items():
        if tier != "none":
            console.print(
                f"nothing shared, {tier}: {found['throughput_over_none']:.1%} of the throughput without"
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--sizes", default="1,3,10", help="working sets, as multiples of the cache")
    parser.add_argument("--num-blocks", type=int, default=40, help="of the cache, 16 tokens each")
    parser.add_argument("--context", type=int, default=320, help="tokens of a conversation's first turn")
    parser.add_argument("--turn", type=int, default=32, help="tokens that the second turn adds")
    parser.add_argument("--unshared", type=int, default=30, help="prompts that share nothing")
    parser.add_argument("--unshared-tokens", type=int, default=192, help="tokens of each of them")
    parser.add_argument("--max-token", type=int, default=40_000, help="token ids are below it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small cache and few prompts: does it work?")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.sizes = [int(size) for size in args.sizes.split(",")]
    if args.quick:
        args.sizes, args.num_blocks, args.context = [1, 3], 32, 240
        args.turn, args.unshared, args.unshared_tokens = 16, 2, 64
    with tempfile.TemporaryDirectory(prefix="tiers") as folder, redis_url(Path(folder)) as url:
        figures = measure(args, Path(folder), url)
    show(figures)
    write_figures(args.json, "tiers", figures)


if __name__ == "__main__":
    main()
