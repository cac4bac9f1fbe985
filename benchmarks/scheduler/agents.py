# SPDX-License-Identifier: Apache-2.0
"""Agents whose contexts outgrow the pool: the real scheduler and prefix cache in virtual time, with the rules
of long prompts and without them.

A step costs a fixed time and a time for each token; nothing is computed, so that all figures are the same on
every machine. Agents are in closed loops: a turn is sent when the pause after the answer before it is over.

    python -m benchmarks.agents                      # 14, 28, 42 agents; one-shots at saturation
    python -m benchmarks.agents --kind swe --agents 20 40 --pool 200000
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cli.bench.agent_jobs import KINDS, AgentAnswer, AgentJob, AgentTurn, agent_figures, make_jobs
from radixkv.engine.config import SchedulerConfig
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence

BLOCK = 16
VOCABULARY = 49_152
NEVER_LONG = 1 << 30

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Machine:
    """Simulated hardware; a pool in tokens, a step's cost in seconds."""

    pool: int
    budget: int
    max_num_seqs: int
    step_s: float
    token_s: float


#: A toy model on two cores, whose pool holds 17 contexts of 12,000 tokens; an 8B model on a large GPU.
MACHINES = {
    "toy": Machine(204_800, 512, 64, 0.004, 40e-6),
    "gpu": Machine(800_000, 8192, 64, 0.008, 100e-6),
}


