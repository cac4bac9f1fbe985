# SPDX-License-Identifier: Apache-2.0
"""Generation: running a request's prompts on the engine, with everything counted.

It knows no dialect: an `Asking` goes in, outputs or what a `Renderer` makes of deltas come out. A
delta goes through two generators on its way to the connection: the engine's and `frames`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial

from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.errors import ContextLengthExceededError, InvalidRequestError, RequestFailedError
from radixkv.scheduling.request import Request
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Dialect, Json
from radixkv_server.errors import ApiError
from radixkv_server.generation.concurrency import Merged, gather_or_cancel
from radixkv_server.generation.metering import Meter
from radixkv_server.generation.request import Asking
from radixkv_server.generation.usage import Usage
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.off_loop import INLINE_TOKENS, off_loop


class WholeRenderer(ABC):
    """How one answer is said that is never streamed."""

    @abstractmethod
    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        """The body of a whole answer; one output per prompt, in order."""

    async def keep(self, usage: Usage) -> None:  # noqa: B027
        """The answer is complete, and the client has not seen its end: keep what must be kept of it."""


class Renderer(WholeRenderer):
    """How one answer is said: whole by `answer`, or as it comes by `chunk` and, at the end, `ending`."""

    @abstractmethod
    def chunk(self, prompt_index: int, delta: OutputDelta, usage: Usage) -> bytes:
        """Framed events for what a step added to a prompt; may be empty. `usage` is what is known so far."""

    @abstractmethod
    def ending(self, usage: Usage) -> bytes:
        """Framed events after the last delta."""

    def stream_dialect(self, dialect: Dialect) -> Dialect:
        """How the stream is framed, and errors in it: by the API's own dialect, if nothing else is said."""
        return dialect


class Generation:
    """The engine's work for one HTTP request, in no dialect.

    Attributes:
        usage: what it used so far.
    """

    def __init__(self, context: ServerContext, record: RequestRecord, exchange: Asking) -> None:
        self._meter = Meter(context.metrics, context.activity, context.fingerprints, record, exchange)
        self._engine = context.engine
        self._exchange = exchange
        for request in exchange.requests:
            request.tenant = record.tenant
        self.usage = self._meter.usage
        record.operation = exchange.operation

    async def check_quota(self) -> None:
        """Make sure, before the first of several prompts begins, that the tenant's ceiling lets all run.

        Raises:
            ContextLengthExceededError: one of them never can.
        """
        with self._naming_fields():
            await self._engine.check_quota(self._exchange.requests)

    async def run(self) -> list[RequestOutput]:
        """Generate all of it, to the end, at once.

        Raises:
            RadixKVError: one of them was refused or failed; the others have been aborted.
        """
        with self._meter as meter, self._naming_fields():
            outputs = await gather_or_cancel([*map(self._engine.generate, self._exchange.requests)])
            meter.take_outputs(outputs)
            for output in outputs:
                for sample in output.outputs:
                    _check_finish(sample.finish_reason, output.error, output.error_code)
        return outputs

    async def frames(self, renderer: Renderer) -> AsyncGenerator[bytes]:
        """The answer as it comes, as framed events.

        Raises:
            RadixKVError: one prompt was refused or failed; the others have been aborted.
        """
        usage = self.usage
        begun: set[tuple[int, int]] = set()
        with self._meter as meter, self._naming_fields():
            streams = [self._engine.stream(request) for request in self._exchange.requests]
            async with aclosing(Merged(streams)) as deltas:
                async for index, delta in deltas:
                    meter.take_delta(index, delta)
                    _check_finish(delta.finish_reason, delta.error, delta.error_code)
                    is_first = (index, delta.index) not in begun
                    begun.add((index, delta.index))
                    if is_first and _has_long_logprobs(self._exchange.requests[index]):
                        frames = await off_loop(partial(renderer.chunk, index, delta, usage))
                    else:
                        frames = renderer.chunk(index, delta, usage)
                    if frames:
                        yield frames
            await renderer.keep(usage)
            yield renderer.ending(usage)

    @contextlib.contextmanager
    def _naming_fields(self) -> Iterator[None]:
        """Errors that the engine raises in here name the fields of this route's body."""
        try:
            yield
        except InvalidRequestError as error:
            raise self._named(error) from None

    def _named(self, error: InvalidRequestError) -> InvalidRequestError:
        """The engine does not know what prompt and grammar are called in this route's body."""
        if isinstance(error, ContextLengthExceededError):
            return ContextLengthExceededError(str(error), param=self._exchange.prompt_param)
        if error.param == "structured":
            return self._exchange.facts[0].grammar_places.name(error)
        return error


def _has_long_logprobs(request: Request) -> bool:
    """Whether an answer begins with logprobs of a long prompt."""
    return request.params.prompt_logprobs is not None and len(request.prompt) > INLINE_TOKENS


def _check_finish(reason: str | None, error: str | None, code: str | None) -> None:
    if reason == "error":
        raise RequestFailedError(error or "the request failed while it ran", code=code)
    if reason == "abort":
        raise ApiError(503, error or "The request was aborted by the server.", code="aborted")
