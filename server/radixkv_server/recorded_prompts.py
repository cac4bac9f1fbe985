# SPDX-License-Identifier: Apache-2.0
"""Recorded requests in their model's tokens, made by the same code as in the server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from radixkv.cache.keys import EncodedTokens, encode_tokens
from radixkv.engine.client import EngineClient
from radixkv.engine.config import EngineConfig
from radixkv.engine.input_processor import PromptLimits
from radixkv.errors import InvalidRequestError, RadixKVError
from radixkv.images.image_processor import ImageProcessor
from radixkv.observe.audit.prompt_units import PromptUnits, TextCoding, prompt_text
from radixkv.observe.audit.record import Block, Json, Record
from radixkv.observe.audit.request_bodies import NoRequest
from radixkv.text.json_text import read_json_text
from radixkv.text.text_tokenizer import TextTokenizer
from radixkv_server.apis.anthropic.schemas import MessagesRequest
from radixkv_server.apis.anthropic.serving import messages_chat
from radixkv_server.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from radixkv_server.apis.openai.serving import completion_chat
from radixkv_server.apis.responses.schemas import ResponseRequest
from radixkv_server.apis.responses.serving import response_chat
from radixkv_server.chats.chat import Chat, ChatPrompt
from radixkv_server.chats.render import chat_prompt
from radixkv_server.context import ServerContext
from radixkv_server.errors import ApiError
from radixkv_server.http.body import Ignored
from radixkv_server.settings import ServerSettings
from radixkv_server.tenants.tenant import EVERYBODY

_BODIES: dict[str, type[BaseModel]] = {
    "chat": ChatCompletionRequest,
    "messages": MessagesRequest,
    "responses": ResponseRequest,
}


class _TokenizerAlone:
    """Stand-in for an engine that has only a tokenizer."""

    def __init__(self, tokenizer: TextTokenizer, image_processor: ImageProcessor | None) -> None:
        self.tokenizer = tokenizer
        self.limits = PromptLimits(2**31 - 1, 2**31 - 1, 16, None)
        self.model_name = ""
        self.cache = None
        self.image_processor = image_processor
        self.config = EngineConfig()

    async def tokenize(self, text: str, **options: bool) -> list[int]:
        return self.tokenizer.encode(text, **options)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, **options)


@dataclass(slots=True)
class ServedModelCoding:
    """Coding of prompts as rendered by a server of this model; see `PromptCoding`."""

    context: ServerContext
    is_exact: bool = True

    @classmethod
    def of(cls, tokenizer: TextTokenizer, image_processor: ImageProcessor | None = None) -> ServedModelCoding:
        """Make the coding of a served model, from its tokenizer with the chat template.

        Args:
            image_processor: how it takes images; None: it does not see.
        """
        engine = cast(EngineClient, _TokenizerAlone(tokenizer, image_processor))
        return cls(ServerContext.for_engine(engine, ServerSettings()))

    def encode(self, record: Record) -> PromptUnits:
        """See `PromptCoding.encode`."""
        tokenizer = self.context.engine.tokenizer
        if record.dialect != "completions" and not tokenizer.has_chat_template:
            return TextCoding(self._encode, tokenizer.token_bytes).encode(record)
        try:
            ids, after = asyncio.run(self._ids(record))
        except (RadixKVError, ApiError) as error:
            raise NoRequest(f"a server of this model refuses it: {_reason(error)}") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise NoRequest(f"a server of this model refuses it: {where}: {first['type']}") from None
        return PromptUnits(
            EncodedTokens(encode_tokens(ids)),
            prompt_text(record.blocks),
            tuple(EncodedTokens(encode_tokens(answer)) for answer in after),
            1.0,
            is_exact=True,
        )

    def unit_bytes(self, unit: int) -> bytes:
        """See `PromptCoding`."""
        return self.context.engine.tokenizer.token_bytes(unit)

    async def _ids(self, record: Record) -> tuple[list[int], list[list[int]]]:
        """Return tokens of the prompt, and the computed tokens of each answer."""
        answers = [answer for answer in (record.answer, *record.other_answers) if answer]
        if record.dialect == "completions":
            return await self._completion(record), [self._cut(self._text_of(one), record) for one in answers]
        images = "placeholder" if self.context.engine.image_processor is None else "show"
        body = _BODIES[record.dialect].model_validate(record.whole_body, context=Ignored(True, images))
        chat = await self._chat(body)
        prompt = await chat_prompt(self.context, chat)
        return list(map(int, prompt.ids)), [
            await self._answer(chat, prompt, answer, record) for answer in answers
        ]

    async def _answer(
        self, chat: Chat, prompt: ChatPrompt, answer: Sequence[Block], record: Record
    ) -> list[int]:
        """Return the computed tokens of an answer to a chat, as the template writes it in a later turn."""
        ids, said = list(map(int, prompt.ids)), [*prompt.messages, _assistant(answer)]
        whole = replace(
            chat,
            convert=lambda: list(said),
            add_generation_prompt=False,
            tools=prompt.tools,
            orders_results=False,
        )
        try:
            with_answer = list(map(int, (await chat_prompt(self.context, whole)).ids))
        except (InvalidRequestError, ApiError):
            with_answer = []
        if with_answer[: len(ids)] != ids:  # the template writes an answer otherwise than it asks for one
            return self._cut(self._text_of(answer), record)
        return self._cut(with_answer[len(ids) :], record)

    async def _chat(self, body: Any) -> Chat:
        if isinstance(body, ChatCompletionRequest):
            return completion_chat(self.context, body)
        if isinstance(body, MessagesRequest):
            return await messages_chat(self.context, body, EVERYBODY)
        return await response_chat(self.context, body, EVERYBODY)

    async def _completion(self, record: Record) -> list[int]:
        prompts = CompletionRequest.model_validate(record.body, context=Ignored(True, "placeholder")).prompts
        if len(prompts) != 1:
            raise NoRequest(f"{len(prompts)} prompts in one request; only one can be followed")
        return self._encode(prompts[0], True) if isinstance(prompts[0], str) else list(prompts[0])

    def _encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        plain = text.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair is no text
        return self.context.engine.tokenizer.encode(plain, add_special_tokens=add_special_tokens)

    def _text_of(self, answer: Sequence[Block]) -> list[int]:
        return self._encode("".join(block.text for block in answer))

    def _cut(self, ids: list[int], record: Record) -> list[int]:
        """Drop tokens that were not computed: the last one, and any that templates write after an answer.

        The usage gives their number for a single answer, else the end of the answer's text does.
        """
        reported = record.usage.output
        if reported is not None and not record.other_answers:
            return ids[: max(0, reported - 1)]
        end = self._encode(str(self.context.engine.tokenizer.facts.get("eos_token") or ""))
        if len(end) == 1 and end[0] in ids:
            ids = ids[: len(ids) - 1 - ids[::-1].index(end[0])]
        return ids[:-1] if record.is_cut else ids


def _assistant(answer: Sequence[Block]) -> Json:
    """Return an answer in the form for chat templates."""
    message: Json = {"role": "assistant", "content": "".join(b.text for b in answer if b.kind == "text")}
    thoughts = "".join(block.text for block in answer if block.kind == "thinking")
    if thoughts:
        message["reasoning_content"] = thoughts
    calls = [block for block in answer if block.kind == "call"]
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.text)}}
            for call in calls
        ]
    return message


@functools.lru_cache(maxsize=256)
def _arguments(text: str) -> Any:
    try:
        return read_json_text(text)
    except (ValueError, RecursionError):
        return text


def _reason(error: Exception) -> str:
    """Return a refusal's message without its quotes of the body."""
    param = getattr(error, "param", None)
    code = getattr(error, "code", None)
    return " ".join(str(part) for part in (param, code) if part) or type(error).__name__
