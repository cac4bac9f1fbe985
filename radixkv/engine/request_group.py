"""The bookkeeping around samples: a request with all its samples, one step's results, the counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.engine.output_processor import SampleOutput
from radixkv.request import CompletionOutput, OutputDelta, RequestOutput, SamplingParams, TokenLogprobs
from radixkv.sampling.sampling_state import SamplingState
from radixkv.scheduling.request_state import Request


@dataclass(slots=True)
class EngineStats:
    """A snapshot of the engine's counters; tokens and requests since the start, times in seconds.

    Attributes:
        cache: the prefix cache's own snapshot.
        model_time_s: time in the model, sampling included.
        gap_time_s: time between two model calls while work was waiting.
        num_rebuilds: how often a broken invariant made the engine rebuild its cache.
    """

    num_waiting: int
    num_running: int
    num_preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    computed_prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    finished_requests: int
    failed_requests: int
    aborted_requests: int
    steps: int
    model_time_s: float
    gap_time_s: float
    num_rebuilds: int
    cache: Any


@dataclass(slots=True)
class StepResult:
    """What one step gave: increments of every sample, and the requests that ended with it."""

    deltas: list[OutputDelta] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)


class Sample(Request):
    """A request to the scheduler, with its text and stop conditions, its random stream, and its siblings.

    Its maker sets all three.
    """

    __slots__ = ("group", "output", "sampling_state")
    group: RequestGroup
    output: SampleOutput
    sampling_state: SamplingState


def sample_of(request: Request) -> Sample:
    """The scheduler gives back what it was given: all its requests are samples."""
    assert isinstance(request, Sample)
    return request


@dataclass(slots=True)
class RequestGroup:
    """All samples of one request as the user sees it."""

    request_id: str
    prompt: str | None
    params: SamplingParams
    samples: list[Sample]
    error: str | None = None
    error_code: str | None = None

    @property
    def is_finished(self) -> bool:
        return all(sample.is_finished for sample in self.samples)

    @property
    def is_ranked(self) -> bool:
        """With best_of > n nothing can be delivered before all samples are complete."""
        return self.params.num_samples > self.params.n


def rank_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Samples by descending mean logprob of their tokens."""

    def mean_logprob(request: Sample) -> float:
        return request.output.cumulative_logprob / max(1, request.output.num_tokens)

    return sorted(samples, key=mean_logprob, reverse=True)


def make_delta(
    request: Sample, text: str, token_ids: list[int], logprobs: list[TokenLogprobs] | None
) -> OutputDelta:
    """What a step adds to one sample, with how it ended if it did."""
    output, group = request.output, request.group
    failed = output.finish_reason == "error"
    return OutputDelta(
        request.request_id,
        request.index,
        text,
        token_ids,
        logprobs,
        output.finish_reason,
        output.stop_reason,
        request.num_prompt_tokens,
        request.num_cached_tokens,
        request.cache_report,
        group.error if failed else None,
        group.error_code if failed else None,
    )


def ranked_deltas(group: RequestGroup) -> list[OutputDelta]:
    """The n best of best_of complete samples, each as one delta, by mean logprob of their tokens."""
    deltas = []
    for index, request in enumerate(rank_samples(group.samples)[: group.params.n]):
        output = request.output
        logprobs = list(output.logprobs) if group.params.logprobs is not None else None
        delta = make_delta(request, output.text, request.output_token_ids(), logprobs)
        delta.index = index
        deltas.append(delta)
    return deltas


def collect_output(group: RequestGroup) -> RequestOutput:
    """The finished request as one object, the n best samples first when best_of > n."""
    params = group.params
    ranked = rank_samples(group.samples) if group.is_ranked else group.samples
    first = group.samples[0]
    outputs = []
    for index, request in enumerate(ranked[: params.n]):
        output = request.output
        wanted = params.logprobs is not None
        outputs.append(
            CompletionOutput(
                index=index,
                text=output.text,
                token_ids=request.output_token_ids(),
                logprobs=list(output.logprobs) if wanted else None,
                cumulative_logprob=output.cumulative_logprob if wanted else None,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
        )
    return RequestOutput(
        request_id=first.request_id,
        prompt=group.prompt,
        prompt_token_ids=first.tokens.view(0, first.num_prompt_tokens).tolist(),
        outputs=outputs,
        num_cached_tokens=first.num_cached_tokens,
        cache_report=first.cache_report,
        prompt_logprobs=first.prompt_logprobs,
        num_preemptions=sum(request.num_preemptions for request in group.samples),
        num_generated_tokens=sum(request.output.num_tokens for request in group.samples),
        times=first.times,
        error=group.error,
        error_code=group.error_code,
    )
