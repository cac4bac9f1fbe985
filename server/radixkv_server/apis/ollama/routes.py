# SPDX-License-Identifier: Apache-2.0
"""Ollama's routes: chat, generate, and the discovery of models."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

import radixkv
from radixkv_server.apis.ollama.render import OLLAMA, timestamp
from radixkv_server.apis.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaModelRequest
from radixkv_server.apis.ollama.serving import prepare_ollama
from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Api, Json
from radixkv_server.errors import bad_request
from radixkv_server.generation.generation import answer, begin, json_response
from radixkv_server.http.request_record import record_of
from radixkv_server.http.streaming import EventStream

#: Version of Ollama's API that these routes follow: clients ask for a least one.
SPOKEN = "0.12.6"

router = APIRouter()


@router.post("/api/chat")
async def ollama_chat(request: Request) -> Response:
    """Answer a chat, as lines of JSON or, with `stream` false, as a whole."""
    return await _respond(request, OllamaChatRequest)


@router.post("/api/generate")
async def ollama_generate(request: Request) -> Response:
    """Answer a prompt, through the chat template unless `raw` is true."""
    return await _respond(request, OllamaGenerateRequest)


async def _respond(request: Request, kind: type[OllamaChatRequest | OllamaGenerateRequest]) -> Response:
    context = context_of(request)
    body = await context.bodies.read(request, kind, context.max_body_bytes())
    if body.is_empty:
        is_chat = isinstance(body, OllamaChatRequest)
        said = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        reason = "unload" if str(body.keep_alive) in ("0", "0s", "0.0") else "load"
        loaded = {"model": context.resolve_model(body.model), "created_at": timestamp(), **said}
        return json_response({**loaded, "done": True, "done_reason": reason})

    async def read() -> OllamaChatRequest | OllamaGenerateRequest:
        return body

    response = await answer(
        request, OLLAMA, await begin(context, record_of(request.scope), read, prepare_ollama)
    )
    if isinstance(response, EventStream):
        response.headers["content-type"] = "application/x-ndjson"
    return response


@router.post("/api/show")
async def ollama_show(request: Request) -> Response:
    """Return a model's template, context length and capabilities."""
    context = context_of(request)
    body = await context.bodies.read(request, OllamaModelRequest, context.max_body_bytes())
    name = body.model or body.name
    if name is None:
        raise bad_request("model is missing: the name of a model, as /api/tags lists them.", param="model")
    card = _card(context, context.resolve_model(name))
    known = await context.templates.find(None) if context.engine.tokenizer.has_chat_template else None
    tools = ["tools"] if known is not None and known.format.forms else []
    thinking = ["thinking"] if known is not None and known.thinking.can_think else []
    engine = context.engine
    sees = ["vision"] if engine.image_processor is not None else []
    return json_response(
        {
            "modelfile": f"FROM {card['model']}\n",
            "parameters": "\n".join(f"{key} {value}" for key, value in engine.default_sampling.items()),
            "template": engine.tokenizer.chat_template or "",
            "details": card["details"],
            "model_info": {
                "general.architecture": "radixkv",
                "general.basename": engine.model_name,
                "radixkv.context_length": engine.limits.max_model_len,
                "radixkv.vocab_size": engine.tokenizer.vocab_size,
            },
            "capabilities": ["completion", *tools, *sees, *thinking],
            "modified_at": card["modified_at"],
        }
    )


@router.get("/api/tags")
async def ollama_tags(request: Request) -> Response:
    """List the names of the served model."""
    context = context_of(request)
    return json_response({"models": [_card(context, name) for name in context.model_names]})


@router.get("/api/ps")
async def ollama_ps(request: Request) -> Response:
    """List the model as permanently loaded."""
    context = context_of(request)
    length = context.engine.limits.max_model_len
    more = {"size_vram": 0, "expires_at": "2318-01-01T00:00:00Z", "context_length": length}
    return json_response({"models": [{**_card(context, name), **more} for name in context.model_names]})


@router.head("/")
async def ollama_alive() -> Response:
    """Answer the first request of Ollama's clients: whether a server runs."""
    return Response()


@router.get("/api/version")
async def ollama_version() -> Response:
    """Return the version of Ollama's API, and the server's own."""
    return json_response({"version": SPOKEN, "server": f"radixkv {radixkv.__version__}"})


def _card(context: ServerContext, name: str) -> Json:
    engine = context.engine
    digest = hashlib.sha256(engine.model_fingerprint.encode()).hexdigest()
    details = {"parent_model": "", "format": "", "family": "radixkv", "families": ["radixkv"]}
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(context.started, UTC).isoformat(),
        "size": 0,
        "digest": digest,
        "details": {**details, "parameter_size": "", "quantization_level": ""},
    }


API = Api(
    router,
    {"/api": OLLAMA},
    {
        "POST /api/chat": OllamaChatRequest,
        "POST /api/generate": OllamaGenerateRequest,
        "POST /api/show": OllamaModelRequest,
    },
    generating=frozenset({"/api/chat", "/api/generate"}),
)
