# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's small routes: properties of the server, a rendered chat, and aliases of other routes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

import radixkv
from radixkv.engine.client import EngineClient
from radixkv.sampling.sampling_params import SamplingParams
from radixkv_server.apis.openai.schemas import ChatCompletionRequest
from radixkv_server.apis.openai.serving import completion_chat
from radixkv_server.chats.render import chat_prompt
from radixkv_server.context import context_of
from radixkv_server.dialect import Api, Json
from radixkv_server.generation.generation import json_response

router = APIRouter()


@router.get("/props")
async def props(request: Request) -> Response:
    """Return the server's properties: sampling defaults, context length, slots, chat template.

    Running requests are not shown.
    """
    context = context_of(request)
    engine, facts = context.engine, context.engine.tokenizer.facts
    return json_response(
        {
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": engine.limits.max_model_len,
                "speculative": engine.config.speculation != "off",
                "is_processing": False,
                "params": _sampling_defaults(engine),
                "prompt": "",
            },
            "total_slots": engine.config.max_num_seqs,
            "model_alias": context.model_names[0],
            "model_path": engine.model_name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": facts.get("chat_template") or "",
            "bos_token": facts.get("bos_token") or "",
            "eos_token": facts.get("eos_token") or "",
            "build_info": f"radixkv-{radixkv.__version__}",
            "is_sleeping": False,
        }
    )


def _sampling_defaults(engine: EngineClient) -> Json:
    params = SamplingParams(**{"max_tokens": None, **engine.default_sampling})
    return {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "ignore_eos": params.ignore_eos,
        "stop": list(params.stop_strings),
    }


@router.post("/apply-template")
async def apply_template(request: Request) -> Response:
    """Render the prompt of a chat completion as text, without generating."""
    context = context_of(request)
    body = await context.bodies.read(request, ChatCompletionRequest, context.max_body_bytes())
    context.resolve_model(body.model)
    prompt = await chat_prompt(context, completion_chat(context, body))
    return json_response({"prompt": await context.prompts.detokenize(prompt.ids, "messages")})


API = Api(router, bodies={"POST /apply-template": ChatCompletionRequest})
