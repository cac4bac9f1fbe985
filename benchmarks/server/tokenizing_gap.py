# SPDX-License-Identifier: Apache-2.0
"""How long does a live stream stand still while others send a megabyte of prompt?

One stream decodes on the embedded model; callers send long texts, which are tokenised and then refused (they
exceed the context). Printed are the gaps between the stream's tokens, and how late a 1 ms timer of the event
loop comes, without and with the long texts.

    python -m benchmarks.tokenizing_gap --megabytes 1 --callers 2
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

from radixkv import AsyncEngine, ContextLengthExceededError, EngineConfig, SamplingParams
from radixkv.scheduling.request import Request

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "12345", "internationalisation", "wörld", "\n\n"]


def spread(seconds: list[float]) -> str:
    """Median, 99th percentile and maximum, in ms."""
    ordered = sorted(seconds)
    median, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
    return f"median {1e3 * median:.1f}, p99 {1e3 * p99:.1f}, max {1e3 * ordered[-1]:.1f}"


async def late_timer(delays: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await asyncio.sleep(0.001)
        delays.append(time.perf_counter() - started - 0.001)


async def send(engine: AsyncEngine, text: str, sent: list[float]) -> None:
    while True:
        started = time.perf_counter()
        try:
            await engine.generate(Request(text, SamplingParams(max_tokens=1)))
        except ContextLengthExceededError:
            sent.append(time.perf_counter() - started)


async def measure(engine: AsyncEngine, texts: list[str], tokens: int) -> None:
    gaps: list[float] = []
    delays: list[float] = []
    sent: list[float] = []
    prompt = list(range(100, 164))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    timer = asyncio.create_task(late_timer(delays))
    callers: list[asyncio.Task[None]] = []
    last: float | None = None
    async for _ in engine.stream(Request(prompt, params)):
        now = time.perf_counter()
        if last is None:
            delays.clear()
            callers = [asyncio.create_task(send(engine, text, sent)) for text in texts]
        else:
            gaps.append(now - last)
        last = now
    for task in (timer, *callers):
        task.cancel()
    await asyncio.gather(timer, *callers, return_exceptions=True)
    print(
        f"{len(texts)} callers: {len(sent)} long prompts tokenised; "
        f"gap between tokens, ms: {spread(gaps)}; loop late by, ms: {spread(delays)}"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=150)
    arguments = parser.parse_args()
    engine = AsyncEngine.from_config(EngineConfig(num_blocks=512, max_model_len=2048))
    picked = random.Random(0).choices(WORDS, k=int(arguments.megabytes * 200_000))
    text = " ".join(picked)[: int(arguments.megabytes * 2**20)]
    try:
        await measure(engine, [], arguments.tokens)
        await measure(engine, [text] * arguments.callers, arguments.tokens)
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
