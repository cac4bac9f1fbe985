"""From the body of a chat completion, or of a prompt like one, to a chat and to what the engine shall do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from radixkv_server.apis.common.cache_controls import marked_parts, with_cache_controls
from radixkv_server.apis.common.chat_completion import ChatCompletionRequest, ChatFields
from radixkv_server.apis.common.chat_messages import ChatMessage, template_messages
from radixkv_server.apis.common.fields import plain_choice
from radixkv_server.chats.chat import AnswerReaders, Chat, chat_request
from radixkv_server.chats.structured import tool_choice
from radixkv_server.context import ServerContext
from radixkv_server.errors import bad_request
from radixkv_server.generation.request import PromptRequest


def template_options(
    context: ServerContext, variables: Mapping[str, Any] | None, template: str | None
) -> dict[str, Any]:
    """Arguments of the chat template, and the template itself where a request brings its own.

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


def chat_of(context: ServerContext, body: ChatFields, messages: Sequence[ChatMessage]) -> Chat:
    """The conversation of a body, with what its template is told; any tool may be called."""
    options = template_options(context, body.chat_template_kwargs, body.chat_template)
    if body.continue_final_message:
        options["continue_final_message"] = True
    return Chat(
        source=messages,
        convert=lambda: template_messages(messages),
        tools=[tool.for_template() for tool in body.tools or ()],
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        options=options,
    )


def completion_chat(context: ServerContext, body: ChatCompletionRequest) -> Chat:
    """The conversation of a chat completion, with what its answer may call."""
    chat = chat_of(context, body, body.messages)
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    choice, allowed = tool_choice(plain_choice(body.tool_choice))
    return replace(
        chat,
        options={**effort, **chat.options},
        tool_choice=choice,
        allowed_tools=allowed,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


async def completion_request(
    context: ServerContext, body: ChatCompletionRequest
) -> tuple[PromptRequest, AnswerReaders]:
    """What a chat completion asks of the engine, and what reads its answers."""
    options, renamed = _sampling(body)
    if body.prediction is not None and body.prediction.text:
        options["prediction"] = await context.prompts.tokenize(
            body.prediction.text, param="prediction", add_special_tokens=False
        )
    chat = completion_chat(context, body)
    request, readers = await chat_request(context, chat, options, renamed=renamed, prompt_only=body.prewarms)
    marked = [
        (index, part) for index, message in enumerate(body.messages) for part in marked_parts(message.content)
    ]
    others = [breakpoint for _, breakpoint in body.breakpoints]
    return await with_cache_controls(context, body, chat, request, marked, others), readers


def _sampling(body: ChatCompletionRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments of SamplingParams, and what the body calls those that differ."""
    options = body.sampling_options()
    options["max_tokens"] = body.max_output_tokens
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    options["prompt_logprobs"] = body.prompt_logprobs
    renamed = {"logprobs": "top_logprobs", "structured": body.grammar_param}
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    return options, renamed
