# SPDX-License-Identifier: Apache-2.0
"""OpenAI's routes: chats, completions and models.

The life of a streamed chat in this server:

1. `create_chat_completion` hands the request to `respond` (generation/generation.py), which has the body read
   as a `ChatCompletionRequest` (http/body.py; the fields: schemas.py).
2. `prepare_chat` (serving.py) makes a `Generation` of it: the body becomes a `Chat`, rendered to a
   `ChatPrompt` (chats/render.py), which becomes the engine's `Request`; a `ChatRenderer` (render.py) will
   write the answer.
3. `Generation.frames` reads the engine's deltas and lets the renderer make chunks of them; an `EventStream`
   (http/streaming.py) sends these while it watches the client.
"""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from radixkv.model.loading.sampling_defaults import sampling_source
from radixkv.sampling.sampling_params import SamplingParams
from radixkv_server.apis.common.openai_errors import OPENAI
from radixkv_server.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from radixkv_server.apis.openai.serving import prepare_chat, prepare_completion
from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Api, Json
from radixkv_server.errors import ApiError
from radixkv_server.generation.generation import json_response, respond, respond_with_tokens
from radixkv_server.http.request_record import record_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: HttpRequest) -> Response:
    """Answer a chat, whole or as a stream of server-sent events."""
    return await respond(request, OPENAI, ChatCompletionRequest, prepare_chat)


@router.post("/v1/completions")
async def create_completion(request: HttpRequest) -> Response:
    """Complete prompts, whole or as a stream of server-sent events."""
    return await respond(request, OPENAI, CompletionRequest, prepare_completion, takes_many_prompts=True)


@router.post("/tokenize/v1/chat/completions")
async def tokenize_chat_completion(request: HttpRequest) -> Response:
    """Return the tokens that /v1/chat/completions would send to the model, and their cache namespace."""
    return await respond_with_tokens(request, ChatCompletionRequest, prepare_chat)


@router.post("/tokenize/v1/completions")
async def tokenize_completion(request: HttpRequest) -> Response:
    """Return the tokens of /v1/completions likewise; of several prompts, the longest."""
    return await respond_with_tokens(request, CompletionRequest, prepare_completion, takes_many_prompts=True)


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
async def list_models(request: HttpRequest) -> Response:
    """List the names of the served model, in a form for OpenAI's and Anthropic's SDKs."""
    context, caller = context_of(request), record_of(request.scope).caller
    names = [*context.model_names, *(card.name for card in context.adapters_of(caller))]
    cards = [await _model_card(context, name) for name in names]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return json_response({"object": "list", "data": cards, **page})


@router.get("/v1/models/{model:path}")
async def get_model(request: HttpRequest, model: str) -> Response:
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
        "default_sampling": {
            "temperature": SamplingParams().temperature,
            **context.engine.default_sampling,
            "source": sampling_source(
                context.engine.default_sampling, context.engine.config.generation_config
            ),
        },
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
