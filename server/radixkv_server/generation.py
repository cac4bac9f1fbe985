"""Running prompts on the engine for one HTTP request: jobs in, outputs or deltas out, everything counted."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixkv.errors import ContextLengthExceededError, InvalidRequestError, RequestFailedError
from radixkv.request import OutputDelta, RequestOutput, SamplingParams
from radixkv_server.apis.openai.rendering import Usage
from radixkv_server.apis.openai.schemas import GenerationRequest
from radixkv_server.context import ServerContext
from radixkv_server.http.auth import namespace_for
from radixkv_server.http.errors import ApiError
from radixkv_server.http.observation import RequestRecord
from radixkv_server.http.streaming import gather_or_cancel, merge

if TYPE_CHECKING:
    from radixkv.cache.insight.explain import MissReport


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt with its sampling parameters."""

    prompt_ids: list[int]
    params: SamplingParams


def new_id(prefix: str) -> str:
    """A fresh id of an answer, `prefix-` and 32 hex digits."""
    return f"{prefix}-{uuid.uuid4().hex}"


def fit_max_tokens(requested: int | None, num_prompt_tokens: int, max_model_len: int) -> int | None:
    """`max_tokens` clamped to what is left of the context; values below 1 are left to be refused."""
    if requested is None:
        return None
    return min(requested, max_model_len - num_prompt_tokens)


def check_vocabulary(options: dict[str, Any], vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary in `logit_bias` and `stop_token_ids`.

    Raises:
        InvalidRequestError: names the field and the id.
    """
    for name in ("logit_bias", "stop_token_ids"):
        for token in options.get(name, ()):
            if not 0 <= token < vocab_size:
                message = f"{name}: token id {token} is outside the vocabulary of {vocab_size} tokens"
                raise InvalidRequestError(message, param=name)


class Generation:
    """The engine's work for one HTTP request: one or more jobs under one namespace and priority.

    Attributes:
        usage: token counts so far, complete once `run` has returned or `stream` has ended.
    """

    def __init__(
        self,
        context: ServerContext,
        record: RequestRecord,
        body: GenerationRequest,
        jobs: Sequence[Job],
        answer_id: str,
        prompt_param: str,
    ) -> None:
        self.context = context
        self.record = record
        self.jobs = list(jobs)
        self.usage = Usage(prompt_tokens=sum(len(job.prompt_ids) for job in jobs))
        self._namespace = namespace_for(record.tenant, body.cache_salt)
        self._priority = body.priority or 0
        self._id = answer_id
        self._prompt_param = prompt_param

    async def run(self) -> list[RequestOutput]:
        """Generate all jobs to their end, at once.

        Raises:
            RadixKVError: one of them was refused or failed; the others have been aborted.
        """
        try:
            outputs = await gather_or_cancel([self._run_one(*item) for item in enumerate(self.jobs)])
        except ContextLengthExceededError as error:
            raise self._too_long(error) from None
        for index, output in enumerate(outputs):
            self._note_cache_report(index, output.cache_report)
            for sample in output.outputs:
                self.usage.completion_tokens += len(sample.token_ids)
                _check_finish(sample.finish_reason, output.error, output.error_code)
            self.usage.cached_tokens += output.num_cached_tokens
            times = output.times
            if times is not None and times.first_token is not None:
                self.context.metrics.ttft.observe(times.first_token - times.arrival)
        self._note_usage()
        return outputs

    async def _run_one(self, index: int, job: Job) -> RequestOutput:
        return await self.context.engine.generate(job.prompt_ids, job.params, **self._options(index))

    async def stream(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Deltas of all jobs as they come, each with the index of its job.

        Raises:
            RadixKVError: one of them was refused or failed; the others have been aborted.
        """
        metrics = self.context.metrics
        engine = self.context.engine
        streams = [
            engine.stream(job.prompt_ids, job.params, **self._options(index))
            for index, job in enumerate(self.jobs)
        ]
        last_token_at: dict[tuple[int, int], float] = {}
        cached: dict[int, int] = {}
        first = True
        try:
            async for index, delta in merge(streams):
                cached[index] = max(cached.get(index, 0), delta.num_cached_tokens)
                self._note_cache_report(index, delta.cache_report)
                if delta.token_ids:
                    self.usage.completion_tokens += len(delta.token_ids)
                    if first:
                        first = False
                        metrics.ttft.observe(self.record.age_s)
                    now = time.perf_counter()
                    before = last_token_at.get((index, delta.index))
                    if before is not None:
                        metrics.itl.observe((now - before) / len(delta.token_ids))
                    last_token_at[index, delta.index] = now
                _check_finish(delta.finish_reason, delta.error, delta.error_code)
                self.usage.cached_tokens = sum(cached.values())
                yield index, delta
        except ContextLengthExceededError as error:
            raise self._too_long(error) from None
        finally:
            self._note_usage()

    def _options(self, index: int) -> dict[str, Any]:
        return {
            "request_id": f"{self._id}-{index}",
            "namespace": self._namespace,
            "priority": self._priority,
        }

    def _too_long(self, error: ContextLengthExceededError) -> ContextLengthExceededError:
        """The engine does not know what the prompt is called in this route's body."""
        return ContextLengthExceededError(str(error), param=self._prompt_param)

    def _note_cache_report(self, index: int, report: MissReport | None) -> None:
        """Keep a prompt's report for the usage, and count it, once."""
        if report is not None and index not in self.usage.cache_reports:
            self.usage.cache_reports[index] = report
            self.context.metrics.observe_cache_report(report)

    def _note_usage(self) -> None:
        record = self.record
        record.prompt_tokens = self.usage.prompt_tokens
        record.cached_tokens = self.usage.cached_tokens
        record.completion_tokens = self.usage.completion_tokens


def _check_finish(reason: str | None, error: str | None, code: str | None) -> None:
    if reason == "error":
        raise RequestFailedError(error or "the request failed while it ran", code=code)
    if reason == "abort":
        raise ApiError(503, error or "The request was aborted by the server.", code="aborted")
