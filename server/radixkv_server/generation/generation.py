# SPDX-License-Identifier: Apache-2.0
"""Generation route of any API: parses a body, runs the engine, renders and counts the answer or stream.

An API supplies both ends: `parse`, from its body to an `Asking`, and a `Renderer`, from the engine's outputs
to its answers. The steps between are common to all APIs. A delta passes through two generators on its way to
the connection: the engine's and `frames`. `Meter` follows them for usage, metrics and activity.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel

from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.errors import ContextLengthExceededError, InvalidRequestError, RequestFailedError
from radixkv.scheduling.request import Request
from radixkv_server.activity.activity import Activity, State
from radixkv_server.concurrency import INLINE_TOKENS, Merged, gather_or_cancel, off_loop
from radixkv_server.context import ServerContext, context_of
from radixkv_server.diagnostics.fingerprint import FingerprintStore
from radixkv_server.dialect import Dialect, Json, dump, dump_in_pieces
from radixkv_server.errors import ApiError, to_api_error
from radixkv_server.generation.request import Asking, PromptProgress, SampleProgress, Usage, token_ids
from radixkv_server.http.request_record import RequestRecord, record_of
from radixkv_server.http.streaming import EventStream, run_until_disconnect
from radixkv_server.metrics.request_metrics import ServerMetrics, hit_class
from radixkv_server.tenants.registry import ASSUMED_ANSWER_TOKENS
from radixkv_server.tenants.tenant import Tenant


class Meter:
    """Context manager that measures a request, from its outputs or from its deltas.

    Attributes:
        usage: tokens used so far.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        activity: Activity,
        fingerprints: FingerprintStore,
        record: RequestRecord,
        exchange: Asking,
    ) -> None:
        self._prompts = [
            PromptProgress(len(request.prompt), request.params.n) for request in exchange.requests
        ]
        hints = [facts.hint for facts in exchange.facts]
        self.usage = Usage(self._prompts, hints, exchange.written_ends)
        self._metrics = metrics
        self._record = record
        self._activity = activity
        self._fingerprints = fingerprints
        self._exchange = exchange

    def __enter__(self) -> Meter:
        self._seen = self._activity.begin(self._record, self._exchange, self._prompts)
        return self

    def take_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Count the whole outputs of all prompts."""
        now, tenant = time.monotonic(), self._record.tenant
        for index, (prompt, output) in enumerate(zip(self._prompts, outputs, strict=True)):
            prompt.take_output(output, now)
            self._admitted(index)
            for sample in prompt.samples.values():
                self._metrics.observe_sample(tenant, sample.finish_reason or "abort", sample.num_tokens)
            if prompt.first_token_at is not None:
                # When each token came is not known: they share the time between them.
                elapsed, later = now - prompt.first_token_at, prompt.samples[0].num_tokens - 1
                self._metrics.observe_tokens(tenant, _hit(prompt), elapsed, later)
        self._first_token_came()

    def take_delta(self, index: int, delta: OutputDelta) -> None:
        """Count a step's addition to a prompt's sample."""
        prompt, tenant, now = self._prompts[index], self._record.tenant, time.monotonic()
        is_first = all(prompt.first_token_at is None for prompt in self._prompts)
        since = prompt.take_delta(delta, now)
        if delta.prompt is not None:
            self._admitted(index)
        else:
            self._activity.changed(self._seen[index])
        if is_first:
            self._first_token_came()
        if since is not None:
            self._metrics.observe_tokens(tenant, _hit(prompt), since, len(delta.token_ids))
        if delta.finish_reason is not None:
            num_tokens = prompt.samples[delta.index].num_tokens
            self._metrics.observe_sample(tenant, delta.finish_reason, num_tokens)
        if delta.is_last:
            self._answered()

    def _admitted(self, index: int) -> None:
        """Count a prompt's match when the engine has admitted it."""
        exchange = self._exchange
        self._activity.admitted(
            self._seen[index], exchange.requests[index], exchange.facts[index], exchange.comparison
        )
        report = self._prompts[index].report
        if report is not None:
            self._metrics.observe_cache_report(self._record.tenant, report)
        self._keep_fingerprint(self._prompts[index])

    def _keep_fingerprint(self, prompt: PromptProgress) -> None:
        """Store the fingerprint, so that later requests can be compared with this one, however it ends."""
        fingerprint, outcome = self._exchange.fingerprint, prompt.outcome
        if fingerprint is None or outcome is None:
            return
        kept = self._exchange.requests[0].num_kept(prompt.num_tokens)
        reusable = max(kept, outcome.num_cached_tokens)
        if not outcome.num_cached_tokens + outcome.num_cache_write_tokens:
            reusable = 0  # nothing is cached
        fingerprint.reusable_tokens = reusable
        self._fingerprints.put(self._record.tenant, self._exchange.id, fingerprint)

    def _answered(self) -> None:
        """Count a complete answer, before its client has seen its end."""
        if self._exchange.fingerprint is not None:
            self._exchange.fingerprint.is_running = False

    def _first_token_came(self) -> None:
        """Count the time to the request's first token, if there is one."""
        came = [(prompt.first_token_at, _hit(prompt)) for prompt in self._prompts if prompt.first_token_at]
        if came:
            first_at, hit = min(came)
            self._metrics.observe_first_token(self._record.tenant, hit, first_at - self._record.started)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        has_left = isinstance(error, GeneratorExit | asyncio.CancelledError)
        has_begun = any(prompt.has_begun for prompt in self._prompts)
        # A request that the engine refused before any output is not counted.
        if has_begun:
            self._record.usage = self.usage
        if has_begun or has_left:
            self._count_ends()
        self._answered()
        state: State = "finished" if error is None else "aborted" if has_left else "failed"
        code = None if error is None or has_left else to_api_error(error).code
        for one in self._seen:
            self._activity.ended(one, state, code)

    def _count_ends(self) -> None:
        tenant = self._record.tenant
        for prompt, request in zip(self._prompts, self._exchange.requests, strict=True):
            if request.lora and prompt.outcome is not None:
                cached, generated = prompt.num_cached_tokens, prompt.num_generated_tokens
                self._metrics.observe_adapter(request.lora, prompt.num_tokens, cached, generated)
            for index in range(prompt.num_samples):
                sample = prompt.samples.setdefault(index, SampleProgress())
                if sample.finish_reason is None:
                    sample.finish_reason = "abort"
                    self._metrics.observe_sample(tenant, "abort", sample.num_tokens)
            self._metrics.observe_prompt(tenant, _hit(prompt), prompt.num_tokens, prompt.times)