class Loop:
    """Agents against one scheduler.

    Args:
        long_prompt_tokens: see `SchedulerConfig`.
        guard: long prompts displace no prefixes in use (`radixkv.scheduling.reuse_guard`).
        say_done: the last request of each agent says that its session is over.
        policy: order of admission.
    """

    def __init__(
        self,
        machine: Machine,
        jobs: abc.Sequence[AgentJob],
        *,
        long_prompt_tokens: int | None,
        guard: bool = True,
        policy: str = "prefix",
        eviction: str = "lru",
        seed: int = 0,
        say_done: bool = False,
    ) -> None:
        self._machine = machine
        self._say_done = say_done
        self._now = 0.0
        self._cache = PrefixCache(machine.pool // BLOCK, BLOCK, eviction, clock=self._clock)
        self._scheduler = Scheduler(
            self._cache,
            SchedulerConfig(
                max_num_batched_tokens=machine.budget,
                max_num_seqs=machine.max_num_seqs,
                scheduling_policy=policy,
                long_prompt_tokens=long_prompt_tokens,
            ),
            clock=self._clock if guard else None,
        )
        self._rng = np.random.default_rng(seed)
        self._due: list[tuple[float, int, _Conversation]] = []
        self._order = itertools.count()
        self._asking: dict[int, tuple[Sequence, _Conversation, AgentAnswer]] = {}
        self.answers: list[AgentAnswer] = []
        shared = {job.group: self._random(job.shared) for job in jobs}
        began: set[int] = set()
        for number, job in enumerate(jobs):
            known = len(shared[job.group]) if job.group in began else 0
            began.add(job.group)
            context = np.concatenate([shared[job.group], self._random(job.start)])
            if job.turns:
                self._push(job.delay_s, _Conversation(number, context, job.turns, known))

    def _clock(self) -> float:
        return self._now

    def _random(self, count: int) -> Tokens:
        return self._rng.integers(0, VOCABULARY, count, dtype=np.int32)

    def _push(self, when: float, conversation: _Conversation) -> None:
        heapq.heappush(self._due, (when, next(self._order), conversation))

    def run(self) -> list[AgentAnswer]:
        """Run all jobs to their ends."""
        while self._due or self._asking:
            while self._due and self._due[0][0] <= self._now:
                self._ask(*heapq.heappop(self._due)[::2])
            batch = self._scheduler.schedule().batch
            if batch is None:
                assert self._due or not self._asking, "requests wait, and nothing runs"
                self._now = max(self._now, self._due[0][0] if self._due else 0.0)
                continue
            tokens = sum(entry.count for entry in batch.entries)
            seconds = self._machine.step_s + self._machine.token_s * tokens
            self._now += seconds
            self._scheduler.complete(batch)
            self._scheduler.step_computed(tokens, seconds)
            for entry in batch.entries:
                if entry.samples:
                    self._sampled(entry.request)
        return self.answers

    def _ask(self, when: float, conversation: _Conversation) -> None:
        turn, *rest = conversation.turns
        conversation.turns = rest
        context, known = conversation.context, conversation.known
        if turn.compact_to is not None:
            context, known = context[: turn.compact_to // 2], min(known, turn.compact_to // 2)
            context = np.concatenate([context, self._random(turn.compact_to - len(context))])
        context = np.concatenate([context, self._random(turn.new)])
        conversation.context, conversation.turn = context, turn
        answer = AgentAnswer(
            conversation.job,
            conversation.number,
            when,
            prompt_tokens=len(context),
            new_tokens=len(context) - known,
            is_first=conversation.number == 0,
        )
        conversation.number += 1
        self.answers.append(answer)
        params = SamplingParams(max_tokens=turn.output, ignore_eos=True)
        asked = Request(context, params, request_id=str(next(self._order)))
        asked.session_done = self._say_done and not rest
        request = Sequence(asked, arrival_s=when)
        self._scheduler.add(request)
        self._asking[request.arrival_order] = request, conversation, answer

    def _sampled(self, request: Sequence) -> None:
        _, conversation, answer = self._asking[request.arrival_order]
        if answer.first_token is None:
            answer.first_token, answer.cached_tokens = self._now, request.num_cached_tokens
        request.append(int(self._rng.integers(VOCABULARY)))
        turn = conversation.turn
        assert turn is not None
        if request.num_output_tokens < turn.output:
            return
        answer.ended, answer.output_tokens = self._now, request.num_output_tokens
        conversation.context = request.tokens().copy()
        conversation.known = len(conversation.context) - 1  # the last token is not computed
        self._scheduler.finish(request)
        del self._asking[request.arrival_order]
        for fork in turn.forks:
            if fork:
                self._push(self._now, conversation.forked(fork))
        if conversation.turns:
            self._push(self._now + turn.pause_s, conversation)


@dataclass(slots=True)
class _Conversation:
    """What an agent has sent so far.

    Attributes:
        known: tokens of its context that were computed before, by it or for others.
        number: of its next turn.
        turns: to be asked, and turn: the one that is.
    """

    job: int
    context: Tokens
    turns: abc.Sequence[AgentTurn]
    known: int
    number: int = 0
    turn: AgentTurn | None = None

    def forked(self, turns: abc.Sequence[AgentTurn]) -> _Conversation:
        """A sub-agent that goes on from here."""
        return _Conversation(self.job, self.context, turns, self.known, 1000 * self.number)


def measure(machine: Machine, jobs: abc.Sequence[AgentJob], **options: Any) -> dict[str, float]:
    """Return the figures of jobs on a machine."""
    return agent_figures(Loop(machine, jobs, **options).run())


RULES: dict[str, dict[str, Any]] = {
    "rules, done said": {"long_prompt_tokens": None, "say_done": True},
    "both rules": {"long_prompt_tokens": None},
    "halving alone": {"long_prompt_tokens": None, "guard": False},
    "without": {"long_prompt_tokens": NEVER_LONG},
}


def agents_table(
    machine: Machine, kind: str, counts: abc.Sequence[int], seed: int, scale: float
) -> dict[str, Any]:
    """Return figures by rule and number of agents, with ratios to the smallest number."""
    found: dict[str, Any] = {}
    for name, options in RULES.items():
        rows = {
            count: measure(machine, make_jobs(kind, count, seed, scale=scale), seed=seed, **options)
            for count in counts
        }
        base = rows[counts[0]]
        for row in rows.values():
            row["turns_per_s_over_smallest"] = row["turns_per_s"] / base["turns_per_s"]
            row["hits_over_possible"] = row["hit_rate_after_first"] / max(1e-9, row["possible_hit_rate"])
        found[name] = {str(count): row for count, row in rows.items()}
    for count in map(str, counts):
        *ruled, old = (found[name][count] for name in RULES)
        for new in ruled:
            new["longest_wait_over_without"] = new["longest_wait_s"] / max(1e-9, old["longest_wait_s"])
    return found


SHOWN = {
    "turns_per_s": "turns/s",
    "turns_per_s_over_smallest": "of fits",
    "hits_over_possible": "hits of possible",
    "computed_over_first_time": "computed / first-time",
    "ttft_p50_s": "TTFT p50 s",
    "ttft_p95_s": "p95 s",
    "longest_wait_s": "longest s",
    "makespan_s": "makespan s",
    "fairness": "fairness",
}


def show(title: str, found: dict[str, Any]) -> Table:
    """Return a table of the figures."""
    table = Table(title=title)
    for column in ("rule", "agents", *SHOWN.values()):
        table.add_column(column)
    for name, rows in found.items():
        for count, row in rows.items():
            table.add_row(name, count, *(f"{row[figure]:.3g}" for figure in SHOWN))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=sorted(KINDS), default="cliff")
    parser.add_argument("--agents", type=int, nargs="+", default=[14, 28, 42], help="the first ones fit")
    parser.add_argument("--machine", choices=sorted(MACHINES), default="toy")
    parser.add_argument("--pool", type=int, help="tokens; default: the machine's")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the tokens of all prompts")
    parser.add_argument(
        "--one-shots", type=int, default=200, help="prompts at once that share little; 0: none"
    )
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--json", help="write the figures here")
    arguments = parser.parse_args()
    machine = MACHINES[arguments.machine]
    if arguments.pool:
        machine = Machine(
            arguments.pool, machine.budget, machine.max_num_seqs, machine.step_s, machine.token_s
        )
    console = Console(width=160)
    agents = agents_table(machine, arguments.kind, arguments.agents, arguments.seed, arguments.scale)
    console.print(show(f"{arguments.kind} on {arguments.machine}, a pool of {machine.pool} tokens", agents))
    figures = {"machine_model": arguments.machine, "seed": arguments.seed, arguments.kind: agents}
    if arguments.one_shots:
        counts = [arguments.one_shots]
        figures["one-shot"] = shots = agents_table(
            machine, "one-shot", counts, arguments.seed, arguments.scale
        )
        console.print(show("one-shots, all at once", shots))
    write_figures(arguments.json, "agents", figures)


if __name__ == "__main__":
    main()
