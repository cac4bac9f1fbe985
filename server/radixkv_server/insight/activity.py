"""Activity: what the latest requests got from the cache, and how much of the last minutes' prompts was found.

Kept in the server, for consoles: a bounded ring of requests and a few sums for each tenant. Used on the event
loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from radixkv.request import OutputDelta, RequestOutput
from radixkv_server.errors import to_api_error
from radixkv_server.generation.request import GenerationRequest, PromptRequest
from radixkv_server.http.request_record import RequestRecord

if TYPE_CHECKING:
    from radixkv.cache.insight.explain import MissReport

KEPT_REQUESTS = 200  # of each tenant
KEPT_TENANTS = 1000
KEPT_TOKENS = 48  # of a prompt, at its beginning and on each side of where it missed
KEPT_PROMPTS = 2000  # the latest of all tenants, whole,
KEPT_PROMPT_TOKENS = 4_000_000  # while they are not larger together: 16 MB
MIN_RATED = 4  # tokens after the first one, for a rate,
MIN_STEPS = 2  # in so many steps
BUCKET_S = 10
#: Name -> seconds of the windows that hit rates are told for; None: since the start.
WINDOWS: dict[str, int | None] = {"1m": 60, "5m": 300, "1h": 3600, "total": None}
HISTORY_S = 600

State = Literal["running", "finished", "failed", "aborted"]


@dataclass(slots=True)
class HitCounts:
    """Sums over prompts that were admitted.

    Attributes:
        hit_requests: prompts of which at least half was cached.
    """

    requests: int = 0
    hit_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: HitCounts) -> None:
        self.requests += other.requests
        self.hit_requests += other.hit_requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens


class SeenRequest:
    """One prompt of a request, as it is known so far.

    Attributes:
        id: the answer's, with the prompt's index after it where there are several.
        started_at: seconds since the epoch.
        ttft_s, duration_s: from its arrival; None: not yet.
        report: why it missed; None: not known, or prefix caching is off.
        beginning: the prompt's first token ids.
        last_message: how a chat's last message begins; "" is no chat.
        before, after: those on both sides of the first one that missed.
        prompt: all of them, while there is room; else empty.
        place: whose text the first one that missed is in; None: not known.
        cause: what is known of the miss beyond the report; None: nothing.
        version: of the whole activity when it last changed.
    """

    __slots__ = (
        "_prompt_request",
        "_rated_at",
        "_rated_steps",
        "_rated_tokens",
        "_started",
        "after",
        "before",
        "beginning",
        "cached_tokens",
        "cause",
        "completion_tokens",
        "duration_s",
        "error_code",
        "id",
        "is_admitted",
        "last_message",
        "num_samples",
        "operation",
        "place",
        "prompt",
        "prompt_tokens",
        "report",
        "salt",
        "started_at",
        "state",
        "tenant",
        "ttft_s",
        "version",
    )

    def __init__(self, name: str, record: RequestRecord, request: GenerationRequest, index: int) -> None:
        prompt_request = request.prompt_requests[index]
        self.id = name
        self.tenant = record.tenant
        self.salt = request.cache_salt or ""
        self.operation = request.operation
        self.started_at = time.time() - record.age_s
        self.state: State = "running"
        self.prompt_tokens = len(prompt_request.prompt_ids)
        self.num_samples = prompt_request.params.n
        self.cached_tokens = self.completion_tokens = 0
        self.is_admitted = False
        self.ttft_s: float | None = None
        self.duration_s: float | None = None
        self.error_code: str | None = None
        self.report: MissReport | None = None
        self.beginning = array("i", prompt_request.prompt_ids[:KEPT_TOKENS])
        self.last_message = prompt_request.last_message
        self.before = self.after = self.prompt = array("i")
        self.place: str | None = None
        self.cause: str | None = None
        self.version = 0
        self._prompt_request: PromptRequest | None = prompt_request  # until it is admitted
        self._started = record.started
        self._rated_tokens = 0
        self._rated_at = 0.0
        self._rated_steps = 0

    @property
    def age_s(self) -> float:
        """Seconds since its arrival."""
        return time.monotonic() - self._started

    def admitted(self, cached_tokens: int, report: MissReport | None) -> None:
        """What the cache gave is known."""
        self.is_admitted = True
        self.cached_tokens = cached_tokens
        self.report = report
        prompt_request, self._prompt_request = self._prompt_request, None
        if prompt_request is None:
            return
        position = cached_tokens if report is None else report.num_hit_tokens
        self.prompt = array("i", prompt_request.prompt_ids)
        self.before = self.prompt[max(0, position - KEPT_TOKENS) : position]
        self.after = self.prompt[position : position + KEPT_TOKENS]
        if report is not None and report.reason == "diverged":
            self.cause = None if prompt_request.hint is None else prompt_request.hint(report)
            self.place = (
                None
                if prompt_request.place_name is None
                else prompt_request.place_name(self.before, self.after)
            )

    def first_token(self, at: float) -> None:
        """Its first token came at this reading of the monotonic clock."""
        if self.ttft_s is None:
            self.ttft_s = at - self._started

    def more_tokens(self, count: int, at: float, steps: int = 1) -> None:
        """So many came after the first ones, in so many steps, the last at this reading of the clock."""
        self._rated_tokens += count
        self._rated_steps += steps
        self._rated_at = at

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first token; None: not enough came to tell it."""
        # The tokens of one step come at once, and a few say more about the clock than about the engine.
        if self.ttft_s is None or self._rated_tokens < MIN_RATED or self._rated_steps < MIN_STEPS:
            return None
        spent = self._rated_at - self._started - self.ttft_s
        return self._rated_tokens / spent if spent > 0 else None

    def end(self, state: State, error_code: str | None) -> None:
        """It has ended."""
        self.state, self.error_code, self.duration_s = state, error_code, self.age_s
        self._prompt_request = None


