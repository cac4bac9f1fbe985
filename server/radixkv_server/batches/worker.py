# SPDX-License-Identifier: Apache-2.0
"""BatchWorker: answers a server's batches one after the other, behind all other requests.

    validating --bad file--> failed
        `--> in_progress --all answered--> finalizing --> completed
                 |--cancel--> cancelling --> cancelled      with the answers so far
                 `--expires_at--> expired                   likewise, and an error for each other line

Each change of state is in the folder before the next one begins, and each answer before the next request, so
that a server which was killed goes on where it was, and asks only what has no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

from starlette.types import ASGIApp

from radixkv.errors import EngineStoppedError
from radixkv_server.batches.folder import BatchFolder, StoredBatch
from radixkv_server.batches.lines import (
    BadLine,
    InputFile,
    OutputFile,
    error_line,
    line_errors,
    line_fault,
    parse_line,
)
from radixkv_server.batches.runner import BatchRunner
from radixkv_server.dialect import Json
from radixkv_server.errors import ApiError
from radixkv_server.http.background_requests import background_client

logger = logging.getLogger("radixkv.server")

#: Seconds between looks at the folder: at the state of the batch that runs, and for new ones.
POLL_S = 1.0


class BatchWorker:
    """Works on the folder's batches while no other server does.

    Args:
        max_concurrent: lines that are asked at a time.
        max_lines: most lines of a batch.
    """

    def __init__(self, folder: BatchFolder, *, max_concurrent: int, max_lines: int) -> None:
        self.folder = folder
        self._max_concurrent = max_concurrent
        self._max_lines = max_lines
        self._is_serving: Callable[[], bool] = lambda: True
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp, is_serving: Callable[[], bool]) -> None:
        """Work on what is unfinished, from now on, by requests to `app`.

        Args:
            is_serving: whether the engine works and the server goes on.

        Raises:
            ConfigError: the folder can't be made.
        """
        self._is_serving = is_serving
        self.folder.open()
        self._task = asyncio.create_task(self._run(app))

    def notify(self) -> None:
        """Look at the folder now: a batch is new, or is to end."""
        self._news.set()

    async def close(self) -> None:
        """Leave the lines that run; another start asks them again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.to_thread(self.folder.close)

    async def _run(self, app: ASGIApp) -> None:
        while not await asyncio.to_thread(self.folder.try_to_work):
            await self._wait()
        while True:
            self._news.clear()
            stored = await asyncio.to_thread(self.folder.unfinished)
            if stored is None or not self._is_serving():
                await self._wait()
                continue
            try:
                await self._work(app, stored)
            except* EngineStoppedError:
                await self._wait()
            except* Exception as errors:
                logger.exception("the batch %s failed", stored.batch["id"], exc_info=errors)
                await self._fail(stored, [line_fault("internal_error", "the server failed on it", None)])

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), POLL_S)
        self._news.clear()

    async def _work(self, app: ASGIApp, stored: StoredBatch) -> None:
        """Bring a batch to its end, or as far as the engine goes.

        Raises:
            EngineStoppedError, ExceptionGroup: the engine stopped, or something unexpected happened.
        """
        batch, name = stored.batch, stored.tenant.name
        try:
            path, _ = await asyncio.to_thread(self.folder.file, name, batch["input_file_id"])
        except ApiError as error:
            await self._fail(stored, [line_fault("file_not_found", error.message, None)])
            return
        with closing(await asyncio.to_thread(InputFile, path)) as requests:
            if batch["status"] == "validating":
                errors = await asyncio.to_thread(line_errors, requests, batch["endpoint"], self._max_lines)
                if errors:
                    await self._fail(stored, errors)
                    return
                await self._begin(stored, len(requests.places))
            answers_path = self.folder.answers_path(name, batch["id"])
            answers = await asyncio.to_thread(OutputFile, answers_path, requests)
            with closing(answers):
                status = await self._answer(app, stored, requests, answers)
                if status == "completed":
                    await self._change(stored, lambda one: _set(one, "finalizing"))
                elif status == "expired":
                    late = BadLine("the batch expired before this request was answered")
                    for number in set(requests.places) - answers.done:
                        one = BadLine(str(late), _custom_id(requests, number))
                        answers.write(error_line(number, one, "batch_expired"))
                counts = _counts(requests, answers)
        made = await asyncio.to_thread(self.folder.give_out, name, batch)
        await self._end(stored, status, request_counts=counts, **made)
        answers_path.unlink(missing_ok=True)

    async def _answer(
        self, app: ASGIApp, stored: StoredBatch, requests: InputFile, answers: OutputFile
    ) -> str:
        """Send the lines without an answer; return the state in which the batch ends."""
        if (await self._change(stored, lambda one: None))["status"] == "cancelling":
            return "cancelled"
        async with background_client(app, stored.tenant) as client:
            runner = BatchRunner(
                client,
                max_concurrent=self._max_concurrent,
                is_healthy=self._is_serving,
                tokenized_at_once=1,  # beside chats' own texts
            )
            run = asyncio.create_task(runner.run(requests, answers))
            try:
                while True:
                    wait = asyncio.ensure_future(self._wait())
                    await asyncio.wait([run, wait], return_when=asyncio.FIRST_COMPLETED)
                    wait.cancel()
                    if run.done():
                        run.result()
                        return "completed"
                    change = partial(_set_counts, counts=_counts(requests, answers))
                    batch = await self._change(stored, change)
                    if batch["status"] == "cancelling":
                        return "cancelled"
                    if time.time() >= batch["expires_at"]:
                        return "expired"
            finally:
                run.cancel()
                await asyncio.wait([run])

    async def _begin(self, stored: StoredBatch, total: int) -> None:
        def change(batch: Json) -> None:
            batch["request_counts"] = {"total": total, "completed": 0, "failed": 0}
            if batch["status"] == "validating":
                _set(batch, "in_progress")

        await self._change(stored, change)

    async def _fail(self, stored: StoredBatch, errors: list[Json]) -> None:
        await self._end(stored, "failed", errors={"object": "list", "data": errors})

    async def _end(self, stored: StoredBatch, status: str, **fields: Json | str) -> None:
        def change(batch: Json) -> None:
            batch.update(fields)
            _set(batch, status)

        await self._change(stored, change)

    async def _change(self, stored: StoredBatch, change: Callable[[Json], None]) -> Json:
        folder, name, batch_id = self.folder, stored.tenant.name, stored.batch["id"]
        return await asyncio.to_thread(folder.update, name, batch_id, change)


def _set_counts(batch: Json, counts: Json) -> None:
    batch["request_counts"] = counts


def _set(batch: Json, status: str) -> None:
    batch |= {"status": status, f"{status}_at": int(time.time())}


def _counts(requests: InputFile, answers: OutputFile) -> Json:
    failed = answers.num_failed
    return {"total": len(requests.places), "completed": len(answers.done) - failed, "failed": failed}


def _custom_id(requests: InputFile, number: int) -> str | None:
    try:
        return parse_line(number, requests.read(number)).custom_id
    except BadLine as error:
        return error.custom_id
