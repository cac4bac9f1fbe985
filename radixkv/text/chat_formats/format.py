"""ChatFormat: how one family of models writes reasoning, content and tool calls, declared in one place."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.text.chat_formats.answer import AnswerParser, PlainParser, new_call_id
from radixkv.text.chat_formats.calls import CallSyntax
from radixkv.text.chat_formats.format_parser import CALLS, REASONING, SPOKEN, FormatParser
from radixkv.text.chat_formats.regions import Region

#: Tokens of a prompt's end that may open a region.
TAIL_TOKENS = 16
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What is known of a family. Everything but the name may be missing: such text is all content.

    Args:
        name: what `--chat-format` calls it.
        reasoning: marks around what the model thinks; (opening marks, closing marks).
        spoken: marks around content, for families that frame that, too.
        calls: marks around one or several tool calls.
        syntax: how calls are written between these marks, and with them (`CallSyntax.write`).
        special_tokens: those of the marks that are special tokens, which must stay in the text.
        preamble: what a system message says of tools where the chat template says nothing. `TOOLS` stands for
            their JSON, `EXAMPLE` for an example of a call.
        call_id_length: ids of calls have exactly so many letters and digits; None: as OpenAI's.
        tools_option: argument of the chat template that some of the family take their tools by.
    """

    name: str
    reasoning: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    spoken: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    calls: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    syntax: CallSyntax | None = None
    special_tokens: tuple[str, ...] = ()
    preamble: str = ""
    call_id_length: int | None = None
    tools_option: str | None = None

    def parser(
        self,
        *,
        calls: bool = True,
        parallel: bool = True,
        prompt_end: str = "",
        forced: bool = False,
        names: Collection[str] = (),
    ) -> AnswerParser:
        """A parser for one answer.

        Args:
            calls: tell tool calls as such; False: they are content.
            parallel: False: tell the first call only.
            prompt_end: how the prompt ends (`TAIL_TOKENS` tokens suffice): templates may open the reasoning.
            forced: the answer's grammar wants calls: what there is of one that is cut off is no content.
            names: of the tools that may be called, to tell a call without a mark that is cut off from text.
        """
        marks = {REASONING: self.reasoning, SPOKEN: self.spoken, CALLS: self.calls if calls else None}
        regions = tuple(Region(name, *marked) for name, marked in marks.items() if marked is not None)
        if not regions:
            return PlainParser()
        return FormatParser(
            regions,
            self.syntax or _NO_CALLS,
            parallel=parallel,
            new_id=self.new_call_id,
            prefix=self.opened_by(prompt_end),
            forced=forced,
            names=names,
        )

    def opened_by(self, prompt_end: str) -> str:
        """The end of a prompt from the mark on that opens reasoning; empty where none does."""
        end = prompt_end.rstrip()
        for mark in self.reasoning[0] if self.reasoning is not None else ():
            if end.endswith(mark.strip()):
                return prompt_end[len(end) - len(mark.strip()) :]
        return ""

    def new_call_id(self) -> str:
        """A fresh id of a call, in the form that the family's templates take."""
        return new_call_id() if self.call_id_length is None else self.call_id(uuid.uuid4().hex)

    def call_id(self, given: str) -> str:
        """An id of a call in that form, the same for the same id."""
        size = self.call_id_length
        if size is None or (len(given) == size and given.isascii() and given.isalnum()):
            return given
        number = int.from_bytes(hashlib.sha256(given.encode("utf-8", "replace")).digest(), "big")
        letters = []
        for _ in range(size):
            number, letter = divmod(number, len(_LETTERS))
            letters.append(_LETTERS[letter])
        return "".join(letters)

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name with the JSON text of its arguments, as the model writes them."""
        assert self.syntax is not None
        return self.syntax.write(calls)

    def write_preamble(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a system message says of tools in OpenAI's form."""
        example = self.write_calls([("function-name", '{"argument": "value"}')])
        shown = json.dumps(list(tools), ensure_ascii=False)
        return self.preamble.replace("EXAMPLE", example).replace("TOOLS", shown)


_NO_CALLS = CallSyntax(head="", tail="")
