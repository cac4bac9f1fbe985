# SPDX-License-Identifier: Apache-2.0
"""Chat templates in use, each with its traits and the format of the answers that follow it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from radixkv.text.chat_formats.derive import DERIVED, Message
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.formats import AUTO, KnownTemplate, named_format, probe_template
from radixkv.text.chat_formats.template_input import can_show_tools_first
from radixkv.text.text_tokenizer import TextTokenizer
from radixkv_server.concurrency import off_loop

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
#: Notes in the first answer with tools, by whether the form of calls has been derived.
_NOTES = {
    False: "the chat format of this model is not known, so that its tool calls are asked for and read as "
    "those of Hermes; see --chat-format",
    True: "the chat format of this model is not known, so that its tool calls are read in the form that its "
    "chat template writes; see --chat-format",
}
#: Templates of requests that are remembered, where such are allowed.
_MAX_TEMPLATES = 64


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

        found = probe_template(
            render,
            template or tokenizer.chat_template,
            is_token,
            given=self._given,
            response_template=tokenizer.facts.get("response_template"),
        )
        if not found.format.is_known:
            logger.warning(_UNKNOWN[found.format.name == DERIVED], found.format.name)
        if self._tools_first and not can_show_tools_first(found.format, found.traits):
            logger.warning(_FIXED_TOOLS[found.traits.tools_place == "first"])
        return replace(found, format=found.format.with_vocabulary(_special_tokens(tokenizer)))


def _special_tokens(tokenizer: TextTokenizer) -> list[str]:
    """Return the spellings of a vocabulary's special tokens."""
    added: Mapping[str, Any] = tokenizer.facts.get("added_tokens_decoder") or {}
    return [token["content"] for token in added.values()]
