# SPDX-License-Identifier: Apache-2.0
"""Asking: the common form of all APIs' bodies, the checks that they share, and the usage of a request.

Usage, metrics, traces, rate limits and the list of the latest requests all read the usage's records, which
follow the engine's deltas or its output.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from radixkv.cache.keys import EncodedTokens
from radixkv.engine.outputs import OutputDelta, PromptOutcome, RequestOutput
from radixkv.errors import InvalidRequestError
from radixkv.observe.prompt_parts import PromptParts
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import PrefixPin, Request, RequestTimes
from radixkv.text.chat_formats.client_rules import ClientRule
from radixkv_server.diagnostics.comparison import Comparison
from radixkv_server.diagnostics.fingerprint import Fingerprint
from radixkv_server.errors import bad_request
from radixkv_server.generation.grammar_places import GrammarPlaces

if TYPE_CHECKING:
    from radixkv.cache.reporting.explain import MissReport


MIN_RATED = 4  # fewest tokens after the first one for a rate,
MIN_STEPS = 2  # and fewest steps that they came in


@dataclass(slots=True)
class SampleProgress:
    """Answer to a prompt; `latest_at` is the time of its latest tokens, by the server's clock."""

    num_tokens: int = 0
    latest_at: float = 0.0
    finish_reason: str | None = None


