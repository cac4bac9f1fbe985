# SPDX-License-Identifier: Apache-2.0
"""What does a cached part of the prompt bring? TTFT by hit ratio, throughput by the share of shared prompt.

TTFT         prompts of about 1,500 tokens whose first part was sent before; one at a time
throughput   16 requests of about 512 prompt tokens and 32 output tokens, 8 at a time, that share a first
             part; with the prefix cache and without (--no-prefix-caching), points interleaved

python -m benchmarks.hit_ratio --json benchmarks/results/hit_ratio.json
python -m benchmarks.plots                                           # draws docs/lab/plots from it
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
from pathlib import Path
from typing import Any

from benchmarks.figures import write_figures
from radixkv.cli.bench.server_process import started_server, words
from radixkv.cli.bench.workloads import OUTPUT_TOKENS, Client, served_model

HIT_RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)
LONG, SHORT = 1480, 500


async def ttft_points(url: str, repeats: int, seed: int) -> list[dict[str, float]]:
    """Median TTFT at each share of the prompt that was sent before; seconds, and the hit rate reported."""
    source = random.Random(seed)
    client = Client(url, served_model(url))
    points = []
    async with contextlib.aclosing(client.http):
        await client.ask(words(source, 8))
        for ratio in HIT_RATIOS:
            answers = []
            for _ in range(repeats):
                first = words(source, int(LONG * ratio))
                if first:
                    await client.ask(first)
                answers.append(await client.ask(f"{first} {words(source, LONG - int(LONG * ratio))}".strip()))
            hit = statistics.median(answer.cached_tokens / answer.prompt_tokens for answer in answers)
            points.append(
                {"hit_ratio": hit, "ttft_s": statistics.median(a.first_token or 0.0 for a in answers)}
            )
    return points


async def throughput_point(url: str, share: float, seed: int) -> float:
    """Output tokens per second of one burst."""
    source = random.Random(seed)
    client = Client(url, served_model(url))
    async with contextlib.aclosing(client.http):
        shared = words(source, int(SHORT * share))
        prompts = [f"{shared} {words(source, SHORT - int(SHORT * share))}".strip() for _ in range(16)]
        result = await client.ask_all(prompts, 8)
    return 16 * OUTPUT_TOKENS / result.wall


def measure(repeats: int, seed: int, arguments: list[str]) -> dict[str, Any]:
    with started_server(arguments) as on, started_server([*arguments, "--no-prefix-caching"]) as off:
        ttft = asyncio.run(ttft_points(on, repeats, seed))
        series: dict[str, list[float]] = {"with": [], "without": []}
        for share in SHARES:
            own: dict[str, list[float]] = {"with": [], "without": []}
            for i in range(repeats):
                for name, url in (("with", on), ("without", off)):
                    value = asyncio.run(throughput_point(url, share, seed + 1000 * i + int(100 * share)))
                    own[name].append(value)
            for name, values in own.items():
                series[name].append(statistics.median(values))
    return {
        "ttft": ttft,
        "shares": list(SHARES),
        "output_tokens_per_s": series,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="measurements a point (default 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("server", nargs="*", help="further arguments of `radixkv serve`, after --")
    args = parser.parse_args()
    result = measure(args.repeats, args.seed, args.server)
    print(json.dumps(result, indent=2))
    write_figures(args.json, "hit_ratio", result)


if __name__ == "__main__":
    main()
