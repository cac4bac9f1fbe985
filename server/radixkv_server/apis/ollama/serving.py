# SPDX-License-Identifier: Apache-2.0
"""Serving Ollama's chats and prompts: from a body to its generation, by way of chat completions."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from radixkv.scheduling.request import Request
from radixkv_server.apis.common.logprobs import LogprobsFormat
from radixkv_server.apis.ollama.render import OllamaRenderer
from radixkv_server.apis.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest
from radixkv_server.apis.openai.schemas import ChatCompletionRequest, CommonFields
from radixkv_server.apis.openai.serving import completion_request
from radixkv_server.chats.chat import AnswerReaders
from radixkv_server.chats.constraint import with_default
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json
from radixkv_server.errors import bad_request
from radixkv_server.generation.generation import Generation
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.generation.request import new_id, sampling_params
from radixkv_server.http.body import Ignored, validation_error
from radixkv_server.http.request_record import RequestRecord

Fields = TypeVar("Fields", bound=BaseModel)


async def prepare_ollama(
    context: ServerContext, body: OllamaChatRequest | OllamaGenerateRequest, record: RequestRecord
) -> Generation[OllamaRenderer]:
    """Return the generation that answers /api/chat or /api/generate."""
    model, caller, is_chat = (
        context.resolve_model(body.model),
        record.caller,
        isinstance(body, OllamaChatRequest),
    )
    readers, prompt = AnswerReaders(), None
    if isinstance(body, OllamaGenerateRequest) and body.raw:
        request, places = await _raw(context, body), GrammarPlaces("format")
    else:
        fields = body.chat(partial(context.calls.recall, caller.name))
        ignored = context.bodies.ignored()
        chat = _checked(ChatCompletionRequest, fields, ignored)
        request, prompt, places = await completion_request(context, chat, caller)
        readers = prompt.readers()
        record.ignored += ignored.describe(fields)
    request.session_done = body.ends_session
    remember = partial(context.calls.remember, caller.name)
    logprobs = LogprobsFormat(context.engine.tokenizer, request.params)
    return Generation(
        context,
        record,
        new_id("ollama-"),
        [request],
        OllamaRenderer(model, is_chat, readers, logprobs, remember),
        prompt_param="messages" if is_chat else "prompt",
        stream=bool(body.stream),
        chat_prompt=prompt,
        grammar_places=places,
    )


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
    """Return a prompt that no template changes.

    Raises:
        ApiError: 400; it has images, whose place only a template knows.
    """
    if body.images:
        raise bad_request("images need the model's template: leave raw out.", param="images")
    fields = _checked(CommonFields, body.sampling())
    prompt = await context.prompts.encode(body.prompt or "", param="prompt")
    options = {**fields.sampling_options(), "max_tokens": fields.max_tokens}
    options["structured"] = with_default(options.get("structured"), context.settings)
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    room = context.engine.limits.max_model_len - len(prompt)
    params = sampling_params(options, defaults=context.engine.default_sampling, room=room)
    return Request(prompt, params, **body.request_options())