@dataclass(slots=True)
class PromptProgress:
    """Prompt and its answers so far.

    Attributes:
        num_tokens: tokens of the prompt.
        num_samples: number of requested answers.
        outcome: the cache's work for it; None: it has not been admitted yet.
        times: times in seconds since its arrival in the engine; None: not known.
        arrived_at: time of that arrival, by the server's monotonic clock.
        first_token_at: time of the first token, likewise.
        num_generated_tokens: tokens of all samples, including samples of `best_of` that were not chosen.
        samples: samples that have begun, by their index.
    """

    num_tokens: int
    num_samples: int = 1
    outcome: PromptOutcome | None = None
    times: RequestTimes | None = None
    arrived_at: float = 0.0
    first_token_at: float | None = None
    num_generated_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    samples: dict[int, SampleProgress] = field(default_factory=dict)
    _rated_tokens: int = 0  # tokens after the first ones,
    _rated_steps: int = 0  # the steps that they came in,
    _rated_at: float = 0.0  # and the time of the last of them

    @property
    def has_begun(self) -> bool:
        """True once the engine has reported anything."""
        return self.outcome is not None or bool(self.samples)

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self.outcome is None else self.outcome.num_cached_tokens

    @property
    def report(self) -> MissReport | None:
        """Report on the miss; None: not known, or prefix caching is off."""
        return None if self.outcome is None else self.outcome.cache_report

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None: too few tokens to tell."""
        # The tokens of one step come at once, and a few say more about the clock than about the engine.
        if self.first_token_at is None or self._rated_tokens < MIN_RATED or self._rated_steps < MIN_STEPS:
            return None
        spent = self._rated_at - self.first_token_at
        return self._rated_tokens / spent if spent > 0 else None

    def take_delta(self, delta: OutputDelta, now: float) -> float | None:
        """Count a step's addition to a sample, read at `now`.

        Returns:
            Seconds since the sample's previous tokens; None: there are none before, or none in this step.
        """
        sample = self.samples.setdefault(delta.index, SampleProgress())
        self.outcome = self.outcome or delta.prompt
        if delta.times is not None and (self.times is None or delta.index == 0):
            self._take_times(delta.times, now)
        self.accepted_draft_tokens += delta.accepted_draft_tokens
        self.rejected_draft_tokens += delta.rejected_draft_tokens
        sample.finish_reason = delta.finish_reason
        count = len(delta.token_ids)
        if not count:
            return None
        self.num_generated_tokens += count
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self._rate(count, 1, now)
        since = now - sample.latest_at if sample.num_tokens else None
        sample.num_tokens += count
        sample.latest_at = now
        return since

    def take_output(self, output: RequestOutput, now: float) -> None:
        """Count a whole output, read at `now`."""
        self.outcome = PromptOutcome(
            self.num_tokens,
            output.num_cached_tokens,
            output.num_cache_write_tokens,
            output.num_pinned_tokens,
            output.cache_report,
            tier_hits=output.tier_hits,
        )
        self.num_generated_tokens = output.num_generated_tokens
        self.accepted_draft_tokens = output.accepted_draft_tokens
        self.rejected_draft_tokens = output.rejected_draft_tokens
        for one in output.outputs:
            self.samples[one.index] = SampleProgress(len(one.token_ids), now, one.finish_reason or "abort")
        if output.times is not None:
            self._take_times(output.times, now)
            if output.times.first_token is not None:
                self.first_token_at = self.arrived_at + output.times.first_token
                later = output.num_generated_tokens - self.num_samples
                # A step gives one token, and the guesses that it found to be right.
                self._rate(later, later - output.accepted_draft_tokens, now)

    def _take_times(self, times: RequestTimes, now: float) -> None:
        """Take in times in seconds, ascending; the last is now."""
        latest = times.finished or times.first_token or times.first_scheduled or 0.0
        self.times, self.arrived_at = times, now - latest

    def _rate(self, num_tokens: int, num_steps: int, now: float) -> None:
        self._rated_tokens += num_tokens
        self._rated_steps += num_steps
        self._rated_at = now


#: Adds to a prompt's miss report; None: nothing.
Hint = Callable[["MissReport"], str | None]


@dataclass(slots=True)
class Usage:
    """Token counts of an HTTP request so far, summed over its prompts and samples.

    Attributes:
        prompts: progress of each prompt, from which the counts are read.
        hints: functions that make a hint for each prompt's report.
        written_ends: number of leading tokens of each prompt that can count as written; None: all.
    """

    prompts: Sequence[PromptProgress] = ()
    hints: Sequence[Hint] = ()
    written_ends: Sequence[int | None] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose K/V came from the cache."""
        return sum(prompt.num_cached_tokens for prompt in self.prompts)

    @property
    def by_tier(self) -> dict[str, tuple[int, float]] | None:
        """Cached tokens by memory, with the seconds spent waiting for them.

        `memory` is the cache itself. None: the engine has no tiers.
        """
        hits = [prompt.outcome.tier_hits for prompt in self.prompts if prompt.outcome]
        if all(found is None for found in hits):
            return None
        sums: dict[str, tuple[int, float]] = {"memory": (self.cached_tokens, 0.0)}
        for hit in (hit for found in hits for hit in found or ()):
            tokens, seconds = sums.get(hit.tier, (0, 0.0))
            sums[hit.tier] = tokens + hit.num_tokens, seconds + hit.seconds
            sums["memory"] = sums["memory"][0] - hit.num_tokens, 0.0
        return sums

    @property
    def cache_write_tokens(self) -> int:
        """Prompt tokens that this request added to the cache.

        0 where prefix caching is off; on Messages, those up to the last breakpoint. Elsewhere, with
        `cached_tokens`, it adds up to `prompt_tokens`, but for tokens that had to be computed again although
        they are cached.
        """
        return sum(itertools.starmap(_written, zip(self.prompts, self.written_ends, strict=True)))

    @property
    def completion_tokens(self) -> int:
        return sum(prompt.num_generated_tokens for prompt in self.prompts)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Completion tokens from accepted guesses; see `EngineConfig.speculation`."""
        return sum(prompt.accepted_draft_tokens for prompt in self.prompts)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Rejected guesses, which are not part of the completion."""
        return sum(prompt.rejected_draft_tokens for prompt in self.prompts)

    @property
    def pinned_tokens(self) -> int | None:
        """Prompt tokens pinned within the budget; None: no pins were requested."""
        pinned = [prompt.outcome.num_pinned_tokens for prompt in self.prompts if prompt.outcome]
        asked = [count for count in pinned if count is not None]
        return sum(asked) if asked else None

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the samples that have ended."""
        samples = (sample for prompt in self.prompts for sample in prompt.samples.values())
        return [sample.finish_reason for sample in samples if sample.finish_reason is not None]

    @property
    def misses(self) -> list[tuple[MissReport, str | None]]:
        """Reports on the misses of each prompt, with hints.

        Empty where the engine does not say.
        """
        return [
            (prompt.report, hint(prompt.report))
            for prompt, hint in zip(self.prompts, self.hints, strict=True)
            if prompt.report is not None
        ]


def _written(prompt: PromptProgress, end: int | None) -> int:
    written = 0 if prompt.outcome is None else prompt.outcome.num_cache_write_tokens
    return written if end is None else max(0, min(written, end - prompt.num_cached_tokens))


MAX_SALT_LENGTH = 128

#: Makes the parts of a prompt, at the cost of converting all messages: called on demand.
MakeParts = Callable[[], PromptParts]

_AS_GIVEN = GrammarPlaces("structured_outputs")
_SALT = re.compile(r"[A-Za-z0-9_.+/=:~-]+")


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """Facts of a request about its prompt; a chat knows more (`ChatPrompt`).

    Args:
        grammar_places: fields of the body that the answer's grammar comes from, for errors.
        client_rule: rule that held the client's own text constant; None: none applied.
        ignored: fields of the body without effect, for the header `warning`.
        notes: further notes for that header.
    """

    grammar_places: GrammarPlaces = _AS_GIVEN
    client_rule: ClientRule | None = None
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def last_message(self) -> str:
        """Beginning of a chat's last message; "" is no chat."""
        return ""

    @property
    def parts(self) -> MakeParts | None:
        """Maker of the parts by which prompts are compared; None: only the text is known."""
        return None

    def hint(self, report: MissReport) -> str | None:
        """Return an addition to the reason in the prompt's miss report; None: nothing."""
        return None

    def place_name(self, before: Sequence[int], after: Sequence[int]) -> str | None:
        """Name the message that contains a place, by the token ids before and after it; None: not known."""
        return None


