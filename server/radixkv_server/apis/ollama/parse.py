# SPDX-License-Identifier: Apache-2.0
"""Parser of Ollama's routes: turns bodies into engine requests by way of chat completions."""

from __future__ import annotations

import functools
from dataclasses import replace

from pydantic import ValidationError

from radixkv.scheduling.request import Request
from radixkv_server.apis.common.chat_completion import ChatCompletionRequest, CommonFields
from radixkv_server.apis.common.chats import completion_request
from radixkv_server.apis.common.token_details import LogprobsFormat
from radixkv_server.apis.ollama.render import OllamaRenderer
from radixkv_server.apis.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest
from radixkv_server.chats.chat import AnswerReaders
from radixkv_server.chats.structured import with_default
from radixkv_server.context import ServerContext
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.generation.request import Asking, PromptFacts, check_salt, new_id, sampling_params
from radixkv_server.http.body import Ignored, validation_error
from radixkv_server.tenants.tenant import Tenant

_LATEST = ":latest"


def model_name(context: ServerContext, name: str | None) -> str:
    """Return the name of the served model; clients may add Ollama's default tag.

    Raises:
        ApiError: 404; another model was asked for.
    """
    if name is not None and name not in context.model_names:
        name = name.removesuffix(_LATEST)
    return context.resolve_model(name)


async def parse_ollama(
    context: ServerContext, body: OllamaChatRequest | OllamaGenerateRequest, caller: Tenant
) -> tuple[Asking, OllamaRenderer]:
    """POST /api/chat and /api/generate."""
    model = model_name(context, body.model)
    if isinstance(body, OllamaGenerateRequest) and body.raw:
        prompt, readers = await _raw(context, body), AnswerReaders()
        facts = PromptFacts(grammar_places=GrammarPlaces("format"))
    else:
        chat, ignored = _chat(context, body, caller)
        prompt, facts, readers = await completion_request(context, chat, caller)
        facts = replace(facts, ignored=(*ignored, *facts.ignored))
    prompt.salt = "" if body.cache_salt is None else check_salt(body.cache_salt)
    prompt.priority = body.priority or 0
    prompt.session_done = body.ends_session
    request = Asking(
        new_id("ollama-"),
        (prompt,),
        (facts,),
        stream=body.streams,
        prompt_param="messages" if isinstance(body, OllamaChatRequest) else "prompt",
    )
    return request, OllamaRenderer(
        model,
        isinstance(body, OllamaChatRequest),
        readers,
        LogprobsFormat(context.engine.tokenizer),
        prompt.params,
        functools.partial(context.calls.remember, caller.name),
    )


def _chat(
    context: ServerContext, body: OllamaChatRequest | OllamaGenerateRequest, caller: Tenant
) -> tuple[ChatCompletionRequest, list[str]]:
    """Return the chat completion for a body, and the body's fields without effect."""
    fields = body.chat(functools.partial(context.calls.recall, caller.name))
    ignored = Ignored(context.settings.unknown_fields == "warn", context.settings.images)
    try:
        return ChatCompletionRequest.model_validate(fields, context=ignored), ignored.words(fields)
    except ValidationError as error:
        raise validation_error(error, ChatCompletionRequest) from None


async def _raw(context: ServerContext, body: OllamaGenerateRequest) -> Request:
    """Return a prompt that no template changes."""
    try:
        fields = CommonFields.model_validate(body.sampling())
    except ValidationError as error:
        raise validation_error(error, CommonFields) from None
    prompt = await context.prompts.encode(body.prompt or "", param="prompt")
    options = {**fields.sampling_options(), "max_tokens": fields.max_tokens}
    options["structured"] = with_default(options.get("structured"), context.settings)
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    params = sampling_params(
        options,
        defaults=context.engine.default_sampling,
        room=context.engine.limits.max_model_len - len(prompt),
    )
    return Request(prompt, params)
