# SPDX-License-Identifier: Apache-2.0
"""An open-loop load on any server with OpenAI's chat completions, measured from when each request was due.

A closed loop waits for a slow server before it asks again, and so leaves out just the requests that would
have waited (coordinated omission). Here sessions begin when they are due, however slow the server is, and
waiting counts from then on. Later turns of a session are due when the turn before has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from radixkv.cli.bench.scenarios import Session
from radixkv.cli.openai_http import StreamedAnswer, api_root, authorization
from radixkv.cli.replay.message_log import Message


@dataclass(slots=True)
class Outcome(StreamedAnswer):
    """A request; clock readings are of seconds after the load began."""

    session: int
    turn: int
    due: float
    sent: float | None = None
    ended: float | None = None


class Load:
    """Runs sessions against one server.

    Args:
        url: of the server, with or without `/v1`.
        api_key: None: none is sent.
        at_once: most requests in flight; None: as many as are due. With a bound it is no open loop, and the
            wait for a place still counts.
        exact_length: ask for exactly `max_tokens` tokens (`ignore_eos`: vLLM, SGLang, radixkv).
        on_done: called after each request.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        at_once: int | None = None,
        exact_length: bool = False,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        # A connection a request: servers close idle ones when they like, also just as one is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=api_root(url),
            headers=authorization(api_key),
            timeout=None,
            limits=limits,
            trust_env=False,
        )
        self._options: dict[str, Any] = {"model": model, "temperature": 0.0}
        if exact_length:
            self._options["ignore_eos"] = True
        self._places = asyncio.Semaphore(at_once) if at_once is not None else contextlib.nullcontext()
        self._on_done = on_done or (lambda: None)
        self._began = 0.0

    async def run(self, sessions: Sequence[Session]) -> list[Outcome]:
        """All sessions to their ends; outcomes in the order of sessions and turns."""
        async with contextlib.aclosing(self._http):
            self._began = time.perf_counter()
            runs = [self._session(number, session) for number, session in enumerate(sessions)]
            return [outcome for own in await asyncio.gather(*runs) for outcome in own]

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _session(self, number: int, session: Session) -> list[Outcome]:
        await asyncio.sleep(max(0.0, session.start - self._now()))
        messages: list[Message] = []
        outcomes: list[Outcome] = []
        due = session.start
        for turn, added in enumerate(session.turns):
            messages += added
            outcome = Outcome(number, turn, due)
            outcomes.append(outcome)
            async with self._places:
                await self._ask(outcome, messages, session)
            self._on_done()
            if outcome.error is not None:
                break
            messages.append({"role": "assistant", "content": outcome.text})
            due = self._now()
        return outcomes

    async def _ask(self, outcome: Outcome, messages: list[Message], session: Session) -> None:
        body = {
            **self._options,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if session.tools:
            body["tools"] = session.tools
        if session.max_tokens is not None:
            body["max_tokens"] = session.max_tokens
        if session.says_done:
            body["radixkv"] = {"session_done": True}
        outcome.sent = self._now()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    outcome.error = f"HTTP {response.status_code}"
                    return
                await outcome.read(response, self._now)
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            outcome.error = type(error).__name__
        finally:
            outcome.ended = self._now()
