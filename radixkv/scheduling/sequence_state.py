# SPDX-License-Identifier: Apache-2.0
"""The running state of a request.

A request's state is derived from its tokens and its lease, never stored twice:

    lease is None      -> waiting (never run yet, or preempted)
    lease is not None  -> running
    finish_reason      -> finished

The interval map of a request's tokens, and who owns each range:

    0 ........ num_computed ........ lease.num_tokens ........ num_tokens
    | K/V is in the cache | has a slot, to be computed | has no slot yet   |

A request with one token left to compute is decoding, one with more is computing its prompt (or
recomputing after a preemption): the scheduler knows only this difference.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from radixkv.cache.keys import EncodedTokens, NamespaceName, TokenIds, encode_tokens

if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import Lease, Match
    from radixkv.cache.reporting.explain import MissReport, TierHit
    from radixkv.sampling.logprobs import TokenLogprobs
    from radixkv.sampling.sampling_params import SamplingParams
    from radixkv.scheduling.request import FinishReason, Request


@dataclass(slots=True)
class SequenceTimes:
    """Readings of the engine's clock, in seconds; None: has not happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Producer(Protocol):
    """Maker of the next tokens of a waiting request: another request, or a load from a tier.

    Attributes:
        num_scheduled, num_computed: tokens up to there are made, when the step has run; and so far.
        lease: None: it has ended.
    """

    num_scheduled: int
    num_computed: int
    lease: Lease | None


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    """A sample of a user's request: its tokens so far, its parameters, its lease.

    This is the scheduler's view of it; the engine's `Sample` adds the output.

    A request with `n` samples starts as one sequence with `num_forks` = n - 1: once its prompt is computed
    the engine forks it, so that the prompt is computed and held once.

    Attributes:
        num_tokens: prompt and output tokens known so far.
        last_token: id of the last of them; -1: there are none.
    """

    request: Request
    token_ids: InitVar[TokenIds | None] = None  # None: the request's prompt
    _: KW_ONLY
    arrival_s: InitVar[float] = 0.0
    index: int = 0
    params: SamplingParams = field(init=False)
    namespace: NamespaceName = field(init=False)
    priority: int = field(init=False)
    num_tokens: int = field(init=False)
    last_token: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    times: SequenceTimes = field(init=False)
    arrival_order: int = 0  # set by the scheduler when the request is added to it
    was_added: bool = False
    lease: Lease | None = None
    match: Match | None = None
    producer: Producer | None = None  # who makes its next tokens, while it waits for them
    produced_until: int = 0  # up to which token
    tier_wait: Any = None  # notes of `TierLoads` since it last ran
    tier_weight: tuple[int, int, float] | None = None  # by its match's length: what it misses, until when
    tier_hits: tuple[TierHit, ...] | None = None  # what tiers brought of its prompt; None: there are none
    num_scheduled: int = 0  # tokens computed once the step being built has run
    num_computed: int = 0
    num_cached_tokens: int = 0
    num_cache_write_tokens: int = 0
    num_forks: int = 0
    num_preemptions: int = 0
    resumed_at: int = -1  # num_tokens when it was last resumed after a preemption
    was_admitted: bool = False
    shares_blocks: bool = False  # it was forked, or is a fork: operations of others may change its lease
    is_promoted: bool = False  # under `priority`: it was passed often enough, and comes before all others
    overtaken_steps: int = 0  # steps in which later requests were admitted while it waited
    held_up_steps: int = 0  # steps in which it did not fit, and others after it were admitted
    long_passes: int = 0  # later long prompts of its line that began meanwhile
    held_back_since: float | None = None  # clock seconds: it would have displaced prefixes in use
    begins_early: bool = False  # it began beside long prompts since its tenant goes first
    last_scheduled_step: int = -1
    cache_report: MissReport | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # of the prompt's first tokens, so far
    _tokens: npt.NDArray[np.int32] = field(init=False)  # [num_tokens, and room for more]
    _encoded: EncodedTokens | None = field(init=False, default=None)  # a part encoded is not encoded again

    def __post_init__(self, token_ids: TokenIds | None, arrival_s: float) -> None:
        request = self.request
        self.params, self.namespace, self.priority = request.params, request.namespace, request.priority
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
        """Tokens [start, end) as an int32 view, valid until the next append."""
        return self._tokens[start : self.num_tokens if end is None else end]

    def encoded_part(self, start: int, end: int | None = None) -> EncodedTokens:
        """Tokens [start, end) as the cache compares them. O(end - start)."""
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
        """Of the most requests that may run at once: how many it takes up or will need soon."""
        return 1 + self.num_forks

    @property
    def needs_prompt_logits(self) -> bool:
        """True if logits of its prompt are still wanted, so that it must be computed, cached or not."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def num_kept_tokens(self) -> int:
        """Of its prompt, what may stay cached because of it."""
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

    def preempt(self) -> None:
        """It waits again, and has nothing in the cache: its lease was released, or is gone with the cache."""
        self.lease = self.match = self.producer = self.tier_wait = None
        self.num_computed = 0

    def release(self, *, discard: bool = False, done: bool = False) -> None:
        """End its lease, if it has one; see `Lease.release`."""
        lease, self.lease = self.lease, None
        self.match = self.producer = None
        if lease is not None:
            lease.release(discard=discard, keep=self.request.keep_tokens, done=done)

    def output_token_ids(self) -> list[int]:
        """The generated tokens as a list."""
        return self.tokens(self.num_prompt_tokens).tolist()

    def __repr__(self) -> str:
        state = self.finish_reason or ("running" if self.is_running else "waiting")
        return (
            f"Request({self.request_id}[{self.index}], {state}, {self.num_prompt_tokens}+"
            f"{self.num_output_tokens} tokens, {self.num_computed} computed)"
        )
