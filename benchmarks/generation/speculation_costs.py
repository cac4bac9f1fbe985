# SPDX-License-Identifier: Apache-2.0
"""How long is a step, by its rows? What `radixkv.speculation.step_costs` has for the CPU.

    python -m benchmarks.speculation_costs [--rounds N] [--json FILE]

Requests of the embedded model, after a prompt of 512 tokens, get exactly the answer that came with them as a
`prediction`, so that each step checks as many rows as wanted: up to 32 of one request, then of 2 and 4 at
once. Sizes take turns; printed are the medians of the steps as multiples of a step of one row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from benchmarks.figures import write_figures
from benchmarks.speculation_exactness import FREE
from radixkv import EngineConfig, SamplingParams
from radixkv.engine.engine import Engine
from radixkv.entrypoints.builder import build_engine

#: Rows of each request and requests at once.
SIZES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (32, 2), (32, 4))
CONTEXT, STEPS = 512, 4


def prompt(engine: Engine, number: int) -> list[int]:
    """A text of `CONTEXT` tokens, another for each number."""
    text = (Path(__file__).resolve().parents[1] / "data" / "text.txt").read_text(encoding="utf-8")
    assert engine.model.tokenizer is not None
    return engine.model.tokenizer.encode(f"Part {number}. {text}")[:CONTEXT]


def steps(engine: Engine, rows: int, requests: int, answers: dict[int, list[int]]) -> list[float]:
    """Seconds of `STEPS` steps in which every request checks `rows` rows."""
    ids = []
    for number in range(requests):
        guess = answers.get(number, [])[: rows * (STEPS + 2)]
        params = SamplingParams(
            max_tokens=rows * (STEPS + 2),
            temperature=0.0,
            ignore_eos=True,
            prediction=guess if rows > 1 else None,
        )
        ids.append(engine.add_request(prompt(engine, number), params, stream=True))
    times: list[float] = []
    given: dict[str, list[int]] = {}
    while engine.has_work:
        began = time.perf_counter()
        outcome = engine.step()
        sizes = [len(delta.token_ids) for delta in outcome.deltas]
        if sizes == [rows] * requests:
            times.append(time.perf_counter() - began)
        for delta in outcome.deltas:
            given.setdefault(delta.request_id, []).extend(delta.token_ids)
    for number, request_id in enumerate(ids):
        # Greedy tokens, which the next turn predicts; longer ones replace shorter.
        answers[number] = max(answers.get(number, []), given[request_id], key=len)
    return times[:STEPS]


def measure(rounds: int) -> dict[int, float]:
    """Medians of the durations in seconds, by rows."""
    limits = sorted({rows for rows, _ in SIZES})
    engines = {
        rows: build_engine(
            EngineConfig(
                num_blocks=400,
                max_draft_tokens=max(1, rows - 1),
                # A wrong guess would make a second row of a step that gives one token.
                speculation="off" if rows == 1 else "auto",
            ),
            FREE,
        )
        for rows in limits
    }
    answers: dict[int, list[int]] = {}
    longest = max(limits) * (STEPS + 2)
    plain = SamplingParams(max_tokens=longest, temperature=0.0, ignore_eos=True)
    for number in range(max(requests for _, requests in SIZES)):
        engines[1].add_request(prompt(engines[1], number), plain)
        while engines[1].has_work:
            for output in engines[1].step().finished:
                answers[number] = list(output.outputs[0].token_ids)
    found: dict[int, list[float]] = {}
    for turn in range(rounds + 1):
        for rows, requests in SIZES:
            engine = engines[rows]
            engine.cache.reset()
            times = steps(engine, rows, requests, answers)
            assert times, f"no step had {rows} rows of each request"
            if turn:
                found.setdefault(rows * requests, []).extend(times)
    return {rows: statistics.median(times) for rows, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    durations = measure(arguments.rounds)
    figures = {
        "context": CONTEXT,
        "one_row_ms": round(1e3 * durations[1], 2),
        "multiples": {rows: round(seconds / durations[1], 2) for rows, seconds in durations.items()},
    }
    print(json.dumps(figures, indent=2))
    write_figures(arguments.json, "speculation_costs", figures)


if __name__ == "__main__":
    main()
