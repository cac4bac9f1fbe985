# SPDX-License-Identifier: Apache-2.0
"""Texts and messages to checked token ids, without blocking the event loop, by the chat templates in use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.cache.keys import EncodedTokens
from radixkv.engine.client import EngineClient
from radixkv.errors import InvalidRequestError
from radixkv.text.chat_formats.derived_form import DERIVED, with_derived_form
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.formats import AUTO, find_format, named_format
from radixkv.text.chat_formats.response_choice import with_response_template
from radixkv.text.chat_formats.template_form import fit_to_template
from radixkv.text.chat_formats.template_input import ThinkingSwitch, can_show_tools_first, find_switch
from radixkv.text.chat_formats.template_traits import Message, TemplateTraits, find_traits, render_probe
from radixkv.text.prompt_texts import text_size
from radixkv.text.text_tokenizer import TextTokenizer
from radixkv_server.concurrency import INLINE_CHARS, off_loop
from radixkv_server.errors import bad_request

logger = logging.getLogger("radixkv.server")

_NO_SIGN = (
    "The chat format of this model is not known: chat template and vocabulary show no sign of a family. "
)
#: By whether the form of calls has been derived.
_UNKNOWN = {
    False: _NO_SIGN + "Tools are described, and calls read, in the form of %s; --chat-format sets another.",
    True: _NO_SIGN + "Calls are read in the form that the chat template writes them in (%s); --chat-format "
    "sets another.",
}
#: By whether tools come first all the same.
_FIXED_TOOLS = {
    True: "--tools-first changes nothing: this model's chat template shows tools before the system prompt.",
    False: "--tools-first changes nothing: this model's chat template shows tools after the system prompt, "
    "and has no place for another system message after them.",
}
#: What the first answer with tools says of it.
_NOTES = {
    False: "the chat format of this model is not known, so that its tool calls are asked for and read as "
    "those of Hermes; see --chat-format",
    True: "the chat format of this model is not known, so that its tool calls are read in the form that its "
    "chat template writes; see --chat-format",
}
#: Templates of requests that are remembered, where such are allowed.
_MAX_TEMPLATES = 64


@dataclass(frozen=True, slots=True)
class KnownTemplate:
    """A chat template with the format of the answers that follow it."""

    format: ChatFormat
    traits: TemplateTraits
    thinking: ThinkingSwitch


class ChatTemplates:
    """Traits of the model's template and of templates in requests. Each is probed once.

    Args:
        format_name: `auto`, or the format of all answers: a known name, or a file that declares one.
        tools_first: tools are to be shown before the system prompt.
    """

    def __init__(self, tokenizer: TextTokenizer, format_name: str, *, tools_first: bool = False) -> None:
        self._tokenizer = tokenizer
        self._tools_first = tools_first
        self._given = None if format_name == AUTO else named_format(format_name)
        self._known: dict[str | None, KnownTemplate] = {}
        self._noted: set[str] = set()

    async def find(self, template: str | None) -> KnownTemplate:
        """Return the traits of a request's own template, or of the model's (None)."""
        known = self._known.get(template)
        if known is None:
            known = await off_loop(lambda: self._probe(template))
            if len(self._known) >= _MAX_TEMPLATES:
                self._known.clear()
            self._known[template] = known
        return known

    def notes(self, chat_format: ChatFormat) -> tuple[str, ...]:
        """Note on the format for the first answer with tools: that it is not known. None: no note."""
        if chat_format.is_known or chat_format.name in self._noted:
            return ()
        self._noted.add(chat_format.name)
        return (_NOTES[chat_format.name == DERIVED],)

    def _probe(self, template: str | None) -> KnownTemplate:
        tokenizer = self._tokenizer

        def render(
            messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]
        ) -> str:
            more = options if template is None else {**options, "chat_template": template}
            ids = tokenizer.apply_chat_template(messages, tools, True, **more)
            return tokenizer.decode(ids, skip_special_tokens=False)

        def is_token(text: str) -> bool:
            return len(tokenizer.encode(text, add_special_tokens=False)) == 1

        shown, source = render_probe(render), template or tokenizer.chat_template
        found = self._given or find_format(source, is_token, shown)
        traits = find_traits(render, found.tools_option)
        if self._given is None:
            found = with_derived_form(found, render, traits)
        fitted = fit_to_template(found, render, traits)
        if self._given is None:
            fitted = self._with_response_template(fitted)
        if not fitted.is_known:
            logger.warning(_UNKNOWN[fitted.name == DERIVED], fitted.name)
        if self._tools_first and not can_show_tools_first(fitted, traits):
            logger.warning(_FIXED_TOOLS[traits.tools_place == "first"])
        said: Sequence[Message] = [{"role": "user", "content": "hello"}]
        thinking = find_switch(lambda variables: render(said, None, variables), source)
        return KnownTemplate(fitted.with_vocabulary(_special_tokens(tokenizer)), traits, thinking)

    def _with_response_template(self, found: ChatFormat) -> ChatFormat:
        """Return the format with the tokenizer's own declaration of answers, if there is one."""
        given = self._tokenizer.facts.get("response_template")
        if given is None:
            return found
        try:
            return with_response_template(found, given)
        except ValueError as error:
            logger.warning("The tokenizer's response_template is not used: %s", error)
            return found


