# SPDX-License-Identifier: Apache-2.0
"""Sequence: one answer to a request, from its arrival to its end.

Its state is derived from its tokens and its lease, never stored twice:

    lease is None      -> waiting (never run yet, or preempted)
    lease is not None  -> running
    finish_reason      -> finished

The interval map of its tokens, and who owns each range:

    0 ........ num_computed ........ lease.num_tokens ........ num_tokens
    | K/V is in the cache | has a slot, to be computed | has no slot yet   |

A sequence with one token left to compute is decoding, one with more is computing its prompt (or
recomputing after a preemption): the scheduler knows only this difference.

Of its output, text is held back in two cases only: while it ends in half a character, and while its end could
begin a stop string.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from radixkv.cache.keys import EncodedTokens, NamespaceName, TokenIds, encode_tokens
from radixkv.cache.prefix_cache import Lease
from radixkv.cache.reporting.explain import MissReport, TierHit
from radixkv.sampling.logprobs import TokenLogprobs
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import FinishReason, Request
from radixkv.text.chat_formats.answer_marks import AnswerScope
from radixkv.text.text_tokenizer import TextDecoder

if TYPE_CHECKING:  # it brings torch
    from radixkv.sampling.sampling_state import SamplingState


@dataclass(slots=True)
class SequenceTimes:
    """Readings of the engine's clock, in seconds; None: has not happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class TextSource(Protocol):
    """Part of the tokenizer's interface that this module needs."""

    def stream(self, skip_special_tokens: bool = True, *, kept: Collection[str] = ()) -> TextDecoder: ...

    def token_text(self, token_id: int) -> str: ...

    def is_added_token(self, token_id: int) -> bool: ...


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One answer to a user's request: its tokens so far, its lease, its text and its end.

    A request with `n` samples starts as one sequence with `num_forks` = n - 1: once its prompt is computed
    the engine forks it, so that the prompt is computed and held once. The engine calls `begin_output` and
    sets `sampling_state`; a scheduler alone needs neither.

    Attributes:
        request: what the user asked.
        index: of the sample.
        params: the request's; those of ranked samples with logprobs.
        namespace: in which its prefix is shared.
        num_tokens: prompt and output tokens known so far.
        last_token: id of the last of them; -1: there are none.
        num_computed: leading tokens whose K/V is in the cache.
        arrival_order: number that the scheduler gave it when it was added; -1: it was not.
        lease: its hold on blocks; None: it waits, or has ended.
        shares_blocks: it was forked, or is a fork: operations of others may change its lease.
        last_scheduled_step: number of the last step that computed tokens of it.
        resumed_at: `num_tokens` when it was last resumed after a preemption.
        num_forks: samples that are still to be forked from it.
        was_admitted: it has run.
        num_cached_tokens: prompt tokens found in the cache at its first admission.
        num_cache_write_tokens: prompt tokens that it has added to the cache.
        cache_report: why the rest was not cached.
        tier_hits: what tiers brought of its prompt; None: there are no tiers.
        prompt_logprobs: of the prompt's first tokens, so far; None: they are not wanted.
        end_token_ids: the model's own end tokens (empty with `ignore_eos`).
        max_output_tokens: most tokens that it may get.
        grows_until: output tokens after which its length is in another class, or its output ends.
        text: text that was not taken yet, without a found stop string: all of it, if it is never taken.
        logprobs: likewise.
        accepted_draft_tokens: right guesses; in a stream, since the last delta.
        rejected_draft_tokens: wrong guesses, likewise.
    """

    request: Request
    token_ids: InitVar[TokenIds | None] = None  # None: the request's prompt
    _: KW_ONLY
    arrival_s: InitVar[float] = 0.0
    index: int = 0
    params: SamplingParams = field(init=False)
    namespace: NamespaceName = field(init=False)
    times: SequenceTimes = field(init=False)
    # Tokens, and how many of them are computed:
    num_tokens: int = field(init=False)
    last_token: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed: int = 0
    _tokens: npt.NDArray[np.int32] = field(init=False)  # [num_tokens, and room for more]
    _encoded: EncodedTokens | None = field(init=False, default=None)  # a part encoded is not encoded again
    # Its place among the others:
    arrival_order: int = -1
    lease: Lease | None = None
    shares_blocks: bool = False
    last_scheduled_step: int = -1
    resumed_at: int = -1
    num_preemptions: int = 0
    num_forks: int = 0
    # What became of its prompt:
    was_admitted: bool = False
    num_cached_tokens: int = 0
    num_cache_write_tokens: int = 0
    cache_report: MissReport | None = None
    tier_hits: tuple[TierHit, ...] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    # Its output:
    sampling_state: SamplingState = field(init=False)
    end_token_ids: frozenset[int] = frozenset()
    max_output_tokens: int = 0
    grows_until: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    _decoder: TextDecoder | None = None
    _scope: AnswerScope | None = None  # None: all text is answer
    _plain_stops: dict[int, str] = field(default_factory=dict)  # stop tokens that end answers alone
    # Places in `text`:
    _searched: int = 0  # stop strings that begin before were looked for
    _may_stop_from: int = 0  # the text before comes from the first `min_tokens` tokens
    _answer_from: int = 0  # the last part of the answer, up to `_decided`
    _decided: int = 0  # the text from here on may be the beginning of a mark

    def __post_init__(self, token_ids: TokenIds | None, arrival_s: float) -> None:
        request = self.request
        self.params, self.namespace = request.params, request.namespace
        given = request.prompt if token_ids is None else token_ids
        assert not isinstance(given, str), "the request was not checked"
        if isinstance(given, EncodedTokens):
            self._encoded, given = given, given.token_ids
        self.num_tokens = self.num_prompt_tokens = len(given)
        self._tokens = np.empty(self.num_tokens + 64, dtype=np.int32)
        self._tokens[: self.num_tokens] = given
        self.last_token = int(self._tokens[self.num_tokens - 1]) if self.num_tokens else -1
        self.times = SequenceTimes(arrival_s)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def is_background(self) -> bool:
        return self.request.background

    def append(self, token_id: int) -> None:
        """Add an output token; O(1) amortised."""
        if self.num_tokens == len(self._tokens):
            grown = np.empty(2 * self.num_tokens, dtype=np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.last_token = token_id

    def tokens(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.int32]:
        """Return tokens [start, end) as an int32 view, valid until the next append."""
        return self._tokens[start : self.num_tokens if end is None else end]

    def encoded_part(self, start: int, end: int | None = None) -> EncodedTokens:
        """Return tokens [start, end) as the cache compares them. O(end - start)."""
        return EncodedTokens(self.tokens(start, end).astype("<i4", copy=False).tobytes())

    @property
    def encoded(self) -> EncodedTokens:
        """All tokens as the cache compares them. O(1) until one is appended, then O(tokens) once."""
        if self._encoded is None or len(self._encoded) != self.num_tokens:
            self._encoded = EncodedTokens(encode_tokens(self.tokens()))
        return self._encoded

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens whose K/V is still missing; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def num_sequence_slots(self) -> int:
        """Places that it takes up, or will need soon, of the most requests that may run at once."""
        return 1 + self.num_forks

    @property
    def needs_prompt_logits(self) -> bool:
        """True if logits of its prompt are still wanted, so that it must be computed, cached or not."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of its prompt that may stay cached because of it."""
        return self.request.num_kept(min(self.most_shared, self.num_prompt_tokens))

    @property
    def most_shared(self) -> int:
        """Leading tokens that may be shared with others: all, or those before an activated adapter."""
        return self.request.adapter_from or self.num_tokens

    @property
    def most_found(self) -> int:
        """Leading tokens that the cache may have: the last one is always computed."""
        return min(self.num_tokens - 1, self.most_shared)

    @property
    def lookup_tokens(self) -> EncodedTokens:
        """The tokens to look up in the cache. O(1) for all of them."""
        limit = self.request.adapter_from
        return self.encoded_part(0, limit) if limit else self.encoded

    @property
    def has_progressed(self) -> bool:
        """True if it has got a token since it was last resumed; before that it is not preempted again."""
        return self.num_tokens > self.resumed_at

    @property
    def is_running(self) -> bool:
        return self.lease is not None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def was_added(self) -> bool:
        """True once a scheduler has it."""
        return self.arrival_order >= 0

    def preempt(self) -> None:
        """Wait again, with nothing in the cache: the lease was released, or is gone with the cache."""
        self.lease = None
        self.num_computed = 0

    def release(self, *, discard: bool = False, done: bool = False) -> None:
        """End its lease, if it has one; see `Lease.release`."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release(discard=discard, keep=self.request.keep_tokens, done=done)

    def output_token_ids(self) -> list[int]:
        """Return the generated tokens as a list."""
        return self.tokens(self.num_prompt_tokens).tolist()

    # ------------------------------------------------------------------ output

    def begin_output(
        self, tokenizer: TextSource | None, end_token_ids: frozenset[int], max_output_tokens: int
    ) -> None:
        """Set what makes text of its tokens (None: they have no text) and ends it."""
        self.end_token_ids = end_token_ids
        self.max_output_tokens = self.grows_until = max_output_tokens
        if tokenizer is not None:
            params = self.params
            self._decoder = tokenizer.stream(params.skip_special_tokens, kept=params.kept_special_tokens)
            if params.answer_marks is not None and (params.stop_strings or params.stop_token_ids):
                self._scope = AnswerScope(params.answer_marks)
                self._plain_stops = {
                    token: tokenizer.token_text(token)
                    for token in params.stop_token_ids
                    if not tokenizer.is_added_token(token)
                }

    def push(self, token_id: int, *, is_complete: bool = False) -> None:
        """Take one more token; sets `finish_reason` when it is the last.

        Args:
            is_complete: the output's grammar says that it ends here.
        """
        assert self.finish_reason is None
        params = self.params
        self.append(token_id)
        may_stop = is_complete or self.num_output_tokens >= params.min_tokens
        if may_stop and token_id in self.end_token_ids and token_id not in params.stop_token_ids:
            self.finish_reason = "stop"
        elif may_stop and token_id in params.stop_token_ids and not self._is_aside(token_id):
            self.finish_reason, self.stop_reason = "stop", token_id
        if self._decoder is not None and (self.finish_reason is None or params.include_stop_str_in_output):
            self.text += self._decoder.push([token_id])
        if self.finish_reason is None and is_complete:
            self.finish_reason = "stop"
        if self.finish_reason is None and self.num_output_tokens >= self.max_output_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._decoder is not None:
            self.text += self._decoder.finish()
        if params.stop_strings or self._scope is not None:
            if not may_stop:
                self._may_stop_from = len(self.text)
            self._look_for_stop(params.stop_strings)

    def _is_aside(self, token_id: int) -> bool:
        """Tell whether a stop token comes where it ends nothing: in thoughts, or as a break after them."""
        text = self._plain_stops.get(token_id)
        if self._scope is None or text is None:
            return False
        return self._scope.is_thinking or (self._scope.is_before_words and not text.strip("\n"))

    def _look_for_stop(self, stops: tuple[str, ...]) -> None:
        """Look for stop strings in the parts of the answer that the text has gained."""
        # A stop string may have begun in the searched part.
        overlap = max((len(stop) for stop in stops), default=1) - 1
        at, has_ended = self._searched, self.finish_reason is not None
        while True:
            start, end, at = self._next_part(at, ended=has_ended)
            found = find_stop(self.text, stops, max(start, self._may_stop_from), end)
            if found is not None:
                begin, stop = found
                keeps = self.params.include_stop_str_in_output
                self.text = self.text[: begin + len(stop) if keeps else begin]
                self.finish_reason, self.stop_reason = "stop", stop
                return
            if at == end:
                break
        self._answer_from, self._decided = start, end
        self._searched = max(start, end - overlap)

    def _next_part(self, at: int, *, ended: bool) -> tuple[int, int, int]:
        if self._scope is not None:
            return self._scope.next_part(self.text, at, ended=ended)
        return at, len(self.text), len(self.text)

    def take(self) -> tuple[str, list[TokenLogprobs]]:
        """Take the text to deliver now, and the logprobs of the tokens since the last call."""
        size, stops = len(self.text), self.params.stop_strings
        if self.finish_reason is None and (stops or self._scope is not None):
            size = self._decided - held_back(self.text[self._answer_from : self._decided], stops)
        text, self.text = self.text[:size], self.text[size:]
        self._searched, self._may_stop_from, self._answer_from, self._decided = (
            max(0, place - size)
            for place in (self._searched, self._may_stop_from, self._answer_from, self._decided)
        )
        logprobs, self.logprobs = self.logprobs, []
        return text, logprobs

    def abort(self, reason: FinishReason = "abort") -> None:
        """End the sample from outside, with the text that it has."""
        if self.finish_reason is None:
            self.finish_reason = reason
            if self._decoder is not None:
                self.text += self._decoder.finish()

    def record_logprobs(self, entry: TokenLogprobs) -> None:
        self.logprobs.append(entry)
        self.cumulative_logprob += entry.chosen.logprob

    def __repr__(self) -> str:
        state = self.finish_reason or ("running" if self.is_running else "waiting")
        return (
            f"Request({self.request_id}[{self.index}], {state}, {self.num_prompt_tokens}+"
            f"{self.num_output_tokens} tokens, {self.num_computed} computed)"
        )


def find_stop(text: str, stops: tuple[str, ...], start: int, end: int) -> tuple[int, str] | None:
    """Return the earliest stop string in text[start:end], as (position, string); the longest one on ties.

    >>> find_stop("one two", ("wo", "tw"), 0, 7)
    (4, 'tw')
    """
    found: tuple[int, str] | None = None
    for stop in stops:
        at = text.find(stop, start, end)
        if at < 0:
            continue
        if found is None or at < found[0] or (at == found[0] and len(stop) > len(found[1])):
            found = (at, stop)
    return found


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Count the characters at the end of a text that could begin a stop string.

    >>> held_back("and so", ("stop",)), held_back("and s", ("stop",))
    (0, 1)
    """
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
