"""One generation route of any API: body in, engine at work, answer or stream out.

An API gives the two ends: `parse`, from its body to a `GenerationRequest`, and a `Renderer`, from what the
engine gives to its answers. All between is the same for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Dialect, Json, dump, dump_in_pieces
from radixkv_server.generation.generation import Generation, Renderer, WholeRenderer
from radixkv_server.generation.request import INLINE_TOKENS, GenerationRequest
from radixkv_server.http.disconnect import run_until_disconnect
from radixkv_server.http.request_record import record_of
from radixkv_server.http.streaming import EventStream
from radixkv_server.tenants.rate_limits import ASSUMED_ANSWER_TOKENS
from radixkv_server.tenants.tenant import Tenant

Body = TypeVar("Body", bound=BaseModel)


#: From a body and who sent it to what the engine shall do, and how its answer is said.
Parse = Callable[[ServerContext, Body, Tenant], Awaitable[tuple[GenerationRequest, WholeRenderer]]]


def json_response(value: Json, status: int = 200) -> Response:
    """A response of compact JSON as UTF-8."""
    return Response(dump(value), status, media_type="application/json")


async def long_json_response(make: Callable[[], Json], *, size: int) -> Response:
    """A response of what `make` gives; both are done in a thread, if there may be much of it.

    Args:
        size: tokens that the answer has something about.
    """
    if size <= INLINE_TOKENS:
        return json_response(make())
    body = await asyncio.to_thread(lambda: dump_in_pieces(make()))
    return Response(body, media_type="application/json")


async def respond(
    request: Request,
    dialect: Dialect,
    model: type[Body],
    parse: Parse[Body],
    *,
    takes_many_prompts: bool = False,
) -> Response:
    """Serve a request of a generation route.

    Raises:
        ApiError, RadixKVError: the request is refused, or failed before its answer began.
        ClientDisconnect: the client left first.
    """
    context, record = context_of(request), record_of(request.scope)
    settings = context.settings
    visit = record.enter(context.tenants.limiter_of(record.caller))
    most = context.max_body_bytes(settings.max_prompts if takes_many_prompts else 1)
    body = await context.bodies.read(request, model, most)
    wanted, renderer = await parse(context, body, record.caller)
    generation = Generation(context, record, wanted)
    if len(wanted.prompt_requests) > 1 and context.tenants.has_ceiling(record.caller):
        await generation.check_quota()
    visit.expect(wanted.num_prompt_tokens, wanted.longest_answer(ASSUMED_ANSWER_TOKENS))
    if wanted.stream:
        assert isinstance(renderer, Renderer)
        frames = generation.frames(renderer)
        return EventStream(frames, renderer.stream_dialect(dialect), record, settings.ping_interval_s)
    outputs = await run_until_disconnect(request.receive, generation.run())
    usage = generation.usage
    size = usage.prompt_tokens + usage.completion_tokens
    answer = await _make(lambda: renderer.answer(outputs, usage), size=size)
    await renderer.keep(usage)
    return await long_json_response(lambda: answer, size=size)


async def tell_prompt(
    request: Request, model: type[Body], parse: Parse[Body], *, takes_many_prompts: bool = False
) -> Response:
    """What a generation route would send to the model for the same body, and where the cache looks it up.

    For who chooses between several servers; of several prompts the longest is told.

    Raises:
        ApiError, RadixKVError: what the request would be refused for.
    """
    context, record = context_of(request), record_of(request.scope)
    most = context.max_body_bytes(context.settings.max_prompts if takes_many_prompts else 1)
    wanted, _ = await parse(context, await context.bodies.read(request, model, most), record.caller)
    prompt = max((one.prompt for one in wanted.prompt_requests), key=len)
    namespace = [record.tenant, wanted.cache_salt or "", ""]  # no adapter
    return await long_json_response(
        lambda: {"tokens": prompt.token_ids.tolist(), "count": len(prompt), "namespace": namespace},
        size=len(prompt),
    )


async def _make(make: Callable[[], Json], *, size: int) -> Json:
    """What `make` gives, in a thread where there may be much of it; see `long_json_response`."""
    return make() if size <= INLINE_TOKENS else await asyncio.to_thread(make)
