# SPDX-License-Identifier: Apache-2.0
"""Outputs for users: of a request as a whole (`RequestOutput`) or as its deltas (`OutputDelta`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixkv.sampling.logprobs import TokenLogprobs
from radixkv.scheduling.request import FinishReason, RequestTimes

if TYPE_CHECKING:
    from radixkv.cache.reporting.explain import MissReport, TierHit

#: Characters of a text in the `repr` of an output.
_SHOWN_CHARS = 60


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…")


@dataclass(slots=True, repr=False)
class CompletionOutput:
    """A sample of a request.

    Attributes:
        index: 0 to n - 1.
        text: the generated text, stop string removed.
        token_ids: the generated ids, a final stop or end token included.
        logprobs: one entry per token of `token_ids`, or None when not asked for.
        cumulative_logprob: sum of the chosen tokens' logprobs, or None when not asked for.
        finish_reason: `stop`, `length`, `abort` or `error`; None while running.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end token.
        score: beam search only: cumulative logprob over length to the power of the length penalty.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    def __repr__(self) -> str:
        end = f", {self.finish_reason}" if self.finish_reason else ""
        score = f", score {self.score:.3f}" if self.score is not None else ""
        return (
            f"CompletionOutput({self.index}: {_shown(self.text)}, {len(self.token_ids)} tokens{end}{score})"
        )


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """Cache use of a request's prompt, in the fields of `RequestOutput`.

    Attributes:
        num_tokens: tokens of the prompt.
        logprobs: logprobs of the whole prompt; None when not asked for.
    """

    num_tokens: int
    num_cached_tokens: int = 0
    num_cache_write_tokens: int = 0
    num_pinned_tokens: int | None = None
    cache_report: MissReport | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    tier_hits: tuple[TierHit, ...] | None = None


@dataclass(slots=True, repr=False)
class RequestOutput:
    """A finished request.

    Attributes:
        num_cached_tokens: prompt tokens whose K/V came from the cache when the request was first admitted.
        num_cache_write_tokens: prompt tokens that the cache did not hold when the request was first admitted,
            and holds because of it; 0 when prefix caching is off. A recomputed cached token (the
            last token of a prompt that is cached whole) counts neither as this nor as cached.
        num_pinned_tokens: prompt tokens that are pinned because the request asked for it, as far as the
            budget went; None: it did not ask.
        tier_hits: cached tokens brought by tiers below the cache; None: there is no tier.
        cache_report: why the rest of the prompt missed; None when prefix caching is off.
        prompt_logprobs: one entry per prompt token, None for the first; None when not asked for.
        num_preemptions: how often the request was preempted and resumed.
        accepted_draft_tokens, rejected_draft_tokens: guesses of next tokens that were right, and wrong, of
            all samples; see `EngineConfig.speculation`.
        num_generated_tokens: of all samples, discarded ones of `best_of` included.
        error: message, when a finish reason is `error`.
        error_code: machine-readable reason of the error, such as `timeout`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    num_cache_write_tokens: int = 0
    cache_report: MissReport | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_preemptions: int = 0
    num_generated_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    times: RequestTimes | None = None
    error: str | None = None
    error_code: str | None = None
    num_pinned_tokens: int | None = None
    tier_hits: tuple[TierHit, ...] | None = None

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f" {_shown(self.prompt)}"
        miss = "" if self.cache_report is None else f" ({self.cache_report.reason})"
        error = "" if self.error is None else f", error {self.error_code}: {_shown(self.error)}"
        return (
            f"RequestOutput({self.request_id}: {len(self.prompt_token_ids)} prompt tokens{prompt}, "
            f"{self.num_cached_tokens} cached{miss}, outputs={self.outputs}{error})"
        )


@dataclass(slots=True, repr=False)
class OutputDelta:
    """A step's addition to one sample of a request; the stream of these concatenates to the whole.

    Attributes:
        text: may be empty: text is held back while it could be part of a stop string or of an incomplete
            character.
        finish_reason, stop_reason: in the sample's last delta.
        prompt: in the request's first delta alone; None there, too, if the request ended before it was
            admitted.
        times: in the request's first delta, and, complete, in each sample's last.
        accepted_draft_tokens, rejected_draft_tokens: guesses that the step found to be right, and wrong.
        error, error_code: as in `RequestOutput`, where the finish reason is `error`.
        is_last: the request has ended: all its samples have.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt: PromptOutcome | None = None
    times: RequestTimes | None = None
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    is_last: bool = False

    def __repr__(self) -> str:
        end = f", {self.finish_reason}" if self.finish_reason else ""
        size = f"{len(self.token_ids)} tokens"
        return f"OutputDelta({self.request_id}, {self.index}: {_shown(self.text)}, {size}{end})"
