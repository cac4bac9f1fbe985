"""From the body of a cache route to the token ids of a generation request with the same fields."""

from __future__ import annotations

from radixkv_server.apis.cache.schemas import PromptFields
from radixkv_server.apis.openai.parse import parse_chat
from radixkv_server.context import ServerContext
from radixkv_server.usage import Hint


async def prompt_ids(
    context: ServerContext, body: PromptFields, *, add_generation_prompt: bool = True
) -> list[int]:
    """The token ids of a body's prompt; see `prompt_job`."""
    ids, _ = await prompt_job(context, body, add_generation_prompt=add_generation_prompt)
    return ids


async def prompt_job(
    context: ServerContext, body: PromptFields, *, add_generation_prompt: bool = True
) -> tuple[list[int], Hint | None]:
    """The token ids of a body's prompt, through the very path of chats and completions, and its hints.

    Args:
        add_generation_prompt: end a chat where the assistant begins to speak, if the body says nothing.

    Raises:
        ApiError, InvalidRequestError: what a generation request would be refused for.
    """
    if isinstance(body.prompt, str):
        context.resolve_model(body.model)
        return await context.prompts.encode(body.prompt, param="prompt"), None
    if body.prompt is not None:
        context.resolve_model(body.model)
        return context.prompts.check_ids(body.prompt, "prompt"), None
    if body.add_generation_prompt is None and not body.continue_final_message:
        body = body.model_copy(update={"add_generation_prompt": add_generation_prompt})
    request, _ = await parse_chat(context, body)
    (job,) = request.jobs
    return job.prompt_ids, job.hint
