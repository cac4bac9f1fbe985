# SPDX-License-Identifier: Apache-2.0
"""Serving workloads over HTTP: how long a server takes, and how much of the prompts it found in its cache.

Greedy, exactly 32 output tokens a request, OpenAI completions, streaming:

    W1 cold  one new shared prompt of about 1,500 tokens + 24 different questions, 8 at a time, fresh server
    W1 warm  the same shared prompt, 24 new questions
    W2       4 conversations at once x 6 turns, about 100 new tokens a turn, a shared prompt of 800 tokens
    W3       16 requests of about 256 tokens that share nothing, 8 at a time
    single   4 requests like those in W3, one at a time: the experience of one interactive user

    radixkv bench                                     # starts radixkv itself, one server per round
    radixkv bench --rounds 3 --json serving.json
    radixkv bench --url http://127.0.0.1:8000 --model NAME
    radixkv bench -- --no-prefix-caching
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from radixkv.cli.bench.server_process import machine, started_server, words
from radixkv.cli.openai_http import StreamedAnswer, api_root, authorization

OUTPUT_TOKENS = 32
WORKLOADS = ("W1 cold", "W1 warm", "W2", "W3", "single")


@dataclass
class Result:
    """A run of one workload."""

    wall: float
    answers: list[StreamedAnswer] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        ttfts = sorted(answer.first_token or 0.0 for answer in self.answers)
        gaps = [gap for answer in self.answers for gap in answer.gaps]
        prompt = sum(answer.prompt_tokens for answer in self.answers)
        cached = sum(answer.cached_tokens for answer in self.answers)
        return {
            "wall_s": self.wall,
            "output_tokens_per_s": sum(answer.output_tokens for answer in self.answers) / self.wall,
            "ttft_p50_s": statistics.median(ttfts),
            "ttft_p95_s": ttfts[min(len(ttfts) - 1, int(0.95 * len(ttfts)))],
            "itl_p50_s": statistics.median(gaps),
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "hit_rate": cached / prompt,
        }


class Client:
    """Streams completions from one server."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url.rstrip("/") + "/v1/completions"
        self.model = model
        # A connection per request: servers close idle ones when they like, also just as one is used again.
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)

    async def ask(self, prompt: str) -> StreamedAnswer:
        """Its clock begins when it is asked."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, answer = time.perf_counter(), StreamedAnswer()
        async with self.http.stream("POST", self.url, json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"HTTP {response.status_code}: {(await response.aread())[:500]!r}")
            await answer.read(response, lambda: time.perf_counter() - started)
        if answer.error or answer.first_token is None or not answer.prompt_tokens:
            raise SystemExit("an answer came without tokens or without usage")
        return answer

    async def ask_all(self, prompts: Sequence[str], at_once: int) -> Result:
        """All prompts, in order, at most `at_once` at a time."""
        slots = asyncio.Semaphore(at_once)

        async def one(prompt: str) -> StreamedAnswer:
            async with slots:
                return await self.ask(prompt)

        started = time.perf_counter()
        answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return Result(time.perf_counter() - started, list(answers))

    async def converse(self, opening: str, turns: Sequence[str]) -> list[StreamedAnswer]:
        """A conversation: each turn repeats all before it, the answers included."""
        history, answers = opening, []
        for turn in turns:
            history += f"\nQuestion: {turn}\nAnswer:"
            answers.append(await self.ask(history))
            history += answers[-1].text
        return answers


async def run_workloads(
    url: str,
    model: str,
    seed: int,
    chosen: Sequence[str],
    timeout: float | None = None,
    on_done: Callable[[], None] | None = None,
) -> dict[str, Result]:
    """The chosen workloads, in order, against a server that has not seen their prompts.

    The prompts of a workload depend on the seed only, not on what else is chosen. A workload that takes
    longer than `timeout` seconds ends the run: it and those after it are missing from the answer.
    """
    client = Client(url, model)
    results: dict[str, Result] = {}
    async with contextlib.aclosing(client.http):
        await client.ask(words(random.Random(f"{seed}: first request"), 8))  # the code paths, not the cache
        for name in chosen:
            try:
                results[name] = await asyncio.wait_for(run_workload(client, name, seed), timeout)
            except TimeoutError:
                break
            if on_done is not None:
                on_done()
    return results


async def run_workload(client: Client, name: str, seed: int) -> Result:
    """Run one of `WORKLOADS`; see the top of this file."""
    source = random.Random(f"{seed}: {name}")
    if name in ("W1 cold", "W1 warm"):
        shared = words(random.Random(f"{seed}: W1"), 1480)
        prompts = [f"{shared}\nQuestion: {words(source, 38)}?\nAnswer:" for _ in range(24)]
        return await client.ask_all(prompts, 8)
    if name == "W2":
        opening = words(source, 790)
        scripts = [[words(source, 62) for _ in range(6)] for _ in range(4)]
        started = time.perf_counter()
        answers = await asyncio.gather(*(client.converse(opening, turns) for turns in scripts))
        return Result(time.perf_counter() - started, [a for own in answers for a in own])
    count, at_once = (16, 8) if name == "W3" else (4, 1)
    return await client.ask_all([words(source, 252) for _ in range(count)], at_once)


def served_model(url: str, api_key: str | None = None) -> str:
    """The first model that a server serves."""
    address = api_root(url) + "/v1/models"
    answer = httpx.get(address, headers=authorization(api_key), trust_env=False).raise_for_status()
    return str(answer.json()["data"][0]["id"])


def medians(rounds: Sequence[dict[str, Result]]) -> dict[str, dict[str, float]]:
    figures = {}
    for name in rounds[0]:
        own = [one[name].figures() for one in rounds]
        figures[name] = {key: statistics.median(each[key] for each in own) for key in own[0]}
    return figures


def show(figures: dict[str, dict[str, float]], title: str) -> None:
    table = Table(title=title)
    for column in ("", "wall s", "output tok/s", "TTFT p50 s", "TTFT p95 s", "ITL p50 ms", "cached / prompt"):
        table.add_column(column, justify="right" if column else "left")
    for name, f in figures.items():
        table.add_row(
            name,
            f"{f['wall_s']:.1f}",
            f"{f['output_tokens_per_s']:.1f}",
            f"{f['ttft_p50_s']:.2f}",
            f"{f['ttft_p95_s']:.2f}",
            f"{f['itl_p50_s'] * 1000:.0f}",
            f"{f['cached_tokens']:,.0f} / {f['prompt_tokens']:,.0f} ({f['hit_rate']:.1%})",
        )
    Console(width=120).print(table)


def measure(
    url: str | None,
    *,
    model: str | None = None,
    chosen: Sequence[str] = WORKLOADS,
    num_rounds: int = 1,
    seed: int = 0,
    server_arguments: Sequence[str] = (),
    on_done: Callable[[], None] | None = None,
) -> list[dict[str, Result]]:
    """Rounds of workloads against a server that runs, or a fresh `radixkv serve` for each round.

    Args:
        url: of the server; None: start one.
        model: what to ask for; None: the first that is served.
        on_done: called after each workload.
    """
    rounds = []
    for i in range(num_rounds):
        with contextlib.nullcontext(url) if url else started_server(list(server_arguments)) as address:
            name = model or served_model(address)
            rounds.append(asyncio.run(run_workloads(address, name, seed + i, chosen, on_done=on_done)))
    return rounds


def report(rounds: Sequence[dict[str, Result]]) -> dict[str, Any]:
    """All figures, to be written as JSON."""
    return {
        "benchmark": "serving",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "medians": medians(rounds),
        "rounds": [{name: result.figures() for name, result in one.items()} for one in rounds],
    }
