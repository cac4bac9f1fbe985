# SPDX-License-Identifier: Apache-2.0
"""Attempts: one request, sent to one engine after another until one has begun to answer it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from radixkv.cache.keys import EncodedTokens, frame_namespace
from radixkv.cluster.replicas.members import Members, SentRequest
from radixkv.engine.client import EngineClient
from radixkv.errors import EngineOverloadedError, EngineStoppedError, InvalidRequestError
from radixkv.scheduling.request import Request

if TYPE_CHECKING:
    from radixkv.cluster.replicas.member import Member

# Seconds between two looks for an engine where there is none.
_LOOK_S = 0.05

#: Requests that run, by their ids, and where; None: between two engines.
Running = dict[str, "Member | None"]


class Attempts:
    """See the module's text.

    Args:
        request: with its prompt as encoded token ids, and its namespace.
        patience_s: seconds that it waits for an engine where there is none.
    """

    def __init__(
        self,
        members: Members,
        running: Running,
        request: Request,
        patience_s: float,
    ) -> None:
        request.request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        self._request = request
        self._members = members
        self._running = running
        self._namespace = frame_namespace(request.namespace)
        self._session = None if request.session is None else "\0".join(request.session)
        self._tried: set[str] = set()
        self._error: Exception | None = None
        self._sent: SentRequest | None = None
        self._started = time.monotonic()
        self._gives_up = self._started + patience_s

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """While it runs its id is taken.

        Raises:
            InvalidRequestError: it was before.
        """
        request_id = self._request.request_id
        if request_id in self._running:
            raise InvalidRequestError(f"a request with the id {request_id!r} is running already")
        self._running[request_id] = None
        try:
            yield
        finally:
            del self._running[request_id]

    async def route(self) -> SentRequest:
        """Choose the next engine.

        Raises:
            EngineOverloadedError: all queues are full.
            EngineStoppedError: there is no engine, and there was none for a while.
        """
        while True:
            try:
                prompt = self._request.prompt
                assert isinstance(prompt, EncodedTokens)
                return self._members.send(prompt, self._namespace, self._session, excluded=self._tried)
            except EngineOverloadedError:
                if isinstance(self._error, EngineOverloadedError):
                    raise self._error from None
                if time.monotonic() >= self._gives_up:
                    raise EngineStoppedError(
                        "no replica takes requests now; try again later", retry_after_s=2.0
                    ) from self._error
            self._tried.clear()  # who failed may be back
            await asyncio.sleep(_LOOK_S)

    @contextlib.contextmanager
    def sent(self, sent: SentRequest) -> Iterator[tuple[EngineClient, Request]]:
        """While an engine has it: that engine, and the request for it alone."""
        request_id = self._request.request_id
        self._sent = sent
        self._started = time.monotonic()
        self._running[request_id] = sent.member
        try:
            yield sent.member.engine, replace(self._request)
        finally:
            self._running[request_id] = None
            self._members.ended(sent)

    def begun(self, after_s: float | None = None) -> None:
        """Record the first token, `after_s` seconds after the request was sent, or (None) now."""
        assert self._sent is not None
        at = time.monotonic() if after_s is None else self._started + after_s
        self._members.computed(self._sent, at)

    def failed(self, error: EngineStoppedError | EngineOverloadedError) -> None:
        """The engine that has it has not begun to answer, and will not."""
        assert self._sent is not None
        member = self._sent.member
        self._error = error
        self._tried.add(member.name)
        member.num_retries += 1
        if isinstance(error, EngineStoppedError):  # nothing goes there until its health is seen to be good
            self._members.open(member, False)
