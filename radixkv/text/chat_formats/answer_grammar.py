"""The Lark grammar of an answer that must call tools, or must be JSON after what the model thinks.

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

from radixkv.text.chat_formats.calls import NAME, CallSyntax
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.closed_objects import close_objects

#: Between the tokens of arguments: none is needed, one is what most models are used to.
_WHITESPACE = " ?"
#: What may follow a backslash: one spelling for each character, so that no key can be hidden as another.
_ESCAPES = '"\\bfnrt'
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
#: So many characters more than other marks begin with tell that a call begins, where no special token does.
_TELLING = 6
#: What a schema without properties says at most.
_WITHOUT_PROPERTIES = frozenset({"type", "title", "description", "$schema", "properties", "required"})


@dataclass(frozen=True, slots=True)
class MarkToken:
    """A mark that is one token; `is_special`: text can't spell it."""

    id: int
    is_special: bool


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What an answer in a format may be.

    Args:
        tools: in OpenAI's form; those with `strict` true are held to their schema in full, the others as far
            as it can be enforced.
        parallel: more than one call is allowed.
        token_of: the token that a text is, if it is one.
        prompt_end: how the prompt ends; it may have opened the thinking.
        others: the prompt shows other tools, too, which must not be called.
        closes_objects: arguments have the properties that are listed, and no others, unless a tool's schema
            says something of others; those of strict tools, and of tools without properties, always.
        inputs: name of a tool -> Lark grammar, escaped (`radixkv.grammar.escaped_lark`), of the text that is
            its only argument, `input`; its schema does not count.
    """

    format: ChatFormat
    tools: Sequence[Mapping[str, Any]]
    parallel: bool
    token_of: Callable[[str], MarkToken | None]
    prompt_end: str = ""
    others: bool = False
    closes_objects: bool = False
    inputs: Mapping[str, str] = field(default_factory=dict)

    def required(self, name: str | None = None) -> str | None:
        """An answer that calls: the function of that name, once; None: any. None: the format has no calls."""
        if self.format.syntax is None:
            return None
        rules = [f"start: {self._thinking()} calls", *self._calls(name), *_TEXT]
        return "\n".join([*rules, *self._thinking_rules()])

    def optional(self) -> str | None:
        """Any text, in which every call is as its tool's schema wants it.

        None: no tool is strict or has a grammar and all may be called, or the format does not show where a
        call begins.
        """
        syntax, trigger = self.format.syntax, self._trigger()
        wanted = self.others or any(_is_strict(tool) or _name(tool) in self.inputs for tool in self.tools)
        if syntax is None or trigger is None or not wanted:
            return None
        specials = [text for text in self.format.special_tokens if self._is_special(text)]
        free = " | ".join(f"TEXT {self._literal(text)}" for text in specials if text != trigger)
        before = "(call | free)*" if free else "call*"
        rules = [
            f"start: {before} tail" if self.parallel else f"start: {'free* ' if free else ''}(call | tail)",
            f"call: head first {'more* ' if self.parallel else ''}finish",
            f"head{'' if self._is_special(trigger) else '[lazy]'}: TEXT {self._literal(trigger)}",
            f"first: {self._alternatives(syntax.begin, len(trigger))}",
            f"more: {self._literal(syntax.between)} any",
            f"any: {self._alternatives()}",
            f"finish: {self._literal(syntax.end)}",
            "tail: TEXT",
            *_TEXT,
            *self._arguments(),
        ]
        return "\n".join([*rules, f"free: {free}"] if free else rules)

    def json(self, schema: str) -> str | None:
        """JSON of a schema, after thinking if the model does that, or calls where there are tools.

        None: the model does neither, so that its answer is the JSON and nothing else.
        """
        calls = bool(self.tools) and self.format.syntax is not None
        thinks = bool(self._thinking_rules())
        if not calls and not thinks and self.format.spoken is None:
            return None
        spoken = self._literal(self.format.spoken[0][0]) if self.format.spoken is not None else ""
        rules = [
            f"start: {self._thinking()} ({'calls | ' if calls else ''}{spoken} body)",
            f"body: %json {schema}",
            *_TEXT,
            *self._thinking_rules(),
        ]
        return "\n".join([*rules, *(self._calls(None) if calls else ())])

    def without_calls(self) -> str | None:
        """Any text in which no call of the tools begins. None: the format has no calls."""
        if self.format.calls is None or not self.tools:
            return None
        marks = [self.format.reasoning, self.format.spoken]
        elsewhere = [mark for known in marks if known is not None for part in known for mark in part]
        specials = [mark for mark in self.format.special_tokens if self._is_special(mark)]
        free = [text for text in specials if any(text in mark for mark in elsewhere)]
        beginnings = set()
        for mark in self.format.calls[0]:
            if not any(text in mark for text in specials if text not in free):
                mark = mark.strip("\n")
                shared = max((_num_shared(mark, other) for other in elsewhere), default=0)
                prefix = mark[: shared + _TELLING]
                for text in free:
                    prefix = prefix.rpartition(text)[2]
                if not prefix.startswith("{"):
                    beginnings.add(_exactly(prefix))
        if self.format.syntax is not None and f'"name": "{NAME}"' in self.format.syntax.head:
            # Kept from the mark, a model would go on with what comes after it.
            beginnings.add(self._bare_beginning())
        unlike = rf" & ~/(.|\n)*({'|'.join(sorted(beginnings))})(.|\n)*/" if beginnings else ""
        follow = " | ".join(f"TEXT {self._literal(text)}" for text in free)
        rules = [f"start: {'free* ' if free else ''}TEXT", rf"TEXT: /(.|\n)*/{unlike}"]
        return "\n".join([*rules, f"free: {follow}"] if free else rules)

    # ------------------------------------------------------------------ calls

    def _bare_beginning(self) -> str:
        """How a call without a mark begins, as a regular expression: other objects may have names, too."""
        names = "|".join(_exactly(tool["function"]["name"]) for tool in self.tools)
        return rf'\{{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"({names})"'

    def _calls(self, name: str | None) -> list[str]:
        """The rule `calls`, and those it needs."""
        syntax = self.format.syntax
        assert syntax is not None
        more = f"({self._literal(syntax.between)} any)*" if self.parallel and name is None else ""
        return [
            f"calls: {self._literal(syntax.begin)} any {more} {self._literal(syntax.end)}",
            f"any: {self._alternatives(name=name)}",
            *self._arguments(name),
        ]

    def _alternatives(self, before: str = "", skipped: int = 0, *, name: str | None = None) -> str:
        """A call of any tool, or of one, with something before it of which the first characters are there."""
        syntax = self.format.syntax
        assert syntax is not None
        return " | ".join(
            f"{self._literal((before + _head(syntax, tool))[skipped:])} args_{i} {self._literal(syntax.tail)}"
            for i, tool in enumerate(self.tools)
            if name is None or _name(tool) == name
        )

    def _arguments(self, name: str | None = None) -> list[str]:
        """The rules of the arguments of all tools, or of one: each takes time to compile."""
        rules = []
        for i, tool in enumerate(self.tools):
            if name is not None and _name(tool) != name:
                continue
            given = self.inputs.get(_name(tool))
            if given is None:
                rules.append(f"args_{i}: %json {json.dumps(_schema(tool, self.closes_objects))}")
            else:
                rules += [f"args_{i}: {_INPUT_BEGIN} input_{i} {_INPUT_END}", _embedded(i, given)]
        return rules

    def _trigger(self) -> str | None:
        """What of a call's writing tells that it is one; None: not known without a look at what is around."""
        syntax = self.format.syntax
        if syntax is None or self.format.calls is None or self.format.spoken is not None:
            return None
        written = syntax.begin + syntax.head
        marks = [mark for mark in self.format.calls[0] if written.startswith(mark) and NAME not in mark]
        return min(marks, key=len, default=None)

    def inputs_in(self, written: str) -> Iterator[tuple[str, range]]:
        """Where the inputs' grammars are in one that this has written: a tool's name, and the lines."""
        for i, tool in enumerate(self.tools):
            given = self.inputs.get(_name(tool))
            at = written.find(_embedded(i, given)) if given is not None else -1
            if given is not None and at >= 0:
                first = written.count("\n", 0, at) + 2
                yield _name(tool), range(first, first + given.count("\n") + 2)  # with the closing brace

    # ------------------------------------------------------------------ thinking

    def _thinking(self) -> str:
        if not self._thinking_rules():
            return ""
        return "thinking" if self.format.opened_by(self.prompt_end) else "thinking?"

    def _thinking_rules(self) -> list[str]:
        """Where the prompt has opened the thinking, or the model has tokens for it."""
        marks = self.format.reasoning
        if marks is None:
            return []
        opening, closing = marks[0][0], marks[1][0]
        opened = bool(self.format.opened_by(self.prompt_end))
        if not opened and not self._is_known(opening):
            return []
        between = self.format.syntax.between if self.format.syntax is not None else ""
        after = f"({self._literal(between)})? BLANKS?" if between.strip() else "BLANKS?"
        return [
            f"thinking: {'' if opened else self._literal(opening)} thought {after}",
            f"thought{'' if self._is_special(closing) else '[lazy]'}: TEXT {self._literal(closing)}",
            r"BLANKS: /[ \n]{1,4}/",
        ]

    # ------------------------------------------------------------------ literals

    def _is_special(self, text: str) -> bool:
        token = self.token_of(text)
        return token is not None and token.is_special

    def _is_known(self, mark: str) -> bool:
        """Whether the model has tokens for a mark."""
        return self.token_of(mark.strip()) is not None or any(
            text in mark and self._is_special(text) for text in self.format.special_tokens
        )

    def _literal(self, text: str) -> str:
        """A text in Lark, with the special tokens in it as tokens."""
        special = [mark for mark in self.format.special_tokens if self._is_special(mark)]
        pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        written = []
        for piece in pieces:
            token = self.token_of(piece) if piece in special else None
            if token is not None:
                written.append(f"<[{token.id}]>")
            elif piece:
                written.append(json.dumps(piece, ensure_ascii=False))
        return " ".join(written) or '""'


