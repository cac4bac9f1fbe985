# SPDX-License-Identifier: Apache-2.0
"""RequestRecord: the facts of a request, filled in as it passes through the server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Scope

from radixkv_server.generation.progress import Usage
from radixkv_server.tenants.registry import Limiter, LimitState, RateReservation
from radixkv_server.tenants.tenant import EVERYBODY, Tenant

_RECORD = "radixkv.record"

STATUS_CLIENT_GONE = 499
MAX_SESSION_ID = 256
#: Headers in which clients name the session of a request, the most specific first: Dynamo's, those of agents
#: in Claude Code and of its sessions, Codex's, opencode's.
SESSION_HEADERS = (
    "x-dynamo-session-id",
    "x-claude-code-agent-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-id",
)
FINAL_HEADER = "x-dynamo-session-final"


def session_of(headers: Headers) -> tuple[str, bool]:
    """Return the session that headers name (empty: none), and whether this is its last request."""
    names = (headers.get(name, "").strip() for name in SESSION_HEADERS)
    name = next((name for name in names if name and len(name) <= MAX_SESSION_ID), "")
    return name, headers.get(FINAL_HEADER, "").strip().lower() == "true"


@dataclass(slots=True)
class RequestRecord:
    """Facts about one request so far.

    Attributes:
        request_id: the `x-request-id` of the response: the client's own if it sent a sound one.
        caller: tenant of the API key; `EVERYBODY` when no keys are configured.
        started: `time.monotonic` at arrival.
        status: HTTP status sent; 499 when the client left first; None before either.
        usage: tokens used so far; empty while none are known.
        operation: kind of generation, `chat` or `text_completion`; None: nothing was generated.
        adapter: name of the LoRA adapter that it asked for; empty: none.
        failed: an error was sent inside a stream that had begun with status 200.
        error_code: code of the error that was sent; empty: no error, or one without a code.
        ignored: fields of the body without effect, for the `warning` header.
        notes: what else that header says.
        is_background: the server itself asks, in the caller's name.
        session: name of its session by the headers; empty: none.
        ends_session: by the headers, this is the session's last request.
    """

    request_id: str
    caller: Tenant = EVERYBODY
    started: float = field(default_factory=time.monotonic)
    status: int | None = None
    usage: Usage = field(default_factory=Usage)
    operation: str | None = None
    adapter: str = ""
    failed: bool = False
    error_code: str = ""
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_background: bool = False
    session: str = ""
    ends_session: bool = False
    _limiter: Limiter | None = None
    _reservation: RateReservation | None = None

    @property
    def tenant(self) -> str:
        """The caller's name, "" when no keys are configured."""
        return self.caller.name

    def enter(self, limiter: Limiter) -> RateReservation:
        """Count the request for the caller's limits, until `end`.

        Raises:
            ApiError: 429; a limit has been reached.
        """
        self._limiter = limiter
        self._reservation = limiter.enter()
        return self._reservation

    def hand_over(self) -> RequestRecord:
        """Make a record for work that goes on after this request, and move the limits' reservation to it."""
        record = RequestRecord(self.request_id, self.caller)
        record._limiter, record._reservation = self._limiter, self._reservation
        self._reservation = None
        return record

    def end(self) -> None:
        """Release the request's share of the limits; it counts with the tokens it used, if they are known."""
        if self._reservation is not None:
            used = self.usage.prompt_tokens + self.usage.completion_tokens
            self._reservation.end(None if not used and self.status in (None, STATUS_CLIENT_GONE) else used)

    def limits(self) -> list[LimitState]:
        """Return the limits that the request counts for, and their remainders."""
        return [] if self._limiter is None else self._limiter.state()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request that `scope` belongs to."""
    record = scope[_RECORD]
    assert isinstance(record, RequestRecord)
    return record


def attach_record(scope: Scope, record: RequestRecord) -> None:
    """Make `record` the one that `record_of` finds."""
    scope[_RECORD] = record
