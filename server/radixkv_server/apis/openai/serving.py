# SPDX-License-Identifier: Apache-2.0
"""Serving chats and completions: from a body to its generation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

from radixkv.cache.keys import EncodedTokens
from radixkv.errors import InvalidRequestError
from radixkv.grammar.escaped_lark import escape_lark
from radixkv.sampling.sampling_params import MAX_N, SamplingParams
from radixkv.scheduling.request import Request
from radixkv.text.chat_formats.thinking import Thinking
from radixkv_server.apis.common.answer_formats import tool_choice
from radixkv_server.apis.common.cache_diagnosis import chat_fingerprint, diagnose, for_prompt, unusual
from radixkv_server.apis.common.chat_messages import (
    ChatMessage,
    marked_parts,
    template_messages,
    with_cache_controls,
)
from radixkv_server.apis.common.fields import plain_choice
from radixkv_server.apis.common.logprobs import LogprobsFormat
from radixkv_server.apis.openai.render import ChatRenderer, Envelope, TextRenderer
from radixkv_server.apis.openai.schemas import (
    ChatCompletionRequest,
    ChatCustomTool,
    ChatFields,
    CommonFields,
    CompletionRequest,
    GrammarFields,
)
from radixkv_server.chats.chat import Chat, ChatPrompt, InputGrammar
from radixkv_server.chats.constraint import with_default
from radixkv_server.chats.render import chat_prompt, chat_request
from radixkv_server.context import ServerContext
from radixkv_server.diagnostics.fingerprint import Fingerprint
from radixkv_server.errors import bad_request
from radixkv_server.generation.generation import Generation
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.generation.request import encoded_prompt, new_id, pin_whole, sampling_params
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.tenants.tenant import EVERYBODY, Tenant

DEFAULT_MAX_TOKENS = 16
MAX_PROMPT_LOGPROBS = 4_000_000


async def prepare_chat(
    context: ServerContext, body: ChatCompletionRequest, record: RequestRecord
) -> Generation[ChatRenderer]:
    """Return the generation that answers a chat."""
    model, caller = context.resolve_model(body.model), record.caller
    request, prompt, places = await completion_request(context, body, caller)
    diagnosis = await diagnose(
        context, caller.name, prompt, partial(_fingerprint, body, model), earlier_id=body.compared_with
    )
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = Envelope(body, new_id("chatcmpl-"), kind, model)
    renderer = ChatRenderer(
        envelope,
        encoded_prompt(request),
        _logprobs(context, body, request),
        {tool.name for tool in body.tools or () if isinstance(tool, ChatCustomTool)},
        prompt.readers(),
        diagnosis,
        partial(context.calls.remember, caller.name),
    )
    return Generation(
        context,
        record,
        envelope.id,
        [request],
        renderer,
        prompt_param="messages",
        stream=bool(body.stream),
        chat_prompt=prompt,
        grammar_places=places,
        fingerprint=diagnosis.fingerprint,
        comparison=diagnosis.comparison,
    )


async def completion_request(
    context: ServerContext, body: ChatCompletionRequest, caller: Tenant = EVERYBODY
) -> tuple[Request, ChatPrompt, GrammarPlaces]:
    """Return the engine's request for a chat completion, its prompt, and the origin of its grammar."""
    sampling, renamed = _sampling(body)
    if body.prediction is not None and body.prediction.text:
        sampling["prediction"] = await context.prompts.tokenize(
            body.prediction.text, param="prediction", add_special_tokens=False
        )
    chat = replace(
        completion_chat(context, body, caller),
        sampling=sampling,
        renamed=renamed,
        prompt_only=body.prewarms,
        request_options=body.request_options(),
    )
    prompt = await chat_prompt(context, chat)
    request, places = await chat_request(context, prompt)
    if not body.is_uncached:
        marked = [
            (index, part)
            for index, message in enumerate(body.messages)
            for part in marked_parts(message.content)
        ]
        others = [breakpoint for _, breakpoint in body.breakpoints]
        await with_cache_controls(context, body, chat, request, marked, others)
        pin_whole(request, body.cache_control.seconds if body.cache_control is not None else None)
    return request, prompt, places


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


def chat_of(
    context: ServerContext, body: ChatFields, messages: Sequence[ChatMessage], caller: Tenant = EVERYBODY
) -> Chat:
    """Return the conversation of a body, with the arguments of its template; any tool may be called."""
    recall = partial(context.calls.recall, caller.name)
    options = body.template_options(trusted=context.settings.trust_request_chat_template)
    if body.continue_final_message:
        options["continue_final_message"] = True
    return Chat(
        source=messages,
        convert=lambda: template_messages(messages, recall),
        images=body.image_sources,
        tools=[tool.for_template() for tool in body.tools or ()],
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        options=options,
    )


def completion_chat(context: ServerContext, body: ChatCompletionRequest, caller: Tenant = EVERYBODY) -> Chat:
    """Return the chat of a chat completion, with the tools that its answer may call."""
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


async def prepare_completion(
    context: ServerContext, body: CompletionRequest, record: RequestRecord
) -> Generation[TextRenderer]:
    """Return the generation that completes texts."""
    model = context.resolve_model(body.model)
    prompts = await _encode_prompts(context, body)
    _check_prompt_logprobs(body, sum(map(len, prompts)))
    requests = [
        Request(prompt, _text_params(context, body, len(prompt)), **body.request_options())
        for prompt in prompts
    ]
    envelope = Envelope(body, new_id("cmpl-"), "text_completion", model)
    renderer = TextRenderer(
        body,
        envelope,
        _logprobs(context, body, requests[0]),
        await _prompt_texts(context, body) if body.echo else [""] * len(requests),
        prompts,
    )
    return Generation(
        context,
        record,
        envelope.id,
        requests,
        renderer,
        prompt_param="prompt",
        stream=bool(body.stream),
        operation="text_completion",
        grammar_places=GrammarPlaces(body.grammar_param),
    )


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
