# SPDX-License-Identifier: Apache-2.0
"""Token ids of a cache route's prompt, equal to a generation request's with the same fields."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv_server.apis.cache_api.schemas import CachePromptFields
from radixkv_server.apis.common.chat_completion import completion_request
from radixkv_server.context import ServerContext
from radixkv_server.generation.request import PromptFacts, token_ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt with its facts."""

    ids: list[int]
    facts: PromptFacts = field(default_factory=PromptFacts)


async def prompt_ids(
    context: ServerContext, body: CachePromptFields, *, add_generation_prompt: bool = True
) -> list[int]:
    """Return the token ids of a body's prompt; see `prompt_of`."""
    return (await prompt_of(context, body, add_generation_prompt=add_generation_prompt)).ids


async def prompt_of(
    context: ServerContext, body: CachePromptFields, *, add_generation_prompt: bool = True
) -> Prompt:
    """Return a body's prompt, made by the same code as for chats and completions.

    Args:
        add_generation_prompt: end a chat with the assistant's header; the body's own field has precedence.

    Raises:
        ApiError, InvalidRequestError: a generation request would be refused for the same reason.
    """
    context.resolve_model(body.model)
    if isinstance(body.prompt, str):
        encoded = await context.prompts.encode(body.prompt, param="prompt")
        return Prompt(encoded.token_ids.tolist())
    if body.prompt is not None:
        await context.prompts.accept(body.prompt, "prompt")
        return Prompt(body.prompt)
    if body.add_generation_prompt is None and not body.continue_final_message:
        body = body.model_copy(update={"add_generation_prompt": add_generation_prompt})
    request, facts, _ = await completion_request(context, body)
    ids = token_ids(request).tolist()
    return Prompt(ids, facts)
