# SPDX-License-Identifier: Apache-2.0
"""Parser of Ollama's routes: turns bodies into engine requests by way of chat completions."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from radixkv.scheduling.request import Request
from radixkv_server.apis.common.chat_completion import ChatCompletionRequest, CommonFields, completion_request
from radixkv_server.apis.common.token_details import LogprobsFormat
from radixkv_server.apis.ollama.render import OllamaRenderer
from radixkv_server.apis.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest
from radixkv_server.chats.chat import AnswerReaders, with_default
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.generation.request import Asking, PromptFacts, new_id, sampling_params
from radixkv_server.http.body import Ignored, validation_error
from radixkv_server.tenants.tenant import Tenant

Fields = TypeVar("Fields", bound=BaseModel)


async def parse_ollama(
    context: ServerContext, body: OllamaChatRequest | OllamaGenerateRequest, caller: Tenant
) -> tuple[Asking, OllamaRenderer]:
    """POST /api/chat and /api/generate."""
    model, is_chat = context.resolve_model(body.model), isinstance(body, OllamaChatRequest)
    if isinstance(body, OllamaGenerateRequest) and body.raw:
        prompt, readers = await _raw(context, body), AnswerReaders()
        facts = PromptFacts(grammar_places=GrammarPlaces("format"))
    else:
        fields = body.chat(functools.partial(context.calls.recall, caller.name))
        ignored = Ignored(context.settings.unknown_fields == "warn", context.settings.images)
        chat = _checked(ChatCompletionRequest, fields, ignored)
        prompt, facts, readers = await completion_request(context, chat, caller)
        facts = replace(facts, ignored=(*ignored.words(fields), *facts.ignored))
    request = body.exchange(new_id("ollama-"), [prompt], [facts], "messages" if is_chat else "prompt")
    logprobs = LogprobsFormat(context.engine.tokenizer, prompt.params)
    remember = functools.partial(context.calls.remember, caller.name)
    return request, OllamaRenderer(model, is_chat, readers, logprobs, remember)


def _checked(kind: type[Fields], fields: Json, ignored: Ignored | None = None) -> Fields:
    """Return the body of another route that a body comes down to.

    Raises:
        ApiError: 400; a field is not of the kind that it should be.
    """
    try:
        return kind.model_validate(fields, context=ignored)
    except ValidationError as error:
        raise validation_error(error, kind) from None


async def _raw(context: ServerContext, body: OllamaGenerateRequest) -> Request:
    """Return a prompt that no template changes."""
    fields = _checked(CommonFields, body.sampling())
    prompt = await context.prompts.encode(body.prompt or "", param="prompt")
    options = {**fields.sampling_options(), "max_tokens": fields.max_tokens}
    options["structured"] = with_default(options.get("structured"), context.settings)
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    room = context.engine.limits.max_model_len - len(prompt)
    return Request(prompt, sampling_params(options, defaults=context.engine.default_sampling, room=room))
