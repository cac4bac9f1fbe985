"""Two plots of one server on this machine: TTFT by hit ratio, and throughput by the share of shared prompt.

TTFT         prompts of about 1,500 tokens whose first part was sent before; one at a time
throughput   16 requests of about 512 prompt tokens and 32 output tokens, 8 at a time, that share a first
             part; with the prefix cache and without (--no-prefix-caching), points interleaved

python -m benchmarks.plots                                 # measures, writes docs/plots/*.svg
python -m benchmarks.plots --json benchmarks/results/plots.json
python -m benchmarks.plots --from benchmarks/results/plots.json     # only draws
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from radixkv.tools.bench.server_process import machine, started_server
from radixkv.tools.bench.workloads import OUTPUT_TOKENS, Client, served_model, words

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
            points.append({"hit_ratio": hit, "ttft_s": statistics.median(a.ttft for a in answers)})
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
        "benchmark": "plots",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "ttft": ttft,
        "shares": list(SHARES),
        "output_tokens_per_s": series,
    }


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write ttft_by_hit_ratio.svg and throughput_by_share.svg."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    about = f"{result['machine']['processor']}, {result['machine']['cpus']} CPUs, {result['date']}"
    # A reader must be able to tell a quiet machine from a busy one.
    about += f", load average {result['machine']['load_average'][0]:.1f}"
    pyplot.rcParams["svg.hashsalt"] = "radixkv"  # the same figures give the same file
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    points = result["ttft"]
    axes.plot([100 * p["hit_ratio"] for p in points], [1000 * p["ttft_s"] for p in points], "o-")
    axes.set(xlabel="prompt tokens from the cache, %", ylabel="time to first token, ms", ylim=(0, None))
    axes.set_title(f"1,500-token prompts\n{about}", fontsize=9)
    axes.grid(alpha=0.3)
    figure.savefig(folder / "ttft_by_hit_ratio.svg", metadata={"Date": None})
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, values in result["output_tokens_per_s"].items():
        axes.plot([100 * share for share in result["shares"]], values, "o-", label=f"{name} prefix cache")
    axes.set(xlabel="share of the prompt that requests share, %", ylabel="output tokens/s", ylim=(0, None))
    axes.set_title(f"16 requests of 500 + 32 tokens, 8 at a time\n{about}", fontsize=9)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / "throughput_by_share.svg", metadata={"Date": None})
    pyplot.close("all")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="measurements a point (default 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="draw these figures")
    parser.add_argument("--folder", type=Path, default=Path("docs/plots"), help="where the plots go")
    parser.add_argument("server", nargs="*", help="further arguments of `radixkv serve`, after --")
    args = parser.parse_args()
    if args.source:
        result = json.loads(args.source.read_text(encoding="utf-8"))
    else:
        result = measure(args.repeats, args.seed, args.server)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    draw(result, args.folder)


if __name__ == "__main__":
    main()
