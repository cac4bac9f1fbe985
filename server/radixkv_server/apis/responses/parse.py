"""From the body of POST /v1/responses to what the engine shall do, how it is answered, and what is kept."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any

from radixkv_server.apis.openai.logprobs import LogprobsFormat
from radixkv_server.apis.responses.conversation import chat_of, items_of
from radixkv_server.apis.responses.errors import ResponsesDialect
from radixkv_server.apis.responses.render import ResponseRenderer, base_response
from radixkv_server.apis.responses.schemas import InputTokensRequest, PromptFields, ResponseRequest
from radixkv_server.apis.responses.stored import StoredResponse, StoredResponses
from radixkv_server.apis.responses.tools import Toolbox
from radixkv_server.apis.responses.truncation import fit
from radixkv_server.chat.chat import Chat, chat_prompt, chat_request
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json
from radixkv_server.errors import ApiError
from radixkv_server.generation.request import GenerationRequest
from radixkv_server.generation.usage import Usage
from radixkv_server.response_store import StoreError

logger = logging.getLogger("radixkv.server")

_RENAMED = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "structured": "text.format"}


class Creation(ResponsesDialect):
    """The making of one response; also the dialect of its stream, whose errors continue its events.

    Args:
        stored: the caller's responses.
        tenant: the caller.
    """

    def __init__(self, stored: StoredResponses, tenant: str) -> None:
        self._stored = stored
        self._tenant = tenant
        self._conversation: list[Json] = []
        self._renderer: ResponseRenderer | None = None
        self._is_stored = False

    async def parse(
        self, context: ServerContext, body: ResponseRequest
    ) -> tuple[GenerationRequest, ResponseRenderer]:
        """The prompt: the conversation so far, with the new input after it."""
        model = context.resolve_model(body.model)
        response_id = f"resp_{uuid.uuid4().hex}"
        before, new = await items_of(body, self._stored, response_id)
        conversation = self._conversation = [*before, *new]
        salt = body.cache_salt or ""
        chat, tools = await chat_that_fits(
            context, body, conversation, self._tenant, salt=salt, room=body.max_output_tokens
        )
        prompt_request, readers = await chat_request(context, chat, _sampling_of(body), renamed=_RENAMED)

        def remember(call_id: str, arguments: str) -> None:
            context.calls.remember(self._tenant, call_id, arguments)

        self._is_stored = body.store is not False
        base = base_response(response_id, model, body, prompt_request.params)
        self._renderer = ResponseRenderer(
            base,
            len(new),
            LogprobsFormat(context.engine.tokenizer),
            readers,
            prompt_request.params,
            tools,
            remember,
            with_logprobs=body.wants_logprobs,
            hides_reasoning=body.wants_encrypted_reasoning,
        )
        wanted = GenerationRequest(
            id=response_id,
            prompt_requests=(prompt_request.pinning(body.pinned_s),),
            stream=bool(body.stream),
            prompt_param="input",
            cache_salt=body.cache_salt,
            cache_key_hint=body.prompt_cache_key or "",
            priority=body.priority or 0,
        )
        return wanted, self._renderer

    async def keep(self, usage: Usage) -> None:
        """Store the response, unless the client does not want that; if it can't be, its `store` says so."""
        assert self._renderer is not None
        if not self._is_stored:
            return
        self._renderer.conclude(usage)
        response = self._renderer.response
        try:
            await self._stored.add(StoredResponse(response, self._conversation))
        except StoreError as error:
            logger.error("%s was answered and is not stored: %s", response["id"], error)
            response["store"] = False

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        assert self._renderer is not None, "a stream begins with its first event"
        return self._renderer.failure(error)


async def chat_that_fits(
    context: ServerContext,
    body: PromptFields,
    items: Sequence[Json],
    tenant: str,
    *,
    salt: str = "",
    room: int | None = None,
) -> tuple[Chat, Toolbox]:
    """The chat of a conversation, shortened where the body says that it may be, and its tools.

    Args:
        room: tokens of the answer, if it is known.
    """
    tools = Toolbox(body.tools or ())

    def make_chat(some: Sequence[Json]) -> Chat:
        return chat_of(context, body, some, tools, tenant)

    if body.truncation == "auto":
        items = await fit(context, items, make_chat, room, tenant, salt)
    return make_chat(items), tools


async def count_input_tokens(
    context: ServerContext, body: InputTokensRequest, stored: StoredResponses, tenant: str
) -> int:
    """POST /v1/responses/input_tokens: the length of the prompt that a response to this would have."""
    context.resolve_model(body.model)
    before, new = await items_of(body, stored, "resp_count")
    chat, _ = await chat_that_fits(context, body, [*before, *new], tenant)
    return len((await chat_prompt(context, chat)).ids)


def _sampling_of(body: ResponseRequest) -> dict[str, Any]:
    options = {**body.sampling_options(), "max_tokens": body.max_output_tokens}
    if body.wants_logprobs:
        options["logprobs"] = body.top_logprobs or 0
    if body.text is not None and body.text.format is not None:
        options["structured"] = body.text.format.grammar()
    return options
