# SPDX-License-Identifier: Apache-2.0
"""One generation route of any API: body in, engine at work, answer or stream out.

An API supplies the two ends: `parse`, from its body to an `Asking`, and a `Renderer`, from the
engine's outputs to its answers. The steps between are common to all APIs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Dialect, Json, dump, dump_in_pieces
from radixkv_server.generation.generation import Generation, Renderer, WholeRenderer
from radixkv_server.generation.request import Asking, token_ids
from radixkv_server.http.disconnect import run_until_disconnect
from radixkv_server.http.request_record import RequestRecord, record_of
from radixkv_server.http.streaming import EventStream
from radixkv_server.off_loop import off_loop
from radixkv_server.tenants.rate_limits import ASSUMED_ANSWER_TOKENS
from radixkv_server.tenants.tenant import Tenant

Body = TypeVar("Body", bound=BaseModel)

AnyRenderer = TypeVar("AnyRenderer", bound=WholeRenderer, covariant=True)

#: Makes the engine's work and the answer's renderer of a body and its sender.
Parse = Callable[[ServerContext, Body, Tenant], Awaitable[tuple[Asking, AnyRenderer]]]


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


def name_adapter(context: ServerContext, body: BaseModel, caller: Tenant, wanted: Asking) -> None:
    """Have the adapter that a body's model names, if it is one, compute the requests.

    Raises:
        ApiError: 404; the caller may not use it.
    """
    model: str | None = getattr(body, "model", None)
    lora = context.adapter_name(model, caller)
    for request in wanted.requests:
        request.lora = lora


@dataclass(frozen=True, slots=True)
class Admitted(Generic[AnyRenderer]):
    """A request of a generation route that has been read and checked, and not run yet."""

    context: ServerContext
    record: RequestRecord
    wanted: Asking
    renderer: AnyRenderer
    generation: Generation


async def begin(
    context: ServerContext,
    record: RequestRecord,
    read: Callable[[], Awaitable[Body]],
    parse: Parse[Body, AnyRenderer],
) -> Admitted[AnyRenderer]:
    """Read a body, parse it, and count the request for its caller's limits.

    Raises:
        ApiError, RadixKVError: the request is refused.
    """
    visit = record.enter(context.tenants.limiter_of(record.caller))
    body = await read()
    wanted, renderer = await parse(context, body, record.caller)
    name_adapter(context, body, record.caller, wanted)
    record.ignored += [word for facts in wanted.facts for word in facts.ignored]
    record.notes += dict.fromkeys(note for facts in wanted.facts for note in facts.notes)
    generation = Generation(context, record, wanted)
    if len(wanted.requests) > 1 and context.tenants.has_ceiling(record.caller):
        await generation.check_quota()
    visit.expect(wanted.num_prompt_tokens, wanted.longest_answer(ASSUMED_ANSWER_TOKENS))
    return Admitted(context, record, wanted, renderer, generation)


async def respond(
    request: Request,
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


async def answer(request: Request, dialect: Dialect, begun: Admitted[WholeRenderer]) -> Response:
    """Run a request and answer it, whole or as a stream.

    Raises:
        RadixKVError: the request failed before its answer began.
        ClientDisconnect: the client left first.
    """
    generation, renderer = begun.generation, begun.renderer
    if begun.wanted.stream:
        assert isinstance(renderer, Renderer)
        frames, ping = generation.frames(renderer), begun.context.settings.ping_interval_s
        return EventStream(frames, renderer.stream_dialect(dialect), begun.record, ping)
    outputs = await run_until_disconnect(request.receive, generation.run())
    usage = generation.usage
    size = usage.prompt_tokens + usage.completion_tokens
    body = await off_loop(lambda: renderer.answer(outputs, usage), tokens=size)
    await renderer.keep(usage)
    return await long_json_response(lambda: body, size=size)


async def tell_prompt(
    request: Request,
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
    prompt, namespace = token_ids(longest), [record.tenant, longest.salt, card.identity if card else ""]
    return await long_json_response(
        lambda: {"tokens": prompt.tolist(), "count": len(prompt), "namespace": namespace},
        size=len(prompt),
    )
