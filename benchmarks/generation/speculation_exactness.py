# SPDX-License-Identifier: Apache-2.0
"""Does speculation change what requests get? Random requests twice, and a chi-square over sampled tokens."""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speculation_workloads import WORKLOADS, prompts, sampling
from radixkv import EngineConfig, SamplingParams
from radixkv.engine.engine import Engine
from radixkv.entrypoints.builder import build_engine
from radixkv.speculation.step_costs import StepCosts

#: Guesses cost nothing: as many are made as there are, whether they pay or not.
FREE = StepCosts({1: 1.0, 2: 1.0})
#: Of the random requests, so many are for the embedded model.
ON_EMBEDDED = 20
POSITIONS = 10


def _tiny_engines(folder: Path, **options: Any) -> dict[str, Engine]:
    """Two engines over a random model of 3 layers, the tests' own."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    from tiny_models import save_tiny_model  # of the tests, found by the path above

    path = str(save_tiny_model(folder, "llama"))
    return {
        name: build_engine(EngineConfig(path, num_blocks=600, speculation=speculation, **options), FREE)
        for name, speculation in (("off", "off"), ("on", "auto"))
    }


def _answers(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    ids = [engine.add_request(tokens, params) for tokens, params in requests]
    found = {}
    while engine.has_work:
        for output in engine.step().finished:
            found[output.request_id] = [one.token_ids for one in output.outputs]
    return [found[request_id] for request_id in ids]


def _random_request(random: np.random.Generator, seed: int) -> tuple[list[int], SamplingParams]:
    """A prompt that repeats a phrase, and any sampling; a fifth of the requests come again and again."""
    if random.random() < 0.2:
        random, seed = np.random.default_rng(int(random.integers(8))), 0
    phrase = random.integers(3, 300, int(random.integers(4, 30))).tolist()
    start = random.integers(3, 300, int(random.integers(0, 40))).tolist()
    extras: list[dict[str, Any]] = [
        {},
        {},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"top_p": 0.9},
        {"top_k": 20, "min_p": 0.05},
        {"logprobs": 1},
        {"n": 2},
        {"min_tokens": 8},
    ]
    params = SamplingParams(
        max_tokens=int(random.integers(8, 64)),
        temperature=float(random.choice([0.0, 0.0, 0.5, 1.0])),
        seed=seed,
        **extras[int(random.integers(len(extras)))],
    )
    return start + phrase * int(random.integers(1, 4)), params


def same_tokens(num_requests: int) -> dict[str, Any]:
    """How many random requests get the same tokens with speculation and without, both `deterministic`."""
    random = np.random.default_rng(0)
    tiny = [_random_request(random, seed) for seed in range(max(0, num_requests - ON_EMBEDDED))]
    figures: dict[str, Any] = {"requests": num_requests, "same": 0, "draft_tokens": 0, "accepted_tokens": 0}

    def compare(engines: dict[str, Engine], requests: list[tuple[list[int], SamplingParams]]) -> None:
        found = {name: _answers(engine, requests) for name, engine in engines.items()}
        figures["same"] += sum(on == off for on, off in zip(found["on"], found["off"], strict=True))
        counts = engines["on"].stats().speculation
        figures["draft_tokens"] += counts.num_draft_tokens
        figures["accepted_tokens"] += counts.num_accepted_tokens

    with tempfile.TemporaryDirectory() as folder:
        compare(_tiny_engines(Path(folder), deterministic=True), tiny)
    engines = {
        name: build_engine(EngineConfig(num_blocks=768, speculation=speculation, deterministic=True))
        for name, speculation in (("off", "off"), ("on", "auto"))
    }
    every = {workload: prompts(engines["on"].model.tokenizer, workload) for workload in WORKLOADS}
    embedded = []
    for i in range(min(num_requests, ON_EMBEDDED)):
        workload = WORKLOADS[i % len(WORKLOADS)]
        params = sampling(workload, temperature=(0.0, 0.8)[i // len(WORKLOADS) % 2], seed=i)
        embedded.append((every[workload][i // len(WORKLOADS) % 8], params))
    compare(engines, embedded)
    return figures


def chi_square(num_tokens: int) -> dict[str, Any]:
    """Are tokens sampled with speculation distributed as those without?

    Many samples of one prompt, with other seeds on each side, are guesses for one another. Counted are the
    tokens at each place of the answer: those of different samples are independent. The smallest p-value of
    the places is multiplied by their number (Bonferroni).
    """
    num_samples = num_tokens // POSITIONS
    counts: dict[str, list[Counter[int]]] = {}
    prompt = np.random.default_rng(1).integers(3, 300, 20).tolist()
    with tempfile.TemporaryDirectory() as folder:
        engines = _tiny_engines(Path(folder), max_num_seqs=64)
        for side, (name, engine) in enumerate(engines.items()):
            requests = [
                (
                    prompt,
                    SamplingParams(max_tokens=POSITIONS, temperature=0.3, seed=2 * i + side, ignore_eos=True),
                )
                for i in range(num_samples)
            ]
            places = [Counter[int]() for _ in range(POSITIONS)]
            for (tokens,) in _answers(engine, requests):
                for place, token in zip(places, tokens, strict=True):
                    place[token] += 1
            counts[name] = places
        speculation = engines["on"].stats().speculation
    values = [_p_value(on, off) for on, off in zip(counts["on"], counts["off"], strict=True)]
    return {
        "tokens_on_each_side": num_samples * POSITIONS,
        "draft_tokens": speculation.num_draft_tokens,
        "accepted_tokens": speculation.num_accepted_tokens,
        "p_values": [round(value, 3) for value in values],
        "p_value": round(min(1.0, len(values) * min(values)), 3),
    }


def _p_value(one: Counter[int], other: Counter[int]) -> float:
    """Of the hypothesis that both come from one distribution; rare tokens are counted as one."""
    rows = [(one[token], other[token]) for token in one.keys() | other.keys()]
    common = [row for row in rows if sum(row) >= 10]
    rare = [sum(row[i] for row in rows if sum(row) < 10) for i in (0, 1)]
    table = np.array([*common, rare] if sum(rare) >= 10 else common, dtype=np.float64)
    if len(table) < 2:
        return 1.0
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    statistic, freedom = float(((table - expected) ** 2 / expected).sum()), len(table) - 1
    # Wilson and Hilferty's approximation of the chi-square distribution.
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2
