"""POST /v1/completions: text completion of one or many prompts."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request, Response

from radixkv.request import CompletionOutput, RequestOutput, SamplingParams
from radixkv_server.apis.openai.rendering import Envelope, Json, dump, sse
from radixkv_server.apis.openai.schemas import CompletionRequest, check_sample_count, sampling_params
from radixkv_server.context import ServerContext, context_of
from radixkv_server.generation import Generation, Job, check_vocabulary, fit_max_tokens, new_id
from radixkv_server.http.errors import bad_request
from radixkv_server.http.json_body import read_json
from radixkv_server.http.observation import record_of
from radixkv_server.http.streaming import EventStream, run_until_disconnect

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Complete prompts, whole or as a stream of server-sent events."""
    context = context_of(request)
    body = await read_json(request, CompletionRequest, context.settings.max_json_depth)
    model = context.resolve_model(body.model)
    prompts = await _encode_prompts(context, body)
    jobs = [Job(ids, _params(context, body, len(ids))) for ids in prompts]
    texts = _prompt_texts(context, body, prompts) if body.echo else [""] * len(jobs)
    answer_id = new_id("cmpl")
    generation = Generation(context, record_of(request.scope), body, jobs, answer_id, "prompt")
    envelope = Envelope(answer_id, "text_completion", int(time.time()), model, context.fingerprint)
    if body.stream:
        frames = _frames(context, body, generation, envelope, texts)
        return EventStream(frames, context.settings, record_of(request.scope))
    outputs = await run_until_disconnect(request.receive, generation.run())
    if body.scores_only:
        generation.usage.completion_tokens = 0
    choices = _choices(context, body, outputs, prompts, texts)
    answer = envelope.wrap(choices, usage=generation.usage.as_json())
    return Response(dump(answer), media_type="application/json")


async def _encode_prompts(context: ServerContext, body: CompletionRequest) -> list[list[int]]:
    check_sample_count("n", body.n)
    check_sample_count("best_of", body.best_of)
    prompts = body.prompts
    settings = context.settings
    if len(prompts) > settings.max_prompts:
        raise bad_request(f"At most {settings.max_prompts} prompts are allowed in a request.", param="prompt")
    if len(prompts) * body.num_samples > settings.max_samples:
        most = settings.max_samples
        raise bad_request(f"At most {most} samples (prompts x n or best_of) are allowed.", param="n")
    encoder = context.encoder
    return [
        await encoder.encode(prompt, param="prompt")
        if isinstance(prompt, str)
        else encoder.check_ids(prompt, "prompt")
        for prompt in prompts
    ]


def _params(context: ServerContext, body: CompletionRequest, num_prompt_tokens: int) -> SamplingParams:
    options = body.sampling_options()
    check_vocabulary(options, context.encoder.tokenizer.vocab_size)
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.scores_only:
        wanted = 1  # the engine generates at least one token; it is left out of the answer
    options["max_tokens"] = fit_max_tokens(wanted, num_prompt_tokens, context.encoder.max_model_len)
    if body.best_of is not None:
        options["best_of"] = body.best_of
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
        if body.echo:
            options["prompt_logprobs"] = body.logprobs
    return sampling_params(options, renamed={"prompt_logprobs": "logprobs"})


def _prompt_texts(context: ServerContext, body: CompletionRequest, prompts: Sequence[list[int]]) -> list[str]:
    tokenizer = context.encoder.tokenizer
    return [
        given if isinstance(given, str) else tokenizer.decode(ids, skip_special_tokens=False)
        for given, ids in zip(body.prompts, prompts, strict=True)
    ]


def _choices(
    context: ServerContext,
    body: CompletionRequest,
    outputs: Sequence[RequestOutput],
    prompts: Sequence[list[int]],
    texts: Sequence[str],
) -> list[Json]:
    choices: list[Json] = []
    for output, ids, text in zip(outputs, prompts, texts, strict=True):
        for sample in output.outputs:
            choices.append(
                {
                    "index": len(choices),
                    "text": text if body.scores_only else text + sample.text,
                    "logprobs": _logprobs(context, body, output, sample, ids),
                    "finish_reason": "length" if body.scores_only else sample.finish_reason,
                    "stop_reason": None if body.scores_only else sample.stop_reason,
                }
            )
    return choices


def _logprobs(
    context: ServerContext,
    body: CompletionRequest,
    output: RequestOutput,
    sample: CompletionOutput,
    prompt_ids: list[int],
) -> Json | None:
    if body.logprobs is None or sample.logprobs is None:
        return None
    entries = [] if body.scores_only else list(sample.logprobs)
    ids = [] if body.scores_only else sample.token_ids
    if not body.echo:
        return context.logprobs.text(entries, ids, 0, body.logprobs)
    before = output.prompt_logprobs or []
    return context.logprobs.text([*before, *entries], [*prompt_ids, *ids], 0, body.logprobs)


async def _frames(
    context: ServerContext,
    body: CompletionRequest,
    generation: Generation,
    envelope: Envelope,
    texts: Sequence[str],
) -> AsyncGenerator[bytes, None]:
    """The stream: chunks of text per choice, the last with its finish reason; then the usage if asked for."""
    more: Json = {"usage": None} if body.wants_stream_usage else {}
    per_prompt = body.n or 1
    offsets: dict[int, int] = {}
    async for job_index, delta in generation.stream():
        index = job_index * per_prompt + delta.index
        text = delta.text
        if index not in offsets:
            offsets[index] = 0
            text = texts[job_index] + text
        logprobs = None
        if delta.logprobs and body.logprobs is not None:
            logprobs = context.logprobs.text(delta.logprobs, delta.token_ids, offsets[index], body.logprobs)
        if logprobs is not None:
            offsets[index] += sum(len(token) for token in logprobs["tokens"])
        if text or logprobs or delta.finish_reason is not None:
            choice = {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
            yield sse(envelope.wrap([choice], **more))
    if body.wants_stream_usage:
        yield sse(envelope.wrap([], usage=generation.usage.as_json()))
