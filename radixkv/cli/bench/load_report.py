# SPDX-License-Identifier: Apache-2.0
"""The figures of a load: percentiles, throughput, cached tokens, failures."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from radixkv.cli.bench.load import Outcome
from radixkv.cli.bench.server_process import machine

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile; None of nothing.

    >>> [percentile([4.0, 1.0, 3.0, 2.0], p) for p in (0, 50, 75, 100)], percentile([], 50)
    ([1.0, 2.0, 3.0, 4.0], None)
    """
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, percentiles and maximum."""
    found: dict[str, float | None] = {"mean": sum(values) / len(values) if values else None}
    found.update({f"p{percent}": percentile(values, percent) for percent in PERCENTILES})
    found["max"] = max(values, default=None)
    return found


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of all outcomes; times in seconds, from when a request was due."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    ends = [outcome.ended for outcome in outcomes if outcome.ended is not None]
    wall = max(ends, default=0.0) - min((outcome.due for outcome in outcomes), default=0.0)
    prompt, cached = (sum(getattr(o, name) for o in good) for name in ("prompt_tokens", "cached_tokens"))
    output = sum(o.output_tokens for o in good)
    return {
        "requests": len(outcomes),
        "failed": dict(Counter(o.error for o in outcomes if o.error is not None)),
        "wall_s": wall,
        "requests_per_s": len(good) / wall if wall else None,
        "output_tokens_per_s": output / wall if wall else None,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": cached / prompt if prompt else None,
        "output_tokens": output,
        "accepted_prediction_tokens": sum(o.accepted_tokens for o in good),
        "ttft_s": spread([o.first_token - o.due for o in good if o.first_token is not None]),
        "latency_s": spread([o.ended - o.due for o in good if o.ended is not None]),
        "itl_s": spread([gap for o in good for gap in o.gaps]),
        # How late this client itself was: above some ms its own machine is the bottleneck.
        "sent_late_s": spread([o.sent - o.due for o in outcomes if o.sent is not None]),
    }


def show(found: dict[str, Any], title: str) -> None:
    """Print the figures as a table."""
    console = Console(width=120)
    table = Table(title=title)
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    for column in ("ms", *columns):
        table.add_column(column, justify="left" if column == "ms" else "right")
    names = {"ttft_s": "first token", "itl_s": "between tokens", "latency_s": "whole answer"}
    for key, name in {**names, "sent_late_s": "sent late"}.items():
        cells = [found[key][column] for column in columns]
        table.add_row(name, *("-" if cell is None else f"{cell * 1000:,.1f}" for cell in cells))
    console.print(table)
    rate, tokens = found["requests_per_s"] or 0.0, found["output_tokens_per_s"] or 0.0
    line = (
        f"{found['requests']} requests in {found['wall_s']:.1f} s: {rate:.2f}/s, {tokens:.1f} output tokens/s"
    )
    if found["hit_rate"] is not None:
        line += f", {found['cached_tokens']:,} of {found['prompt_tokens']:,} prompt tokens cached"
        line += f" ({found['hit_rate']:.1%})"
    if found["accepted_prediction_tokens"]:
        line += f", {found['accepted_prediction_tokens']:,} output tokens drafted"
    console.print(line, highlight=False)
    if found["failed"]:
        failures = ", ".join(f"{count} x {error}" for error, count in found["failed"].items())
        console.print(f"failed: {failures}", style="red", highlight=False)


def report(outcomes: Sequence[Outcome], settings: dict[str, Any]) -> dict[str, Any]:
    """All figures, to be written as JSON; each request's own among them."""
    return {
        "benchmark": "load",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "settings": settings,
        "figures": figures(outcomes),
        "requests": [
            {
                "session": o.session,
                "turn": o.turn,
                "due_s": o.due,
                "sent_s": o.sent,
                "first_token_s": o.first_token,
                "ended_s": o.ended,
                "prompt_tokens": o.prompt_tokens,
                "cached_tokens": o.cached_tokens,
                "output_tokens": o.output_tokens,
                "error": o.error,
            }
            for o in outcomes
        ],
    }


def show_agents(found: Mapping[str, float], title: str) -> None:
    """Print the figures of agents in closed loops."""
    table = Table(title=title, show_header=False)
    for name, value in found.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}")
    Console().print(table)
