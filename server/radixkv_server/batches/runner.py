# SPDX-License-Identifier: Apache-2.0
"""A batch's life: order its lines by their prefixes, ask the server's own app, write answers as they come.

1. Each line is parsed; a bad one gets its error line at once.
2. The others are rendered and tokenised by the app (`POST /tokenize/v1/...`), which gives them their place in
   the tree of all prompts (`PrefixOrder`).
3. They are asked in that order, a bounded number at a time, so that a prefix is computed once though the pool
   is smaller than all prefixes together.
4. Each answer is appended to the output before the next one is awaited; what was cut off is asked again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from radixkv.errors import EngineStoppedError
from radixkv_server.batches.lines import (
    BadLine,
    BatchRequest,
    InputFile,
    OutputFile,
    answer_line,
    error_line,
    parse_line,
)
from radixkv_server.batches.prefix_order import PrefixOrder


@dataclass(slots=True)
class BatchCounts:
    """Lines so far.

    Attributes:
        total: with something in them.
        ordered: that have their place, or none.
        answered: with an answer of the model.
        failed: refused by their route, or no requests at all.
    """

    total: int = 0
    ordered: int = 0
    answered: int = 0
    failed: int = 0

    @property
    def ended(self) -> int:
        return self.answered + self.failed


class BatchRunner:
    """Answers the lines of a file that have no answer yet.

    Args:
        client: speaks to the app, over a transport in this process or over a network.
        max_concurrent: requests asked at a time: enough to fill the engine's steps and a little of its queue.
        is_healthy: whether the engine works; where it does not, the run ends and loses no line.
        on_progress: called with the counts after each line.
        tokenized_at_once: lines that are tokenised at a time.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        max_concurrent: int,
        is_healthy: Callable[[], bool] = lambda: True,
        on_progress: Callable[[BatchCounts], None] = lambda counts: None,
        tokenized_at_once: int = 8,
    ) -> None:
        self._client = client
        self._max_concurrent = max_concurrent
        self._is_healthy = is_healthy
        self._on_progress = on_progress
        self._tokenized_at_once = tokenized_at_once

    async def run(self, requests: InputFile, answers: OutputFile) -> BatchCounts:
        """Answer all lines that `answers` has no answer to.

        Raises:
            EngineStoppedError: the engine failed; the lines without an answer are left.
            ConfigError: the answers can't be written.
        """
        counts = BatchCounts(total=len(requests.places) - len(answers.done))
        order = iter(await self._order(requests, answers, counts))

        async def worker() -> None:
            for number in order:
                request = parse_line(number, requests.read(number))
                status, request_id, body = await self._ask(request)
                answers.write(answer_line(request, status, request_id, body))
                if httpx.codes.is_success(status):
                    counts.answered += 1
                else:
                    counts.failed += 1
                self._on_progress(counts)

        async with asyncio.TaskGroup() as group:  # the first failure ends all
            for _ in range(self._max_concurrent):
                group.create_task(worker())
        return counts

    async def _order(self, requests: InputFile, answers: OutputFile, counts: BatchCounts) -> list[int]:
        """Return the numbers of the lines to ask in the order of their prefixes; write bad lines' errors."""
        tree, keys = PrefixOrder(), dict[int, bytes]()
        left = iter([number for number in requests.places if number not in answers.done])
        while some := list(itertools.islice(left, self._tokenized_at_once)):
            asked = []
            for number in some:
                try:
                    asked.append(parse_line(number, requests.read(number)))
                except BadLine as error:
                    answers.write(error_line(number, error))
                    counts.failed += 1
            prompts = await asyncio.gather(*map(self._tokens, asked))
            for request, token_ids in zip(asked, prompts, strict=True):
                keys[request.line] = tree.key(token_ids)
            counts.ordered += len(some)
            self._on_progress(counts)
        return sorted(keys, key=lambda number: (keys[number], number))

    async def _tokens(self, request: BatchRequest) -> list[int]:
        """Return a prompt's tokens; none where the app refuses it, as it will when it is asked."""
        answer = await self._client.post(f"/tokenize{request.url}", json=request.body)
        tokens: list[int] = answer.json().get("tokens", []) if answer.status_code == httpx.codes.OK else []
        return tokens

    async def _ask(self, request: BatchRequest) -> tuple[int, str, Any]:
        """Return status, request's id and body of the answer; waits for as long as the server has no room."""
        while True:
            answer = await self._client.post(request.url, json=request.body)
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the app made an answer of it, that of a shutdown
                raise asyncio.CancelledError
            busy = answer.status_code in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
            if answer.is_server_error and not self._is_healthy():
                raise EngineStoppedError("the engine stopped; the same command goes on with the other lines")
            if not busy or "retry-after" not in answer.headers:
                return answer.status_code, answer.headers.get("x-request-id", ""), _json(answer)
            await asyncio.sleep(float(answer.headers["retry-after"]))


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return answer.text
