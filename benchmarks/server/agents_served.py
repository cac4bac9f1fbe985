# SPDX-License-Identifier: Apache-2.0
"""Agents in closed loops against servers of their own: contexts that fit the pool, and 1.7 and 2.5 times as
much, with the rules of long prompts and without them, in turn, on a random model with a long context.

    python -m benchmarks.agents_served                                   # 14, 28 and 42 agents; 10 minutes
    python -m benchmarks.agents_served --context 6000 --pool 102400      # half of all tokens; 5 minutes
    python -m benchmarks.agents_served --rules with --say-done           # 3 minutes
    python -m benchmarks.agents_served --kind one-shot --agents 60      # one-shots, all at once
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from radixkv.cli.bench.agent_jobs import KINDS, agent_figures, make_jobs
from radixkv.cli.bench.agent_loop import AgentLoop
from radixkv.cli.bench.server_process import started_server, words
from radixkv.cli.bench.workloads import served_model

BLOCK = 16
CONTEXT = 12_000  # of `cliff` at scale 1
#: Rules -> the configuration file of their server.
RULES = {"with": "", "without": "[engine]\nlong_prompt_tokens = 100_000_000\n"}
SHOWN = (
    "turns_per_s",
    "hit_rate_after_first",
    "possible_hit_rate",
    "computed_over_first_time",
    "ttft_p50_s",
    "ttft_p95_s",
    "longest_wait_s",
    "makespan_s",
    "fairness",
)


def model_folder(folder: Path) -> Path:
    """Make the random model that the tests of coding agents use."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
    from long_context_model import save_long_context_model  # of the tests, found by the path above

    return Path(save_long_context_model(folder / "model"))


def tokens_per_word(url: str) -> float:
    """Return how many tokens the model makes of a random word."""
    text = words(random.Random(1), 2000)
    answer = httpx.post(f"{url}/tokenize", json={"prompt": text}, timeout=60, trust_env=False)
    return float(answer.raise_for_status().json()["count"]) / 2000


def run(url: str, count: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the figures of so many agents on a server with an empty cache."""
    httpx.post(f"{url}/v1/cache/reset", timeout=60, trust_env=False).raise_for_status()
    scale = arguments.context / CONTEXT / tokens_per_word(url)
    jobs = make_jobs(arguments.kind, count, arguments.seed, scale=scale)
    loop = AgentLoop(url, served_model(url, None))
    loop.say_done = arguments.say_done
    return agent_figures(asyncio.run(loop.run_jobs(jobs, arguments.seed)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=sorted(KINDS), default="cliff")
    parser.add_argument("--agents", type=int, nargs="+", default=[14, 28, 42], help="the first ones fit")
    parser.add_argument("--rules", choices=sorted(RULES), nargs="+", default=["with", "without"])
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of an agent's first prompt")
    parser.add_argument("--pool", type=int, default=204_800, help="tokens")
    parser.add_argument(
        "--say-done", action="store_true", help="the last requests say that sessions are over"
    )
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    console, found = Console(width=170), {}
    table = Table(title=f"{arguments.kind}, prompts of {arguments.context} tokens, pool {arguments.pool}")
    for column in ("rule", "agents", *SHOWN):
        table.add_column(column.replace("_", " "))
    options = ["--num-blocks", str(arguments.pool // BLOCK), "--max-num-seqs", "64", "--warm-up", "quick"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        model, urls = str(model_folder(Path(folder))), {}
        for rule in arguments.rules:
            (config := Path(folder) / f"{rule}.toml").write_text(RULES[rule])
            urls[rule] = servers.enter_context(started_server([model, *options, "--config", str(config)]))
        for count in arguments.agents:
            for rule, url in urls.items():
                row = found[f"{rule} {count}"] = run(url, count, arguments)
                table.add_row(rule, str(count), *(f"{row.get(name, 0.0):.3g}" for name in SHOWN))
    console.print(table)
    for line in ratios(found, arguments):
        console.print(line)
    settings: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name != "json"}
    write_figures(arguments.json, "agents_served", {"settings": settings, "runs": found})


def ratios(found: dict[str, dict[str, float]], arguments: argparse.Namespace) -> list[str]:
    """Return the ratios between the runs as lines of text."""
    lines, smallest = [], arguments.agents[0]
    for count in arguments.agents:
        for rule in arguments.rules:
            row, fits = found[f"{rule} {count}"], found[f"{rule} {smallest}"]
            if count != smallest:
                lines.append(
                    f"{rule} the rule, {count} / {smallest} agents: turns/s "
                    f"{row['turns_per_s'] / fits['turns_per_s']:.2f}"
                )
        if len(arguments.rules) == 2:
            new, old = found[f"with {count}"], found[f"without {count}"]
            parts = (
                f"{name.replace('_', ' ')} {new[name] / max(1e-9, old[name]):.2f}"
                for name in ("turns_per_s", "makespan_s", "ttft_p50_s", "longest_wait_s")
            )
            lines.append(f"with / without the rule, {count} agents: {', '.join(parts)}")
    return lines


if __name__ == "__main__":
    main()
