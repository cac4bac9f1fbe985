# SPDX-License-Identifier: Apache-2.0
"""Jobs of agents in closed loops: tokens added by each turn, pauses of tools or people, shared prefixes.

| kind     | turns | tokens at first                | pauses           | more                             |
|----------|-------|--------------------------------|------------------|----------------------------------|
| agents   | 43    | 12k shared + 14k; to 142k      | tools: 2 s       | 3 % of turns fork 1-3 sub-agents |
| swe      | 25    | 3k shared + 5k; to about 30k   | tools: 2 s       |                                  |
| chat     | 6     | 2k shared + 1.5k               | people: 45 s     |                                  |
| one-shot | 1     | 500 shared + 4k                |                  |                                  |
| cliff    | 8     | 650 shared + 11.4k             | exponential: 1 s | 150 new tokens a turn            |
| mixed    |       |                                |                  | 30 % agents, 25 % swe, 35 % chat |

Numbers are medians of log-normal distributions. At 142,000 tokens an agent's context is compacted to 20,000.
All depends on the seed alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Contexts beyond this are compacted to that.
FULL, COMPACTED = 142_000, 20_000
FORK_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """Turn of a job; sizes in tokens.

    Attributes:
        new: tokens added to the context before the request.
        output: tokens of its answer.
        pause_s: seconds between its answer and the next turn.
        compact_to: tokens of the context that are kept before the request; None: all.
        forks: turns of each sub-agent that goes on from the turn's context after its answer.
    """

    new: int
    output: int
    pause_s: float
    compact_to: int | None = None
    forks: tuple[tuple[AgentTurn, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class AgentJob:
    """A conversation from its first prompt to its end.

    Attributes:
        group: agents of one group begin with the same `shared` tokens.
        start: further tokens of its first prompt.
        delay_s: seconds before its first turn.
    """

    kind: str
    group: int
    shared: int
    start: int
    turns: tuple[AgentTurn, ...]
    delay_s: float = 0.0

    @property
    def num_requests(self) -> int:
        """Number of turns, including sub-agents' turns."""
        return sum(1 + sum(map(len, turn.forks)) for turn in self.turns)


def make_jobs(kind: str, count: int, seed: int, *, scale: float = 1.0) -> list[AgentJob]:
    """Return as many jobs of a kind, which depend on the seed and the number of each alone.

    Args:
        scale: multiplies all tokens, not the pauses.
    """
    jobs = []
    for number in range(count):
        source = random.Random(f"{seed}: {kind} {number}")
        jobs.append(KINDS[kind](source, _Sizes(source, scale)))
    return jobs


class _Sizes:
    """Draws numbers of tokens."""

    def __init__(self, source: random.Random, scale: float) -> None:
        self._source = source
        self.scale = scale

    def __call__(self, median: float, sigma: float, most: float) -> int:
        return max(1, int(self.scale * log_normal(self._source, median, sigma, most)))

    def exactly(self, tokens: float) -> int:
        return max(1, int(self.scale * tokens))


def log_normal(source: random.Random, median: float, sigma: float, most: float) -> float:
    """Draw a log-normal number, at most `most`."""
    return min(most, median * math.exp(source.gauss(0, sigma)))


def _tool_s(source: random.Random) -> float:
    return log_normal(source, 2.0, 1.2, 300.0)


def _sub_agent(source: random.Random, size: _Sizes) -> tuple[AgentTurn, ...]:
    return tuple(
        AgentTurn(size(800, 0.6, 4000), size(150, 0.5, 800), _tool_s(source))
        for _ in range(source.randint(3, 8))
    )


def _agent(source: random.Random, size: _Sizes) -> AgentJob:
    start, turns = size(14_000, 0.4, 40_000), []
    context = start
    for _ in range(max(5, int(log_normal(source, 43, 0.5, 120)))):
        forks: tuple[tuple[AgentTurn, ...], ...] = ()
        if source.random() < FORK_SHARE:
            forks = tuple(_sub_agent(source, size) for _ in range(source.randint(1, 3)))
        new, output = size(800, 0.8, 8000), size(180, 0.7, 1500)
        context += new + output
        compact_to = None
        if context > size.exactly(FULL):
            context = compact_to = size.exactly(COMPACTED)
        turns.append(AgentTurn(new, output, _tool_s(source), compact_to, forks))
    return AgentJob("agents", 0, size.exactly(12_000), start, tuple(turns), _tool_s(source))


