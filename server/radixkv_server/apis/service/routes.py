# SPDX-License-Identifier: Apache-2.0
"""The routes around the service: tokenizer, health, load, metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

import radixkv
from radixkv.text.text_tokenizer import TextTokenizer
from radixkv_server.apis.openai.serving import chat_of
from radixkv_server.apis.service.schemas import DetokenizeRequest, TokenizeRequest
from radixkv_server.chats.render import chat_prompt
from radixkv_server.context import context_of
from radixkv_server.dialect import Api, Json
from radixkv_server.generation.generation import json_response, long_json_response
from radixkv_server.http.request_record import record_of
from radixkv_server.metrics.request_metrics import CONTENT_TYPE

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Return token ids of a text, or of a rendered chat; of `content` in llama.cpp's form."""
    context = context_of(request)
    body = await context.bodies.read(request, TokenizeRequest, context.max_body_bytes())
    context.resolve_model(body.model)
    prompts, tokenizer = context.prompts, context.engine.tokenizer
    if body.content is not None:
        ids = await prompts.tokenize(
            body.content,
            param="content",
            add_special_tokens=bool(body.add_special),
            allow_special=body.parse_special is not False,
        )
        pieces = bool(body.with_pieces)
        return await long_json_response(
            lambda: {"tokens": [_piece(tokenizer, token) for token in ids] if pieces else ids}, size=len(ids)
        )
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = await prompts.tokenize(body.prompt, param="prompt", add_special_tokens=special)
    else:
        assert body.messages is not None
        chat = await chat_prompt(context, chat_of(context, body, body.messages))
        ids = list(map(int, chat.ids))

    def answer() -> Json:
        found: Json = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": context.engine.limits.max_model_len,
        }
        if body.return_token_strs:
            found["token_strs"] = [tokenizer.token_text(token) for token in ids]
        return found

    return await long_json_response(answer, size=len(ids))


def _piece(tokenizer: TextTokenizer, token: int) -> Json:
    """Return a token with its text, or with its bytes if they are not whole characters."""
    raw = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": raw.decode("utf-8")}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(raw)}


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    context = context_of(request)
    body = await context.bodies.read(request, DetokenizeRequest, context.max_body_bytes())
    context.resolve_model(body.model)
    return json_response({"prompt": await context.prompts.detokenize(body.tokens, "tokens")})


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    """Answer 200 while the engine works, 503 once it has failed or stopped. Needs no key."""
    healthy = context_of(request).engine.is_healthy
    return json_response({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)


@router.api_route("/health/ready", methods=["GET", "HEAD"])
async def ready(request: Request) -> Response:
    """Answer 200 while requests should be sent here; 503 during the shutdown, and without an engine.

    Needs no key.
    """
    context = context_of(request)
    if context.is_ready:
        return json_response({"status": "ready"})
    return json_response({"status": "draining" if context.is_draining else "unavailable"}, 503)


@router.api_route("/ping", methods=["GET", "HEAD"])
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    """Answer like /health, without a body. Needs no key."""
    return Response(status_code=200 if context_of(request).engine.is_healthy else 503)


@router.get("/load")
async def load(request: Request) -> Response:
    """Return the running and waiting generations of the caller, and of all tenants for an admin."""
    tenants, caller = context_of(request).tenants, record_of(request.scope).caller
    return json_response({"server_load": tenants.num_running(caller)})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Return the model's tokenizer_config.json, with the chat template."""
    engine = context_of(request).engine
    return json_response({**engine.tokenizer.facts, "model_max_length": engine.limits.context_length})


@router.get("/version")
async def version() -> Response:
    """Return the server's version."""
    return json_response({"version": radixkv.__version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus' text format: a user's own, and all for an admin."""
    caller = record_of(request.scope).caller
    text = context_of(request).metrics.render(None if caller.is_admin else caller.name)
    return Response(text, media_type=CONTENT_TYPE)


API = Api(
    router,
    bodies={"POST /tokenize": TokenizeRequest, "POST /detokenize": DetokenizeRequest},
    open_paths=frozenset({"/health", "/health/ready", "/ping"}),  # what balancers and supervisors ask
)
