# SPDX-License-Identifier: Apache-2.0
"""What a beam search costs: milliseconds and computed tokens of `LLM.beam_search` on the embedded model.

    python -m benchmarks.beam_search [--width 4 --width 8] [--prompt-tokens N] [--max-tokens N] [--rounds N]

In each round each width searches a prompt that was never seen before. Printed are medians: the time of a
search, of one step of it, of what a step does outside model and sampler, and the tokens that a search
computed (the prompt once, and one a step of each beam). To compare versions of the code, run them in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from radixkv import LLM
from radixkv.entrypoints.beam_search import BeamSearchParams


def measure(
    llm: LLM, widths: list[int], *, prompt_tokens: int, max_tokens: int, rounds: int
) -> dict[int, dict[str, float]]:
    """Per width: median milliseconds of a search and of a step, and the tokens that one search computes."""
    rng = np.random.default_rng(0)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    outside: dict[int, list[float]] = {width: [] for width in widths}
    computed: dict[int, list[int]] = {width: [] for width in widths}
    for _ in range(rounds + 1):
        for width in widths:
            prompt = rng.integers(100, 40_000, prompt_tokens).tolist()
            params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
            before = llm.engine.stats()
            start = time.perf_counter()
            llm.beam_search(prompt, params, progress=False)
            seconds[width].append(time.perf_counter() - start)
            after = llm.engine.stats()
            outside[width].append(seconds[width][-1] - (after.model_time_s - before.model_time_s))
            computed[width].append(after.computed_tokens - before.computed_tokens)
    return {
        width: {
            "search_ms": statistics.median(seconds[width][1:]) * 1e3,
            "step_ms": statistics.median(seconds[width][1:]) * 1e3 / max_tokens,
            "outside_ms": statistics.median(outside[width][1:]) * 1e3 / max_tokens,
            "computed_tokens": statistics.median(computed[width]),
        }
        for width in widths
    }


def table(figures: dict[int, dict[str, Any]]) -> Table:
    result = Table(title="Beam search on the embedded model")
    for name in ("width", "search, ms", "a step, ms", "outside the model, ms", "computed tokens"):
        result.add_column(name, justify="right")
    for width, row in figures.items():
        result.add_row(
            str(width),
            f"{row['search_ms']:.0f}",
            f"{row['step_ms']:.1f}",
            f"{row['outside_ms']:.2f}",
            f"{row['computed_tokens']:.0f}",
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, action="append", help="default: 4 and 8")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    figures = measure(
        LLM(),
        arguments.width or [4, 8],
        prompt_tokens=arguments.prompt_tokens,
        max_tokens=arguments.max_tokens,
        rounds=arguments.rounds,
    )
    Console().print(table(figures))
    write_figures(arguments.json, "beam_search", {str(width): row for width, row in figures.items()})


if __name__ == "__main__":
    main()