#: Around the input of a tool that takes text.
_INPUT_BEGIN, _INPUT_END = (json.dumps(text) for text in ('{"input": "', '"}'))
#: Any text; what follows it ends it.
_TEXT = (r"TEXT: /(.|\n)*/",)


def _num_shared(text: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))))


def _exactly(text: str) -> str:
    """A regular expression, between slashes, for a text."""
    return re.sub(r"([^\w\s<>=\"'▁｜])", r"\\\1", text)


def _head(syntax: CallSyntax, tool: Mapping[str, Any]) -> str:
    return syntax.head.replace(NAME, _name(tool))


def _name(tool: Mapping[str, Any]) -> str:
    name = tool["function"]["name"]
    assert isinstance(name, str)
    return name


def _embedded(i: int, grammar: str) -> str:
    """The rule of an input, with names of its own."""
    return f"input_{i}: %lark {{\n{grammar}\n}}"


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _schema(tool: Mapping[str, Any], closes_objects: bool) -> dict[str, Any]:
    """The schema of a tool's arguments, an object; unless it is strict, as far as it can be enforced."""
    parameters = {**(tool["function"].get("parameters") or {}), **_ANY_ARGUMENTS}
    lists_none = not parameters.get("properties") and parameters.keys() <= _WITHOUT_PROPERTIES
    if closes_objects or _is_strict(tool) or lists_none:
        parameters = close_objects(parameters, is_closed=True)
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": _ESCAPES}
    if not _is_strict(tool):
        options |= {"lenient": True, "coerce_one_of": True}
    return {**parameters, "x-guidance": options}
