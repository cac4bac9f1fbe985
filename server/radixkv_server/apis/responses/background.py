# SPDX-License-Identifier: Apache-2.0
"""Responses in the background: begun by POST, watched by GET, ended by cancel or by themselves."""

from __future__ import annotations

from dataclasses import replace

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from radixkv_server.apis.responses.errors import ResponsesDialect
from radixkv_server.apis.responses.render import ResponseRenderer
from radixkv_server.apis.responses.stored import UNFINISHED, StoredResponses
from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Json
from radixkv_server.errors import ApiError, bad_request
from radixkv_server.generation.background import KEPT_S, BackgroundAnswer
from radixkv_server.generation.generation import Generation, json_response
from radixkv_server.http.request_record import RequestRecord, record_of
from radixkv_server.http.streaming import EventStream


async def answer_in_background(request: Request, begun: Generation[ResponseRenderer]) -> Response:
    """Start a response that continues without its client, and answer with its state or its stream.

    Raises:
        ApiError: 429; the tenant runs too many.
        StoreError: the response can't be stored.
    """
    context, record, renderer = begun.context, begun.record, begun.renderer
    context.background.check_room(record.tenant)
    work = record.hand_over()
    work.operation = begun.operation
    generation = replace(begun, record=work)
    running = BackgroundAnswer(
        record.tenant,
        begun.id,
        renderer,
        generation.frames(),
        generation.usage,
        lambda error: _ended(context, request.scope, work, error),
    )
    try:
        await renderer.store(renderer.response)
    except BaseException:
        work.end()
        raise
    context.background.start(running)
    if begun.stream:
        return _stream(request, running, -1)
    return json_response(renderer.so_far())


def _ended(context: ServerContext, scope: Scope, work: RequestRecord, error: ApiError | None) -> None:
    work.status = 200
    if error is not None:
        work.failed, work.error_code = True, error.code or ""
    context.observer.work_ended(scope, work)


async def retrieve(request: Request, response_id: str) -> Response:
    """Answer with the present state of a response, or with its events after `starting_after`.

    Raises:
        ApiError: 404; the tenant has no such response. 400; its events are not kept.
        StoreError: the store fails.
    """
    after = _starting_after(request.query_params)
    running = context_of(request).background.get(record_of(request.scope).tenant, response_id)
    if running is None:
        stored = (await stored_responses(request).get(response_id)).response
        if after is None:
            return json_response(stored)
        why = "it was answered in the foreground"
        if stored["background"]:
            why = f"they are kept for {KEPT_S / 60:g} minutes after its end, by the server that ran it"
        message = f"The events of {response_id} are not there: {why}. Retrieve it without stream."
        raise bad_request(message, param="stream", code="events_not_kept")
    return json_response(_state_of(running)) if after is None else _stream(request, running, after)


async def cancel(request: Request, response_id: str) -> Response:
    """End a response in the background; its items so far stay.

    Raises:
        ApiError: 404; the tenant has no such response. 400; it ran in the foreground, or has ended. 409;
            another server runs it.
        StoreError: the store fails.
    """
    running = context_of(request).background.get(record_of(request.scope).tenant, response_id)
    if running is not None and running.ended_at is None:
        await running.end(by_client=True)
        if (response := _state_of(running))["status"] == "cancelled":
            return json_response(response)
    response = (await stored_responses(request).get(response_id)).response
    status = response["status"]
    if status == "cancelled":
        return json_response(response)
    if not response["background"]:
        message = "Only background responses can be cancelled: close the connection of others to end them."
        raise bad_request(message, param="response_id", code="not_in_background")
    if status in UNFINISHED:
        message = f"Another server runs the response {response_id}: send its cancellation there."
        raise ApiError(409, message, param="response_id", code="runs_elsewhere")
    message = f"The response {response_id} has ended ({status}): there is nothing to cancel."
    raise bad_request(message, param="response_id", code="response_ended")


def stored_responses(request: Request) -> StoredResponses:
    """Return the stored responses of the caller's tenant."""
    return StoredResponses(context_of(request).responses, record_of(request.scope).tenant)


def _state_of(running: BackgroundAnswer) -> Json:
    assert isinstance(running.renderer, ResponseRenderer)
    return running.renderer.so_far()


def _stream(request: Request, running: BackgroundAnswer, after: int) -> Response:
    ping = context_of(request).settings.ping_interval_s
    return EventStream(running.stream(after), ResponsesDialect(), record_of(request.scope), ping)


def _starting_after(asked: QueryParams) -> int | None:
    """Return the number of the last event that the client has, -1 for none; None: no stream is asked for.

    Raises:
        ApiError: 400; a value is wrong.
    """
    stream, after = asked.get("stream", "false"), asked.get("starting_after")
    if stream not in ("true", "false"):
        raise bad_request("stream must be true or false.", param="stream")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) <= 9):
        message = "starting_after must be the sequence_number of an event."
        raise bad_request(message, param="starting_after")
    if after is not None and stream == "false":
        raise bad_request("starting_after is only allowed when stream is true.", param="starting_after")
    if stream == "false":
        return None
    return -1 if after is None else int(after)