def _hit(prompt: PromptProgress) -> str:
    return hit_class(prompt.num_cached_tokens, prompt.num_tokens)


class WholeRenderer(ABC):
    """Renderer of answers that are never streamed."""

    @abstractmethod
    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        """Return the body of a whole answer; one output per prompt, in order."""

    async def keep(self, usage: Usage) -> None:  # noqa: B027
        """Store a complete answer, if needed, before the client sees its end."""


class Renderer(WholeRenderer):
    """Renderer of answers: whole by `answer`, or streamed by `chunk` and, at the end, `ending`."""

    @abstractmethod
    def chunk(self, prompt_index: int, delta: OutputDelta, usage: Usage) -> bytes:
        """Frame a step's addition to a prompt; may be empty. `usage` counts the tokens so far."""

    @abstractmethod
    def ending(self, usage: Usage) -> bytes:
        """Return framed events after the last delta."""

    def stream_dialect(self, dialect: Dialect) -> Dialect:
        """Dialect that frames the stream and errors in it; by default the API's own."""
        return dialect


Body = TypeVar("Body", bound=BaseModel)

AnyRenderer = TypeVar("AnyRenderer", bound=WholeRenderer, covariant=True)

#: Makes the engine's work and the answer's renderer of a body and its sender.
Parse = Callable[[ServerContext, Body, Tenant], Awaitable[tuple[Asking, AnyRenderer]]]


