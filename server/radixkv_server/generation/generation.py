# SPDX-License-Identifier: Apache-2.0
"""Generation route of any API: reads a body, runs the engine, renders and counts the answer or stream.

An API supplies both ends: `prepare`, from its body to a `Generation`, and a `Renderer`, from the engine's
outputs to its answers. The steps between are common to all APIs:

1. `respond` reads the body, and has the API make its `Generation`: engine requests, and a renderer.
2. `Generation.frames` runs the requests on the engine. A delta passes through two generators on its way to
   the connection: the engine's and this one. `Generation.run` waits for the whole outputs instead.
3. `Meter` follows them, for usage, metrics, and the list of the latest requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel

from radixkv.engine.cache_client import Owner
from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.errors import ContextLengthExceededError, InvalidRequestError, RequestFailedError
from radixkv.scheduling.request import Request
from radixkv_server.activity.activity import State
from radixkv_server.chats.chat import ChatPrompt
from radixkv_server.concurrency import INLINE_TOKENS, Merged, gather_or_cancel, off_loop
from radixkv_server.context import ServerContext, context_of
from radixkv_server.diagnostics.comparison import Comparison
from radixkv_server.diagnostics.fingerprint import Fingerprint
from radixkv_server.dialect import Dialect, Json, dump, dump_in_pieces
from radixkv_server.errors import ApiError, to_api_error
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.generation.progress import PromptProgress, SampleProgress, Usage
from radixkv_server.generation.request import encoded_prompt, pin_whole
from radixkv_server.http.request_record import RequestRecord, record_of
from radixkv_server.http.streaming import EventStream, run_until_disconnect
from radixkv_server.metrics.request_metrics import hit_class
from radixkv_server.tenants.registry import ASSUMED_ANSWER_TOKENS

_AS_GIVEN = GrammarPlaces("structured_outputs")


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


AnyRenderer = TypeVar("AnyRenderer", bound=WholeRenderer, covariant=True)


@dataclass(eq=False)
class Generation(Generic[AnyRenderer]):
    """The engine's work for an HTTP request, and its answer, whatever API it came by.

    Args:
        record: record of the HTTP request; its tenant owns the engine's requests.
        id: id of the answer, from which the engine's requests get theirs.
        requests: a request per prompt, at least one.
        renderer: makes the answer of their outputs.
        prompt_param: name of the prompt's field in the body, for errors about its length.
        stream: stream the answer instead of sending it at the end.
        operation: name of the operation in traces: `chat` or `text_completion`.
        chat_prompt: the only prompt, if it is a chat; None: prompts are text.
        grammar_places: fields of the body that the answers' grammar comes from, for errors.
        fingerprint: key by which later requests are compared with it; None: they can't be.
        comparison: comparison with an earlier request; None: there is none.
        written_end: see `Usage`.

    Attributes:
        prompts: progress of each prompt.
        usage: tokens used so far.
    """

    context: ServerContext
    record: RequestRecord
    id: str
    requests: Sequence[Request]
    renderer: AnyRenderer
    _: KW_ONLY
    prompt_param: str
    stream: bool = False
    operation: str = "chat"
    chat_prompt: ChatPrompt | None = None
    grammar_places: GrammarPlaces = _AS_GIVEN
    fingerprint: Fingerprint | None = None
    comparison: Comparison | None = None
    written_end: int | None = None
    prompts: list[PromptProgress] = field(init=False)
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        for index, request in enumerate(self.requests):
            request.request_id, request.tenant = f"{self.id}-{index}", self.record.tenant
            if self.record.is_background:  # what it alone has cached makes room first, too
                request.background = request.session_done = True
        self.prompts = [PromptProgress(len(one.prompt), one.params.n) for one in self.requests]
        hint = None if self.chat_prompt is None else self.chat_prompt.hint
        self.usage = Usage(self.prompts, hint, self.written_end)

    def use_adapter(self, model: str | None) -> None:
        """Have the requests computed by the adapter that a body's model names, if any.

        Raises:
            ApiError: 404; the caller may not use it.
        """
        self.record.adapter = self.context.adapter_name(model, self.record.caller)
        for request in self.requests:
            request.lora = self.record.adapter

    async def join_session(self, session: str, pin_s: float | None) -> None:
        """Let the only request belong to a session, by the body or else by the headers, and be pinned.

        Args:
            session: its name in the body; empty: none.
            pin_s: seconds for which the prompt is to be pinned; None: it is not.
        """
        if len(self.requests) != 1:
            return
        (request,), record, context = self.requests, self.record, self.context
        pin_whole(request, pin_s)
        request.session_done = request.session_done or record.ends_session
        name = session or record.session
        if not name:
            return
        request.cache_key_hint = request.cache_key_hint or name
        if request.session_done:
            await context.sessions.end(record.tenant, name)
        else:
            card = context.engine.adapters.card(request.lora) if request.lora else None
            owner = Owner(record.tenant, request.salt, card.identity if card else "")
            context.sessions.note(name, owner, encoded_prompt(request))

    def note_ignored_fields(self) -> None:
        """Note the fields that have no effect on the template of a chat, for the header `warning`."""
        prompt = self.chat_prompt
        if prompt is not None:
            self.record.ignored += prompt.ignored
            if prompt.chat.callable_tools:
                self.record.notes += self.context.templates.notes(prompt.format)

    def longest_answer(self, assumed: int) -> int:
        """Return the most tokens that may be generated, over all samples; `assumed` is the default limit."""
        each = ((request.params.max_tokens, request.params.num_samples) for request in self.requests)
        return sum((assumed if limit is None else limit) * count for limit, count in each)

    async def check_quota(self) -> None:
        """Check, before the first of several prompts begins, that the tenant's ceiling admits all.

        Raises:
            ContextLengthExceededError: one of them never can.
        """
        with self._naming_fields():
            await self.context.engine.check_quota(self.requests)

    async def run(self) -> list[RequestOutput]:
        """Generate the whole answer, without a stream.

        Raises:
            RadixKVError: one of them was refused or failed; the others have been aborted.
        """
        with Meter(self) as meter, self._naming_fields():
            outputs = await gather_or_cancel([*map(self.context.engine.generate, self.requests)])
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
        with Meter(self) as meter, self._naming_fields():
            streams = [self.context.engine.stream(request) for request in self.requests]
            async with aclosing(Merged(streams)) as deltas:
                async for index, delta in deltas:
                    meter.take_delta(index, delta)
                    _check_finish(delta.finish_reason, delta.error, delta.error_code)
                    is_first = (index, delta.index) not in begun
                    begun.add((index, delta.index))
                    if is_first and _has_long_logprobs(self.requests[index]):
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
            return ContextLengthExceededError(str(error), param=self.prompt_param)
        if error.param == "structured":
            return self.grammar_places.name(error)
        return error


def _has_long_logprobs(request: Request) -> bool:
    """Tell whether an answer begins with logprobs of a long prompt."""
    return request.params.prompt_logprobs is not None and len(request.prompt) > INLINE_TOKENS


def _check_finish(reason: str | None, error: str | None, code: str | None) -> None:
    if reason == "error":
        raise RequestFailedError(error or "the request failed while it ran", code=code)
    if reason == "abort":
        raise ApiError(503, error or "The request was aborted by the server.", code="aborted")


class Meter:
    """Context manager that measures a generation while it runs, from its outputs or from its deltas."""

    def __init__(self, generation: Generation[WholeRenderer]) -> None:
        context = generation.context
        self._generation = generation
        self._prompts = generation.prompts
        self._record = generation.record
        self._metrics, self._activity = context.metrics, context.activity
        self._fingerprints = context.fingerprints

    def __enter__(self) -> Meter:
        one = self._generation
        self._seen = self._activity.begin(self._record, one.id, one.requests, one.chat_prompt, self._prompts)
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
        one, report = self._generation, self._prompts[index].report
        self._activity.admitted(self._seen[index], one.requests[index], one.chat_prompt, one.comparison)
        if report is not None:
            self._metrics.observe_cache_report(self._record.tenant, report)
        self._keep_fingerprint(self._prompts[index])

    def _keep_fingerprint(self, prompt: PromptProgress) -> None:
        """Store the fingerprint, so that later requests can be compared with this one, however it ends."""
        one, outcome = self._generation, prompt.outcome
        if one.fingerprint is None or outcome is None:
            return
        reusable = max(one.requests[0].num_kept(prompt.num_tokens), outcome.num_cached_tokens)
        if not outcome.num_cached_tokens + outcome.num_cache_write_tokens:
            reusable = 0  # nothing is cached
        one.fingerprint.reusable_tokens = reusable
        self._fingerprints.put(self._record.tenant, one.id, one.fingerprint)

    def _answered(self) -> None:
        """Count a complete answer, before its client has seen its end."""
        if self._generation.fingerprint is not None:
            self._generation.fingerprint.is_running = False

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
            self._record.usage = self._generation.usage
        if has_begun or has_left:
            self._count_ends()
        self._answered()
        state: State = "finished" if error is None else "aborted" if has_left else "failed"
        code = None if error is None or has_left else to_api_error(error).code
        for one in self._seen:
            self._activity.ended(one, state, code)

    def _count_ends(self) -> None:
        tenant = self._record.tenant
        for prompt, request in zip(self._prompts, self._generation.requests, strict=True):
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


Body = TypeVar("Body", bound=BaseModel)

#: Makes the generation that answers a body.
Prepare = Callable[[ServerContext, Body, RequestRecord], Awaitable[Generation[AnyRenderer]]]


async def begin(
    context: ServerContext,
    record: RequestRecord,
    read: Callable[[], Awaitable[Body]],
    prepare: Prepare[Body, AnyRenderer],
) -> Generation[AnyRenderer]:
    """Read a body, prepare its generation, and count the request for its caller's limits.

    Raises:
        ApiError, RadixKVError: the request is refused.
    """
    tenants = context.tenants
    limiter = tenants.background if record.is_background else tenants.limiter_of(record.caller)
    reservation = record.enter(limiter)
    body = await read()
    generation = await prepare(context, body, record)
    generation.use_adapter(getattr(body, "model", None))
    generation.note_ignored_fields()
    if not record.is_background:
        await generation.join_session(getattr(body, "session", ""), getattr(body, "pin_s", None))
    record.operation = generation.operation
    if len(generation.requests) > 1 and context.tenants.has_ceiling(record.caller):
        await generation.check_quota()
    reservation.expect(generation.usage.prompt_tokens, generation.longest_answer(ASSUMED_ANSWER_TOKENS))
    return generation


async def respond(
    request: HttpRequest,
    dialect: Dialect,
    model: type[Body],
    prepare: Prepare[Body, WholeRenderer],
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
    return await answer(request, dialect, await begin(context, record_of(request.scope), read, prepare))


async def answer(request: HttpRequest, dialect: Dialect, generation: Generation[WholeRenderer]) -> Response:
    """Run a generation and answer it, whole or as a stream.

    Raises:
        RadixKVError: the request failed before its answer began.
        ClientDisconnect: the client left first.
    """
    renderer = generation.renderer
    if generation.stream:
        assert isinstance(renderer, Renderer)
        ping = generation.context.settings.ping_interval_s
        return EventStream(generation.frames(), renderer.stream_dialect(dialect), generation.record, ping)
    outputs = await run_until_disconnect(request.receive, generation.run())
    usage = generation.usage
    size = usage.prompt_tokens + usage.completion_tokens
    body = await off_loop(lambda: renderer.answer(outputs, usage), tokens=size)
    await renderer.keep(usage)
    return await long_json_response(lambda: body, size=size)


async def respond_with_tokens(
    request: HttpRequest,
    model: type[Body],
    prepare: Prepare[Body, WholeRenderer],
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
    generation = await prepare(context, body, record)
    generation.use_adapter(getattr(body, "model", None))
    longest = max(generation.requests, key=lambda one: len(one.prompt))
    card = context.engine.adapters.card(longest.lora)
    ids, namespace = encoded_prompt(longest).token_ids, [record.tenant, longest.salt]
    return await long_json_response(
        lambda: {
            "tokens": ids.tolist(),
            "count": len(ids),
            "namespace": [*namespace, card.namespace_part if card else ""],
        },
        size=len(ids),
    )


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