def _swe(source: random.Random, size: _Sizes) -> AgentJob:
    count = max(6, int(log_normal(source, 25, 0.4, 60)))
    start = size(5000, 0.4, 15_000)
    turns = (AgentTurn(size(600, 0.9, 6000), size(200, 0.6, 1200), _tool_s(source)) for _ in range(count))
    return AgentJob("swe", 1, size.exactly(3000), start, tuple(turns), _tool_s(source))


def _chat(source: random.Random, size: _Sizes) -> AgentJob:
    def pause() -> float:
        return log_normal(source, 45.0, 1.0, 1800.0)

    count = max(2, int(log_normal(source, 6, 0.7, 30)))
    start = size(1500, 0.8, 12_000)
    turns = (AgentTurn(size(120, 0.9, 4000), size(300, 0.6, 1500), pause()) for _ in range(count))
    return AgentJob("chat", 2 + source.randrange(3), size.exactly(2000), start, tuple(turns), pause())


def _one_shot(source: random.Random, size: _Sizes) -> AgentJob:
    turn = AgentTurn(1, size(200, 0.6, 1000), 1.0)
    return AgentJob("one-shot", 6, size.exactly(500), size(4000, 0.8, 30_000), (turn,))


def _cliff(source: random.Random, size: _Sizes) -> AgentJob:
    turns = tuple(AgentTurn(size.exactly(150), 24, source.expovariate(1.0)) for _ in range(8))
    return AgentJob("cliff", 7, size.exactly(650), size.exactly(11_400), turns, source.random())


def _mixed(source: random.Random, size: _Sizes) -> AgentJob:
    drawn = source.random()
    for share, make in ((0.3, _agent), (0.55, _swe), (0.9, _chat)):
        if drawn < share:
            return make(source, size)
    return _one_shot(source, size)


KINDS: dict[str, Callable[[random.Random, _Sizes], AgentJob]] = {
    "agents": _agent,
    "swe": _swe,
    "chat": _chat,
    "one-shot": _one_shot,
    "mixed": _mixed,
    "cliff": _cliff,
}


@dataclass(slots=True)
class AgentAnswer:
    """Measured turn; times in seconds after the load began, sizes in tokens.

    Attributes:
        job, turn: job and index of the turn; sub-agents count as turns of their job.
        is_first: True if its context had not been sent before.
        new_tokens: tokens of its prompt that had not been sent before.
    """

    job: int
    turn: int
    sent: float
    first_token: float | None = None
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    new_tokens: int = 0
    is_first: bool = False
    error: str | None = None


def agent_figures(answers: Sequence[AgentAnswer]) -> dict[str, float]:
    """Return the figures of a run.

    `turns_per_s` counts up to when 80 % of the turns have ended; `possible_hit_rate` is that of a cache in
    which everything stays; `fairness` is the 95th over the 5th percentile of the jobs' turns per second.
    """
    good = [answer for answer in answers if answer.error is None]
    if not good:
        return {"turns": 0.0, "failed": float(len(answers))}
    ends = sorted(answer.ended for answer in good)
    index = max(0, math.ceil(0.8 * len(ends)) - 1)
    later = [answer for answer in good if not answer.is_first]
    waits = sorted((answer.first_token or answer.ended) - answer.sent for answer in good)
    jobs: dict[int, list[AgentAnswer]] = {}
    for answer in good:
        jobs.setdefault(answer.job, []).append(answer)
    lives = [max(a.ended for a in own) - min(a.sent for a in own) for own in jobs.values()]
    rates = sorted(len(own) / max(1e-9, life) for own, life in zip(jobs.values(), lives, strict=True))
    prompt = sum(answer.prompt_tokens for answer in later)
    first_time = sum(answer.new_tokens for answer in good)
    return {
        "turns": float(len(good)),
        "failed": float(len(answers) - len(good)),
        "turns_per_s": (index + 1) / max(1e-9, ends[index]),
        "makespan_s": ends[-1],
        "job_mean_s": sum(lives) / len(lives),
        "hit_rate_after_first": sum(answer.cached_tokens for answer in later) / prompt if prompt else 0.0,
        "possible_hit_rate": sum(a.prompt_tokens - a.new_tokens for a in later) / prompt if prompt else 0.0,
        "computed_over_first_time": sum(a.prompt_tokens - a.cached_tokens for a in good) / max(1, first_time),
        "first_time_tokens": float(first_time),
        "ttft_p50_s": waits[len(waits) // 2],
        "ttft_p95_s": waits[int(0.95 * (len(waits) - 1))],
        "longest_wait_s": waits[-1],
        "fairness": rates[int(0.95 * (len(rates) - 1))] / max(1e-9, rates[int(0.05 * (len(rates) - 1))]),
    }
