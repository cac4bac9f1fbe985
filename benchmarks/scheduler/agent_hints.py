# SPDX-License-Identifier: Apache-2.0
"""Recorded agent sessions at a small pool, with the hints that agents can give and without them.

The real scheduler and prefix cache in virtual time; nothing is computed, so that all figures are the same on
every machine. Requests arrive at their recorded times. The hints are what the recording knows and the server
does not: that a request is its session's last, how long the pause until the next one is, that the requests of
a third of the sessions are urgent, and which requests are of one session (`adaptive` eviction alone).

    RADIXKV_TRACES=../traces python -m benchmarks.agent_hints
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence as Sequential
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from benchmarks.traces import traces_folder
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cli.replay.readers import read_json_lines
from radixkv.engine.config import SchedulerConfig
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence

BLOCK = 16
TRACE_BLOCK = 64
TAIL = 1 << 29  # ids of prompts' last tokens, of which the recording says nothing
#: Costs of a step, in seconds: as of an 8B model on a large GPU.
STEP_S, TOKEN_S, BUDGET = 0.008, 100e-6, 8192
URGENT = 3  # every third session


@dataclass(slots=True)
class Turn:
    """A recorded request.

    Attributes:
        pause_s: seconds until its session's next request; None: it is the last.
    """

    number: int
    session: int
    at: float
    prompt: npt.NDArray[np.int32]
    output: int
    pause_s: float | None = None
    first_token_s: float = 0.0
    cached: int = 0


def read_turns(path: Path, limit: int | None) -> list[Turn]:
    """Return a trace's requests, in the order of their arrival."""
    turns: list[Turn] = []
    for _, line in read_json_lines(path):
        if len(turns) == limit:
            break
        ids = np.asarray(line["hash_ids"], dtype=np.int32)
        tail = max(1, line["input_length"] - TRACE_BLOCK * len(ids))
        number = len(turns)
        tokens = (ids[:, None] * TRACE_BLOCK + np.arange(TRACE_BLOCK, dtype=np.int32)).ravel()
        own = TAIL + TRACE_BLOCK * 64 * number + np.arange(tail, dtype=np.int32)
        prompt = np.concatenate([tokens, own]).astype(np.int32)
        output = max(1, line["output_length"])
        turns.append(Turn(number, line["session"], line["timestamp"] / 1000, prompt, output))
    turns.sort(key=lambda turn: turn.at)
    sessions: dict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        sessions[turn.session].append(turn)
    for own_turns in sessions.values():
        for turn, following in pairwise(own_turns):
            turn.pause_s = following.at - turn.at
    return turns


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints that are given, and the policies that read them.

    Attributes:
        longest_pause_s: prompts that come back sooner are pinned until then; 0: none are.
    """

    done: bool = False
    longest_pause_s: float = 0.0
    sessions: bool = False
    priority: bool = False
    eviction: str = "lru"


VARIANTS = {
    "no hints": Hints(),
    "session_done": Hints(done=True),
    "pause of up to 60 s": Hints(longest_pause_s=60),
    "pause of up to 600 s": Hints(longest_pause_s=600),
    "session_done, pause of up to 600 s": Hints(done=True, longest_pause_s=600),
    "priority": Hints(priority=True),
    "adaptive, no hints": Hints(eviction="adaptive"),
    "adaptive, session": Hints(eviction="adaptive", sessions=True),
    "adaptive, session, session_done": Hints(eviction="adaptive", sessions=True, done=True),
}


class Replay:
    """Requests of a recording against one scheduler."""

    def __init__(self, hints: Hints, pool: int, max_num_seqs: int) -> None:
        self._hints, self._now = hints, 0.0
        self.cache = PrefixCache(pool // BLOCK, BLOCK, hints.eviction, clock=self._clock, pin_budget=0.5)
        config = SchedulerConfig(
            max_num_batched_tokens=BUDGET,
            max_num_seqs=max_num_seqs,
            scheduling_policy="priority" if hints.priority else "prefix",
        )
        self._scheduler = Scheduler(self.cache, config, clock=self._clock)
        self._asking: dict[int, tuple[Sequence, Turn]] = {}

    def _clock(self) -> float:
        return self._now

    def run(self, turns: Sequential[Turn]) -> None:
        """Run all requests to their ends."""
        coming = iter(turns)
        following = next(coming, None)
        while following is not None or self._asking:
            while following is not None and following.at <= self._now:
                self._ask(following)
                following = next(coming, None)
            batch = self._scheduler.schedule().batch
            if batch is None:
                assert following is not None, "requests wait, and nothing runs"
                self._now = max(self._now, following.at)
                continue
            tokens = sum(entry.count for entry in batch.entries)
            seconds = STEP_S + TOKEN_S * tokens
            self._now += seconds
            self._scheduler.complete(batch)
            self._scheduler.step_computed(tokens, seconds)
            for entry in batch.entries:
                if entry.samples:
                    self._sampled(entry.request)

    def _ask(self, turn: Turn) -> None:
        params = SamplingParams(max_tokens=turn.output, ignore_eos=True)
        request = Request(turn.prompt, params, request_id=str(turn.number))
        if self._hints.sessions:
            request.cache_key_hint = str(turn.session)
        if self._hints.priority:
            request.priority = int(turn.session % URGENT != 0)
        request.session_done = self._hints.done and turn.pause_s is None
        sequence = Sequence(request, arrival_s=turn.at)
        self._scheduler.add(sequence)
        self._asking[sequence.arrival_order] = sequence, turn

    def _sampled(self, sequence: Sequence) -> None:
        _, turn = self._asking[sequence.arrival_order]
        if not sequence.num_output_tokens:
            turn.first_token_s, turn.cached = self._now - turn.at, sequence.num_cached_tokens
            pause = turn.pause_s
            if pause is not None and 0 < pause <= self._hints.longest_pause_s:
                self.cache.pin(turn.prompt, ttl=pause + 1.0, at_least=True)
        sequence.append(0)
        if sequence.num_output_tokens == turn.output:
            self._scheduler.finish(sequence)
            del self._asking[sequence.arrival_order]


def figures_of(turns: Sequential[Turn]) -> dict[str, float]:
    """Return the hit rate, and TTFT in seconds, of all turns and of the urgent sessions'."""
    waits = np.array([turn.first_token_s for turn in turns])
    urgent = waits[[turn.session % URGENT == 0 for turn in turns]]
    return {
        "hit_rate": sum(turn.cached for turn in turns) / sum(len(turn.prompt) for turn in turns),
        "ttft_p50_s": float(np.quantile(waits, 0.5)),
        "ttft_p95_s": float(np.quantile(waits, 0.95)),
        "ttft_mean_s": float(waits.mean()),
        "urgent_ttft_p50_s": float(np.quantile(urgent, 0.5)),
        "urgent_ttft_p95_s": float(np.quantile(urgent, 0.95)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="agent_a64.jsonl.gz")
    parser.add_argument("--limit", type=int, help="requests; default: all")
    parser.add_argument("--pools", type=int, nargs="+", default=[400_000, 800_000], help="tokens")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    console, found = Console(width=150), dict[str, dict[str, Any]]()
    for pool in arguments.pools:
        found[str(pool)] = rows = {}
        table = Table(title=f"{arguments.trace}, a pool of {pool:,} tokens")
        for column in ("hints", "hit rate", "TTFT p50 s", "p95 s", "mean s", "urgent p50 s", "p95 s"):
            table.add_column(column)
        for name in arguments.variants:
            turns = read_turns(traces_folder() / arguments.trace, arguments.limit)
            Replay(VARIANTS[name], pool, arguments.max_num_seqs).run(turns)
            rows[name] = figures_of(turns)
            table.add_row(name, *(f"{value:.3f}" for value in rows[name].values()))
        console.print(table)
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    write_figures(arguments.json, "agent_hints", {"settings": settings, "block_size": BLOCK, "runs": found})


if __name__ == "__main__":
    main()
