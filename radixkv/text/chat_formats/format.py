# SPDX-License-Identifier: Apache-2.0
"""ChatFormat: how one family of models writes reasoning, content and tool calls, declared in one place."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixkv.text.chat_formats.answer import AnswerParser, PlainParser, new_call_id
from radixkv.text.chat_formats.answer_marks import AnswerMarks
from radixkv.text.chat_formats.calls import CallForm
from radixkv.text.chat_formats.format_parser import FormatParser, Section
from radixkv.text.trusted_text import TrustedText

#: Tokens of a prompt's end that may open a region.
TAIL_TOKENS = 64
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

THINK = Section(("<think>",), ("</think>",))


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Declaration of a family's format. All fields but the name are optional; by default all text is content.

    Args:
        name: name in `--chat-format`.
        families: models that write it, for the documentation.
        signs: texts in a chat template, or in its renderings, that identify the family: alternatives, each
            a list of texts that must all occur.
        tokens: texts that are single tokens in the family's vocabulary, which identify it if its template
            shows no sign.
        reasoning: marks around reasoning.
        spoken: marks around content, in families that have them.
        forms: forms of calls. The first one is written, and all are read.
        dropped: marks without meaning, dropped from answers.
        calls_end_reasoning: a call that begins inside of reasoning ends it.
        preamble: text about tools for a system message if the chat template has none. `TOOLS` stands for
            their JSON, `EXAMPLE` for an example of a call.
        call_id_length: number of letters and digits in ids of calls; None: as OpenAI's.
        numbers_ids: ids of calls are `functions.NAME:N`, counted through a conversation.
        counts_calls: the template writes them so itself, whatever ids the calls have.
        tools_option: argument of the chat template by which some of the family take tools.
        frames_content: content always stands in `spoken`.
        after_reasoning: text between reasoning and the rest.
        thinking: text that the chat template writes before reasoning, after it, and between that and a call;
            None: not known.
        lead: text that it writes before a call without reasoning; None: not known.
        special_tokens: special tokens of a vocabulary that occur in the marks, which must stay in the text.
        is_known: False: the model's family is not known; the format is a guess.
    """

    name: str
    families: str = ""
    signs: tuple[tuple[str, ...], ...] = ()
    tokens: tuple[str, ...] = ()
    reasoning: Section | None = THINK
    spoken: Section | None = None
    forms: tuple[CallForm, ...] = ()
    dropped: tuple[str, ...] = ()
    calls_end_reasoning: bool = False
    preamble: str = ""
    call_id_length: int | None = None
    numbers_ids: bool = False
    counts_calls: bool = False
    tools_option: str | None = None
    frames_content: bool = False
    after_reasoning: str = ""
    thinking: tuple[str, str, str] | None = None
    lead: str | None = None
    special_tokens: tuple[str, ...] = ()
    is_known: bool = True

    @property
    def form(self) -> CallForm | None:
        """Return the form of calls that is written; None: the format has no calls."""
        return self.forms[0] if self.forms else None

    def marks(self) -> tuple[str, ...]:
        """Return all texts in marks, with placeholders for names in them."""
        sections = [part for part in (self.reasoning, self.spoken) if part is not None]
        found = [mark for part in sections for mark in (*part.opens, *part.closes)]
        for form in self.forms:
            found += [*form.opens, *form.closes, *form.literals()]
        return (*found, *self.dropped)

    def with_vocabulary(self, spellings: Iterable[str]) -> ChatFormat:
        """Return the format with the special tokens of a vocabulary that are part of its marks."""
        marks = self.marks()
        kept = (text for text in spellings if text and any(text in mark for mark in marks))
        return replace(self, special_tokens=tuple(sorted(kept, key=len, reverse=True)))

    def parser(
        self,
        *,
        calls: bool = True,
        parallel: bool = True,
        prompt_end: str = "",
        forced: bool = False,
        tools: Mapping[str, Any] | None = None,
    ) -> AnswerParser:
        """Return a parser for one answer.

        Args:
            calls: emit tool calls as such; False: they are content.
            parallel: False: emit the first call only.
            prompt_end: how the prompt ends (`TAIL_TOKENS` tokens suffice): templates may open the reasoning.
            forced: the answer's grammar wants calls: what there is of one that is cut off is no content.
            tools: schema of the arguments by the name of each function that may be called: how arguments that
                are written as text are to be understood, and how a call without a mark is told from text.
        """
        if self.reasoning is None and self.spoken is None and not self.forms:
            return PlainParser()
        return FormatParser(
            self.reasoning,
            self.spoken,
            self.forms if calls else (),
            dropped=self.dropped,
            calls_end_reasoning=self.calls_end_reasoning,
            parallel=parallel,
            new_id=self.new_call_id,
            prefix=self.opened_by(prompt_end),
            forced=forced,
            tools=tools,
        )

    def opened_by(self, prompt_end: str) -> str:
        """Return the end of a prompt from the mark on that opens reasoning or a call; empty: none does."""
        end = prompt_end.rstrip()
        opens = (
            self.reasoning.opens if self.reasoning is not None else (),
            *(form.opens for form in self.forms),
        )
        for mark in sorted((mark for marks in opens for mark in marks), key=len, reverse=True):
            if mark.strip() and end.endswith(mark.strip()):
                return prompt_end[len(end) - len(mark.strip()) :]
        return ""

    def answer_marks(self, prompt_end: str, *, calls: bool = True) -> AnswerMarks:
        """Return the marks that tell an answer from thoughts; for the arguments see `parser`."""
        thoughts, spoken = self.reasoning or Section(()), self.spoken or Section(())
        ending = self.forms if calls and self.calls_end_reasoning else ()
        return AnswerMarks(
            opens=thoughts.opens,
            closes=thoughts.closes,
            spoken=spoken.opens,
            calls=tuple(mark for form in ending for mark in form.opens),
            prefix=self.opened_by(prompt_end),
        )

    def thinks(self, opened: str) -> bool:
        """Return whether a text begins with a mark that opens reasoning."""
        opens = self.reasoning.opens if self.reasoning is not None else ()
        return any(opened.startswith(mark.strip()) for mark in opens)

    def new_call_id(self) -> str:
        """Return a fresh id of a call, in the form that the family's templates take."""
        return new_call_id() if self.call_id_length is None else self.call_id(uuid.uuid4().hex)

    def call_id(self, given: str) -> str:
        """Return an id of a call in that form, the same for the same id."""
        size = self.call_id_length
        if size is None or (len(given) == size and given.isascii() and given.isalnum()):
            return given
        number = int.from_bytes(hashlib.sha256(given.encode("utf-8", "replace")).digest(), "big")
        letters = []
        for _ in range(size):
            number, letter = divmod(number, len(_LETTERS))
            letters.append(_LETTERS[letter])
        return "".join(letters)

    def write_calls(self, calls: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Write calls, each a name with the JSON text of its arguments, as the model does."""
        assert self.form is not None
        return self.form.write(calls, schemas_of(tools))

    def write_calls_after(
        self, content: str, calls: Sequence[tuple[str, str]], numbers: Sequence[int] = ()
    ) -> TrustedText:
        """Write calls into a message after its content, with their marks as the tokens that these are."""
        assert self.form is not None
        mark = f"\N{NULL}{secrets.token_hex(16)}\N{NULL}"  # in no arguments
        number = {token: f"{mark}{i}{mark}" for i, token in enumerate(self.special_tokens)}
        pattern = re.compile("|".join(map(re.escape, self.special_tokens)) or "(?!)")
        form = self.form.respelled(lambda text: pattern.sub(lambda found: number[found[0]], text))
        return TrustedText.parted(content, form.write(calls, None, numbers), mark, self.special_tokens)

    def write_preamble(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Write a system message's words on tools in OpenAI's form."""
        example = self.write_calls([("function-name", '{"argument": "value"}')])
        shown = json.dumps(list(tools), ensure_ascii=False)
        return self.preamble.replace("EXAMPLE", example).replace("TOOLS", shown)


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema of each tool's arguments by the tool's name, of tools in OpenAI's form."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
