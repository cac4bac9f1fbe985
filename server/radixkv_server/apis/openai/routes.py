# SPDX-License-Identifier: Apache-2.0
"""OpenAI's routes."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from radixkv_server.apis.common.chat_completion import ChatCompletionRequest
from radixkv_server.apis.common.openai_errors import OPENAI
from radixkv_server.apis.openai.parse import parse_chat, parse_completion
from radixkv_server.apis.openai.schemas import CompletionRequest
from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Api, Json
from radixkv_server.errors import ApiError
from radixkv_server.generation.generation import json_response, respond, tell_prompt
from radixkv_server.http.request_record import record_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a chat, whole or as a stream of server-sent events."""
    return await respond(request, OPENAI, ChatCompletionRequest, parse_chat)


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Complete prompts, whole or as a stream of server-sent events."""
    return await respond(request, OPENAI, CompletionRequest, parse_completion, takes_many_prompts=True)


@router.post("/tokenize/v1/chat/completions")
async def tokenize_chat_completion(request: Request) -> Response:
    """Return the tokens that /v1/chat/completions would send to the model, and their cache namespace."""
    return await tell_prompt(request, ChatCompletionRequest, parse_chat)


@router.post("/tokenize/v1/completions")
async def tokenize_completion(request: Request) -> Response:
    """Return the tokens of /v1/completions likewise; of several prompts, the longest."""
    return await tell_prompt(request, CompletionRequest, parse_completion, takes_many_prompts=True)


@router.post("/v1/embeddings")
async def create_embedding() -> Response:
    """Refuse embeddings."""
    raise ApiError(
        400,
        "This server generates text and computes no embeddings: its models are trained to predict the next "
        "token, and what they hold for a text inside is no measure of its meaning. Use an embedding model.",
        code="unsupported_endpoint",
    )


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the names of the served model, in a form for OpenAI's and Anthropic's SDKs."""
    context, caller = context_of(request), record_of(request.scope).caller
    names = [*context.model_names, *(card.name for card in context.adapters_of(caller))]
    cards = [await _model_card(context, name) for name in names]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return json_response({"object": "list", "data": cards, **page})


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> Response:
    """Return a model; names may contain slashes."""
    context, caller = context_of(request), record_of(request.scope).caller
    context.adapter_name(model, caller)
    return json_response(await _model_card(context, context.resolve_model(model)))


async def _model_card(context: ServerContext, name: str) -> Json:
    longest = context.engine.limits.max_model_len
    known = (await context.templates.find(None)).format
    openai = {"object": "model", "created": context.started, "owned_by": "radixkv"}
    anthropic = {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.started, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest,
    }
    own = {
        "root": context.engine.model_name,
        "max_model_len": longest,
        "context_length": context.engine.limits.context_length,
        "chat_format": {"name": known.name, "is_known": known.is_known},
    }
    adapter = None if name in context.model_names else context.engine.adapters.card(name)
    if adapter is not None:
        own |= {"parent": context.model_names[0], "created": adapter.created, "rank": adapter.rank}
    return {"id": name, **openai, **anthropic, **own}


#: OpenAI's is also the dialect of every path that no other API claims.
API = Api(
    router,
    {"/": OPENAI},
    {
        "POST /v1/chat/completions": ChatCompletionRequest,
        "POST /v1/completions": CompletionRequest,
        "POST /tokenize/v1/chat/completions": ChatCompletionRequest,
        "POST /tokenize/v1/completions": CompletionRequest,
    },
    generating=frozenset({"/v1/chat/completions", "/v1/completions"}),
)
