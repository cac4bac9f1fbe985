# SPDX-License-Identifier: Apache-2.0
"""Serving messages: from a body to its generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from radixkv.text.chat_formats.thinking import Thinking
from radixkv_server.apis.anthropic.blocks import (
    InputMessage,
    ServerToolResultBlock,
    ServerToolUseBlock,
    ToolResultBlock,
)
from radixkv_server.apis.anthropic.messages import Conversation
from radixkv_server.apis.anthropic.render import MessageRenderer
from radixkv_server.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from radixkv_server.apis.anthropic.threads import Threads
from radixkv_server.apis.common.answer_formats import grammar_of
from radixkv_server.apis.common.cache_diagnosis import (
    CacheDiagnosis,
    chat_fingerprint,
    diagnose,
    for_prompt,
    text_block,
    unusual,
)
from radixkv_server.chats.breakpoints import prefix_pins
from radixkv_server.chats.chat import Chat, ChatPrompt
from radixkv_server.chats.render import chat_prompt, chat_request
from radixkv_server.context import ServerContext
from radixkv_server.diagnostics.comparison import Finding
from radixkv_server.diagnostics.fingerprint import Fingerprint
from radixkv_server.dialect import Json
from radixkv_server.errors import bad_request
from radixkv_server.generation.generation import Generation
from radixkv_server.generation.progress import Usage
from radixkv_server.generation.request import encoded_prompt, new_id
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.tenants.tenant import Tenant

Body = TypeVar("Body", bound=CountTokensRequest)

_FORMAT = "output_config.format"
_RENAMED = {"stop": "stop_sequences", "structured": _FORMAT}
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_REASONS = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "system_changed",
    "messages": "messages_changed",
}
_PARAMETERS = (
    "thinking",
    "tool_choice",
    "context_management",
    "output_config",
    "output_format",
    "cache_salt",
)


async def prepare_messages(
    context: ServerContext, body: MessagesRequest, record: RequestRecord
) -> Generation[MessageRenderer]:
    """Return the generation that answers a conversation."""
    model, caller = context.resolve_model(body.model), record.caller
    threads = Threads(context.responses, caller.name)
    whole = await threads.whole(body, context.bodies.ignored())
    body, context_management = await _edited(context, whole, caller)
    chat, conversation = _chat_of(context, body, caller)
    chat = replace(
        chat,
        sampling=_sampling(body),
        renamed=_RENAMED,
        prompt_only=body.prewarms,
        request_options=body.request_options(),
    )
    prompt = await chat_prompt(context, chat)
    request, places = await chat_request(context, prompt)
    if conversation.breakpoints:
        tokens = encoded_prompt(request)
        request.pins = await prefix_pins(context, chat, conversation.breakpoints, tokens)
    asked, answer_id = body.diagnostics, new_id("msg_")
    diagnosis = await diagnose(
        context,
        caller.name,
        prompt,
        partial(_fingerprint, body, model),
        earlier_id=None if asked is None else asked.previous_message_id,
        asked=asked is not None,
        words=diagnosis_fields,
    )
    renderer = MessageRenderer(
        answer_id,
        model,
        request.pins,
        prompt.readers(),
        partial(context.calls.remember, caller.name),
        partial(threads.keep, answer_id, whole),
        diagnosis,
        hides_thinking=body.thinking is not None and body.thinking.display == "omitted",
        more=context_management,
    )
    return Generation(
        context,
        record,
        answer_id,
        [request],
        renderer,
        prompt_param="messages",
        stream=bool(body.stream),
        chat_prompt=prompt,
        grammar_places=places,
        fingerprint=diagnosis.fingerprint,
        comparison=diagnosis.comparison,
        written_end=max((pin.num_tokens for pin in request.pins), default=0),
    )


async def count_tokens(context: ServerContext, body: CountTokensRequest, caller: Tenant) -> Json:
    """POST /v1/messages/count_tokens: the length of the prompt that /v1/messages would make."""
    context.resolve_model(body.model)
    edited, applied_edits = await _edited(context, body, caller)
    answer: Json = {"input_tokens": await _count(context, edited, caller)}
    if applied_edits:
        original = answer["input_tokens"] if edited is body else await _count(context, body, caller)
        answer["context_management"] = {"original_input_tokens": original}
    return answer


async def messages_chat(context: ServerContext, body: CountTokensRequest, caller: Tenant) -> Chat:
    """Return the chat of a body after its requested edits."""
    edited, _ = await _edited(context, body, caller)
    return _chat_of(context, edited, caller)[0]


async def _count(context: ServerContext, body: CountTokensRequest, caller: Tenant) -> int:
    chat, _ = _chat_of(context, body, caller)
    return len((await chat_prompt(context, chat)).ids)


async def _edited(context: ServerContext, body: Body, caller: Tenant) -> tuple[Body, Json]:
    """Return the body after its requested edits, and the answer's report on them."""
    if body.context_management is None:
        return body, {}

    def changed(messages: Sequence[InputMessage]) -> Body:
        return body.model_copy(update={"messages": list(messages)})

    async def count(messages: Sequence[InputMessage]) -> int:
        return await _count(context, changed(messages), caller)

    messages, applied = await body.context_management.apply(body.messages, count)
    return changed(messages) if applied else body, {"context_management": {"applied_edits": applied}}


