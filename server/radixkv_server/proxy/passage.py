# SPDX-License-Identifier: Apache-2.0
"""Passage: a passing request and its answer, kept for the observer within bounds."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar
from urllib.parse import unquote_plus

from radixkv.observe.audit.exchange import (
    SECRET_HEADERS,
    SECRET_PARAMETERS,
    Exchange,
    conversation_in,
    key_digest,
)
from radixkv_server.proxy.fleet_state import Choice

_SCHEMES = ("bearer ", "basic ", "token ")
_MAX_OPEN_BYTES = 512 * 1024 * 1024  # of bodies, of all requests whose answers have not ended
_numbers = count(1)
_MIN_SECRET = 8  # characters: shorter ones can't be told from other text


@dataclass(slots=True, eq=False)
class Passage:
    """Request on its way through the proxy, with its answer.

    Args:
        max_bytes: longest body to keep; longer ones are dropped as a whole.

    Attributes:
        number: number that identifies it in this process.
        request, answer: bodies so far; None: they are not kept.
        open_bytes: bytes of bodies kept for all requests whose answers have not ended.
    """

    open_bytes: ClassVar[int] = 0

    path: str
    headers: dict[str, str]
    upstream: str
    max_bytes: int
    started: float = field(default_factory=time.time)
    number: int = field(default_factory=lambda: next(_numbers))
    status: int = 0
    first_seconds: float | None = None
    seconds: float | None = None
    is_cut_off: bool = False
    choice: Choice | None = None  # of several upstreams
    answer_headers: dict[str, str] = field(default_factory=dict)
    request: bytearray | None = field(default_factory=bytearray)
    answer: bytearray | None = field(default_factory=bytearray)
    _clock: float = field(default_factory=time.monotonic)

    @classmethod
    def of(
        cls, target: bytes, headers: Iterable[tuple[bytes, bytes]], upstream: str, max_bytes: int
    ) -> Passage:
        """Make the passage of a request whose head has been read."""
        named = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        return cls(target.decode("latin-1"), named, upstream, max_bytes)

    def add_request(self, data: bytes | bytearray) -> None:
        """Add data of the request's body."""
        self.request = self._extended(self.request, data)

    def keep_request(self, body: bytearray) -> None:
        """Keep the whole body of the request without a copy; it must not change afterwards."""
        if self._has_room(0, len(body)):
            Passage.open_bytes += len(body)
            self.request = body
        else:
            self.request = None

    def answered(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Note the head of the answer."""
        self.status = status
        self.answer_headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}

    def add_answer(self, data: bytes) -> None:
        """Add data of the answer's body."""
        if self.first_seconds is None:
            self.first_seconds = time.monotonic() - self._clock
        self.answer = self._extended(self.answer, data)

    def cut_off(self) -> None:
        """Note that the answer ended incomplete."""
        self.is_cut_off = True

    def end(self) -> None:
        """Note the end of the answer. Called once."""
        self.seconds = time.monotonic() - self._clock
        Passage.open_bytes -= len(self.request or b"") + len(self.answer or b"")

    def _extended(self, kept: bytearray | None, data: bytes | bytearray) -> bytearray | None:
        if kept is None or self.seconds is not None:  # it has been told of
            return kept
        if not self._has_room(len(kept), len(data)):
            Passage.open_bytes -= len(kept)
            return None
        Passage.open_bytes += len(data)
        kept += data
        return kept

    def _has_room(self, kept: int, more: int) -> bool:
        return kept + more <= self.max_bytes and Passage.open_bytes + more <= _MAX_OPEN_BYTES

    @property
    def secrets(self) -> tuple[str, ...]:
        """Keys of the request, longest first, to be removed from all texts."""
        found: set[str] = set()
        for name in SECRET_HEADERS:
            value = self.headers.get(name, "")
            parts = [value, *value.split(), *(pair.partition("=")[2] for pair in value.split(";"))]
            found.update(part.strip() for part in parts if part.strip().lower() + " " not in _SCHEMES)
            found.update(_basic_password(value))
        for pair in self.path.partition("?")[2].split("&"):
            name, _, value = pair.partition("=")
            found.update((value, unquote_plus(value)) if name.lower() in SECRET_PARAMETERS else ())
        return tuple(sorted((one for one in found if len(one) >= _MIN_SECRET), key=len, reverse=True))

    def exchange_without_bodies(self) -> Exchange:
        """Record of the request without its bodies and its caller's identity."""
        kept = {name: self.headers[name] for name in ("content-encoding",) if name in self.headers}
        encoding = self.answer_headers.get("content-encoding")
        return Exchange(
            path=self.path.partition("?")[0],
            request=b"",
            request_headers=kept,
            response_headers={} if encoding is None else {"content-encoding": encoding},
            status=self.status,
            time=self.started,
            seconds=self.seconds,
            first_seconds=self.first_seconds,
            key=key_digest(self.headers, self.path),
        )

    @property
    def conversation(self) -> str:
        """Conversation's name in the headers; empty: none."""
        return conversation_in(self.headers)


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Settings of relays.

    Attributes:
        on_begin: called with each complete request once its upstream is known; must not block.
        on_passage: called with each request whose answer has ended; must not block.
        max_body_bytes: longest request body; longer ones are refused; None: limited by memory alone.
        max_kept_bytes: longest body to keep for the observer.
    """

    on_begin: Callable[[Passage], None]
    on_passage: Callable[[Passage], None]
    max_body_bytes: int | None
    max_kept_bytes: int


def _basic_password(value: str) -> tuple[str, ...]:
    """Return user and password, and the password alone, of a header with basic authentication."""
    kind, _, encoded = value.partition(" ")
    if kind.lower() != "basic":
        return ()
    try:
        pair = base64.b64decode(encoded.strip()).decode()
    except ValueError:
        return ()
    return pair, pair.partition(":")[2]
