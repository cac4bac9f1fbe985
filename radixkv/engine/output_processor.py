# SPDX-License-Identifier: Apache-2.0
"""OutputProcessor: from sampled tokens to outputs, deltas for streams and whole outputs for other requests.

What fails here (a decoder, a stop condition, a sampling state) belongs to one request and comes back as its
`Failure`. Nothing in here holds blocks or a place in a queue.
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixkv.engine.outputs import CompletionOutput, OutputDelta, PromptOutcome, RequestOutput
from radixkv.errors import ENDS_PROCESS, RequestFailedError
from radixkv.images.placed_image import FIRST_IMAGE_ID
from radixkv.sampling.logprobs import Logprob, TokenLogprobs
from radixkv.sampling.sampler import NOTHING_LEFT, RawLogprobs, SampledToken, gather_logprobs
from radixkv.scheduling.request import Failure, FinishReason, Request, RequestTimes
from radixkv.scheduling.sequence import Sequence, SequenceTimes, TextSource

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("radixkv")

_NOT_NUMBERS = Failure("the model's logits are not numbers (NaN) for this request", "nan_logits")


@dataclass(slots=True)
class StepResult:
    """Results of one step.

    Attributes:
        deltas: increments of the requests that are streamed.
        finished: other requests that ended with it.
    """

    deltas: list[OutputDelta] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)


class OutputProcessor:
    """Collects the results of an engine's steps.

    Args:
        tokenizer: names tokens in logprobs; None: by their ids.

    Attributes:
        num_generated: tokens that requests have got.
    """

    def __init__(self, tokenizer: TextSource | None) -> None:
        self._tokenizer = tokenizer
        self._result = StepResult()
        self.num_generated = 0

    def take_result(self) -> StepResult:
        """Take the outputs added since the last call."""
        result, self._result = self._result, StepResult()
        return result

    def add_tokens(self, sample: Sequence, run: abc.Sequence[SampledToken], now: float) -> Failure | None:
        """Append tokens to a request; its `finish_reason` says then if it has ended.

        Tokens after its end are left out.

        Args:
            now: a clock reading, in seconds.

        Returns:
            Why the request can't go on, if so: it has got the tokens before.
        """
        if sample.times.first_token is None:
            sample.times.first_token = now
        tokens: list[int] = []
        for token in run:
            failure = self._add_token(sample, token)
            if failure is not None:
                sample.finish_reason = None  # whatever the token would have ended: this is what ends it
                self._emit(sample, tokens)
                return failure
            tokens.append(token.token_id)
            if sample.finish_reason is not None:
                sample.times.finished = now
                break
        self._emit(sample, tokens)
        return None

    def _add_token(self, sample: Sequence, token: SampledToken) -> Failure | None:
        """Append one token to a request."""
        if token.token_id < 0:
            failure = sample.sampling_state.failure
            if failure is not None:
                return Failure(failure, "grammar_failed")
            if token.token_id == NOTHING_LEFT:
                message = (
                    f"no token is left to choose after {sample.num_output_tokens}: all are ruled out by "
                    "bad_words, allowed_token_ids, min_tokens and the grammar together; loosen one of them"
                )
                return Failure(message, "no_token_left")
            return _NOT_NUMBERS
        try:
            sample.sampling_state.accept(token.token_id)
        except ENDS_PROCESS:
            raise
        except RequestFailedError as error:
            return Failure(str(error), error.code or "sampling_failed")
        except BaseException as error:
            return _failure(sample, "sampling", error, "sampling_failed")
        self.num_generated += 1
        try:
            sample.push(token.token_id, is_complete=sample.sampling_state.is_complete)
            if token.logprobs is not None:
                named = name_logprobs(token.logprobs, self._token_text)
                sample.record_logprobs(named)
        except ENDS_PROCESS:
            raise
        except BaseException as error:
            return _decoding_failure(sample, error)
        return None

    def add_prompt_logits(self, sample: Sequence, start: int, logits: torch.Tensor) -> Failure | None:
        """Record the logprobs of prompt tokens; logits [N, V] at position p belong to token p + 1.

        Args:
            start: position of the first row.

        Returns:
            Why the request can't go on, if so.
        """
        num_top = sample.params.prompt_logprobs
        assert sample.prompt_logprobs is not None
        assert num_top is not None
        end = min(start + len(logits), sample.num_prompt_tokens - 1)
        first = len(sample.prompt_logprobs) - 1  # position whose logits come next
        if end <= first:
            return None
        tokens = sample.tokens(first + 1, end + 1).tolist()
        # An image's tokens are not chosen, so they have no logprobs: any token's stand for them.
        is_text = [token < FIRST_IMAGE_ID for token in tokens]
        asked = [token if text else 0 for token, text in zip(tokens, is_text, strict=True)]
        found = gather_logprobs(logits[first - start : end - start], asked, num_top)
        try:
            named = [
                name_logprobs(raw, self._token_text) if text else None
                for raw, text in zip(found, is_text, strict=True)
            ]
        except ENDS_PROCESS:
            raise
        except BaseException as error:
            return _decoding_failure(sample, error)
        sample.prompt_logprobs.extend(named)
        return None

    @staticmethod
    def check_logits(row: torch.Tensor) -> Failure | None:
        """Return why a prompt with these last logits can't be trusted; None: it can. Waits."""
        return None if bool(row.max().isfinite()) else _NOT_NUMBERS

    def end(self, sample: Sequence, reason: FinishReason, now: float) -> None:
        """End a sample without another token; deliver its last delta."""
        sample.times.finished = now
        try:
            sample.abort(reason)
        except ENDS_PROCESS:
            raise
        except BaseException as error:  # the decoder is what has failed: its last half character is lost
            logger.debug("the end of %r was lost", sample, exc_info=error)
        self._emit(sample, ())

    def close(self, request: Request) -> None:
        """Deliver the unsent parts of a request whose samples have all ended."""
        if not request.stream:
            self._result.finished.append(_collect(request))
        elif request.is_ranked:
            self._result.deltas.extend(_ranked_deltas(request))

    def _emit(self, sample: Sequence, token_ids: abc.Sequence[int]) -> None:
        """Deliver a step's addition to a sample, if any, and how it ended if it did."""
        request = sample.request
        if not request.stream or request.is_ranked or not (token_ids or sample.finish_reason):
            return
        text, logprobs = sample.take()
        self._result.deltas.append(
            _delta(sample, sample.index, text, list(token_ids), logprobs, is_last=request.is_finished)
        )

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id) if self._tokenizer is not None else str(token_id)


