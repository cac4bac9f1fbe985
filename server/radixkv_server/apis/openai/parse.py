"""From the bodies of the OpenAI routes to what the engine shall do, and how its answer will be said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from radixkv.errors import InvalidRequestError
from radixkv.request import MAX_N, SamplingParams
from radixkv_server.apis.openai.fields import plain_choice
from radixkv_server.apis.openai.logprobs import LogprobsFormat
from radixkv_server.apis.openai.messages import template_messages
from radixkv_server.apis.openai.render import ChatRenderer, Envelope, TextRenderer
from radixkv_server.apis.openai.schemas import ChatCompletionRequest, CommonFields, CompletionRequest
from radixkv_server.chat.breakpoints import prefix_pins
from radixkv_server.chat.chat import Chat, chat_request
from radixkv_server.chat.structured import tool_choice, with_default
from radixkv_server.context import ServerContext
from radixkv_server.errors import bad_request
from radixkv_server.generation.grammar_places import GrammarPlaces
from radixkv_server.generation.request import GenerationRequest, PromptRequest, new_id, sampling_params

DEFAULT_MAX_TOKENS = 16
MAX_PROMPT_LOGPROBS = 4_000_000


async def parse_chat(
    context: ServerContext, body: ChatCompletionRequest
) -> tuple[GenerationRequest, ChatRenderer]:
    """POST /v1/chat/completions."""
    model = context.resolve_model(body.model)
    options, renamed = _chat_sampling(body)
    if body.prediction is not None and body.prediction.text:
        options["prediction"] = await context.prompts.tokenize(
            body.prediction.text, param="prediction", add_special_tokens=False
        )
    chat = chat_of(context, body)
    prompt_request, readers = await chat_request(context, chat, options, renamed=renamed)
    places = [place for _, place in body.breakpoints]
    if places:
        prompt_request = replace(
            prompt_request, pins=await prefix_pins(context, chat, places, prompt_request.prompt_ids)
        )
    prompt_requests, cache_key_hint = [prompt_request.pinning(body.pinned_s)], body.prompt_cache_key or ""
    request = _request(new_id("chatcmpl"), body, prompt_requests, "messages", cache_key_hint=cache_key_hint)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = Envelope(request.id, kind, int(time.time()), model)
    return request, ChatRenderer(
        body, envelope, _logprobs(context, body), readers, prompt_request.prompt_ids, prompt_request.params
    )


async def parse_completion(
    context: ServerContext, body: CompletionRequest
) -> tuple[GenerationRequest, TextRenderer]:
    """POST /v1/completions."""
    model = context.resolve_model(body.model)
    prompts = await _encode_prompts(context, body)
    _check_prompt_logprobs(body, sum(map(len, prompts)))
    places = GrammarPlaces(_grammar_param(body))
    prompt_requests = [
        PromptRequest(ids, _text_params(context, body, len(ids)), grammar_places=places) for ids in prompts
    ]
    request = _request(new_id("cmpl"), body, prompt_requests, "prompt", "text_completion")
    request = replace(request, scores_only=body.scores_only)
    envelope = Envelope(request.id, "text_completion", int(time.time()), model)
    echoes = await _prompt_texts(context, body, prompts) if body.echo else [""] * len(prompt_requests)
    return request, TextRenderer(body, envelope, _logprobs(context, body), echoes, prompts)


def _logprobs(context: ServerContext, body: CommonFields) -> LogprobsFormat:
    return LogprobsFormat(context.engine.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))


def _request(
    answer_id: str,
    body: CommonFields,
    prompt_requests: Sequence[PromptRequest],
    prompt_param: str,
    operation: str = "chat",
    cache_key_hint: str = "",
) -> GenerationRequest:
    return GenerationRequest(
        id=answer_id,
        prompt_requests=tuple(prompt_requests),
        stream=bool(body.stream),
        prompt_param=prompt_param,
        cache_salt=body.cache_salt,
        cache_key_hint=cache_key_hint,
        priority=body.priority or 0,
        operation=operation,
    )


def chat_of(context: ServerContext, body: ChatCompletionRequest) -> Chat:
    """The conversation of a body, with what its template is told."""
    options = template_options(context, body.chat_template_kwargs, body.chat_template)
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    if body.continue_final_message:
        options["continue_final_message"] = True
    choice, allowed = tool_choice(plain_choice(body.tool_choice))
    return Chat(
        source=body.messages,
        convert=lambda: template_messages(body.messages),
        tools=[tool.for_template() for tool in body.tools or ()],
        tool_choice=choice,
        allowed_tools=allowed,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        options=options,
    )


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


def _chat_sampling(body: ChatCompletionRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments of SamplingParams, and what the body calls those that differ."""
    options = body.sampling_options()
    options["max_tokens"] = body.max_output_tokens
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    options["prompt_logprobs"] = body.prompt_logprobs
    renamed = {"logprobs": "top_logprobs", "structured": _grammar_param(body)}
    _add_grammar(options, body)
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    return options, renamed


def _add_grammar(options: dict[str, Any], body: CommonFields) -> None:
    if (found := body.grammar()) is not None:
        options["structured"] = found[0]


def _grammar_param(body: CommonFields) -> str:
    found = body.grammar()
    return found[1] if found is not None else "structured_outputs"


async def _encode_prompts(context: ServerContext, body: CompletionRequest) -> list[list[int]]:
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
            encoded.append(context.prompts.check_ids(prompt, "prompt"))
            await asyncio.sleep(0)  # others have their turn between hundreds of long prompts
    return encoded


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """How many alternatives of each prompt token are to be told; None: not even its own logprob."""
    wanted = (body.prompt_logprobs, body.logprobs if body.echo else None)
    return max((number for number in wanted if number is not None), default=None)


def _check_prompt_logprobs(body: CompletionRequest, num_tokens: int) -> None:
    """Each choice tells of its prompt."""
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
    if body.scores_only:
        options["max_tokens"] = 1  # the engine generates at least one token; it is left out of the answer
    if body.best_of is not None:
        options["best_of"] = body.best_of
    _add_grammar(options, body)
    options["structured"] = with_default(options.get("structured"), context.settings)
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
    options["prompt_logprobs"] = _prompt_logprobs(body)
    return _params(context, options, num_prompt_tokens, {})


def _params(
    context: ServerContext, options: dict[str, Any], num_prompt_tokens: int, renamed: dict[str, str]
) -> SamplingParams:
    return sampling_params(
        options,
        defaults=context.engine.default_sampling,
        room=context.prompts.max_model_len - num_prompt_tokens,
        vocab_size=context.engine.tokenizer.vocab_size,
        renamed=renamed,
    )


async def _prompt_texts(
    context: ServerContext, body: CompletionRequest, prompts: Sequence[list[int]]
) -> list[str]:
    return [
        given if isinstance(given, str) else await context.prompts.detokenize(ids, "prompt")
        for given, ids in zip(body.prompts, prompts, strict=True)
    ]
