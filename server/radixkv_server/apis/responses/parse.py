"""From the body of POST /v1/responses to what the engine shall do, how it is answered, and what is kept."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv_server.apis.openai.fields import plain_choice
from radixkv_server.apis.openai.logprobs import LogprobsFormat
from radixkv_server.apis.openai.parse import template_options
from radixkv_server.apis.responses.errors import ResponsesDialect
from radixkv_server.apis.responses.items import ItemReference, MessageItem, item_id, messages_of
from radixkv_server.apis.responses.render import ResponseRenderer, base_response
from radixkv_server.apis.responses.schemas import ResponseRequest
from radixkv_server.apis.responses.stored import StoredResponse, StoredResponses
from radixkv_server.apis.responses.tools import Toolbox
from radixkv_server.chat.chat import Chat, chat_job
from radixkv_server.chat.structured import tool_choice
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
        """The prompt: the conversation so far, with the new input behind it."""
        model = context.resolve_model(body.model)
        response_id = f"resp_{uuid.uuid4().hex}"
        before: list[Json] = []
        if body.previous_response_id is not None:
            previous = await self._stored.get(body.previous_response_id, "previous_response_id")
            before = previous.conversation
        new = await self._new_items(response_id, body)
        conversation = self._conversation = [*before, *new]
        tools = Toolbox(body.tools or ())
        chat = _chat_of(context, body, conversation, tools, self._tenant)
        job, readers = await chat_job(context, chat, _sampling_of(body), renamed=_RENAMED)

        def remember(call_id: str, arguments: str) -> None:
            context.calls.remember(self._tenant, call_id, arguments)

        self._is_stored = body.store is not False
        base = base_response(response_id, model, body, job.params)
        self._renderer = ResponseRenderer(
            base,
            len(new),
            LogprobsFormat(context.engine.tokenizer),
            readers,
            job.params,
            tools,
            remember,
            with_logprobs=body.wants_logprobs,
            hides_reasoning=body.wants_encrypted_reasoning,
        )
        wanted = GenerationRequest(
            id=response_id,
            jobs=(job.keeping(body.kept_s),),
            stream=bool(body.stream),
            prompt_param="input",
            cache_salt=body.cache_salt,
            family=body.prompt_cache_key or "",
            priority=body.priority or 0,
        )
        return wanted, self._renderer

    async def _new_items(self, response_id: str, body: ResponseRequest) -> list[Json]:
        """The input in its plain form."""
        if body.input is None:
            return []
        if isinstance(body.input, str):
            given: Sequence[Any] = [MessageItem(role="user", content=body.input)]
        else:
            given = body.input
        items = []
        for number, item in enumerate(given):
            if isinstance(item, ItemReference):
                items.append(await self._stored.item(item.id))
            else:
                items.append(item.plain(item.id or item_id(response_id, item.type, number)))
        return items

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


def _chat_of(
    context: ServerContext, body: ResponseRequest, conversation: Sequence[Json], tools: Toolbox, tenant: str
) -> Chat:
    options = template_options(context, body.chat_template_kwargs, body.chat_template)
    if body.reasoning is not None and body.reasoning.effort is not None:
        options.setdefault("reasoning_effort", body.reasoning.effort)
    choice, allowed = tool_choice(tools.choice(plain_choice(body.tool_choice)))

    def recall(call_id: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return context.calls.recall(tenant, call_id, value)

    return Chat(
        source=[body.instructions, *conversation],
        convert=lambda: messages_of(body.instructions, conversation, tools, recall),
        param="input",
        tools=tools.functions,
        tool_choice=choice,
        allowed_tools=allowed,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        options=options,
    )


def _sampling_of(body: ResponseRequest) -> dict[str, Any]:
    options = {**body.sampling_options(), "max_tokens": body.max_output_tokens}
    if body.wants_logprobs:
        options["logprobs"] = body.top_logprobs or 0
    if body.text is not None and body.text.format is not None:
        options["structured"] = body.text.format.grammar()
    return options