def _special_tokens(tokenizer: TextTokenizer) -> list[str]:
    """Return the spellings of a vocabulary's special tokens."""
    added: Mapping[str, Any] = tokenizer.facts.get("added_tokens_decoder") or {}
    return [token["content"] for token in added.values()]


class PromptEncoder:
    """Encoder of prompts: all rendering, tokenising and checks of the server, for one engine."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._max_chars: int | None = None

    async def encode(self, text: str, *, param: str) -> EncodedTokens:
        """Encode a prompt, and check its tokens.

        Raises:
            InvalidRequestError: the text can't be tokenised, or gives no tokens.
            ContextLengthExceededError: it gives too many.
        """
        return await self.accept(await self.tokenize(text, param=param), param)

    async def tokenize(
        self, text: str, *, param: str, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Return token ids of a text; their number is not checked.

        Args:
            allow_special: True: spellings of control tokens in the text become these tokens; False: text.

        Raises:
            InvalidRequestError: the text can't be tokenised.
            ContextLengthExceededError: far too long for the context; raised before tokenising.
        """
        await self.check_size(text, param=param)
        return await self._engine.tokenize(
            text, add_special_tokens=add_special_tokens, allow_special=allow_special
        )

    async def render_chat(
        self,
        messages: Sequence[Any],
        convert: Callable[[], list[dict[str, Any]]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
        param: str = "messages",
    ) -> Sequence[int] | npt.NDArray[np.int32]:
        """Return token ids of a chat, through the model's chat template; their number is not checked.

        Args:
            messages: the chat as JSON-like data, used for its size.
            convert: makes the messages that templates expect.
            options: further arguments of the template.
            param: name of the messages' field in the body.

        Raises:
            InvalidRequestError: the template refuses the messages, or there is none.
            ContextLengthExceededError: far too long for the context; raised before rendering.
        """
        size = await self.check_size(messages, tools, options, param=param)
        try:
            return await self._engine.render_chat(
                await off_loop(convert, chars=size),
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except RecursionError:
            raise InvalidRequestError("the chat template can't render messages nested this deep") from None

    async def accept(self, ids: Sequence[int] | npt.NDArray[np.int32], param: str) -> EncodedTokens:
        """Check the given ids against the engine's limits, and return them.

        Raises:
            InvalidRequestError: there are none, or one is outside the vocabulary.
            ContextLengthExceededError: there are too many.
        """
        limits = self._engine.limits
        limits.check_length(len(ids), param)
        return await off_loop(lambda: limits.encode(ids, param), tokens=len(ids))

    async def detokenize(self, ids: Sequence[int] | npt.NDArray[np.int32], param: str) -> str:
        """Return the text of ids, including special tokens.

        Raises:
            ApiError: an id is outside the vocabulary.
        """

        tokenizer = self._engine.tokenizer

        def work() -> str:
            size = tokenizer.vocab_size
            wrong = next((token for token in ids if not 0 <= token < size), None)
            if wrong is not None:
                raise bad_request(
                    f"Token id {wrong} is outside the vocabulary of {size} tokens.", param=param
                )
            return tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)

        return await off_loop(work, tokens=len(ids))

    async def check_size(self, *values: Any, param: str) -> int:
        """Count characters in all strings of JSON-like data; refuse more than the context could ever hold.

        Raises:
            ContextLengthExceededError: it could not; found without tokenising, and without counting them all.
        """
        size = text_size(*values, limit=INLINE_CHARS)
        if size <= INLINE_CHARS:
            return size
        limits = self._engine.limits
        most = await off_loop(self._find_most_chars)
        size = await off_loop(lambda: text_size(*values, limit=most))
        if size > most:
            raise limits.too_long(
                f"over {most} characters, more than any {limits.max_model_len} tokens", param
            )
        return size

    def _find_most_chars(self) -> int:
        """Return the most characters that can fit into the context."""
        if self._max_chars is None:
            tokenizer = self._engine.tokenizer
            longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
            # Twice the bound, since some tokenizers fold several characters into one before they look.
            self._max_chars = max(INLINE_CHARS, 2 * self._engine.limits.max_model_len * max(1, longest))
        return self._max_chars
