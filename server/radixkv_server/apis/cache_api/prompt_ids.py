# SPDX-License-Identifier: Apache-2.0
"""Token ids of a cache route's prompt, equal to a generation request's with the same fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.cache.reporting.explain import MissReport
from radixkv.observe.prompt_parts import MakeParts
from radixkv.text.chat_formats.client_rules import ClientRule
from radixkv_server.apis.cache_api.schemas import CachePromptFields
from radixkv_server.apis.openai.serving import completion_request
from radixkv_server.chats.chat import ChatPrompt
from radixkv_server.context import ServerContext
from radixkv_server.generation.request import encoded_prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt, and what is known of it if it is a chat."""

    ids: list[int]
    chat: ChatPrompt | None = None

    @property
    def parts(self) -> MakeParts | None:
        """Maker of the parts by which prompts are compared; None: only the text is known."""
        return None if self.chat is None else self.chat.parts

    @property
    def client_rule(self) -> ClientRule | None:
        """Rule that held the client's own text constant; None: none applied."""
        return None if self.chat is None else self.chat.client_rule

    def hint(self, report: MissReport) -> str | None:
        """Return an addition to the reason for a miss; None: nothing."""
        return None if self.chat is None else self.chat.hint(report)

    def place_name(self, before: Sequence[int], after: Sequence[int]) -> str | None:
        """Name the message that contains a place, by the token ids before and after it; None: not known."""
        return None if self.chat is None else self.chat.place_name(before, after)


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
    request, chat, _ = await completion_request(context, body)
    return Prompt(encoded_prompt(request).token_ids.tolist(), chat)
