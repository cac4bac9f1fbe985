# SPDX-License-Identifier: Apache-2.0
"""CallRegion: calls that are being read, form by form, and emitted once they are certain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixkv.text.chat_formats.answer import (
    AnswerEvent,
    AnswerWriter,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from radixkv.text.chat_formats.argument_types import ArgumentSchema
from radixkv.text.chat_formats.calls import CallForm
from radixkv.text.chat_formats.cursor import Cursor, Steps


class CallRegion:
    """Calls that are being read, and the part of them that has been emitted. A CallSink.

    Attributes:
        start: the place in the cursor's text from which on nothing has been emitted.
        is_emitted: a call has been emitted whose end has not come yet.
        is_first: nothing has been emitted.
        is_delayed: a call has begun whose name comes after its arguments.
    """

    def __init__(
        self,
        forms: tuple[CallForm, ...],
        mark: str,
        cursor: Cursor,
        answer: AnswerWriter,
        tools: Mapping[str, Any],
    ) -> None:
        self.mark = mark
        self.start = cursor.at
        self.is_emitted = False
        self.is_delayed = False
        self._forms = list(forms)
        self._cursor = cursor
        self._answer = answer
        self._tools = tools
        self.is_first = True
        self._pending: list[AnswerEvent] = []
        self._is_open = False
        self._has_ended = False
        self._size = 0  # of the whole calls among what is pending
        self._reader: Steps[None] = self._forms.pop(0).read(cursor, self)

    @property
    def has_whole(self) -> bool:
        """True if a whole call waits to be emitted."""
        return self._size > 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def schema(self, name: str) -> ArgumentSchema:
        return ArgumentSchema(self._tools.get(name) or {})

    def delay(self) -> None:
        self.is_delayed = True

    def begin(self, name: str, call_id: str | None) -> None:
        self.is_delayed = False
        self._is_open = True
        self._pending.append(ToolCallBegin(0, call_id or "", name))

    def add(self, text: str) -> None:
        if self.is_emitted:
            self._answer.add_arguments(text)
        else:
            self._pending.append(ToolCallArguments(0, text))

    def end(self, call_id: str | None = None) -> None:
        self._is_open = False
        self._has_ended = True
        if self.is_emitted:
            self._answer.end_call()
            self.is_emitted = False
            self.start = self._cursor.at
            return
        if call_id is not None:
            last = max(i for i, event in enumerate(self._pending) if isinstance(event, ToolCallBegin))
            begun = self._pending[last]
            assert isinstance(begun, ToolCallBegin)
            self._pending[last] = ToolCallBegin(0, call_id, begun.name)
        self._pending.append(ToolCallEnd(0))
        self._size = self._cursor.at - self.start

    def step(self) -> bool:
        """Read on; False: that takes more text.

        Raises:
            StopIteration: all calls have been read.
            NotACall, ValueError, RecursionError: it is none.
        """
        self._has_ended = False
        next(self._reader)
        return self._has_ended

    def emit(self) -> bool:
        """Emit all that has been read; False: no call has begun."""
        if not self._pending:
            return False
        self._flush()
        if not self._is_open:
            self.start += self._size
        self.is_emitted = self._is_open
        return True

    def try_next(self) -> bool:
        """Begin again with the next form; False: there is none."""
        if not self.is_first or not self._forms:
            return False
        self._pending = []
        self._size = 0
        self._is_open = self.is_delayed = False
        self._cursor.at = self.start
        self._reader = self._forms.pop(0).read(self._cursor, self)
        return True

    def cut(self) -> None:
        """Emit the part that has been read; the last call is not whole."""
        self._flush()
        if self._is_open:
            self._answer.end_call(cut=True)

    def _flush(self) -> None:
        for event in self._pending:
            if isinstance(event, ToolCallBegin):
                self._answer.begin_call(event.name, event.id)
            elif isinstance(event, ToolCallArguments):
                self._answer.add_arguments(event.text)
            elif isinstance(event, ToolCallEnd):
                self._answer.end_call()
        self.is_first = self.is_first and not self._pending
        self._pending = []