@dataclass(frozen=True, slots=True)
class Asking:
    """The engine's requests for an HTTP request, independent of its API.

    Args:
        id: id of the answer, from which the engine's requests get theirs.
        requests: a request per prompt, at least one.
        facts: facts of each prompt.
        stream: stream the answer instead of sending it at the end.
        prompt_param: name of the prompt's field in the body, for errors about its length.
        operation: name of the operation in traces: `chat` or `text_completion`.
        fingerprint: key by which later requests are compared with it; None: they can't be.
        comparison: comparison with an earlier request; None: there is none.
        writes_to_pins: count tokens up to the last pin as written in the usage, as Messages does.
    """

    id: str
    requests: tuple[Request, ...]
    facts: tuple[PromptFacts, ...]
    stream: bool
    prompt_param: str
    operation: str = "chat"
    fingerprint: Fingerprint | None = None
    comparison: Comparison | None = None
    writes_to_pins: bool = False

    def __post_init__(self) -> None:
        for index, request in enumerate(self.requests):
            request.request_id = f"{self.id}-{index}"

    @property
    def written_ends(self) -> list[int | None]:
        """Return the number of leading tokens of each prompt that can count as written; None: all."""
        if not self.writes_to_pins:
            return [None] * len(self.requests)
        return [max((pin.num_tokens for pin in request.pins), default=0) for request in self.requests]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    def longest_answer(self, assumed: int) -> int:
        """Return the most tokens that may be generated, over all samples; `assumed` is the default limit."""
        each = ((request.params.max_tokens, request.params.num_samples) for request in self.requests)
        return sum((assumed if limit is None else limit) * count for limit, count in each)


def token_ids(request: Request) -> npt.NDArray[np.int32]:
    """Tokens of a request's prompt, which the server has encoded."""
    assert isinstance(request.prompt, EncodedTokens)
    return request.prompt.token_ids


def pin_whole(request: Request, ttl: float | None) -> None:
    """Have the whole prompt of a request pinned for `ttl` seconds; None: change nothing."""
    if ttl is not None:
        request.pins = (*request.pins, PrefixPin(len(request.prompt), ttl))


def check_salt(salt: str) -> str:
    """Return a salt after a check of its form.

    Raises:
        ApiError: it is empty, too long, or has other characters or path segments than a salt may have.
    """
    good = 1 <= len(salt) <= MAX_SALT_LENGTH and _SALT.fullmatch(salt) is not None
    if not good or any(part in (".", "..") for part in salt.split("/")):
        raise bad_request(
            f"cache_salt must have 1 to {MAX_SALT_LENGTH} characters out of letters, digits and "
            "_.+/=:~-, without . or .. between slashes.",
            param="cache_salt",
        )
    return salt


def new_id(prefix: str) -> str:
    """Make the id of an answer: the prefix and 32 hex digits."""
    return f"{prefix}{uuid.uuid4().hex}"


def sampling_params(
    options: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    room: int,
    renamed: Mapping[str, str] | None = None,
    prompt_only: bool = False,
) -> SamplingParams:
    """Make SamplingParams from the fields of a body; errors name the field as the client wrote it.

    Whether the model has the tokens that they name is for the engine to say.

    Args:
        options: arguments of SamplingParams. `max_tokens` is clamped to `room`; a value below 1 is refused.
        defaults: arguments where `options` has none: the model's.
        room: tokens left of the context after the prompt.
        renamed: argument -> field of the body, where they differ.
        prompt_only: nothing is to be generated, whatever `max_tokens` and `min_tokens` say.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    wanted = options.get("max_tokens")
    try:
        if prompt_only:
            return SamplingParams(**{**defaults, **options, "max_tokens": 0, "min_tokens": 0, "n": 1})
        if wanted == 0:
            raise InvalidRequestError("max_tokens must be at least 1, not 0", param="max_tokens")
        max_tokens = None if wanted is None else min(wanted, room)
        return SamplingParams(**{**defaults, **options, "max_tokens": max_tokens})
    except InvalidRequestError as error:
        param = (renamed or {}).get(error.param or "", error.param)
        raise InvalidRequestError(str(error), param=param, code=error.code) from None
