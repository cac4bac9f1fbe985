# SPDX-License-Identifier: Apache-2.0
"""Grown, GrownText, GrownTokens: beginnings of lists, texts and tokens that later, longer ones share.

Turn n of a stored conversation is turn n - 1 with something at its end. What it adds is written behind the
earlier turn's end, in the same memory, and both know their own length:

    memory         [b0 b1 ... b7 b8 b9]
    earlier turn   [0 ........ 8)
    next turn      [0 .............. 10)

So a turn costs what it adds, and two turns of one memory are compared in O(1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar, overload

Value = TypeVar("Value")


class Grown(Sequence[Value]):
    """Beginning of a list that is shared with later, longer ones.

    Args:
        values: the list; this sequence owns it together with those that grow from it.
    """

    __slots__ = ("_length", "_values")

    def __init__(self, values: list[Value]) -> None:
        self._values, self._length = values, len(values)

    def grown(self, more: Sequence[Value]) -> Grown[Value]:
        """Return a sequence with more values at its end. O(new values), for the first that grows from it."""
        values = self._values
        if len(values) > self._length:  # another one has grown from it
            values = values[: self._length]
        values.extend(more)
        return Grown(values)

    def begins_with(self, other: Sequence[Value]) -> bool:
        """Tell whether all of `other` is at its beginning. O(1) for a sequence that it grew from."""
        if isinstance(other, Grown) and other._values is self._values:
            return len(other) <= self._length
        return self._length >= len(other) and all(map(_same, self, other))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Value]:
        return islice(self._values, self._length)

    @overload
    def __getitem__(self, at: int) -> Value: ...
    @overload
    def __getitem__(self, at: slice) -> list[Value]: ...
    def __getitem__(self, at: int | slice) -> Value | list[Value]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._length)
            return self._values[start:stop:step] if step > 0 else self._values[: self._length][at]
        if not -self._length <= at < self._length:
            raise IndexError(at)
        return self._values[at if at >= 0 else at + self._length]


def _same(one: object, other: object) -> bool:
    return one is other or one == other


class GrownText:
    """Text in pieces, joined when it is read.

    Args:
        pieces: its pieces in their order.

    Attributes:
        ends: offset in the text of each piece's end.
    """

    __slots__ = ("_num_bytes", "_pieces", "_whole", "ends")

    def __init__(self, pieces: Sequence[str] = ()) -> None:
        self._pieces: Grown[str] = Grown([])
        self.ends: Grown[int] = Grown([])
        self._num_bytes = 0
        self._whole: str | None = None
        if pieces:
            self._add(pieces)

    def grown(self, pieces: Sequence[str]) -> GrownText:
        """Return the text with more pieces at its end. O(those), for the first that grows from it."""
        text = GrownText()
        text._pieces, text.ends, text._num_bytes = self._pieces, self.ends, self._num_bytes
        text._add(pieces)
        return text

    def _add(self, pieces: Sequence[str]) -> None:
        end, ends = len(self), []
        for piece in pieces:
            end += len(piece)
            ends.append(end)
            self._num_bytes += len(piece.encode("utf-8", "surrogatepass"))
        self._pieces, self.ends = self._pieces.grown(pieces), self.ends.grown(ends)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __str__(self) -> str:
        if self._whole is None:
            self._whole = "".join(self._pieces)
        return self._whole

    @property
    def num_bytes(self) -> int:
        """Its size in UTF-8. O(1)."""
        return self._num_bytes

    def is_prefix_of(self, other: GrownText) -> bool:
        """Tell whether the other one has grown from it, without reading either. O(1)."""
        return other._pieces._values is self._pieces._values and len(self._pieces) <= len(other._pieces)


class GrownTokens:
    """Encoded token ids (four bytes each) that stand for `bytes` where they are looked up and leased.

    Slices are `bytes`. What is added with `+=`, as leases do, is written behind the end as well.
    """

    __slots__ = ("_buffer", "_length")

    def __init__(self) -> None:
        self._buffer, self._length = bytearray(), 0

    def grown(self, more: bytes) -> GrownTokens:
        """Return the tokens with more at their end. O(new bytes), if nothing different follows them yet."""
        tokens = GrownTokens()
        buffer, length = self._buffer, self._length
        behind = bytes(buffer[length : length + len(more)])  # of an answer, which its next turn repeats
        if not more.startswith(behind):
            buffer, behind = buffer[:length], b""
        buffer += more[len(behind) :]
        tokens._buffer, tokens._length = buffer, length + len(more)
        return tokens

    __add__ = __iadd__ = grown

    def startswith(self, prefix: bytes | bytearray, start: int = 0, stop: int | None = None) -> bool:
        """See `bytes.startswith`. O(prefix), without a copy."""
        stop = self._length if stop is None else min(stop, self._length)
        return self._buffer.startswith(prefix, start, stop)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: slice) -> bytes:
        start, stop, step = at.indices(self._length)
        return bytes(self._buffer[start:stop:step])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GrownTokens):
            return NotImplemented
        if self._buffer is other._buffer:
            return self._length == other._length
        return self[:] == other[:]

    __hash__ = None  # type: ignore[assignment]  # grows, as bytearrays do
