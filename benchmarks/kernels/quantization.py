# SPDX-License-Identifier: Apache-2.0
"""What quantised weights and quantised K/V do on a CPU: to answers, to perplexity, to memory and to speed.

Each setting answers the same prompts greedily, next to float32 weights with float32 K/V:

    same answers   share of prompts whose whole answer is token-identical
    same tokens    share of next tokens that are the same when both see the same text so far (argmax over the
                   shipped text, position by position: one early difference does not count twice)
    perplexity     of the shipped text, benchmarks/data/text.txt
    tokens/GiB     tokens of K/V that one GiB holds
    burst          wall time of float32 over that of the setting: 16 requests of about 250 new tokens and 32
                   answered ones, 8 at a time; the same requests, settings taking turns
    single         the same of one request at a time: time per token after the first

Both speeds are medians of the rounds' ratios. With `--threads 1` the clock is the thread's own CPU time,
which other programs disturb little; otherwise it is wall time, and nothing else should run on the machine.

    python -m benchmarks.quantization
    python -m benchmarks.quantization --threads 1 --json benchmarks/results/quantization.json
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from radixkv import LLM, RadixKVError, SamplingParams
from radixkv.cli.bench.server_process import WORDS
from radixkv.model.runner import ModelRunner

TEXT = Path(__file__).resolve().parents[1] / "data" / "text.txt"
BASELINE = "float32"
SETTINGS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "int8 weights": {"quantization": "int8"},
    "int8 K/V": {"kv_cache_dtype": "int8"},
    "fp8_e4m3 K/V": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2 K/V": {"kv_cache_dtype": "fp8_e5m2"},
    "int8 weights, int8 K/V": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int8 weights, fp8_e4m3 K/V": {"quantization": "int8", "kv_cache_dtype": "fp8_e4m3"},
    "int8 weights, fp8_e5m2 K/V": {"quantization": "int8", "kv_cache_dtype": "fp8_e5m2"},
}
ANSWER_TOKENS = 32
Clock = Callable[[], float]
# The text is scored in windows of this many tokens, each on its own.
WINDOW = 256


@dataclass
class Outcome:
    """Figures of one setting."""

    answers: list[list[int]]
    likeliest: list[int]
    perplexity: float
    tokens_per_gib: float
    burst: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)


def prompts(paragraphs: list[str]) -> list[str]:
    """The text's paragraphs to continue, and questions about them."""
    return [*paragraphs, *(f"{text}\n\nQuestion: What is this text about?\nAnswer:" for text in paragraphs)]


def load(options: dict[str, Any], threads: int | None) -> LLM:
    return LLM(num_blocks=2048, max_model_len=2048, threads=threads, **options)


def score(llm: LLM, text: str) -> tuple[list[int], float]:
    """The likeliest next token at each position of the text, and its perplexity."""
    ids = llm.tokenizer.encode(text)
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - 1, WINDOW)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    likeliest, logprobs = [], []
    for output in llm.generate(windows, params, progress=False):
        for entry in output.prompt_logprobs or []:
            if entry is not None:
                likeliest.append(entry.top[0].token_id)
                logprobs.append(entry.chosen.logprob)
    return likeliest, math.exp(-statistics.fmean(logprobs))


def answer(llm: LLM, text: str) -> list[list[int]]:
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts(text.strip().split("\n\n")), params, progress=False)
    return [output.outputs[0].token_ids for output in outputs]


def examine(llm: LLM, text: str) -> Outcome:
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    spec = runner.spec
    likeliest, perplexity = score(llm, text)
    per_gib = 2**30 / (spec.bytes_per_block / spec.block_size)
    return Outcome(answer(llm, text), likeliest, perplexity, per_gib)


def random_texts(count: int, seed: int) -> list[str]:
    source = random.Random(seed)
    return [" ".join(source.choice(WORDS) for _ in range(250)) for _ in range(count)]


def timed_burst(llm: LLM, seed: int, clock: Clock) -> float:
    """Seconds of 16 requests, 8 at a time."""
    texts = random_texts(16, seed)
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    started = clock()
    for half in (texts[:8], texts[8:]):
        llm.generate(half, params, progress=False)
    return clock() - started


def timed_single(llm: LLM, seed: int, clock: Clock) -> float:
    """Median seconds between the tokens of one request that has the engine to itself."""
    params = SamplingParams(max_tokens=2 * ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    times = [clock() for _ in llm.stream(random_texts(1, 1000 + seed)[0], params)]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def measure(rounds: int, threads: int | None) -> tuple[dict[str, Outcome], dict[str, str]]:
    """All settings, and for those that fail the reason."""
    text = TEXT.read_text(encoding="utf-8")
    engines: dict[str, LLM] = {}
    outcomes: dict[str, Outcome] = {}
    failures: dict[str, str] = {}
    for name, options in SETTINGS.items():
        try:
            engine = load(options, threads)
            outcomes[name] = examine(engine, text)
            engines[name] = engine
        except RadixKVError as error:
            failures[name] = f"{type(error).__name__}: {error}"
    clock = time.thread_time if threads == 1 else time.perf_counter
    for seed in range(rounds):
        for name, llm in engines.items():
            outcomes[name].burst.append(timed_burst(llm, seed, clock))
            outcomes[name].single.append(timed_single(llm, seed, clock))
    return outcomes, failures


def summarise(outcomes: dict[str, Outcome]) -> dict[str, dict[str, float]]:
    base = outcomes[BASELINE]
    figures = {}
    for name, own in outcomes.items():
        figures[name] = {
            "same_answers": statistics.fmean(a == b for a, b in zip(own.answers, base.answers, strict=True)),
            "same_tokens": statistics.fmean(
                a == b for a, b in zip(own.likeliest, base.likeliest, strict=True)
            ),
            "perplexity": own.perplexity,
            "tokens_per_gib": own.tokens_per_gib,
            "burst_s": statistics.median(own.burst),
            "burst_speed": statistics.median(b / a for a, b in zip(own.burst, base.burst, strict=True)),
            "single_s_per_token": statistics.median(own.single),
            "single_speed": statistics.median(b / a for a, b in zip(own.single, base.single, strict=True)),
        }
    return figures


def show(figures: dict[str, dict[str, float]], failures: dict[str, str]) -> None:
    console = Console(width=110)
    table = Table(title="Quantisation on this CPU, against float32")
    for column in ("", "same answers", "same tokens", "perplexity", "tokens/GiB", "burst", "single"):
        table.add_column(column, justify="right" if column else "left")
    for name, f in figures.items():
        row = [f"{f['same_answers']:.0%}", f"{f['same_tokens']:.1%}", f"{f['perplexity']:.3f}"]
        row += [f"{f['tokens_per_gib']:,.0f}", f"{f['burst_s']:.1f} s {f['burst_speed']:.2f}x"]
        row.append(f"{f['single_s_per_token'] * 1e3:.1f} ms {f['single_speed']:.2f}x")
        table.add_row(name, *row)
    console.print(table)
    for name, reason in failures.items():
        console.print(f"{name}: {reason}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the timing (default 3)")
    parser.add_argument("--threads", type=int, help="threads that compute (default: the engine's choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    outcomes, failures = measure(args.rounds, args.threads)
    figures = summarise(outcomes)
    show(figures, failures)
    result = {
        "rounds": args.rounds,
        "threads": args.threads,
        "clock": "thread CPU time" if args.threads == 1 else "wall",
        "figures": figures,
        "failures": failures,
    }
    write_figures(args.json, "quantization", result)


if __name__ == "__main__":
    main()
