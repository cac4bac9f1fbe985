# SPDX-License-Identifier: Apache-2.0
"""Agents in closed loops against any server with OpenAI's chat completions: a turn is sent when the pause
after the answer before it is over.

The texts are random words, about a token each, that depend on the seed alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence

from radixkv.cli.bench.agent_jobs import AgentAnswer, AgentJob, AgentTurn
from radixkv.cli.bench.load import Load, Outcome
from radixkv.cli.bench.scenarios import Session
from radixkv.cli.bench.server_process import words
from radixkv.cli.replay.message_log import Message


class AgentLoop(Load):
    """Runs jobs of agents against one server; see `Load` for the arguments.

    Attributes:
        say_done: the last request of each agent says that its session is over.
    """

    say_done = False

    async def run_jobs(self, jobs: Sequence[AgentJob], seed: int) -> list[AgentAnswer]:
        """Run all jobs to their ends and return their turns in the order in which they were sent."""
        answers: list[AgentAnswer] = []
        began: set[int] = set()
        async with contextlib.aclosing(self._http):
            self._began = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for number, job in enumerate(jobs):
                    tasks.create_task(self._job(number, job, seed, job.group in began, answers))
                    began.add(job.group)
        return sorted(answers, key=lambda answer: answer.sent)

    async def _job(
        self, number: int, job: AgentJob, seed: int, shares: bool, answers: list[AgentAnswer]
    ) -> None:
        source = random.Random(f"{seed}: texts {number}")
        system = words(random.Random(f"{seed}: group {job.group}"), job.shared)
        messages: list[Message] = [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": words(source, job.start)})
        await asyncio.sleep(job.delay_s)
        # The shared tokens of the first prompt are estimated by its share of the words.
        share = job.shared / (job.shared + job.start) if shares else 0.0
        await self._conversation(number, messages, job.turns, source, answers, share)

    async def _conversation(
        self,
        number: int,
        messages: list[Message],
        turns: Sequence[AgentTurn],
        source: random.Random,
        answers: list[AgentAnswer],
        share: float,
        known: int = 0,
    ) -> None:
        """Ask the turns of an agent or a sub-agent, one after the other.

        Args:
            share: share of the first prompt that other jobs have sent before.
            known: number of the context's tokens that were computed before.
        """
        async with asyncio.TaskGroup() as forks:
            for place, turn in enumerate(turns):
                if turn.compact_to is not None:
                    summary = {"role": "user", "content": words(source, turn.compact_to)}
                    messages, known = [messages[0], summary], 0
                messages.append({"role": "user", "content": words(source, turn.new)})
                outcome = Outcome(number, place, self._now())
                async with self._places:
                    done = self.say_done and place + 1 == len(turns)
                    await self._ask(
                        outcome, messages, Session(0.0, (), max_tokens=turn.output, says_done=done)
                    )
                self._on_done()
                answers.append(self._answer(outcome, known, share))
                if outcome.error is not None:
                    return
                messages.append({"role": "assistant", "content": outcome.text or "..."})
                known, share = outcome.prompt_tokens + outcome.output_tokens, 0.0
                for fork in turn.forks:
                    texts = random.Random(source.random())
                    forks.create_task(
                        self._conversation(number, [*messages], fork, texts, answers, 0.0, known)
                    )
                if place + 1 < len(turns):
                    await asyncio.sleep(turn.pause_s)

    @staticmethod
    def _answer(outcome: Outcome, known: int, share: float) -> AgentAnswer:
        prompt = outcome.prompt_tokens
        return AgentAnswer(
            outcome.session,
            outcome.turn,
            outcome.due,
            first_token=outcome.first_token,
            ended=outcome.ended or outcome.due,
            prompt_tokens=prompt,
            cached_tokens=outcome.cached_tokens,
            output_tokens=outcome.output_tokens,
            new_tokens=prompt - min(prompt - 1, known + int(share * prompt)) if prompt else 0,
            is_first=not known,
            error=outcome.error,
        )
