# SPDX-License-Identifier: Apache-2.0
"""CallForm: how a family of models writes tool calls, declared so that the same words read and write.

A call is a head with the function's name, its arguments in some notation, and a tail. Readers accept more
than the written form: any white space where a form has some, marks that models leave out, and the usual names
of members of JSON calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import regex

from radixkv.text.chat_formats.argument_types import ArgumentSchema
from radixkv.text.chat_formats.arguments import Arguments, CallSink, pattern_of, respelled
from radixkv.text.chat_formats.cursor import Cursor, NotACall, Parts, RanOut, Steps
from radixkv.text.chat_formats.member_arguments import MemberArguments

#: In declarations: the function's name, a call's id, and its number among the calls of an answer.
NAME, ID, INDEX = "NAME", "IDENT", "INDEX"
_GROUPS = {
    NAME: r"(?P<name>[\w.\-]{1,200})",
    ID: r"(?P<id>[\w.:\-]{1,200})",
    INDEX: r"\d{1,6}",
    "NUMBERED": r"(?P<id>(?:functions\.)?(?P<name>[\w.\-]{1,200}):\d{1,6})",
    "WORD": r"[\w.\-]{1,200}",
}


@dataclass(frozen=True)
class CallForm:
    """Calls with a head, arguments in a notation, and a tail.

    Args:
        begin, between, end: written marks around all calls of an answer, and between calls.
        head, tail: written marks around the arguments of a call; `NAME` is the function's name, `IDENT` an
            id, `INDEX` the call's number.
        arguments: notation of the arguments.
        opens: marks that open calls.
        reads: accepted heads, from the opening mark on: texts with blanks between them, optional if they end
            in `?`. `WORD` stands for any word, `NUMBERED` for an id that contains the name. None: only the
            written head. `MemberArguments` reads whole calls: it needs none of `reads`, `reads_next`,
            `reads_tail`, `separators` and `is_vague`.
        reads_next: accepted heads of further calls; None: as `reads`, or the written head.
        reads_tail: accepted tail, in the form of `reads`; None: the written one.
        closes: optional marks after the last call.
        separators: optional marks between calls.
        bare: marks that open calls only at the beginning of an answer.
        is_vague: a call without arguments must name an offered function, because any word between the marks
            looks like a call.
        id_pattern: regular expression of written ids.
        first_index: number of the first call; None: any.
    """

    head: str
    arguments: Arguments
    tail: str
    opens: tuple[str, ...]
    begin: str = ""
    between: str = "\n"
    end: str = ""
    reads: str | None = None
    reads_next: str | None = None
    reads_tail: str | None = None
    closes: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    is_vague: bool = False
    id_pattern: str = "[a-zA-Z0-9]{9}"
    first_index: int | None = 1

    @cached_property
    def tail_marks(self) -> tuple[str, ...]:
        """Return the marks after arguments."""
        written = self.tail if self.reads_tail is None else self.reads_tail
        return tuple(text.removesuffix("?") for text in written.split())

    @cached_property
    def _reads(self) -> str:
        return self.reads if self.reads is not None else f"{self.begin} {self.head}"

    @cached_property
    def _next(self) -> Parts:
        return _parts(self.reads_next or self.reads or self.head)

    @cached_property
    def _tail(self) -> Parts:
        return _parts(self.tail if self.reads_tail is None else self.reads_tail)

    def read(self, cursor: Cursor, sink: CallSink) -> Steps[None]:
        """Read all calls from the mark on that opens them, and what closes them."""
        if isinstance(self.arguments, MemberArguments):
            yield from self.arguments.read_calls(cursor, sink, self.opens, self.bare, self.closes)
            return
        is_bare = not cursor.text.startswith(self.opens, cursor.at)
        head = _parts(self._reads, tuple(sink.names) if is_bare else ())
        after = self._tail[0][0] if self._tail else _ANYTHING
        while True:
            groups = yield from cursor.sequence(head)
            yield from cursor.blanks()
            yield from cursor.char()  # a name that is cut off is none
            if self.is_vague and sink.names and groups["name"] not in sink.names:
                with cursor.hold() as back:
                    if (yield from cursor.take(self.tail_marks)):
                        raise NotACall
                    back()
            sink.begin(groups["name"], groups.get("id"))
            yield from self.arguments.read(cursor, sink.add, sink.schema(groups["name"]), after)
            yield from cursor.sequence(self._tail)
            sink.end()
            yield
            if (yield from self._closed(cursor)):
                return
            head = self._next

    def _closed(self, cursor: Cursor) -> Steps[bool]:
        """Read what follows a call; return whether no other call does."""
        with cursor.hold() as back:
            yield from cursor.blanks()
            if (yield from cursor.take(self.closes)):
                while (yield from self._closes_again(cursor)):
                    pass
                return True
            while (yield from cursor.take(self.separators)):
                yield from cursor.blanks()
            has_more = cursor.at < len(cursor.text)
            with cursor.hold() as next_call:
                try:
                    yield from cursor.sequence(self._next)
                except NotACall as error:
                    if isinstance(error, RanOut) and has_more:
                        raise
                    back()
                    return True
                next_call()
        return False

    def _closes_again(self, cursor: Cursor) -> Steps[bool]:
        """Read a further mark that closes calls; white space that none follows stays."""
        with cursor.hold() as back:
            yield from cursor.blanks()
            found = yield from cursor.take(self.closes)
            if not found:
                back()
        return bool(found)

    def literals(self) -> tuple[str, ...]:
        """Return the texts around names and arguments."""
        reads = (self.reads, self.reads_next, self.reads_tail)
        written = (self.begin, self.between, self.end, self.head, self.tail)
        return (*written, *(text for text in reads if text), *self.separators, *self.arguments.literals())

    def respelled(self, change: Callable[[str], str]) -> CallForm:
        """Return the form with the texts that it writes changed."""
        return respelled(
            replace(self, arguments=self.arguments.respelled(change)),
            change,
            ("begin", "between", "end", "head", "tail"),
        )

    def write(
        self,
        calls: Iterable[tuple[str, str]],
        schemas: Mapping[str, Any] | None = None,
        numbers: Sequence[int] = (),
    ) -> str:
        """Write calls, each a name with the JSON text of its arguments.

        Args:
            schemas: schema of the arguments by the function's name.
            numbers: numbers of the calls; none: counted from the form's first one.
        """
        written = []
        first = 1 if self.first_index is None else self.first_index
        for i, (name, arguments) in enumerate(calls):
            index = str(numbers[i] if numbers else first + i)
            head, tail = (
                mark.replace(INDEX, index).replace(ID, f"abcdefgh{i % 10}").replace(NAME, name)
                for mark in (self.head, self.tail)
            )
            schema = ArgumentSchema((schemas or {}).get(name) or {})
            written.append(head + self.arguments.write(arguments, schema) + tail)
        return self.begin + self.between.join(written) + self.end


_ANYTHING = regex.compile("")


@functools.lru_cache(maxsize=256)
def _parts(declared: str, names: tuple[str, ...] = ()) -> Parts:
    """Compile texts with blanks between them; one that ends in `?` may be missing.

    Args:
        names: the names for `NAME`; none: any.
    """
    groups = dict(_GROUPS)
    if names:
        groups[NAME] = rf"(?P<name>{'|'.join(map(regex.escape, names))})(?![\w.\-])"
    found = []
    for text in declared.split():
        is_optional = text.endswith("?") and len(text) > 1
        found.append((pattern_of(text.removesuffix("?") if is_optional else text, **groups), is_optional))
    return tuple(found)
