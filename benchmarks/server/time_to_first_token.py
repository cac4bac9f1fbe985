# SPDX-License-Identifier: Apache-2.0
"""Time to first token of a prompt that is new, and of the same prompt sent again.

Starts `radixkv serve` (or talks to a server that runs), and sends each of several fresh prompts of about
1,500 tokens twice over HTTP, streaming. The first time all of the prompt is computed; the second time all
but one token comes from the prefix cache. Prints both times and their ratio, medians over the prompts.

    python -m benchmarks.time_to_first_token
    python -m benchmarks.time_to_first_token --prompts 9 --json ttft.json
    python -m benchmarks.time_to_first_token --url http://127.0.0.1:8000
    python -m benchmarks.time_to_first_token -- --threads 2 --max-num-batched-tokens 256
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import secrets
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.figures import write_figures
from radixkv.cli.bench.server_process import WORDS, started_server


@dataclass(frozen=True)
class Reading:
    """One answer: seconds from sending the request to the first generated text, and the token counts."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Pair:
    """The same prompt, first new and then cached."""

    cold: Reading
    hot: Reading


class Target:
    """A server to measure."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.model = model or self.get("/v1/models")["data"][0]["id"]

    def _connect(self) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(http.client.HTTPConnection(*self.address, timeout=600))

    def get(self, path: str) -> Any:
        """A JSON answer, or the text of another one."""
        with self._connect() as connection:
            connection.request("GET", path, headers=self.headers)
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise SystemExit(f"GET {path}: HTTP {answer.status}: {body[:500]!r}")
            kind = answer.headers.get_content_type()
        return json.loads(body) if kind == "application/json" else body.decode()

    def ask(self, prompt: str) -> Reading:
        """Stream a greedy answer of four tokens and time its first one."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._connect() as connection:
            connection.connect()
            start = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", json.dumps(body), self.headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise SystemExit(f"HTTP {answer.status}: {answer.read()[:500]!r}")
            ttft, usage = None, None
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"the server failed: {event['error']}")
                usage = event.get("usage") or usage
                said = any(choice["delta"].get("content") for choice in event["choices"])
                if said and ttft is None:
                    ttft = time.perf_counter() - start
        if ttft is None or usage is None:
            raise SystemExit("the stream had no text or no usage")
        return Reading(ttft, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def fresh_prompt(source: random.Random, num_words: int) -> str:
    """Words in random order: no two prompts share more than their first few."""
    return " ".join(source.choice(WORDS) for _ in range(num_words)) + ". What comes to your mind?"


def measure(target: Target, *, prompts: int, words: int, seed: int) -> list[Pair]:
    """Every prompt twice in a row, after one unmeasured request that warms the code up."""
    source = random.Random(seed)
    target.ask(fresh_prompt(source, words // 4))
    pairs = []
    console = Console(stderr=True)
    for _ in track(range(prompts), "prompts", console=console, disable=not console.is_terminal):
        prompt = fresh_prompt(source, words)
        pairs.append(Pair(target.ask(prompt), target.ask(prompt)))
    return pairs


def lag_p99_ms(metrics: str) -> float | None:
    """Upper bound of the event loop's lag that 99 % of the probes stay under, in ms."""
    found = re.findall(r'radixkv_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', metrics)
    counts = [(float(bound), float(count)) for bound, count in found]
    if not counts or not counts[-1][1]:
        return None
    return next(bound for bound, count in counts if count >= 0.99 * counts[-1][1]) * 1000


def summarise(pairs: list[Pair], metrics: str) -> dict[str, Any]:
    """The figures to print and to write."""
    cold = statistics.median(pair.cold.ttft_s for pair in pairs)
    hot = statistics.median(pair.hot.ttft_s for pair in pairs)
    return {
        "benchmark": "time_to_first_token",
        "cold_ttft_s": cold,
        "hot_ttft_s": hot,
        "ratio": cold / hot,
        "ratio_min": min(pair.cold.ttft_s / pair.hot.ttft_s for pair in pairs),
        "prompt_tokens": statistics.median(pair.cold.prompt_tokens for pair in pairs),
        "cached_tokens_cold": statistics.median(pair.cold.cached_tokens for pair in pairs),
        "cached_tokens_hot": statistics.median(pair.hot.cached_tokens for pair in pairs),
        "event_loop_lag_p99_ms": lag_p99_ms(metrics),
        "pairs": [asdict(pair) for pair in pairs],
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"Time to first token, {len(result['pairs'])} prompts, medians")
    for column in ("", "TTFT", "prompt tokens", "from the cache"):
        table.add_column(column, justify="left" if not column else "right")
    for name, key in (("new prompt", "cold"), ("same prompt again", "hot")):
        table.add_row(
            name,
            f"{result[f'{key}_ttft_s'] * 1000:,.1f} ms",
            f"{result['prompt_tokens']:,.0f}",
            f"{result[f'cached_tokens_{key}']:,.0f}",
        )
    Console().print(table)
    print(f"ratio {result['ratio']:.1f}x (lowest of the prompts {result['ratio_min']:.1f}x)")
    if result["event_loop_lag_p99_ms"] is not None:
        print(f"event loop lag, 99th percentile: at most {result['event_loop_lag_p99_ms']:g} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="measure this running server instead of starting one")
    parser.add_argument("--model", help="model name to ask for (default: the first that is served)")
    parser.add_argument("--api-key", help="key for a server that wants one")
    parser.add_argument("--prompts", type=int, default=5, help="fresh prompts (default 5)")
    parser.add_argument("--words", type=int, default=1460, help="words a prompt, about a token each")
    parser.add_argument("--seed", type=int, help="seed of the prompts (default: random, so always new)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("server", nargs="*", help="further arguments of `radixkv serve`, after --")
    args = parser.parse_args()
    if args.prompts < 1 or args.words < 8:
        parser.error("--prompts must be at least 1 and --words at least 8")
    seed = secrets.randbits(64) if args.seed is None else args.seed
    server = contextlib.nullcontext(args.url) if args.url else started_server(args.server)
    with server as url:
        target = Target(url, args.model, args.api_key)
        pairs = measure(target, prompts=args.prompts, words=args.words, seed=seed)
        result = summarise(pairs, target.get("/metrics"))
    show(result)
    write_figures(args.json, "time_to_first_token", result)


if __name__ == "__main__":
    main()
