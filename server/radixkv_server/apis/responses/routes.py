"""The routes of the Responses API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from radixkv_server.apis.responses.compaction import parse_compaction
from radixkv_server.apis.responses.errors import ResponsesDialect
from radixkv_server.apis.responses.parse import count_input_tokens, parse_response
from radixkv_server.apis.responses.schemas import CompactRequest, InputTokensRequest, ResponseRequest
from radixkv_server.apis.responses.stored import StoredResponses
from radixkv_server.context import context_of
from radixkv_server.dialect import Api, Json
from radixkv_server.errors import ApiError, bad_request
from radixkv_server.generation.serve_generation import json_response, respond, tell_prompt
from radixkv_server.http.request_record import record_of

router = APIRouter()

RESPONSES = ResponsesDialect()

MAX_ITEMS = 100


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of typed events, and keep the answer."""
    return await respond(request, RESPONSES, ResponseRequest, parse_response)


@router.post("/v1/responses/input_tokens")
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a response would have."""
    context = context_of(request)
    body = await context.bodies.read(request, InputTokensRequest, context.max_body_bytes())
    tokens = await count_input_tokens(context, body, record_of(request.scope).caller)
    return json_response({"object": "response.input_tokens", "input_tokens": tokens})


@router.post("/v1/responses/compact")
async def compact(request: Request) -> Response:
    """A shorter list of items in place of a conversation's: the model sums it up."""
    return await respond(request, RESPONSES, CompactRequest, parse_compaction)


@router.post("/tokenize/v1/responses")
async def tokenize_response(request: Request) -> Response:
    """The tokens that /v1/responses would send to the model, and where the cache looks them up."""
    return await tell_prompt(request, ResponseRequest, parse_response)


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """A stored response."""
    if request.query_params.get("stream") == "true":
        raise bad_request("A stored response can't be streamed: leave stream out.", param="stream")
    return json_response((await _stored(request).get(response_id)).response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a stored response; later ones that build on it stay."""
    await _stored(request).delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """The items that a stored response was given, those of the turns before included."""
    stored = await _stored(request).get(response_id)
    return json_response(_page(list(stored.input), request))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str) -> Response:
    """Refused."""
    raise ApiError(
        400,
        "Only responses that run in the background can be cancelled, and this server runs none there: close "
        "the connection of a response to end it.",
        code="unsupported_endpoint",
    )


def _stored(request: Request) -> StoredResponses:
    return StoredResponses(context_of(request).responses, record_of(request.scope).tenant)


def _page(items: list[Json], request: Request) -> Json:
    """A page of a list, by `order` (newest first unless `asc`), `after` and `limit`."""
    asked = request.query_params
    order, limit, after = asked.get("order", "desc"), asked.get("limit", "20"), asked.get("after")
    if order not in ("asc", "desc"):
        raise bad_request("order must be 'asc' or 'desc'.", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_ITEMS):
        raise bad_request(f"limit must be an integer from 1 to {MAX_ITEMS}.", param="limit")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        indices = [index for index, item in enumerate(items) if item["id"] == after]
        if not indices:
            raise bad_request(f"after: there is no item {after[:200]!r}.", param="after")
        items = items[indices[0] + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


API = Api(
    router,
    {"/v1/responses": RESPONSES},
    {
        "POST /v1/responses": ResponseRequest,
        "POST /v1/responses/input_tokens": InputTokensRequest,
        "POST /v1/responses/compact": CompactRequest,
        "POST /tokenize/v1/responses": ResponseRequest,
    },
    {"GET /v1/responses/{response_id}/input_items": ("after", "limit", "order")},
    generating=frozenset({"/v1/responses", "/v1/responses/compact"}),
)
