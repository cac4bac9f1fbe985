# SPDX-License-Identifier: Apache-2.0
"""Activity: cached parts of the latest requests, and the hit rate of the last minutes.

Kept in the server, for consoles: a bounded ring of requests and a few sums for each tenant. Used on the event
loop.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from radixkv.cache.keys import Owner
from radixkv.cache.reporting.explain import MissReport
from radixkv.engine.adapters import adapter_part
from radixkv.observe.explanation import SHOWN_TOKENS, sides_of
from radixkv.observe.prompt_parts import MakeParts
from radixkv.scheduling.request import Request
from radixkv_server.activity.hit_windows import HitCounts, HitWindows, history_of, windows_of
from radixkv_server.chats.chat import ChatPrompt
from radixkv_server.diagnostics.comparison import Comparison, Finding
from radixkv_server.generation.progress import PromptProgress
from radixkv_server.generation.request import encoded_prompt
from radixkv_server.http.request_record import RequestRecord

KEPT_REQUESTS = 200  # of each tenant
KEPT_TENANTS = 1000
KEPT_ADAPTERS = 100  # of each tenant
KEPT_PROMPTS = 2000  # the latest of all tenants, whole,
KEPT_PROMPT_TOKENS = 4_000_000  # while they are not larger together: 16 MB
HISTORY_S = 600

State = Literal["running", "finished", "failed", "aborted"]


class SeenRequest:
    """A prompt of a request.

    Attributes:
        lora: name of the adapter that was asked for; empty: none.
        adapter: its identity, once the prompt is admitted.
        id: the answer's, with the prompt's index after it where there are several.
        progress: how far its answers have come.
        started_at: seconds since the epoch.
        duration_s: from its arrival; None: not yet.
        beginning: the prompt's first token ids.
        last_message: how a chat's last message begins; "" is no chat.
        before, after: those on both sides of the first one that missed.
        prompt: all of them, while there is room; else empty.
        place: whose text the first one that missed is in; None: not known.
        client_rule: rule that held its client's own text constant; None: none did.
        parts: makes the compared form of a chat, while its prompt is kept; None: it is no chat.
        cause: cause of the miss beyond the report; None: not known.
        compared_with, finding: the id of the request that its client had it compared with, and the result;
            None: no comparison, or not yet.
        version: of the whole activity when it last changed.
    """

    __slots__ = (
        "_started",
        "adapter",
        "after",
        "before",
        "beginning",
        "cause",
        "client_rule",
        "compared_with",
        "duration_s",
        "error_code",
        "finding",
        "id",
        "last_message",
        "lora",
        "operation",
        "parts",
        "place",
        "progress",
        "prompt",
        "salt",
        "started_at",
        "state",
        "tenant",
        "version",
    )

    def __init__(
        self,
        name: str,
        record: RequestRecord,
        request: Request,
        chat: ChatPrompt | None,
        progress: PromptProgress,
    ) -> None:
        self.id = name
        self.progress = progress
        self.tenant = record.tenant
        self.salt = request.salt
        self.lora, self.adapter = request.lora, ""
        self.operation = record.operation
        self.started_at = time.time() - record.age_s
        self.state: State = "running"
        self.duration_s: float | None = None
        self.error_code: str | None = None
        self.beginning = array("i", encoded_prompt(request).token_ids[:SHOWN_TOKENS].tobytes())
        self.last_message = "" if chat is None else chat.last_message
        self.client_rule = None if chat is None else chat.client_rule
        self.parts: MakeParts | None = None
        self.before = self.after = self.prompt = array("i")
        self.place: str | None = None
        self.cause: str | None = None
        self.compared_with: str | None = None
        self.finding: Finding | None = None
        self.version = 0
        self._started = record.started

    @property
    def owner(self) -> Owner:
        """Owner of the prompt: tenant, salt and adapter."""
        return Owner(self.tenant, self.salt, self.adapter)

    @property
    def started(self) -> float:
        """Time of its arrival, by the monotonic clock."""
        return self._started

    @property
    def age_s(self) -> float:
        """Seconds since its arrival."""
        return time.monotonic() - self._started

    @property
    def ttft_s(self) -> float | None:
        """Seconds from its arrival to its first token; None: not yet."""
        first = self.progress.first_token_at
        return None if first is None else first - self._started

    @property
    def report(self) -> MissReport | None:
        """Report on its miss; None: not known, or prefix caching is off."""
        return self.progress.report

    def note_match(self, request: Request, chat: ChatPrompt | None) -> None:
        """Note the part of the prompt that explains the report of the cache."""
        self.adapter = adapter_part(request.namespace) if request.lora else ""
        report = self.report
        position = self.progress.num_cached_tokens if report is None else report.num_hit_tokens
        self.prompt = array("i", encoded_prompt(request).token_ids.tobytes())
        self.parts = None if chat is None else chat.parts
        before, after = sides_of(position)
        self.before, self.after = self.prompt[before], self.prompt[after]
        if chat is not None and report is not None and report.reason == "diverged":
            self.cause = chat.hint(report)
            self.place = chat.place_name(self.before, self.after)


class _Tenant:
    """Latest requests of one tenant, and sums over all of them."""

    def __init__(self) -> None:
        self.requests: deque[SeenRequest] = deque(maxlen=KEPT_REQUESTS)
        self.hits = HitWindows()
        self.missed: dict[str, int] = {}
        self.by_adapter: dict[str, HitCounts] = {}  # by the name that was asked for

    def count_adapter(self, name: str, counts: HitCounts) -> None:
        """Count a prompt of an adapter; the adapter asked for first is forgotten where there are too many."""
        known = self.by_adapter.get(name)
        if known is None:
            if len(self.by_adapter) >= KEPT_ADAPTERS:
                del self.by_adapter[next(iter(self.by_adapter))]
            known = self.by_adapter[name] = HitCounts()
        known.add(counts)


@dataclass(slots=True)
class Activity:
    """Latest requests of all tenants.

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
        """Tenants that have sent requests."""
        return list(self._tenants)

    def begin(
        self,
        record: RequestRecord,
        answer_id: str,
        requests: Sequence[Request],
        chat: ChatPrompt | None,
        prompts: Sequence[PromptProgress],
    ) -> list[SeenRequest]:
        """Begin a request with these prompts; `chat` is the only one, if that is a chat."""
        many = len(prompts) > 1
        seen = []
        for index, (request, progress) in enumerate(zip(requests, prompts, strict=True)):
            name = f"{answer_id}-{index}" if many else answer_id
            seen.append(SeenRequest(name, record, request, chat, progress))
            self.changed(seen[-1])
        self._of(record.tenant).requests.extend(seen)
        return seen

    def _of(self, tenant: str) -> _Tenant:
        known = self._tenants.get(tenant)
        if known is None:
            while len(self._tenants) >= KEPT_TENANTS:
                del self._tenants[next(iter(self._tenants))]
            known = self._tenants[tenant] = _Tenant()
        return known

    def changed(self, one: SeenRequest) -> None:
        """Note that a request has changed."""
        self.version += 1
        one.version = self.version

    def admitted(
        self,
        one: SeenRequest,
        request: Request,
        chat: ChatPrompt | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        """Count a request's cached tokens, and keep its prompt for a while."""
        one.note_match(request, chat)
        if comparison is not None:
            one.compared_with = comparison.earlier_id
            one.finding = comparison.finding(one.progress.num_cached_tokens)
        progress, tenant = one.progress, self._of(one.tenant)
        cached, total = progress.num_cached_tokens, progress.num_tokens
        tenant.hits.count(HitCounts.of_prompt(total, cached), self.clock())
        if one.lora:
            tenant.count_adapter(one.lora, HitCounts.of_prompt(total, cached))
        if one.report is not None:
            missed = one.report.num_missed_tokens
            tenant.missed[one.report.reason] = tenant.missed.get(one.report.reason, 0) + missed
        self._keep_prompt(one)
        self.changed(one)

    def ended(self, one: SeenRequest, state: State, error_code: str | None) -> None:
        """Note that a request has ended."""
        one.state, one.error_code, one.duration_s = state, error_code, one.age_s
        self.changed(one)

    def _keep_prompt(self, one: SeenRequest) -> None:
        """Keep a request's prompt, and drop the oldest ones beyond the bound."""
        self._prompts.append(one)
        self._kept_tokens += len(one.prompt)
        while self._kept_tokens > KEPT_PROMPT_TOKENS or len(self._prompts) > KEPT_PROMPTS:
            oldest = self._prompts.popleft()
            self._kept_tokens -= len(oldest.prompt)
            oldest.prompt, oldest.parts = array("i"), None

    def _chosen(self, tenant: str | None) -> Iterable[_Tenant]:
        if tenant is None:
            return self._tenants.values()
        known = self._tenants.get(tenant)
        return () if known is None else (known,)

    def latest(self, tenant: str | None, limit: int = KEPT_REQUESTS, after: int = 0) -> list[SeenRequest]:
        """Return the latest requests of a tenant, or of all, newest first.

        Args:
            after: only requests that changed since this version of the activity.
        """
        found = [one for each in self._chosen(tenant) for one in each.requests if one.version > after]
        found.sort(key=lambda one: one.started_at, reverse=True)
        return found[:limit]

    def find(self, tenant: str | None, name: str) -> SeenRequest | None:
        """Find a request by its id."""
        return next((one for each in self._chosen(tenant) for one in each.requests if one.id == name), None)

    def windows(self, tenant: str | None) -> dict[str, HitCounts]:
        """Return cached tokens of the last minutes, and since the start; of a tenant, or of all."""
        return windows_of((each.hits for each in self._chosen(tenant)), self.clock())

    def history(self, tenant: str | None) -> list[tuple[float, HitCounts]]:
        """Return recently cached tokens, in the form of `history_of`; of a tenant, or of all."""
        return history_of((each.hits for each in self._chosen(tenant)), HISTORY_S, self.clock())

    def missed(self, tenant: str | None) -> dict[str, int]:
        """Return missed prompt tokens since the start, by the reason for the first of each prompt."""
        total: dict[str, int] = {}
        for each in self._chosen(tenant):
            for reason, count in each.missed.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def of_adapter(self, tenant: str | None, name: str) -> HitCounts:
        """Cached tokens of an adapter's prompts since the start; of a tenant, or of all."""
        total = HitCounts()
        for each in self._chosen(tenant):
            total.add(each.by_adapter.get(name, HitCounts()))
        return total

    def num_running(self, tenant: str | None) -> int:
        """Return the number of the latest requests that have not ended."""
        return sum(one.state == "running" for each in self._chosen(tenant) for one in each.requests)
