# SPDX-License-Identifier: Apache-2.0
"""Scenarios of a load: sessions of chats that begin at given times.

The prompts depend on the seed alone, so that two servers get the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.cli.bench.server_process import words
from radixkv.cli.replay.message_log import LoggedRequest, Message, MessageLog
from radixkv.cli.replay.readers import read_json_lines
from radixkv.errors import ConfigError

SCENARIOS = ("shared", "agent", "unique", "replay")


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: each turn adds messages to all before, the answers included.

    Args:
        start: time of its first turn, in seconds after the load begins.
        turns: messages that each turn adds.
        max_tokens: most tokens of an answer; None: the server's own limit.
        says_done: its last request tells a radixkv server that the conversation is over.
    """

    start: float
    turns: Sequence[Sequence[Message]]
    tools: Any | None = None
    max_tokens: int | None = None
    says_done: bool = False


def arrivals(rate: float, count: int, seed: int) -> Iterator[float]:
    """Times of a Poisson process, seconds; a rate of 0 or less: all at once."""
    source, now = random.Random(f"{seed}: arrivals"), 0.0
    for _ in range(count):
        if rate > 0:
            now += source.expovariate(rate)
        yield now


def make_sessions(
    scenario: str, *, count: int, rate: float, seed: int, max_tokens: int, turns: int, shared_words: int
) -> list[Session]:
    """The sessions of a scenario other than `replay`, in the order of their starts.

    shared: one question each after one system prompt of `shared_words` words, the same for all.
    agent: `turns` turns each, every result some hundred words that the next turn repeats.
    unique: one prompt each, of `shared_words` words without shared ones.
    """
    times = arrivals(rate, count, seed)
    common = words(random.Random(f"{seed}: shared"), shared_words)
    make = {"shared": _shared, "agent": _agent, "unique": _unique}[scenario]
    sessions = []
    for number, start in enumerate(times):
        source = random.Random(f"{seed}: {scenario} {number}")
        sessions.append(Session(start, make(source, common, turns, shared_words), max_tokens=max_tokens))
    return sessions


def _shared(source: random.Random, common: str, turns: int, size: int) -> list[list[Message]]:
    system = {"role": "system", "content": common}
    return [[system, {"role": "user", "content": words(source, 30)}]]


def _unique(source: random.Random, common: str, turns: int, size: int) -> list[list[Message]]:
    return [[{"role": "user", "content": words(source, size)}]]


def _agent(source: random.Random, common: str, turns: int, size: int) -> list[list[Message]]:
    steps: list[list[Message]] = [
        [{"role": "system", "content": common}, {"role": "user", "content": words(source, 60)}]
    ]
    for step in range(1, turns):
        result = f"Result of step {step}:\n{words(source, source.randint(50, 250))}"
        steps.append([{"role": "user", "content": result}])
    return steps


def replayed(requests: Sequence[LoggedRequest], *, speed: float, max_tokens: int) -> list[Session]:
    """The requests of a log, each at its own time since the first, `speed` times as fast.

    Raises:
        ConfigError: there are none.
    """
    if not requests:
        raise ConfigError("--log: there are no requests in it")
    first = min(request.arrival for request in requests)
    return sorted(
        (
            Session(
                (request.arrival - first) / speed,
                [request.messages],
                request.tools,
                request.max_tokens or max_tokens,
            )
            for request in requests
        ),
        key=lambda session: session.start,
    )


def read_log(path: Path, schedule: Path | None, tools: Path | None) -> list[LoggedRequest]:
    """The requests of a chat log; see `radixkv replay`.

    Raises:
        TraceError: what stands in the files is no log.
    """
    log = MessageLog.load(path, read_json_lines(path), tools)
    return list(log.requests(schedule, None if schedule is None else read_json_lines(schedule)))