class Generation(Generic[AnyRenderer]):
    """The engine's work for an HTTP request, read and checked, and its answer, independent of its API.

    Attributes:
        wanted: the engine's requests.
        renderer: makes the answer of their outputs.
        usage: tokens used so far.
    """

    def __init__(
        self, context: ServerContext, record: RequestRecord, wanted: Asking, renderer: AnyRenderer
    ) -> None:
        self._meter = Meter(context.metrics, context.activity, context.fingerprints, record, wanted)
        self.context, self.record, self.wanted, self.renderer = context, record, wanted, renderer
        for request in wanted.requests:
            request.tenant = record.tenant
        self.usage = self._meter.usage
        record.operation = wanted.operation

    async def check_quota(self) -> None:
        """Check, before the first of several prompts begins, that the tenant's ceiling admits all.

        Raises:
            ContextLengthExceededError: one of them never can.
        """
        with self._naming_fields():
            await self.context.engine.check_quota(self.wanted.requests)

    async def run(self) -> list[RequestOutput]:
        """Generate the whole answer, without a stream.

        Raises:
            RadixKVError: one of them was refused or failed; the others have been aborted.
        """
        with self._meter as meter, self._naming_fields():
            outputs = await gather_or_cancel([*map(self.context.engine.generate, self.wanted.requests)])
            meter.take_outputs(outputs)
            for output in outputs:
                for sample in output.outputs:
                    _check_finish(sample.finish_reason, output.error, output.error_code)
        return outputs

    async def frames(self) -> AsyncGenerator[bytes]:
        """Yield the answer as framed events; for a renderer of streams.

        Raises:
            RadixKVError: one prompt was refused or failed; the others have been aborted.
        """
        usage, renderer = self.usage, self.renderer
        assert isinstance(renderer, Renderer)
        begun: set[tuple[int, int]] = set()
        with self._meter as meter, self._naming_fields():
            streams = [self.context.engine.stream(request) for request in self.wanted.requests]
            async with aclosing(Merged(streams)) as deltas:
                async for index, delta in deltas:
                    meter.take_delta(index, delta)
                    _check_finish(delta.finish_reason, delta.error, delta.error_code)
                    is_first = (index, delta.index) not in begun
                    begun.add((index, delta.index))
                    if is_first and _has_long_logprobs(self.wanted.requests[index]):
                        frames = await off_loop(partial(renderer.chunk, index, delta, usage))
                    else:
                        frames = renderer.chunk(index, delta, usage)
                    if frames:
                        yield frames
            await renderer.keep(usage)
            yield renderer.ending(usage)

    @contextlib.contextmanager
    def _naming_fields(self) -> Iterator[None]:
        """Rename fields in the engine's errors to the fields of this route's body."""
        try:
            yield
        except InvalidRequestError as error:
            raise self._named(error) from None

    def _named(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error with the names of prompt and grammar in this route's body."""
        if isinstance(error, ContextLengthExceededError):
            return ContextLengthExceededError(str(error), param=self.wanted.prompt_param)
        if error.param == "structured":
            return self.wanted.facts[0].grammar_places.name(error)
        return error


def _has_long_logprobs(request: Request) -> bool:
    """Tell whether an answer begins with logprobs of a long prompt."""
    return request.params.prompt_logprobs is not None and len(request.prompt) > INLINE_TOKENS


def _check_finish(reason: str | None, error: str | None, code: str | None) -> None:
    if reason == "error":
        raise RequestFailedError(error or "the request failed while it ran", code=code)
    if reason == "abort":
        raise ApiError(503, error or "The request was aborted by the server.", code="aborted")


def json_response(value: Json, status: int = 200) -> Response:
    """Make a response of compact JSON as UTF-8."""
    return Response(dump(value), status, media_type="application/json")


async def long_json_response(make: Callable[[], Json], *, size: int) -> Response:
    """Make a response of the result of `make`; a long one is made in a thread.

    Args:
        size: number of tokens that the answer describes.
    """
    body = await off_loop(lambda: dump_in_pieces(make()), tokens=size)
    return Response(body, media_type="application/json")


def name_adapter(context: ServerContext, body: BaseModel, caller: Tenant, wanted: Asking) -> str:
    """Let the requests use the adapter that the body's model names, if any.

    Returns:
        Its name; empty: the base alone computes them.

    Raises:
        ApiError: 404; the caller may not use it.
    """
    model: str | None = getattr(body, "model", None)
    lora = context.adapter_name(model, caller)
    for request in wanted.requests:
        request.lora = lora
    return lora


async def begin(
    context: ServerContext,
    record: RequestRecord,
    read: Callable[[], Awaitable[Body]],
    parse: Parse[Body, AnyRenderer],
) -> Generation[AnyRenderer]:
    """Read a body, parse it, and count the request for its caller's limits.

    Raises:
        ApiError, RadixKVError: the request is refused.
    """
    visit = record.enter(context.tenants.limiter_of(record.caller))
    body = await read()
    wanted, renderer = await parse(context, body, record.caller)
    record.adapter = name_adapter(context, body, record.caller, wanted)
    record.ignored += [word for facts in wanted.facts for word in facts.ignored]
    record.notes += dict.fromkeys(note for facts in wanted.facts for note in facts.notes)
    generation = Generation(context, record, wanted, renderer)
    if len(wanted.requests) > 1 and context.tenants.has_ceiling(record.caller):
        await generation.check_quota()
    visit.expect(wanted.num_prompt_tokens, wanted.longest_answer(ASSUMED_ANSWER_TOKENS))
    return generation


async def respond(
    request: HttpRequest,
    dialect: Dialect,
    model: type[Body],
    parse: Parse[Body, WholeRenderer],
    *,
    takes_many_prompts: bool = False,
) -> Response:
    """Serve a request of a generation route.

    Raises:
        ApiError, RadixKVError: the request is refused, or failed before its answer began.
        ClientDisconnect: the client left first.
    """
    context = context_of(request)
    most = context.max_body_bytes(context.settings.max_prompts if takes_many_prompts else 1)
    read = partial(context.bodies.read, request, model, most)
    return await answer(request, dialect, await begin(context, record_of(request.scope), read, parse))


async def answer(request: HttpRequest, dialect: Dialect, generation: Generation[WholeRenderer]) -> Response:
    """Run a request and answer it, whole or as a stream.

    Raises:
        RadixKVError: the request failed before its answer began.
        ClientDisconnect: the client left first.
    """
    renderer = generation.renderer
    if generation.wanted.stream:
        assert isinstance(renderer, Renderer)
        ping = generation.context.settings.ping_interval_s
        return EventStream(generation.frames(), renderer.stream_dialect(dialect), generation.record, ping)
    outputs = await run_until_disconnect(request.receive, generation.run())
    usage = generation.usage
    size = usage.prompt_tokens + usage.completion_tokens
    body = await off_loop(lambda: renderer.answer(outputs, usage), tokens=size)
    await renderer.keep(usage)
    return await long_json_response(lambda: body, size=size)


async def tell_prompt(
    request: HttpRequest,
    model: type[Body],
    parse: Parse[Body, WholeRenderer],
    *,
    takes_many_prompts: bool = False,
) -> Response:
    """Answer with the tokens that a generation route would send to the model, and their cache namespace.

    Meant for routers in front of several servers; of several prompts, the longest is shown.

    Raises:
        ApiError, RadixKVError: the request would be refused.
    """
    context, record = context_of(request), record_of(request.scope)
    most = context.max_body_bytes(context.settings.max_prompts if takes_many_prompts else 1)
    body = await context.bodies.read(request, model, most)
    wanted, _ = await parse(context, body, record.caller)
    name_adapter(context, body, record.caller, wanted)
    longest = max(wanted.requests, key=lambda one: len(one.prompt))
    card = context.engine.adapters.card(longest.lora)
    prompt, namespace = token_ids(longest), [record.tenant, longest.salt, card.namespace_part if card else ""]
    return await long_json_response(
        lambda: {"tokens": prompt.tolist(), "count": len(prompt), "namespace": namespace},
        size=len(prompt),
    )
