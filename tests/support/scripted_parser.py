# SPDX-License-Identifier: Apache-2.0
"""A parser of answers for tests of APIs: what a model of no real family would write, one character at a time.

(thought)    thinking
<name{...}>  a call with these arguments; ids count up from call_0
all else     content
"""

from __future__ import annotations

import itertools

from radixkv.text.chat_formats.answer import (
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)


class ScriptedParser:
    """See the module's text."""

    ids = itertools.count()

    def __init__(self) -> None:
        self._in = "text"
        self._name = ""
        self._calls = 0
        self._at = -1

    def push(self, text: str) -> list[AnswerEvent]:
        return [event for char in text for event in self._push(char)]

    def finish(self, *, cut: bool = False) -> list[AnswerEvent]:
        return []

    def _push(self, char: str) -> list[AnswerEvent]:
        index = self._calls - 1
        self._at += 1
        if self._in == "text":
            if char in "(<":
                self._in = "thought" if char == "(" else "name"
                self._name = ""
                return []
            return [ContentDelta(char, self._at)]
        if self._in == "thought":
            if char == ")":
                self._in = "text"
                return []
            return [ReasoningDelta(char)]
        if self._in == "name":
            if char != "{":
                self._name += char
                return []
            self._in = "arguments"
            self._calls += 1
            begin = ToolCallBegin(index + 1, f"call_{next(self.ids)}", self._name)
            return [begin, ToolCallArguments(index + 1, char)]
        if char == ">":
            self._in = "text"
            return [ToolCallEnd(index)]
        return [ToolCallArguments(index, char)]
