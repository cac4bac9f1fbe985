# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses/compact: shorten a conversation to the model's summary of it.

The answer has the messages of the user and the system, word for word, and one `compaction` item in place of
all others. As input, this item becomes a message of the assistant with the summary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from radixkv.engine.outputs import RequestOutput
from radixkv_server.apis.common.cache_diagnosis import (
    CacheDiagnosis,
    chat_fingerprint,
    diagnose,
    text_block,
)
from radixkv_server.apis.common.chat_messages import with_cache_controls
from radixkv_server.apis.responses.conversation import chat_of, items_of, marked_items
from radixkv_server.apis.responses.items import compaction, comparable_item, item_id, summaries_in
from radixkv_server.apis.responses.render import usage_json
from radixkv_server.apis.responses.schemas import CompactRequest, ResponsePromptFields
from radixkv_server.apis.responses.stored import StoredResponses
from radixkv_server.apis.responses.stored_conversations import StoredConversations
from radixkv_server.apis.responses.tools import Toolbox
from radixkv_server.apis.responses.truncation import fit
from radixkv_server.chats.chat import AnswerReaders, Chat
from radixkv_server.chats.render import chat_prompt, chat_request
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json
from radixkv_server.generation.generation import Generation, WholeRenderer
from radixkv_server.generation.progress import Usage
from radixkv_server.generation.request import cache_options, new_id
from radixkv_server.http.request_record import RequestRecord

#: Most tokens of a summary.
SUMMARY_TOKENS = 1024

_WISH = (
    "Sum up this conversation for yourself, so that you can go on without it: what was asked, what was done "
    "and found out, what was decided, and what is left to do. Write only the summary."
)


@dataclass(eq=False)
class CompactionRenderer(WholeRenderer):
    """Renderer of the answer: a shorter list of items."""

    id: str
    kept: Sequence[Json]
    readers: AnswerReaders
    diagnosis: CacheDiagnosis

    def answer(self, outputs: Sequence[RequestOutput], usage: Usage) -> Json:
        answer = self.readers.answer(outputs[0].outputs[0])
        summary = compaction(item_id(self.id, "compaction", 0), answer.content or answer.reasoning)
        return {
            "id": self.id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self.kept, summary],
            "usage": usage_json(usage, 0),
            **self.diagnosis.fields(usage),
        }


async def prepare_compaction(
    context: ServerContext, body: CompactRequest, record: RequestRecord
) -> Generation[CompactionRenderer]:
    """Return the generation of a summary: its prompt is the conversation, then the wish for a summary."""
    model, caller = context.resolve_model(body.model), record.caller
    response_id, stored = new_id("resp_"), StoredResponses(context.responses, caller.name)
    conversations = StoredConversations(context.responses, caller.name)
    before, new = await items_of(body, stored, conversations, response_id)
    items = [*before, *new]
    wish = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _WISH}]}
    asked, tools = ResponsePromptFields(input=_WISH, instructions=body.instructions), Toolbox(())
    room = min(SUMMARY_TOKENS, context.engine.limits.max_model_len // 4)

    def make_chat(some: Sequence[Json]) -> Chat:
        return chat_of(context, asked, some, tools, caller)

    kept = await fit(context, [*items, wish], make_chat, room, caller, body.cache_salt or "")
    options = cache_options(body.cache_salt, body.prompt_cache_key)
    chat = replace(make_chat(kept), sampling={"max_tokens": room}, request_options=options)
    prompt = await chat_prompt(context, chat)
    request, places = await chat_request(context, prompt)
    await with_cache_controls(context, body, chat, request, marked_items(body, new, kept, tools))
    messages = list(map(comparable_item, kept))
    fingerprint = partial(
        chat_fingerprint,
        api="responses",
        model=model,
        system=() if body.instructions is None else (text_block(body.instructions),),
        messages=messages,
        summaries=summaries_in(messages),
        parameters={"prompt_cache_key": body.prompt_cache_key, "cache_salt": body.cache_salt},
    )
    diagnosis = await diagnose(context, caller.name, prompt, fingerprint, earlier_id=body.compared_with)
    words = [item for item in items if item["type"] == "message" and item["role"] != "assistant"]
    return Generation(
        context,
        record,
        response_id,
        [request],
        CompactionRenderer(response_id, words, prompt.readers(), diagnosis),
        prompt_param="input",
        chat_prompt=prompt,
        grammar_places=places,
        fingerprint=diagnosis.fingerprint,
        comparison=diagnosis.comparison,
    )
