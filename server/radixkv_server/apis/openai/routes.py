# SPDX-License-Identifier: Apache-2.0
"""OpenAI's routes: from a body to engine requests and a renderer of the answer."""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import astuple
from datetime import UTC, datetime

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from radixkv.cache.keys import EncodedTokens
from radixkv.errors import InvalidRequestError
from radixkv.model.loading.sampling_defaults import sampling_source
from radixkv.sampling.sampling_params import MAX_N, SamplingParams
from radixkv.scheduling.request import Request
from radixkv.text.chat_formats.template_input import Thinking
from radixkv_server.apis.common.answer_fields import GrammarFields
from radixkv_server.apis.common.chat_completion import ChatCompletionRequest, CommonFields, completion_request
from radixkv_server.apis.common.compared_requests import chat_fingerprint, diagnosed, for_prompt, unusual
from radixkv_server.apis.common.openai_errors import OPENAI
from radixkv_server.apis.common.token_details import LogprobsFormat
from radixkv_server.apis.openai.render import ChatRenderer, Envelope, TextRenderer
from radixkv_server.apis.openai.schemas import CompletionRequest
from radixkv_server.chats.chat import ChatPrompt, with_default
from radixkv_server.context import ServerContext, context_of
from radixkv_server.diagnostics.fingerprint import Fingerprint
from radixkv_server.dialect import Api, Json
from radixkv_server.errors import ApiError, bad_request
from radixkv_server.generation.generation import json_response, respond, tell_prompt
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.generation.request import Asking, PromptFacts, new_id, sampling_params
from radixkv_server.http.request_record import record_of
from radixkv_server.tenants.tenant import Tenant

DEFAULT_MAX_TOKENS = 16
MAX_PROMPT_LOGPROBS = 4_000_000


async def parse_chat(
    context: ServerContext, body: ChatCompletionRequest, caller: Tenant
) -> tuple[Asking, ChatRenderer]:
    """POST /v1/chat/completions."""
    model = context.resolve_model(body.model)
    prompt, facts, readers = await completion_request(context, body, caller)
    request, told = await diagnosed(
        context,
        caller,
        body.exchange(new_id("chatcmpl-"), [prompt], [facts], "messages"),
        functools.partial(_fingerprint, body, model),
        earlier_id=body.compared_with,
    )
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = Envelope(request.id, kind, int(time.time()), model)
    assert isinstance(prompt.prompt, EncodedTokens)
    return request, ChatRenderer(
        body,
        prompt.prompt,
        envelope,
        _logprobs(context, body, prompt),
        readers,
        told,
        functools.partial(context.calls.remember, caller.name),
    )


def _fingerprint(body: ChatCompletionRequest, model: str, prompt: ChatPrompt) -> Fingerprint:
    """Make the fingerprint by which chats are compared. O(text)."""
    names = [name for name in GrammarFields.model_fields if name != "response_format"]
    answer = body.response_format
    return chat_fingerprint(
        prompt,
        api="chat",
        model=model,
        messages=list(map(for_prompt, body.messages)),
        parameters={
            "template": [
                body.chat_template,
                body.chat_template_kwargs,
                body.add_generation_prompt is False,
                bool(body.continue_final_message),
            ],
            "text_format": [
                None if answer is None or answer.type == "text" else for_prompt(answer),
                *(getattr(body, name) for name in names),
            ],
            "reasoning_effort": None if body.wanted_thinking == Thinking() else astuple(body.wanted_thinking),
            "verbosity": unusual(body.verbosity, "medium"),
            "prompt_cache_key": body.prompt_cache_key,
            "service_tier": unusual(body.service_tier, "auto", "default"),
            "cache_salt": body.cache_salt,
        },
    )


async def parse_completion(
    context: ServerContext, body: CompletionRequest, caller: Tenant
) -> tuple[Asking, TextRenderer]:
    """POST /v1/completions."""
    model = context.resolve_model(body.model)
    prompts = await _encode_prompts(context, body)
    _check_prompt_logprobs(body, sum(map(len, prompts)))
    places = GrammarPlaces(body.grammar_param)
    requests = [Request(prompt, _text_params(context, body, len(prompt))) for prompt in prompts]
    facts = [PromptFacts(grammar_places=places)] * len(requests)
    request = body.exchange(new_id("cmpl-"), requests, facts, "prompt", operation="text_completion")
    envelope = Envelope(request.id, "text_completion", int(time.time()), model)
    echoes = await _prompt_texts(context, body) if body.echo else [""] * len(requests)
    return request, TextRenderer(body, envelope, _logprobs(context, body, requests[0]), echoes, prompts)


