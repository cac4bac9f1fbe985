"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from radixkv.request import OutputDelta, RequestOutput, SamplingParams
from radixkv_server.apis.openai.messages import template_messages
from radixkv_server.apis.openai.rendering import Envelope, Json, dump, sse
from radixkv_server.apis.openai.schemas import ChatCompletionRequest, sampling_params
from radixkv_server.context import ServerContext, context_of
from radixkv_server.generation import Generation, Job, check_vocabulary, fit_max_tokens, new_id
from radixkv_server.http.errors import ApiError
from radixkv_server.http.json_body import read_json
from radixkv_server.http.observation import record_of
from radixkv_server.http.streaming import EventStream, run_until_disconnect

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a chat, whole or as a stream of server-sent events."""
    context = context_of(request)
    body = await read_json(request, ChatCompletionRequest, context.settings.max_json_depth)
    model = context.resolve_model(body.model)
    job = Job(prompt_ids := await chat_prompt(context, body), _params(context, body, len(prompt_ids)))
    answer_id = new_id("chatcmpl")
    generation = Generation(context, record_of(request.scope), body, [job], answer_id, "messages")
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = Envelope(answer_id, kind, int(time.time()), model, context.fingerprint)
    if body.stream:
        frames = _frames(context, body, generation, envelope)
        return EventStream(frames, context.settings, record_of(request.scope))
    outputs = await run_until_disconnect(request.receive, generation.run())
    answer = envelope.wrap(_choices(context, outputs[0]), usage=generation.usage.as_json())
    return Response(dump(answer), media_type="application/json")


async def chat_prompt(context: ServerContext, body: ChatCompletionRequest) -> list[int]:
    """Token ids of the chat, checked against the context limit."""
    limit = context.settings.max_messages
    if len(body.messages) > limit:
        raise ApiError(400, f"At most {limit} messages are allowed.", param="messages", code="invalid_value")
    options: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.chat_template is not None:
        if not context.settings.trust_request_chat_template:
            message = "chat_template in a request is not allowed on this server."
            raise ApiError(400, message, param="chat_template", code="unsupported_parameter")
        options["chat_template"] = body.chat_template
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    if body.continue_final_message:
        options["continue_final_message"] = True
    ask_for_answer = body.add_generation_prompt is not False and not body.continue_final_message
    ids = await context.encoder.render_chat(
        template_messages(body.messages),
        tools=body.template_tools,
        add_generation_prompt=ask_for_answer,
        options=options,
    )
    return context.encoder.check_length(ids, "messages")


def _params(context: ServerContext, body: ChatCompletionRequest, num_prompt_tokens: int) -> SamplingParams:
    options = body.sampling_options()
    check_vocabulary(options, context.encoder.tokenizer.vocab_size)
    wanted = body.max_output_tokens
    options["max_tokens"] = fit_max_tokens(wanted, num_prompt_tokens, context.encoder.max_model_len)
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    renamed = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    return sampling_params(options, renamed=renamed)


def _choices(context: ServerContext, output: RequestOutput) -> list[Json]:
    return [
        {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": context.logprobs.chat(sample.logprobs),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        for index, sample in enumerate(output.outputs)
    ]


async def _frames(
    context: ServerContext, body: ChatCompletionRequest, generation: Generation, envelope: Envelope
) -> AsyncGenerator[bytes, None]:
    """The stream: per choice a role, its text, a finish reason; then the usage if it was asked for."""
    more: Json = {"usage": None} if body.wants_stream_usage else {}
    begun: set[int] = set()
    async for _, delta in generation.stream():
        choices = _delta_choices(context, delta, is_first=delta.index not in begun)
        begun.add(delta.index)
        if choices:
            yield b"".join(sse(envelope.wrap([choice], **more)) for choice in choices)
    if body.wants_stream_usage:
        yield sse(envelope.wrap([], usage=generation.usage.as_json()))


def _delta_choices(context: ServerContext, delta: OutputDelta, *, is_first: bool) -> list[Json]:
    def choice(content: Json, **more: Any) -> Json:
        fields = {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}
        return {**fields, **more}

    choices = []
    if is_first:
        choices.append(choice({"role": "assistant", "content": "", "refusal": None}))
    if delta.text or delta.logprobs:
        choices.append(choice({"content": delta.text}, logprobs=context.logprobs.chat(delta.logprobs)))
    if delta.finish_reason is not None:
        choices.append(choice({}, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason))
    return choices
