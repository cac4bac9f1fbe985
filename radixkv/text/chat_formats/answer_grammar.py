# SPDX-License-Identifier: Apache-2.0
"""The Lark grammar of an answer that must call tools, or must be JSON after the model's thoughts.

Calls are written as the model's family writes them, each with arguments that its tool's schema accepts, or
with an input that its tool's own grammar accepts:

    required, or one function     start: (thinking)? calls
    auto, with strict tools       start: (text up to the mark of a call, calls)* text
    none, with tools              start: text in which no call begins
    JSON, with or without tools   start: (thinking)? (JSON | calls)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from radixkv.text.chat_formats.argument_types import ArgumentSchema
from radixkv.text.chat_formats.arguments import JsonArguments
from radixkv.text.chat_formats.calls import ID, INDEX, NAME
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.grammar_rules import TEXT, GrammarRules, arguments_rule
from radixkv.text.chat_formats.member_arguments import MemberArguments
from radixkv.text.closed_objects import close_objects

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
#: Characters beyond the start of other marks that tell the beginning of a call without a special token.
_TELLING = 6
#: Most characters that a mark of calls may share with other marks and still tell a call by itself.
_SHARED = 3
#: Calls of an answer whose numbers are enforced.
_NUMBERED_CALLS = 8
#: The beginning of a rule of a tool's arguments.
_ARGUMENTS = re.compile(r"args_(\d+)(?:_\d+)?(?:\[\w+\])?: ")
#: Keywords of a schema without properties.
_WITHOUT_PROPERTIES = frozenset({"type", "title", "description", "$schema", "properties", "required"})


@dataclass(frozen=True, slots=True)
class MarkToken:
    """A mark that is one token; `is_special`: text can't spell it."""

    id: int
    is_special: bool


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Grammars of the answers in a format.

    Args:
        tools: tools in OpenAI's form; schemas of tools with `strict` true are enforced in full, others as far
            as possible.
        parallel: allow more than one call.
        token_of: returns the token that is spelled like a text, if there is one.
        prompt_end: end of the prompt, which may have opened the thinking.
        others: True if the prompt also shows other tools, which must not be called.
        closes_objects: arguments have only listed properties, unless a tool's schema sets
            `additionalProperties`; always so for strict tools, and for tools without properties.
        inputs: name of a tool -> Lark grammar, escaped (`radixkv.grammar.escaped_lark`), of its only
            argument, the text `input`; its schema is ignored.
        num_calls: calls in the conversation so far.
    """

    format: ChatFormat
    tools: Sequence[Mapping[str, Any]]
    parallel: bool
    token_of: Callable[[str], MarkToken | None]
    prompt_end: str = ""
    others: bool = False
    closes_objects: bool = False
    inputs: Mapping[str, str] = field(default_factory=dict)
    num_calls: int = 0

    def required(self, name: str | None = None) -> str | None:
        """Return the grammar of an answer that calls; None: the format has no calls.

        Args:
            name: the function to call, once; None: any.
        """
        if self.format.form is None:
            return None
        rules = [f"start: {self._thinking()} calls", *self._calls(name), TEXT]
        return "\n".join([*rules, *self._thinking_rules()])

    def optional(self) -> str | None:
        """Return the grammar of any text in which every call is as its tool's schema wants it.

        None: no tool is strict or has a grammar and all may be called, or the format does not show where a
        call begins.
        """
        form, trigger = self.format.form, self._trigger()
        wanted = self.others or any(_is_strict(tool) or _name(tool) in self.inputs for tool in self.tools)
        if form is None or trigger is None or not wanted:
            return None
        specials = [text for text in self.format.special_tokens if self._is_special(text)]
        free = " | ".join(f"TEXT {self._literal(text)}" for text in specials if text not in trigger)
        before = "(call | free)*" if free else "call*"
        rules = [
            f"start: {before} tail" if self.parallel else f"start: {'free* ' if free else ''}(call | tail)",
            f"call: head first {'more* ' if self.parallel else ''}finish",
            *self._text_until("head", trigger),
            f"first: {self._alternatives(form.begin, trigger)}",
            f"more: {self._literal(form.between)} any",
            f"any: {self._alternatives()}",
            f"finish: {self._literal(form.end)}",
            "tail: TEXT",
            TEXT,
            *self._arguments(),
        ]
        return "\n".join([*rules, f"free: {free}"] if free else rules)

    def json(self, schema: str, *, begun: bool = False) -> str | None:
        """Return the grammar of JSON, or of calls where there are tools, after thinking if the model thinks.

        None: the model does neither, so that its answer is the JSON and nothing else.

        Args:
            begun: the prompt ends within the JSON.
        """
        calls = bool(self.tools) and self.format.form is not None
        thinks = bool(self._thinking_rules())
        spoken = self.format.spoken if self.format.frames_content else None
        if begun:
            calls = thinks = False
        if not calls and not thinks and spoken is None:
            return None
        opens, closes = "", ""
        if spoken is not None:
            opens = self._literal(spoken.opens[0].removeprefix(self._opened()))
            closes = f"({self._literal(spoken.closes[0])})?" if spoken.closes else ""
        if begun:
            return f"start: body {closes}\nbody: %json {schema}"
        rules = [
            f"start: {self._thinking()} ({'calls | ' if calls else ''}{opens} body {closes})",
            f"body: %json {schema}",
            TEXT,
            *self._thinking_rules(),
        ]
        return "\n".join([*rules, *(self._calls(None) if calls else ())])

    def without_calls(self) -> str | None:
        """Return the grammar of any text in which no call begins; None: the format has no calls."""
        if not self.format.forms or not self.tools:
            return None
        sections = [part for part in (self.format.reasoning, self.format.spoken) if part is not None]
        elsewhere = [mark for part in sections for mark in (*part.opens, *part.closes)]
        specials = [mark for mark in self.format.special_tokens if self._is_special(mark)]
        free = [text for text in specials if any(text in mark for mark in elsewhere)]
        names = "|".join(_exactly(_name(tool)) for tool in self.tools)
        beginnings, words = set(), {}
        for mark in dict.fromkeys(mark for form in self.format.forms for mark in form.opens):
            if any(text in mark for text in specials if text not in free):
                continue  # no text spells it
            mark = mark.strip("\n")
            shared = max((_num_shared(mark, other) for other in elsewhere), default=0)
            first = next((text for text in free if mark.startswith(text)), "")
            word = mark.removeprefix(first)
            for text in free:
                word = word.partition(text)[0]
            if first and word:
                words[first] = word
            elif shared >= len(mark):
                beginnings.add(f"{_exactly(mark)}({names})")
            elif not first:
                beginnings.add(_exactly(mark[: shared + _TELLING]))
        for form in self.format.forms:
            if isinstance(form.arguments, MemberArguments) and not form.arguments.is_named:
                # Kept from the mark, a model would go on with what follows; other objects have names, too.
                beginnings.add(rf'\{{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"({names})"')
            elif form.bare:
                beginnings.add(rf"\[?({names})\(")
        unlike = rf" & ~/(.|\n)*({'|'.join(sorted(beginnings))})(.|\n)*/" if beginnings else ""
        if words:
            return "\n".join(self._guarded(free, words, unlike))
        follow = " | ".join(f"TEXT {self._literal(text)}" for text in free)
        rules = [f"start: {'free* ' if free else ''}TEXT", rf"TEXT: /(.|\n)*/{unlike}"]
        return "\n".join([*rules, f"free: {follow}"] if free else rules)

    def _guarded(self, free: Sequence[str], words: Mapping[str, str], unlike: str) -> Iterator[str]:
        """Yield the rules of text in which a word must not follow a special token.

        Args:
            words: special token -> its word.
        """
        names = {text: f"after_{i}" for i, text in enumerate(words)}
        follow = " | ".join(f"{self._literal(text)} {names.get(text, 'start')}" for text in free)
        yield f"start: TEXT ({follow})?"
        yield rf"TEXT: /(.|\n)*/{unlike}"
        for text, name in names.items():
            yield f"{name}: {name.upper()} ({follow})?"
            yield rf"{name.upper()}: /(.|\n)*/ & ~/{_exactly(words[text])}(.|\n)*/{unlike}"

    # ------------------------------------------------------------------ calls

    def _calls(self, name: str | None) -> list[str]:
        """Return the rule `calls`, and the rules that it needs."""
        form = self.format.form
        assert form is not None
        between = self._literal(form.between)
        more = f"({between} any)*" if self.parallel and name is None else ""
        opened = self._opened()
        begun = opened if opened and (form.begin + form.head).startswith(opened) else ""
        rules = [f"first: {self._alternatives(form.begin, begun, name=name)}", *self._arguments(name)]
        if more:
            rules.append(f"any: {self._alternatives()}")
        if more and INDEX in form.head + form.tail and form.first_index is not None:
            for number in range(1, _NUMBERED_CALLS):
                rules.append(f"call_{number}: {self._alternatives(number=number)}")
                rules.append(f"more_{number}: {between} call_{number} more_{number + 1}?")
            rules.append(f"more_{_NUMBERED_CALLS}: {between} any {more}")
            more = "more_1?"
        return [f"calls: first {more} {self._literal(form.end)}", *rules]

    def _alternatives(
        self,
        before: str | None = None,
        begun: str = "",
        *,
        name: str | None = None,
        number: int | None = None,
    ) -> str:
        """Return a call of any tool, or of one, with the text `before` it if it is the first.

        Args:
            begun: the beginning of all that, as far as the prompt has it.
            number: its place among the calls of the answer, from 0 on; None: the first has 0, others any.
        """
        form = self.format.form
        assert form is not None
        written = []
        for i, tool in enumerate(self.tools):
            if name is None or _name(tool) == name:
                head = ((before or "") + form.head.replace(NAME, _name(tool))).removeprefix(begun)
                index = self._index(0 if before is not None else number)
                written.append(f"{self._with_ids(head, index)} args_{i} {self._with_ids(form.tail, index)}")
        return " | ".join(written)

    def _index(self, number: int | None) -> int | None:
        """Return the number that is written in a call; None: any."""
        form = self.format.form
        assert form is not None
        if number is None or form.first_index is None:
            return None
        return form.first_index + number + (self.num_calls if self.format.counts_calls else 0)

    def _with_ids(self, text: str, index: int | None) -> str:
        """Return a literal in which patterns stand for ids and numbers."""
        form = self.format.form
        assert form is not None
        patterns = {ID: f"/{form.id_pattern}/", INDEX: "/[0-9]{1,3}/" if index is None else f'"{index}"'}
        pieces = re.split(f"({ID}|{INDEX})", text)
        return " ".join(
            patterns.get(piece) or self._literal(piece) for piece in pieces if piece or len(pieces) == 1
        )

    def _arguments(self, name: str | None = None) -> list[str]:
        """Return the rules of the arguments of all tools, or of one: each takes time to compile."""
        form = self.format.form
        assert form is not None
        found: list[str] = []
        for i, tool in enumerate(self.tools):
            if name is not None and _name(tool) != name:
                continue
            given = self.inputs.get(_name(tool))
            rules = GrammarRules(self._pieces, f"args_{i}", strict=_name(tool) if _is_strict(tool) else None)
            if given is not None and isinstance(form.arguments, JsonArguments):
                found += [f"args_{i}: {_INPUT_BEGIN} input_{i} {_INPUT_END}", _embedded(i, given)]
            else:
                schema = ArgumentSchema(_schema(tool, self.closes_objects))
                rule = arguments_rule(form.arguments, schema, rules)
                found += [f"args_{i}: {rule}", *rules.rules]
        return found

    def _trigger(self) -> str | None:
        """Return the mark that tells a call; None: only the text around one tells it."""
        form = self.format.form
        if form is None:
            return None
        written = form.begin + form.head
        found = min((mark for mark in form.opens if written.startswith(mark)), key=len, default=None)
        sections = [part for part in (self.format.reasoning, self.format.spoken) if part is not None]
        others = [mark for part in sections for mark in (*part.opens, *part.closes)]
        if found is None or (
            not self._is_special(found) and any(_num_shared(found, mark) > _SHARED for mark in others)
        ):
            return None
        return found

    def inputs_in(self, written: str) -> Iterator[tuple[str, range]]:
        """Yield the places of the inputs' grammars in a written one: a tool's name, and the lines."""
        for i, tool in enumerate(self.tools):
            given = self.inputs.get(_name(tool))
            at = written.find(_embedded(i, given)) if given is not None else -1
            if given is not None and at >= 0:
                first = written.count("\n", 0, at) + 2
                yield _name(tool), range(first, first + given.count("\n") + 2)  # with the closing brace

    def tools_in(self, written: str) -> dict[int, str]:
        """Return the tools by the lines of their arguments' rules in a written grammar, counted from 1."""
        rules = ((line, _ARGUMENTS.match(rule)) for line, rule in enumerate(written.split("\n"), 1))
        return {line: _name(self.tools[int(found[1])]) for line, found in rules if found is not None}

    # ------------------------------------------------------------------ thinking

    def _opened(self) -> str:
        """Return the mark that the prompt has opened; empty: none but of reasoning."""
        opened = self.format.opened_by(self.prompt_end)
        return "" if self.format.thinks(opened) else opened

    def _thinking(self) -> str:
        """Return the beginning of an answer: thinking, or the text that the template writes without it."""
        section, lead = self.format.reasoning, self.format.lead or ""
        closes = section.closes if section is not None else ()
        if any(mark in lead and mark in self.prompt_end for mark in closes):
            lead = ""  # this prompt has closed the thinking itself
        lead = self._literal(lead) if lead else ""
        if not self._thinking_rules():
            return lead
        if self.format.thinks(self.format.opened_by(self.prompt_end)):
            return "thinking"
        return f"(thinking | {lead})" if lead else "thinking?"

    def _thinking_rules(self) -> list[str]:
        """Return the rules of thinking; none where neither prompt nor vocabulary opens it."""
        section = self.format.reasoning
        if section is None:
            return []
        opened = self.format.thinks(self.format.opened_by(self.prompt_end))
        opening, closing = section.opens[0], section.closes[0]
        if not opened and not self._is_known(opening):
            return []
        after = "BLANKS?"
        if self.format.after_reasoning:
            after = f"({self._literal(self.format.after_reasoning)})? BLANKS?"
        if self.format.thinking is not None:
            opening, closing, follows = self.format.thinking
            after = self._literal(follows)
        return [
            f"thinking: {'' if opened else self._literal(opening)} thought {after}",
            *self._text_until("thought", closing),
            r"BLANKS: /[ \n]{1,4}/",
        ]

    # ------------------------------------------------------------------ literals

    def _is_special(self, text: str) -> bool:
        token = self.token_of(text)
        return token is not None and token.is_special

    def _is_known(self, mark: str) -> bool:
        """Return whether the model has tokens for a mark."""
        return self.token_of(mark.strip()) is not None or any(
            text in mark and self._is_special(text) for text in self.format.special_tokens
        )

    def _pieces(self, text: str) -> list[tuple[str, int | None]]:
        """Divide a text at its special tokens: pieces, each with the id of the token that it is, or None."""
        special = [mark for mark in self.format.special_tokens if self._is_special(mark)]
        found: list[tuple[str, int | None]] = []
        for piece in re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]:
            token = self.token_of(piece) if piece in special else None
            if piece:
                found.append((piece, token.id if token is not None else None))
        return found

    def _text_until(self, name: str, mark: str) -> list[str]:
        """Return a rule of any text with a mark after it, and the rules that it needs."""
        rules = GrammarRules(self._pieces, name)
        return [f"{name}: {rules.text_until(mark)}", *rules.rules]

    def _literal(self, text: str) -> str:
        """Write a text in Lark, with its special tokens as tokens."""
        return GrammarRules(self._pieces, "").literal(text)


#: Around the input of a tool that takes text.
_INPUT_BEGIN, _INPUT_END = (json.dumps(text) for text in ('{"input": "', '"}'))


def _num_shared(text: str, other: str) -> int:
    """Return the number of characters that two texts begin with in common."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))))


def _exactly(text: str) -> str:
    """Return a regular expression of a text, for use between slashes."""
    return re.sub(r"([^\w\s<>=\"'▁｜])", r"\\\1", text)


def _name(tool: Mapping[str, Any]) -> str:
    name = tool["function"]["name"]
    assert isinstance(name, str)
    return name


def _embedded(i: int, grammar: str) -> str:
    """Return the rule of an input: its grammar, in which names are its own."""
    return f"input_{i}: %lark {{\n{grammar}\n}}"


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _schema(tool: Mapping[str, Any], closes_objects: bool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, an object."""
    parameters = {**(tool["function"].get("parameters") or {}), **_ANY_ARGUMENTS}
    lists_none = not parameters.get("properties") and parameters.keys() <= _WITHOUT_PROPERTIES
    if closes_objects or _is_strict(tool) or lists_none:
        parameters = close_objects(parameters, is_closed=True)
    return parameters
