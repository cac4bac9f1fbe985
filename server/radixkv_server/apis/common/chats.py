# SPDX-License-Identifier: Apache-2.0
"""Conversion of chat completion bodies, and similar ones, into chats and engine requests."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from radixkv.grammar.escaped_lark import escape_lark
from radixkv.scheduling.request import Request
from radixkv_server.apis.common.cache_controls import marked_parts, with_cache_controls
from radixkv_server.apis.common.chat_completion import ChatCompletionRequest, ChatCustomTool, ChatFields
from radixkv_server.apis.common.chat_messages import ChatMessage, template_messages
from radixkv_server.apis.common.fields import plain_choice
from radixkv_server.chats.chat import AnswerReaders, Chat, InputGrammar, chat_request
from radixkv_server.chats.structured import tool_choice
from radixkv_server.context import ServerContext
from radixkv_server.errors import bad_request
from radixkv_server.generation.request import PromptFacts, pin_whole
from radixkv_server.tenants.tenant import EVERYBODY, Tenant


def template_options(
    context: ServerContext, variables: Mapping[str, Any] | None, template: str | None
) -> dict[str, Any]:
    """Return the arguments of the chat template, and the template itself if the request has one.

    Raises:
        ApiError: 400; requests may not bring any.
    """
    options = dict(variables or {})
    if template is not None:
        if not context.settings.trust_request_chat_template:
            message = "chat_template in a request is not allowed on this server."
            raise bad_request(message, param="chat_template", code="unsupported_parameter")
        options["chat_template"] = template
    return options


def chat_of(
    context: ServerContext, body: ChatFields, messages: Sequence[ChatMessage], caller: Tenant = EVERYBODY
) -> Chat:
    """Return the conversation of a body, with the arguments of its template; any tool may be called."""
    recall = functools.partial(context.calls.recall, caller.name)
    options = template_options(context, body.chat_template_kwargs, body.chat_template)
    if body.continue_final_message:
        options["continue_final_message"] = True
    return Chat(
        source=messages,
        convert=lambda: template_messages(messages, recall),
        tools=[tool.for_template() for tool in body.tools or ()],
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        options=options,
    )


def completion_chat(context: ServerContext, body: ChatCompletionRequest, caller: Tenant = EVERYBODY) -> Chat:
    """Return the conversation of a chat completion, with the tools that its answer may call."""
    chat = chat_of(context, body, body.messages, caller)
    choice, allowed = tool_choice(_with_functions(plain_choice(body.tool_choice)))
    inputs = {
        tool.name: InputGrammar(escape_lark(tool.lark), f"tools[{at}].custom.format.grammar.definition")
        for at, tool in enumerate(body.tools or ())
        if isinstance(tool, ChatCustomTool) and tool.lark is not None
    }
    return replace(
        chat,
        thinking=body.wanted_thinking,
        reasoning_place=body.reasoning_place,
        tool_inputs=inputs,
        tool_choice=choice,
        allowed_tools=allowed,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


def _with_functions(choice: Any) -> Any:
    """Return a `tool_choice` with the names of custom tools replaced by their functions'."""
    if not isinstance(choice, Mapping):
        return choice
    if isinstance(allowed := choice.get("allowed_tools", choice).get("tools"), list):
        listed = {**choice.get("allowed_tools", choice), "tools": [_with_functions(tool) for tool in allowed]}
        return {**choice, "allowed_tools": listed}
    return {"type": "function", "function": choice["custom"]} if choice.get("type") == "custom" else choice


async def completion_request(
    context: ServerContext, body: ChatCompletionRequest, caller: Tenant = EVERYBODY
) -> tuple[Request, PromptFacts, AnswerReaders]:
    """Return the engine request of a chat completion, and the readers of its answers."""
    options, renamed = _sampling(body)
    if body.prediction is not None and body.prediction.text:
        options["prediction"] = await context.prompts.tokenize(
            body.prediction.text, param="prediction", add_special_tokens=False
        )
    chat = completion_chat(context, body, caller)
    request, facts, readers = await chat_request(
        context, chat, options, renamed=renamed, prompt_only=body.prewarms
    )
    marked = [
        (index, part) for index, message in enumerate(body.messages) for part in marked_parts(message.content)
    ]
    others = [breakpoint for _, breakpoint in body.breakpoints]
    await with_cache_controls(context, body, chat, request, marked, others)
    pin_whole(request, body.cache_control.seconds if body.cache_control is not None else None)
    return request, facts, readers


def _sampling(body: ChatCompletionRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """Return arguments of SamplingParams, and the body's names for arguments named otherwise."""
    options = body.sampling_options()
    options["max_tokens"] = body.max_output_tokens
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    options["prompt_logprobs"] = body.prompt_logprobs
    renamed = {"logprobs": "top_logprobs", "structured": body.grammar_param}
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    return options, renamed