def _failure(sample: Sequence, what: str, error: BaseException, code: str) -> Failure:
    logger.error("%s of %r failed", what, sample, exc_info=error)
    return Failure(f"{what} failed: {error}", code)


def _decoding_failure(sample: Sequence, error: BaseException) -> Failure:
    return _failure(sample, "decoding the output", error, "detokenization_failed")


def _delta(
    sample: Sequence,
    index: int,
    text: str,
    token_ids: list[int],
    logprobs: list[TokenLogprobs],
    *,
    is_last: bool,
) -> OutputDelta:
    """Return the new parts of one sample as a delta."""
    request = sample.request
    delta = OutputDelta(sample.request_id, index, text, token_ids, logprobs or None)
    delta.accepted_draft_tokens, sample.accepted_draft_tokens = sample.accepted_draft_tokens, 0
    delta.rejected_draft_tokens, sample.rejected_draft_tokens = sample.rejected_draft_tokens, 0
    first = request.samples[0]
    if not request.prompt_was_sent and first.was_admitted:
        request.prompt_was_sent = True
        delta.prompt = PromptOutcome(
            first.num_prompt_tokens,
            first.num_cached_tokens,
            first.num_cache_write_tokens,
            request.num_pinned_tokens,
            first.cache_report,
            None if first.needs_prompt_logits else first.prompt_logprobs,
            first.tier_hits,
        )
        delta.times = _since_arrival(sample.times)
    if sample.finish_reason is not None:
        delta.finish_reason, delta.stop_reason = sample.finish_reason, sample.stop_reason
        delta.times = _since_arrival(sample.times)
        delta.is_last = is_last
        if request.failure is not None and (is_last or sample.finish_reason == "error"):
            delta.error, delta.error_code = request.failure.message, request.failure.code
    return delta


