"""Generation: running a request's prompts on the engine, with everything counted.

It knows no dialect: a `GenerationRequest` goes in, outputs or deltas come out.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from radixkv.client import EngineClient
from radixkv.errors import (
    ContextLengthExceededError,
    EngineStoppedError,
    InvalidRequestError,
    RequestFailedError,
)
from radixkv.request import OutputDelta, RequestOutput
from radixkv_server.errors import ApiError
from radixkv_server.generation.concurrency import gather_or_cancel, merge
from radixkv_server.generation.metering import Meter
from radixkv_server.generation.request import GenerationRequest, PromptRequest
from radixkv_server.generation.usage import Usage
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.insight.activity import Activity
from radixkv_server.metrics.request_metrics import ServerMetrics


class Generation:
    """The engine's work for one HTTP request, in no dialect.

    Attributes:
        meter: what it used so far; complete once `run` has returned or `stream` has ended. Whoever says the
            answer closes it.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: ServerMetrics,
        record: RequestRecord,
        request: GenerationRequest,
        activity: Activity,
    ) -> None:
        prompts = [
            (len(prompt_request.prompt_ids), prompt_request.params.n)
            for prompt_request in request.prompt_requests
        ]
        self.meter = Meter(
            metrics, record, prompts, [prompt_request.hint for prompt_request in request.prompt_requests]
        )
        self._engine = engine
        self._record = record
        record.operation = request.operation
        self._request = request
        self._activity = activity

    @property
    def usage(self) -> Usage:
        return self.meter.usage

    async def check_quota(self) -> None:
        """Make sure, before the first of several prompts begins, that the tenant's ceiling lets all run.

        Raises:
            ContextLengthExceededError: one of them never can.
        """
        prompts = [prompt_request.prompt_ids for prompt_request in self._request.prompt_requests]
        salt = self._request.cache_salt or ""
        try:
            await self._engine.check_quota(prompts, tenant=self._record.tenant, salt=salt)
        except InvalidRequestError as error:
            raise self._named(error) from None

    async def run(self) -> list[RequestOutput]:
        """Generate all jobs to their end, at once.

        Raises:
            RadixKVError: one of them was refused or failed; the others have been aborted.
        """
        with self._activity.watch(self._record, self._request) as watch:
            try:
                outputs = await gather_or_cancel(
                    [self._run_one(*item) for item in enumerate(self._request.prompt_requests)]
                )
            except InvalidRequestError as error:
                raise self._named(error) from None
            for index, output in enumerate(outputs):
                self.meter.take_output(index, output)
                watch.take_output(index, output)
            for output in outputs:
                for sample in output.outputs:
                    _check_finish(sample.finish_reason, output.error, output.error_code)
        self.meter.first_tokens_came()
        return outputs

    async def _run_one(self, index: int, prompt_request: PromptRequest) -> RequestOutput:
        output = await self._engine.generate(
            prompt_request.prompt_ids, prompt_request.params, **self._options(index)
        )
        await self._keep(prompt_request)
        return output

    async def stream(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Deltas of all jobs as they come, each with the index of its job.

        Raises:
            RadixKVError: one of them was refused or failed; the others have been aborted.
        """
        streams = [
            self._engine.stream(prompt_request.prompt_ids, prompt_request.params, **self._options(index))
            for index, prompt_request in enumerate(self._request.prompt_requests)
        ]
        kept: set[int] = set()
        with self._activity.watch(self._record, self._request) as watch:
            try:
                async for index, delta in merge(streams):
                    self.meter.take_delta(index, delta)
                    watch.take_delta(index, delta)
                    _check_finish(delta.finish_reason, delta.error, delta.error_code)
                    yield index, delta
                    if index not in kept:
                        kept.add(index)
                        await self._keep(self._request.prompt_requests[index])
            except InvalidRequestError as error:
                raise self._named(error) from None

    async def _keep(self, prompt_request: PromptRequest) -> None:
        """Pin what a prompt asks to be kept, as far as the budget goes; it has been computed."""
        owner = {"tenant": self._record.tenant, "salt": self._request.cache_salt or ""}
        pinned = 0
        with contextlib.suppress(EngineStoppedError):  # what has been generated is still an answer
            for prefix in prompt_request.pins:
                ids = prompt_request.prompt_ids[: prefix.num_tokens]
                found = await self._engine.cache.pin(ids, ttl=prefix.ttl, at_least=True, **owner)
                pinned = max(pinned, found)
        if prompt_request.pins:
            self.usage.pinned_tokens = (self.usage.pinned_tokens or 0) + pinned

    def _options(self, index: int) -> dict[str, Any]:
        return {
            "request_id": f"{self._request.id}-{index}",
            "tenant": self._record.tenant,
            "salt": self._request.cache_salt or "",
            "cache_key_hint": self._request.cache_key_hint,
            "priority": self._request.priority,
        }

    def _named(self, error: InvalidRequestError) -> InvalidRequestError:
        """The engine does not know what prompt and grammar are called in this route's body."""
        if isinstance(error, ContextLengthExceededError):
            return ContextLengthExceededError(str(error), param=self._request.prompt_param)
        if error.param == "structured":
            return self._request.prompt_requests[0].grammar_places.name(error)
        return error


def _check_finish(reason: str | None, error: str | None, code: str | None) -> None:
    if reason == "error":
        raise RequestFailedError(error or "the request failed while it ran", code=code)
    if reason == "abort":
        raise ApiError(503, error or "The request was aborted by the server.", code="aborted")