def _logprobs(context: ServerContext, body: CommonFields, request: Request) -> LogprobsFormat:
    as_ids = bool(body.return_tokens_as_token_ids)
    return LogprobsFormat(context.engine.tokenizer, request.params, as_ids=as_ids)


async def _encode_prompts(context: ServerContext, body: CompletionRequest) -> list[EncodedTokens]:
    for name, samples in (("n", body.n), ("best_of", body.best_of)):
        # What SamplingParams would refuse, before it is multiplied by the prompts.
        if samples is not None and samples > MAX_N:
            raise InvalidRequestError(f"{name} must be at most {MAX_N}, not {samples}", param=name)
    settings = context.settings
    if len(body.prompts) > settings.max_prompts:
        raise bad_request(f"At most {settings.max_prompts} prompts are allowed in a request.", param="prompt")
    if len(body.prompts) * body.num_samples > settings.max_samples:
        most = settings.max_samples
        raise bad_request(f"At most {most} samples (prompts x n or best_of) are allowed.", param="n")
    encoded = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            encoded.append(await context.prompts.encode(prompt, param="prompt"))
        else:
            encoded.append(await context.prompts.accept(prompt, "prompt"))
            await asyncio.sleep(0)  # others have their turn between hundreds of long prompts
    return encoded


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return the number of alternatives per prompt token; None: no logprobs of the prompt."""
    wanted = (body.prompt_logprobs, body.logprobs if body.echo else None)
    return max((number for number in wanted if number is not None), default=None)


def _check_prompt_logprobs(body: CompletionRequest, num_tokens: int) -> None:
    """Limit the number of prompt logprobs, which every choice repeats."""
    each = _prompt_logprobs(body)
    entries = 0 if each is None else num_tokens * (each + 1) * (body.n or 1)
    if entries > MAX_PROMPT_LOGPROBS:
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise bad_request(
            f"{param}: prompt tokens x (alternatives + 1) x n are {entries:,}, but at most "
            f"{MAX_PROMPT_LOGPROBS:,} logprobs of prompts are told in an answer.",
            param=param,
        )


def _text_params(context: ServerContext, body: CompletionRequest, num_prompt_tokens: int) -> SamplingParams:
    options = body.sampling_options()
    options["max_tokens"] = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.best_of is not None:
        options["best_of"] = body.best_of
    options["structured"] = with_default(options.get("structured"), context.settings)
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
    options["prompt_logprobs"] = _prompt_logprobs(body)
    return sampling_params(
        options,
        defaults=context.engine.default_sampling,
        room=context.engine.limits.max_model_len - num_prompt_tokens,
        prompt_only=body.prompt_only,
    )


async def _prompt_texts(context: ServerContext, body: CompletionRequest) -> list[str]:
    return [
        given if isinstance(given, str) else await context.prompts.detokenize(given, "prompt")
        for given in body.prompts
    ]


router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: HttpRequest) -> Response:
    """Answer a chat, whole or as a stream of server-sent events."""
    return await respond(request, OPENAI, ChatCompletionRequest, parse_chat)


@router.post("/v1/completions")
async def create_completion(request: HttpRequest) -> Response:
    """Complete prompts, whole or as a stream of server-sent events."""
    return await respond(request, OPENAI, CompletionRequest, parse_completion, takes_many_prompts=True)


@router.post("/tokenize/v1/chat/completions")
async def tokenize_chat_completion(request: HttpRequest) -> Response:
    """Return the tokens that /v1/chat/completions would send to the model, and their cache namespace."""
    return await tell_prompt(request, ChatCompletionRequest, parse_chat)


@router.post("/tokenize/v1/completions")
async def tokenize_completion(request: HttpRequest) -> Response:
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
