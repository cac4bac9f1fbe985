"""Generation: running a request's prompts on the engine, with everything counted.

It knows no dialect: a `GenerationRequest` goes in, outputs or deltas come out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from radixkv.client import EngineClient
from radixkv.errors import ContextLengthExceededError, EngineStoppedError, RequestFailedError
from radixkv.request import OutputDelta, RequestOutput
from radixkv_server.concurrency import gather_or_cancel, merge
from radixkv_server.errors import ApiError
from radixkv_server.generation_request import GenerationRequest, Job
from radixkv_server.http.metrics import ServerMetrics
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.usage import Usage

if TYPE_CHECKING:
    from radixkv.cache.insight.explain import MissReport


class Generation:
    """The engine's work for one HTTP request, in no dialect.

    Attributes:
        usage: token counts so far, complete once `run` has returned or `stream` has ended.
    """

    def __init__(
        self, engine: EngineClient, metrics: ServerMetrics, record: RequestRecord, request: GenerationRequest
    ) -> None:
        self.usage = Usage(prompt_tokens=sum(len(job.prompt_ids) for job in request.jobs))
        self._engine = engine
        self._metrics = metrics
        self._record = record
        self._request = request

    async def run(self) -> list[RequestOutput]:
        """Generate all jobs to their end, at once.

        Raises:
            RadixKVError: one of them was refused or failed; the others have been aborted.
        """
        try:
            outputs = await gather_or_cancel([self._run_one(*item) for item in enumerate(self._request.jobs)])
        except ContextLengthExceededError as error:
            raise self._too_long(error) from None
        for index, output in enumerate(outputs):
            self._note_cache_report(index, output.cache_report)
            self.usage.completion_tokens += output.num_generated_tokens
            for sample in output.outputs:
                _check_finish(sample.finish_reason, output.error, output.error_code)
            self.usage.cached_tokens += output.num_cached_tokens
            self.usage.cache_write_tokens += output.num_cache_write_tokens
        self._note_first_token([output.times.first_token for output in outputs if output.times is not None])
        self._note_usage()
        return outputs

    async def _run_one(self, index: int, job: Job) -> RequestOutput:
        output = await self._engine.generate(job.prompt_ids, job.params, **self._options(index))
        await self._keep(job)
        return output

    async def stream(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Deltas of all jobs as they come, each with the index of its job.

        Raises:
            RadixKVError: one of them was refused or failed; the others have been aborted.
        """
        streams = [
            self._engine.stream(job.prompt_ids, job.params, **self._options(index))
            for index, job in enumerate(self._request.jobs)
        ]
        last_token_at: dict[tuple[int, int], float] = {}
        cached: dict[int, tuple[int, int]] = {}  # of each prompt; (0, 0) until it is admitted
        kept: set[int] = set()
        first = True
        try:
            async for index, delta in merge(streams):
                found = (delta.num_cached_tokens, delta.num_cache_write_tokens)
                cached[index] = max(cached.get(index, (0, 0)), found)
                self._note_cache_report(index, delta.cache_report)
                if delta.token_ids:
                    self.usage.completion_tokens += len(delta.token_ids)
                    if first:
                        first = False
                        self._note_first_token([time.monotonic()])
                    now = time.monotonic()
                    before = last_token_at.get((index, delta.index))
                    if before is not None:
                        self._metrics.itl.observe((now - before) / len(delta.token_ids))
                    last_token_at[index, delta.index] = now
                _check_finish(delta.finish_reason, delta.error, delta.error_code)
                self.usage.cached_tokens = sum(read for read, _ in cached.values())
                self.usage.cache_write_tokens = sum(written for _, written in cached.values())
                yield index, delta
                if index not in kept:
                    kept.add(index)
                    await self._keep(self._request.jobs[index])
        except ContextLengthExceededError as error:
            raise self._too_long(error) from None
        finally:
            self._note_usage()

    async def _keep(self, job: Job) -> None:
        """Pin what a prompt asks to be kept, as far as the budget goes; it has been computed."""
        owner = {"tenant": self._record.tenant, "salt": self._request.cache_salt or ""}
        with contextlib.suppress(EngineStoppedError):  # what has been generated is still an answer
            for prefix in job.kept:
                ids = job.prompt_ids[: prefix.num_tokens]
                await self._engine.cache.pin(ids, ttl=prefix.ttl, at_least=True, **owner)

    def _options(self, index: int) -> dict[str, Any]:
        return {
            "request_id": f"{self._request.id}-{index}",
            "tenant": self._record.tenant,
            "salt": self._request.cache_salt or "",
            "priority": self._request.priority,
        }

    def _too_long(self, error: ContextLengthExceededError) -> ContextLengthExceededError:
        """The engine does not know what the prompt is called in this route's body."""
        return ContextLengthExceededError(str(error), param=self._request.prompt_param)

    def _note_cache_report(self, index: int, report: MissReport | None) -> None:
        """Keep a prompt's report for the usage, and count it, once."""
        if report is not None and index not in self.usage.reports_by_prompt:
            self.usage.reports_by_prompt[index] = report
            self._metrics.observe_cache_report(report)

    def _note_first_token(self, readings: Sequence[float | None]) -> None:
        """Count the time to the request's first token, whichever prompt it is for; one clock for all."""
        seen = [reading for reading in readings if reading is not None]
        if seen:
            self._metrics.ttft.observe(min(seen) - self._record.started)

    def _note_usage(self) -> None:
        record = self._record
        record.prompt_tokens = self.usage.prompt_tokens
        record.cached_tokens = self.usage.cached_tokens
        record.completion_tokens = self.usage.completion_tokens


def _check_finish(reason: str | None, error: str | None, code: str | None) -> None:
    if reason == "error":
        raise RequestFailedError(error or "the request failed while it ran", code=code)
    if reason == "abort":
        raise ApiError(503, error or "The request was aborted by the server.", code="aborted")