def _ranked(samples: abc.Sequence[Sequence]) -> list[Sequence]:
    """Return samples by descending mean logprob of their tokens."""

    def mean_logprob(sample: Sequence) -> float:
        return sample.cumulative_logprob / max(1, sample.num_output_tokens)

    return sorted(samples, key=mean_logprob, reverse=True)


def _ranked_deltas(request: Request) -> list[OutputDelta]:
    """Return the n best of best_of samples, each as one delta, by mean logprob of their tokens."""
    wanted = request.params.reports_logprobs
    best = _ranked(request.samples)[: request.params.n]
    return [
        _delta(
            sample,
            index,
            sample.text,
            sample.output_token_ids(),
            sample.logprobs if wanted else [],
            is_last=sample is best[-1],
        )
        for index, sample in enumerate(best)
    ]


def _collect(request: Request) -> RequestOutput:
    """Return a finished request as one object, the n best samples first when best_of > n."""
    params = request.params
    ranked = _ranked(request.samples) if request.is_ranked else request.samples
    first = request.samples[0]
    outputs = []
    for index, sample in enumerate(ranked[: params.n]):
        wanted = params.reports_logprobs
        outputs.append(
            CompletionOutput(
                index=index,
                text=sample.text,
                token_ids=sample.output_token_ids(),
                logprobs=sample.logprobs if wanted else None,
                cumulative_logprob=sample.cumulative_logprob if wanted else None,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
            )
        )
    return RequestOutput(
        request_id=first.request_id,
        prompt=request.text,
        prompt_token_ids=first.tokens(0, first.num_prompt_tokens).tolist(),
        outputs=outputs,
        num_cached_tokens=first.num_cached_tokens,
        num_cache_write_tokens=first.num_cache_write_tokens,
        cache_report=first.cache_report,
        prompt_logprobs=first.prompt_logprobs,
        num_generated_tokens=sum(sample.num_output_tokens for sample in request.samples),
        num_preemptions=sum(sample.num_preemptions for sample in request.samples),
        accepted_draft_tokens=sum(sample.accepted_draft_tokens for sample in request.samples),
        rejected_draft_tokens=sum(sample.rejected_draft_tokens for sample in request.samples),
        times=_since_arrival(first.times),
        num_pinned_tokens=request.num_pinned_tokens,
        tier_hits=first.tier_hits,
        error=request.failure.message if request.failure is not None else None,
        error_code=request.failure.code if request.failure is not None else None,
    )


def _since_arrival(times: SequenceTimes) -> RequestTimes:
    """Express readings of the engine's clock as durations, for readers with another clock."""
    marks = (times.first_scheduled, times.first_token, times.finished)
    return RequestTimes(*(None if mark is None else max(0.0, mark - times.arrival) for mark in marks))


def name_logprobs(raw: RawLogprobs, text_of: Callable[[int], str]) -> TokenLogprobs:
    """Turn raw logprobs into a record that carries each token's text."""
    token_id, logprob, rank = raw.chosen
    return TokenLogprobs(
        chosen=Logprob(token_id, logprob, rank, text_of(token_id)),
        top=tuple(Logprob(t, value, i + 1, text_of(t)) for i, (t, value) in enumerate(raw.top)),
        named=raw.named,
    )
