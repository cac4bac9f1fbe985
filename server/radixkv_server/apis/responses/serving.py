# SPDX-License-Identifier: Apache-2.0
"""Serving responses: from a body to its generation, and to the stored response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from radixkv_server.apis.common.cache_diagnosis import chat_fingerprint, diagnose, text_block, unusual
from radixkv_server.apis.common.chat_messages import with_cache_controls
from radixkv_server.apis.common.logprobs import LogprobsFormat
from radixkv_server.apis.responses.configuration import configured
from radixkv_server.apis.responses.conversation import chat_of, items_of, marked_items
from radixkv_server.apis.responses.errors import ErrorForm, error_json
from radixkv_server.apis.responses.items import comparable_item, summaries_in
from radixkv_server.apis.responses.provider_items import TRIGGER, loaded_tools
from radixkv_server.apis.responses.render import ResponseRenderer, base_response
from radixkv_server.apis.responses.schemas import InputTokensRequest, ResponsePromptFields, ResponseRequest
from radixkv_server.apis.responses.stored import Local, StoredResponse, StoredResponses
from radixkv_server.apis.responses.stored_conversations import StoredConversations
from radixkv_server.apis.responses.tools import Toolbox
from radixkv_server.apis.responses.truncation import fit
from radixkv_server.chats.chat import Chat, ChatPrompt
from radixkv_server.chats.render import chat_prompt, chat_request
from radixkv_server.context import ServerContext
from radixkv_server.diagnostics.fingerprint import Fingerprint
from radixkv_server.dialect import Json
from radixkv_server.generation.generation import Generation
from radixkv_server.generation.request import new_id
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.tenants.tenant import Tenant

_RENAMED = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "structured": "text.format"}


async def prepare_response(
    context: ServerContext,
    body: ResponseRequest,
    record: RequestRecord,
    *,
    local: Local | None = None,
    error_form: ErrorForm = error_json,
    extra: Mapping[str, Any] | None = None,
) -> Generation[ResponseRenderer]:
    """Return the generation of a response; its prompt is the conversation so far, then the new input.

    Args:
        local: see `StoredResponses`; the response is added to it.
        error_form, extra: see `ResponseRenderer`.
    """
    model, caller, response_id = context.resolve_model(body.model), record.caller, new_id("resp_")
    stored = StoredResponses(context.responses, caller.name, local)
    conversations = StoredConversations(context.responses, caller.name)
    before, new = await items_of(body, stored, conversations, response_id)
    conversation = [*before, *new]
    body = configured(body, conversation)
    chat, tools = await chat_that_fits(
        context, body, conversation, caller, salt=body.cache_salt or "", room=body.max_output_tokens
    )
    chat = replace(
        chat,
        sampling=_sampling_of(body),
        renamed=_RENAMED,
        prompt_only=body.prewarms,
        request_options=body.request_options(),
    )
    prompt = await chat_prompt(context, chat)
    request, places = await chat_request(context, prompt)
    marked = marked_items(body, new, chat.source[1:], tools)
    await with_cache_controls(context, body, chat, request, marked)
    diagnosis = await diagnose(
        context, caller.name, prompt, partial(_fingerprint, body, model), earlier_id=body.compared_with
    )

    async def store(response: Json) -> None:
        kept = StoredResponse(response, conversation)
        if local is not None:
            local[response_id] = kept
        if body.store is not False:
            await stored.add(kept, running_s=context.background.timeout_s)
        if body.conversation_id is not None and response["status"] in ("completed", "incomplete"):
            turn = [*new, *response["output"]]
            await conversations.change(body.conversation_id, lambda conversation: conversation.add(turn))

    renderer = ResponseRenderer(
        base_response(response_id, model, body, request.params),
        len(new),
        LogprobsFormat(context.engine.tokenizer, request.params),
        prompt.readers(),
        request.params,
        tools,
        partial(context.calls.remember, caller.name),
        store,
        diagnosis,
        with_logprobs=body.wants_logprobs,
        hides_reasoning=body.wants_encrypted_reasoning,
        compacts=bool(conversation) and conversation[-1]["type"] == TRIGGER,
        error_form=error_form,
        extra=extra or {},
    )
    return Generation(
        context,
        record,
        response_id,
        [request],
        renderer,
        prompt_param="input",
        stream=bool(body.stream),
        chat_prompt=prompt,
        grammar_places=places,
        fingerprint=diagnosis.fingerprint,
        comparison=diagnosis.comparison,
    )


def _fingerprint(body: ResponseRequest, model: str, prompt: ChatPrompt) -> Fingerprint:
    """Make the fingerprint of a response: of the items of its whole prompt, of every origin.

    O(their text).
    """
    text, effort = body.text, body.reasoning and body.reasoning.effort
    text_format = text and text.format and text.format.plain()
    instructions, *items = prompt.chat.source
    messages = list(map(comparable_item, items))
    return chat_fingerprint(
        prompt,
        api="responses",
        model=model,
        system=() if instructions is None else (text_block(instructions),),
        messages=messages,
        summaries=summaries_in(messages),
        parameters={
            "template": (body.chat_template or body.chat_template_kwargs)
            and [body.chat_template, body.chat_template_kwargs],
            "text_format": None if text_format == {"type": "text"} else text_format,
            "reasoning_effort": effort,
            "verbosity": text and unusual(text.verbosity, "medium"),
            "prompt_cache_key": body.prompt_cache_key,
            "service_tier": unusual(body.service_tier, "auto", "default"),
            "cache_salt": body.cache_salt,
        },
    )


async def chat_that_fits(
    context: ServerContext,
    body: ResponsePromptFields,
    items: Sequence[Json],
    caller: Tenant,
    *,
    salt: str = "",
    room: int | None = None,
) -> tuple[Chat, Toolbox]:
    """Make the chat of a conversation, shortened if the body allows that, and its tools.

    Args:
        room: tokens of the answer, if they are known.
    """
    tools = Toolbox(body.tools or (), loaded_tools(items))

    def make_chat(some: Sequence[Json]) -> Chat:
        return chat_of(context, body, some, tools, caller)

    if body.truncation == "auto":
        items = await fit(context, items, make_chat, room, caller, salt)
    return make_chat(items), tools


async def count_input_tokens(context: ServerContext, body: InputTokensRequest, caller: Tenant) -> int:
    """Count the tokens of the prompt that a response would have."""
    context.resolve_model(body.model)
    return len((await chat_prompt(context, await response_chat(context, body, caller))).ids)


async def response_chat(context: ServerContext, body: ResponsePromptFields, caller: Tenant) -> Chat:
    """Make the chat of the conversation so far, with a body's input after it."""
    stored = StoredResponses(context.responses, caller.name)
    conversations = StoredConversations(context.responses, caller.name)
    before, new = await items_of(body, stored, conversations, "resp_count")
    items = [*before, *new]
    return (await chat_that_fits(context, configured(body, items), items, caller))[0]


def _sampling_of(body: ResponseRequest) -> dict[str, Any]:
    options = {**body.sampling_options(), "max_tokens": body.max_output_tokens}
    if body.wants_logprobs:
        options["logprobs"] = body.top_logprobs or 0
    if body.text is not None and body.text.format is not None:
        options["structured"] = body.text.format.grammar()
    return options
