# SPDX-License-Identifier: Apache-2.0
"""Can a tenant tell by its watch what another one has asked before?

    python -m benchmarks.tenant_timing [--samples N] [--json FILE]

On the embedded model, one request at a time: the time from a request to its first token, for prompts that
tenant `a` has asked before ("hits") and for prompts that nobody has ("misses"), in pairs of one of each in
random order, so that whatever else the machine does meets both alike. Once asked by tenant `b`, each prompt
once, and once by `a` itself. A two-sample Kolmogorov-Smirnov test compares both kinds: between tenants the
times must be alike (p > 0.01), within one they must differ (p < 1e-6), or the measurement would be too coarse
to find anything. Prompts are short (24 tokens), so that 1,000 of them take a few minutes on two busy cores;
within one tenant that is enough to tell hits from misses.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import write_figures
from radixkv.cli.bench.server_process import machine
from radixkv.engine.config import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.entrypoints.builder import build_engine
from radixkv.sampling.sampling_params import SamplingParams

PROMPT_TOKENS = 24
WARM_UP = 10
ONE = SamplingParams(temperature=0.0, max_tokens=1)
SAMPLES = 250


def kolmogorov_smirnov(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """The largest distance of two samples' distributions, and the asymptotic p-value for one distribution.

    >>> kolmogorov_smirnov(range(100), range(100))
    (0.0, 1.0)
    >>> distance, p = kolmogorov_smirnov(range(100), range(50, 150))
    >>> distance, p < 1e-10
    (0.5, True)
    """
    values = np.sort(np.concatenate([np.asarray(a, float), np.asarray(b, float)]))
    below_a = np.searchsorted(np.sort(a), values, side="right") / len(a)
    below_b = np.searchsorted(np.sort(b), values, side="right") / len(b)
    distance = float(np.abs(below_a - below_b).max())
    effective = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    scaled = (effective + 0.12 + 0.11 / effective) * distance  # Stephens (1970)
    if scaled < 0.2:
        return distance, 1.0
    tail = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, tail))


def ask(engine: Engine, tenant: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and cached tokens."""
    begin = time.perf_counter()
    engine.add_request(prompt, ONE, namespace=(tenant, ""))
    while True:
        for output in engine.step().finished:
            return time.perf_counter() - begin, output.num_cached_tokens


def compare(
    engine: Engine, tenant: str, known: list[list[int]], fresh: list[list[int]], rng: np.random.Generator
) -> dict[str, Any]:
    """Times of prompts that `a` has asked before and of new ones, in pairs of random order."""
    hits: list[float] = []
    misses: list[float] = []
    cached = 0
    for one, other in zip(known, fresh, strict=True):
        pair = [(one, hits), (other, misses)]
        for prompt, times in pair if rng.random() < 0.5 else reversed(pair):
            seconds, tokens = ask(engine, tenant, prompt)
            times.append(seconds)
            cached += tokens
    distance, p = kolmogorov_smirnov(hits, misses)
    return {
        "cached_tokens": cached,
        "median_asked_before_ms": 1000 * statistics.median(hits),
        "median_new_ms": 1000 * statistics.median(misses),
        "distance": distance,
        "p": p,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="prompts of each kind")
    parser.add_argument("--machine", help="what the figures say of it, instead of what is found out")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    engine = build_engine(EngineConfig(allow_download=False, num_blocks=8000, max_model_len=1024))
    rng = np.random.default_rng(0)

    firsts = iter(rng.permutation(np.arange(1000, 40_000)).tolist())

    def prompts() -> list[list[int]]:
        # No two begin alike, or a tenant would hit the first token of what it has asked itself.
        rest = rng.integers(1000, 40_000, (arguments.samples, PROMPT_TOKENS - 1)).tolist()
        return [[next(firsts), *tokens] for tokens in rest]

    known = prompts()
    for prompt in known:
        engine.add_request(prompt, ONE, namespace=("a", ""))
    while engine.has_work:
        engine.step()
    for prompt in prompts()[:WARM_UP]:
        ask(engine, "warm-up", prompt)
    results: dict[str, Any] = {
        "machine": arguments.machine or machine(),
        "samples": arguments.samples,
        "prompt_tokens": PROMPT_TOKENS,
        "between_tenants": compare(engine, "b", known, prompts(), rng),
        "within_one": compare(engine, "a", known, prompts(), rng),
    }
    print(json.dumps(results, indent=2))
    write_figures(arguments.json, "tenant_timing", results)
    assert results["between_tenants"]["cached_tokens"] == 0
    assert results["between_tenants"]["p"] > 0.01, "a tenant can tell what another one has asked"
    assert results["within_one"]["p"] < 1e-6, "the measurement is too coarse to find anything"


if __name__ == "__main__":
    main()
