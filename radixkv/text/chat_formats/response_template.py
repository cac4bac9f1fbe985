# SPDX-License-Identifier: Apache-2.0
"""Answers by a tokenizer's own response template, transformers' declaration of an answer's regions.

A response template names fields of a message (`content`, `reasoning_content`, `tool_calls`), each with the
marks around its text and a parser for it. It is used where no declared family reads the same: a
family's reader gives arguments as they come, while these regions give a call when it ends.

    text:     <musing>Hm.</musing>One moment.<use>{"name": ...}</use>
    regions:  reasoning_content    content    tool_calls

Differences from the parser in transformers: a malformed call is the text that it is, a second region of
content adds to the first, and the result is the same however the text is cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.text.chat_formats.answer import AnswerEvent, AnswerWriter
from radixkv.text.chat_formats.argument_types import ArgumentSchema, string_json, value_json
from radixkv.text.chat_formats.arguments import object_of
from radixkv.text.chat_formats.format_parser import Section

CONTENT, REASONING, CALLS = "content", "reasoning", "calls"
#: Field of a response template -> the part of an answer; other fields are content.
PARTS = {
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking", "thought"), REASONING),
    "tool_calls": CALLS,
}


@dataclass(frozen=True)
class ResponseTemplate:
    """A loaded response template.

    Args:
        spec: transformers' `ResponseTemplate`.
        texts: its marks, and the patterns of marks without their escapes.
    """

    spec: Any
    texts: tuple[str, ...]

    @classmethod
    def load(cls, given: Mapping[str, Any]) -> ResponseTemplate:
        """Load a template from the data of a `tokenizer_config.json`.

        Raises:
            ValueError: it is not a response template of this version.
        """
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = load_response_template(dict(given))
        texts = []
        for field in spec.fields.values():
            for literals, pattern in (
                (field.open_literals, field.open_re),
                (field.close_literals, field.close_re),
            ):
                texts += literals or ([] if pattern is None else [pattern.pattern.replace("\\", "")])
        return cls(spec, tuple(texts))

    @property
    def thoughts(self) -> Section | None:
        """The marks of reasoning, where they are literal texts."""
        for name, field in self.spec.fields.items():
            if PARTS.get(name) == REASONING and field.open_literals and field.close_literals:
                return Section(tuple(field.open_literals), tuple(field.close_literals))
        return None

    def after_anchor(self, prompt_end: str) -> str:
        """Return the part of an answer that a prompt has begun; empty: its beginning is not in sight."""
        ends = [found.end() for found in self.spec.start_anchor_re.finditer(prompt_end)]
        return prompt_end[ends[-1] :] if ends else ""


class ResponseTemplateParser:
    """An AnswerParser for one answer by a response template.

    Args:
        answer: takes the events.
        calls: False: calls are content.
        thinks: False: reasoning is content, with its marks.
        prefix: the part of the answer that the prompt has begun.
        tools: schema of the arguments by the name of each function that may be called.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        answer: AnswerWriter,
        *,
        calls: bool = True,
        thinks: bool = True,
        prefix: str = "",
        tools: Mapping[str, Any] | None = None,
    ) -> None:
        self._fields = template.spec.fields
        self._rest = template.spec.implicit
        self._answer = answer
        self._parts = {CONTENT, *([CALLS] if calls else ()), *([REASONING] if thinks else ())}
        self._tools = tools or {}
        self._text = ""
        self._at = 0  # from here on nothing has been told
        self._base = -len(prefix)  # of the text in the sample's
        self._field: Any = None  # the region that is open
        self._groups: dict[str, str] = {}
        self._body: list[str] = []  # of calls
        self._mark = ""  # opened it
        self._began = 0
        self.push(prefix)
        self._answer.take()

    def push(self, text: str) -> list[AnswerEvent]:
        for char in text:  # one at a time, so that patterns decide the same in any pieces
            self._text += char
            while self._step(ended=False):
                pass
        return self._answer.take()

    def finish(self, *, cut: bool = False) -> list[AnswerEvent]:
        while self._step(ended=True):
            pass
        if self._field is not None:
            self._close(cut=cut)
        self._answer.finish()
        return self._answer.take()

    # ------------------------------------------------------------------ regions

    def _watched(self) -> Iterator[tuple[Any, Any, Any, bool]]:
        """Yield the marks that count here: the field, its pattern, its literals, and whether it opens."""
        if self._field is not None:
            if self._field.close_re is not None:
                yield self._field, self._field.close_re, self._field.close_literals, False
            return
        for name, field in self._fields.items():
            if field.open_re is not None:
                yield field, field.open_re, field.open_literals, True
            elif name == self._rest and field.close_re is not None:
                yield field, field.close_re, field.close_literals, False

    def _step(self, *, ended: bool) -> bool:
        """Tell the text up to a mark, and take the mark; False: there is none yet."""
        certain, best = len(self._text), None
        for field, pattern, literals, opens in self._watched():
            found = pattern.search(self._text, self._at, partial=not ended)
            if found is None or (found.end() == found.start() and not found.partial):
                continue
            may_grow = found.end() == len(self._text) and (literals is None or len(literals) > 1)
            if not ended and (found.partial or may_grow):
                certain = min(certain, found.start())
            elif best is None or (found.start(), -found.end()) < (best[0].start(), -best[0].end()):
                best = found, field, opens
        if best is None or best[0].start() >= certain:
            self._tell(certain)
            return False
        found, field, opens = best
        self._tell(found.start())
        self._take(found, field, opens=opens)
        return True

    def _tell(self, end: int) -> None:
        """Tell the text up to a place."""
        text, start = self._text[self._at : end], self._base + self._at
        part = self._part(self._field)
        if text and part == CALLS:
            self._body.append(text)
        elif text and part == REASONING:
            self._answer.think(text)
        elif text:
            self._answer.say(text, start)
        self._forget(end)

    def _forget(self, end: int) -> None:
        self._text, self._base, self._at = self._text[end:], self._base + end, 0

    def _part(self, field: Any) -> str:
        part = CONTENT if field is None else PARTS.get(field.name, CONTENT)
        return part if part in self._parts else CONTENT

    def _take(self, found: Any, field: Any, *, opens: bool) -> None:
        mark, part, start = found[0], self._part(field), self._base + found.start()
        is_shown = PARTS.get(field.name, CONTENT) != part
        if part == CALLS and opens:
            self._mark, self._began = mark, start
        elif is_shown:
            self._answer.say(mark, start)
        self._forget(found.end())
        if opens:
            self._field = field
            self._groups = {name: text for name, text in found.groupdict().items() if text is not None}
            if part == REASONING:
                self._answer.begin_reasoning()
        elif self._field is None:
            self._answer.drop_mark()
        else:
            self._close(mark)

    def _close(self, mark: str = "", *, cut: bool = False) -> None:
        """End the region that is open, by a mark or with the text."""
        field, part = self._field, self._part(self._field)
        self._field = None
        if part == REASONING:
            self._answer.end_reasoning()
        if part != CALLS:
            return
        from transformers.utils.chat_parsing.content_parsers import process_field

        body, self._body = "".join(self._body), []
        try:
            calls = list(self._calls(process_field(body, field, self._groups)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            calls = []
        for name, arguments in calls:
            self._answer.begin_call(name, "")
            self._answer.add_arguments(arguments)
            self._answer.end_call()
        if not calls and not cut:
            self._answer.say(self._mark + body + mark, self._began)

    def _calls(self, value: Any) -> Iterator[tuple[str, str]]:
        """Yield name and arguments, a JSON text, of each call in a region's value.

        Raises:
            ValueError: it is no call.
        """
        if isinstance(value, list):
            for item in value:
                yield from self._calls(item)
            return
        function = value.get("function", value)
        name, given = function["name"], function.get("arguments", function.get("parameters", {}))
        if isinstance(given, str):
            given = object_of(given)
        if not isinstance(name, str) or not name or not isinstance(given, dict):
            raise ValueError("no call")
        schema = ArgumentSchema(self._tools.get(name) or {})
        members = (f"{string_json(key)}: {_json(item, schema.property(key))}" for key, item in given.items())
        yield name, "{" + ", ".join(members) + "}"


def _json(value: Any, schema: ArgumentSchema) -> str:
    """Return the JSON of an argument, whose text takes the type of its schema."""
    if isinstance(value, str):
        return value_json(value, schema)
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