class _Tenant:
    """The ring and the sums of one tenant."""

    def __init__(self) -> None:
        self.requests: deque[SeenRequest] = deque(maxlen=KEPT_REQUESTS)
        self.total = HitCounts()
        self.missed: dict[str, int] = {}
        self._buckets: deque[tuple[int, HitCounts]] = deque(maxlen=3600 // BUCKET_S + 1)

    def count(self, counts: HitCounts, now: float) -> None:
        bucket = int(now) // BUCKET_S
        if not self._buckets or self._buckets[-1][0] != bucket:
            self._buckets.append((bucket, HitCounts()))
        self._buckets[-1][1].add(counts)
        self.total.add(counts)

    def history(self, now: float) -> list[tuple[int, HitCounts]]:
        """The latest buckets, by the clock in steps of `BUCKET_S`, oldest first."""
        first = int(now - HISTORY_S) // BUCKET_S
        found = itertools.takewhile(lambda bucket: bucket[0] > first, reversed(self._buckets))
        return list(found)[::-1]

    def window(self, seconds: int | None, now: float) -> HitCounts:
        if seconds is None:
            return self.total
        first, total = int(now - seconds) // BUCKET_S, HitCounts()
        for bucket, counts in reversed(self._buckets):
            if bucket <= first:
                break
            total.add(counts)
        return total


@dataclass(slots=True)
class Activity:
    """All tenants' latest requests.

    Args:
        clock: seconds, for the windows.

    Attributes:
        version: changes with every request.
    """

    clock: Callable[[], float] = time.monotonic
    version: int = 0
    _tenants: dict[str, _Tenant] = field(default_factory=dict)
    _prompts: deque[SeenRequest] = field(default_factory=deque)  # those whose prompts are kept, oldest first
    _kept_tokens: int = 0

    @property
    def tenants(self) -> list[str]:
        """Those who have sent something."""
        return list(self._tenants)

    def watch(self, record: RequestRecord, request: GenerationRequest) -> Watch:
        """Follow a request from now on."""
        many = len(request.prompt_requests) > 1
        seen = [
            SeenRequest(f"{request.id}-{index}" if many else request.id, record, request, index)
            for index in range(len(request.prompt_requests))
        ]
        ring = self._of(record.tenant).requests
        for one in seen:
            self.changed(one)
            ring.append(one)
        return Watch(self, seen)

    def _of(self, tenant: str) -> _Tenant:
        known = self._tenants.get(tenant)
        if known is None:
            while len(self._tenants) >= KEPT_TENANTS:
                del self._tenants[next(iter(self._tenants))]
            known = self._tenants[tenant] = _Tenant()
        return known

    def changed(self, one: SeenRequest) -> None:
        """A request is not as it was."""
        self.version += 1
        one.version = self.version

    def admitted(self, one: SeenRequest) -> None:
        """Count what a request got from the cache."""
        tenant = self._of(one.tenant)
        is_hit = 2 * one.cached_tokens >= one.prompt_tokens
        tenant.count(HitCounts(1, int(is_hit), one.prompt_tokens, one.cached_tokens), self.clock())
        if one.report is not None:
            missed = one.report.num_missed_tokens
            tenant.missed[one.report.reason] = tenant.missed.get(one.report.reason, 0) + missed

    def keep_prompt(self, one: SeenRequest) -> None:
        """Keep a request's prompt, and of the oldest ones no more than there is room for."""
        self._prompts.append(one)
        self._kept_tokens += len(one.prompt)
        while self._kept_tokens > KEPT_PROMPT_TOKENS or len(self._prompts) > KEPT_PROMPTS:
            oldest = self._prompts.popleft()
            self._kept_tokens -= len(oldest.prompt)
            oldest.prompt = array("i")

    def _chosen(self, tenant: str | None) -> Iterable[_Tenant]:
        if tenant is None:
            return self._tenants.values()
        known = self._tenants.get(tenant)
        return () if known is None else (known,)

    def latest(self, tenant: str | None, limit: int = KEPT_REQUESTS, after: int = 0) -> list[SeenRequest]:
        """The latest requests of a tenant, or of all, newest first.

        Args:
            after: only those that changed since the activity had this version.
        """
        found = [one for each in self._chosen(tenant) for one in each.requests if one.version > after]
        found.sort(key=lambda one: one.started_at, reverse=True)
        return found[:limit]

    def find(self, tenant: str | None, name: str) -> SeenRequest | None:
        """A request by its id."""
        return next((one for each in self._chosen(tenant) for one in each.requests if one.id == name), None)

    def windows(self, tenant: str | None) -> dict[str, HitCounts]:
        """What was found in the last minutes, and since the start; of a tenant, or of all."""
        now, windows = self.clock(), {}
        for name, seconds in WINDOWS.items():
            windows[name] = total = HitCounts()
            for each in self._chosen(tenant):
                total.add(each.window(seconds, now))
        return windows

    def history(self, tenant: str | None) -> list[tuple[float, HitCounts]]:
        """What was found in each `BUCKET_S` of the last minutes with a prompt, oldest first.

        Returns: how many seconds ago each of them ended, and its counts.
        """
        now = self.clock()
        sums: dict[int, HitCounts] = {}
        for each in self._chosen(tenant):
            for bucket, counts in each.history(now):
                sums.setdefault(bucket, HitCounts()).add(counts)
        return [(max(0.0, now - (bucket + 1) * BUCKET_S), sums[bucket]) for bucket in sorted(sums)]

    def missed(self, tenant: str | None) -> dict[str, int]:
        """Prompt tokens that were not found, by the reason for the first of them, since the start."""
        total: dict[str, int] = {}
        for each in self._chosen(tenant):
            for reason, count in each.missed.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def num_running(self, tenant: str | None) -> int:
        """Requests among the latest that have not ended."""
        return sum(one.state == "running" for each in self._chosen(tenant) for one in each.requests)


class Watch:
    """Follows the prompts of one request; a context that ends with it."""

    def __init__(self, activity: Activity, seen: list[SeenRequest]) -> None:
        self._activity = activity
        self._seen = seen

    def take_output(self, index: int, output: RequestOutput) -> None:
        """A prompt's whole output."""
        one = self._seen[index]
        times = output.times
        if times is not None and times.first_token is not None:
            one.first_token(times.first_token)
            if times.finished is not None:
                later = output.num_generated_tokens - one.num_samples
                # A step gives one token, and the guesses that it found to be right.
                one.more_tokens(later, times.finished, steps=later - output.accepted_draft_tokens)
        self._admit(one, output.num_cached_tokens, output.cache_report)
        one.completion_tokens = output.num_generated_tokens
        self._activity.changed(one)

    def take_delta(self, index: int, delta: OutputDelta) -> None:
        """What a step added to a prompt's sample."""
        one = self._seen[index]
        if delta.token_ids:
            now = time.monotonic()
            if one.ttft_s is None:
                one.first_token(now)
            else:
                one.more_tokens(len(delta.token_ids), now)
            one.completion_tokens += len(delta.token_ids)
            self._admit(one, delta.num_cached_tokens, delta.cache_report)
        self._activity.changed(one)

    def _admit(self, one: SeenRequest, cached_tokens: int, report: MissReport | None) -> None:
        if not one.is_admitted:
            one.admitted(cached_tokens, report)
            self._activity.admitted(one)
            self._activity.keep_prompt(one)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        state: State = "finished"
        code = None
        if isinstance(error, GeneratorExit | asyncio.CancelledError):
            state = "aborted"
        elif error is not None:
            state, code = "failed", to_api_error(error).code
        for one in self._seen:
            one.end(state, code)
            self._activity.changed(one)