def _chat_of(context: ServerContext, body: CountTokensRequest, caller: Tenant) -> tuple[Chat, Conversation]:
    """Return a body's chat, and the conversation that is complete once the chat has been rendered."""
    conversation = Conversation()
    last = next((message for message in reversed(body.messages) if message.blocks), None)
    goes_on = last is not None and last.role == "assistant"
    if goes_on and last is not None:
        if any(block.type == "tool_use" for block in last.blocks):
            raise bad_request("a tool_use block must be followed by its tool_result.", param="messages")
        if isinstance(last.blocks[-1], ServerToolUseBlock):
            kind = last.blocks[-1].type
            message = f"a {kind} block must be followed by its result: this server runs no tools itself."
            raise bad_request(message, param="messages")
        goes_on = not isinstance(last.blocks[-1], ServerToolResultBlock)

    recall = partial(context.calls.recall, caller.name)
    choice = body.tool_choice
    chat = Chat(
        source=[body.system, *body.messages],
        convert=lambda: conversation.convert(body, recall),
        images=body.image_sources,
        tools=[tool.for_template() for tool in body.listed_tools],
        unlisted_tools=[tool.for_template() for tool in body.loaded_tools],
        tool_choice="auto" if choice is None else choice.name or _CHOICES[choice.type],
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        add_generation_prompt=not goes_on,
        options={"continue_final_message": True} if goes_on else {},
        thinking=_thinking(body),
    )
    return chat, conversation


def _thinking(body: CountTokensRequest) -> Thinking:
    wanted, enabled = body.thinking, None
    if wanted is None:
        return Thinking(effort=body.effort)
    if wanted.type == "between_tools":
        enabled = any(isinstance(block, ToolResultBlock) for block in body.messages[-1].blocks)
    elif wanted.type != "adaptive":
        enabled = wanted.type == "enabled"
    return Thinking(enabled, body.effort, wanted.budget_tokens)


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    """Return the arguments of SamplingParams that the client gave."""
    names = ("temperature", "top_p", "top_k")
    options = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if body.stop_sequences:
        options["stop"] = tuple(body.stop_sequences)
    if body.answer_format is not None:
        options["structured"] = grammar_of({"json": body.answer_format["schema"]}, _FORMAT)
    return {**options, "max_tokens": body.max_tokens}


def _fingerprint(body: MessagesRequest, model: str, prompt: ChatPrompt) -> Fingerprint:
    """Make the fingerprint by which requests are compared. O(text)."""
    system = body.system or ()
    return chat_fingerprint(
        prompt,
        api="messages",
        model=[model, unusual(body.speed, "standard")],
        system=[text_block(system)] if isinstance(system, str) else list(map(for_prompt, system)),
        messages=[for_prompt(message) for message in body.messages],
        parameters={name: for_prompt(getattr(body, name)) for name in _PARAMETERS},
    )


def diagnosis_fields(diagnosis: CacheDiagnosis, usage: Usage) -> Json:
    """Return the fields of an answer to a request with `diagnostics`.

    Finding                `diagnostics`
    the first turn         null
    no difference          null
    the earlier one runs   {"cache_miss_reason": null}
    any other              {"cache_miss_reason": {"type": ...}}
    """
    finding = diagnosis.finding(usage)
    return {"diagnostics": _miss_reason(finding), **diagnosis.own(finding, usage)}


def _miss_reason(finding: Finding) -> Json | None:
    if finding.state == "running":
        return {"cache_miss_reason": None}
    if finding.state == "not_found":
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    difference = finding.difference
    if difference is not None and difference.part in _REASONS:
        kind = _REASONS[difference.part]
        return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": finding.missed_tokens}}
    if difference is not None or finding.prompts_part:
        return {"cache_miss_reason": {"type": "unavailable"}}
    return None
