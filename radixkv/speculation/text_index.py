# SPDX-License-Identifier: Apache-2.0
"""TextIndex: earlier places of a text's last tokens, the longest match first.

Hash chains as in deflate (RFC 1951, and zlib's implementation of it): `_last` has for each hash of GRAM
tokens the latest position they end at, `_before` for each position the one before it with the same hash.

    text      a b c d e a b c
    position  0 1 2 3 4 5 6 7 8          _last[hash(a b c)] = 8, _before[8] = 3, _before[3] = -1

A chain is followed for a few steps; each candidate is compared backwards, so that hashes only propose. Where
none matches, the latest position of the last two tokens is taken (`_pairs`), which has no chain.
Memory: 8 bytes a token and two tables of fixed size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Tokens that are hashed; only the latest match can be one token shorter.
GRAM = 3
#: Matches are not measured beyond this.
LONGEST_MATCH = 32
_TABLE = 1 << 14
_MASK = _TABLE - 1
_FACTORS = (40503, 30011, 9973)
_MAX_CANDIDATES = 8


class TextIndex:
    """Index of a text that grows at its end.

    Args:
        tokens: beginning of the text. O(tokens log tokens), vectorised: 1 ms for 8,000.
    """

    __slots__ = ("_before", "_last", "_pairs", "_tokens")

    def __init__(self, tokens: npt.NDArray[np.int32]) -> None:
        count = len(tokens)
        self._tokens = array("i", tokens.tobytes())
        last = np.full(_TABLE, -1, dtype=np.int32)
        before = np.full(count + 1, -1, dtype=np.int32)
        pairs = np.full(_TABLE, -1, dtype=np.int32)
        wide = tokens.astype(np.int64)
        if count >= GRAM:
            # Of equal ones the latest stays. The last pair is left out: nothing follows it yet.
            pairs[(wide[:-2] * _FACTORS[1] + wide[1:-1] * _FACTORS[2]) & _MASK] = np.arange(2, count)
            hashes = (wide[:-2] * _FACTORS[0] + wide[1:-1] * _FACTORS[1] + wide[2:] * _FACTORS[2]) & _MASK
            positions = np.argsort(hashes, kind="stable").astype(np.int32)
            ordered = hashes[positions]
            positions += GRAM
            same = ordered[1:] == ordered[:-1]
            before[positions[1:][same]] = positions[:-1][same]
            ends = np.append(~same, True)
            last[ordered[ends]] = positions[ends]
        self._last = array("i", last.tobytes())
        self._before = array("i", before.tobytes())
        self._pairs = array("i", pairs.tobytes())

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token_id: int) -> None:
        """Append a token to the text. O(1)."""
        tokens = self._tokens
        tokens.append(token_id)
        position = len(tokens)
        if position < GRAM:
            self._before.append(-1)
            return
        self._pairs[_hash(0, tokens[-3], tokens[-2])] = position - 1
        key = _hash(tokens[-3], tokens[-2], token_id)
        self._before.append(self._last[key])
        self._last[key] = position

    def read(self, position: int, most: int) -> list[int]:
        """Return at most `most` tokens from a position on."""
        return self._tokens[position : position + most].tolist()

    def find(self, context: Sequence[int], *, inside: bool = False) -> tuple[int, int]:
        """Return the position after the longest (and latest) match of the context's end, and its length.

        (0, 0) where fewer than two tokens match, or the text ends after the match. O(LONGEST_MATCH) for
        each of a few candidates.

        Args:
            context: the last tokens, at most `LONGEST_MATCH`.
            inside: the context is the end of the indexed text itself.
        """
        if len(context) < GRAM:
            return 0, 0
        tokens = self._tokens
        end = len(tokens)
        position = self._last[_hash(context[-3], context[-2], context[-1])]
        if inside and position == end:
            position = self._before[position]
        best, longest = 0, GRAM - 1
        for _ in range(_MAX_CANDIDATES):
            if position < 0:
                break
            if position < end:
                length = self._matching(position, context)
                if length > longest:
                    best, longest = position, length
                    if length >= LONGEST_MATCH:
                        break
            position = self._before[position]
        if best:
            return best, longest
        position = self._pairs[_hash(0, context[-2], context[-1])]
        return (
            (position, GRAM - 1)
            if position >= 0 and self._matching(position, context) >= GRAM - 1
            else (0, 0)
        )

    def _matching(self, position: int, context: Sequence[int]) -> int:
        """Count the tokens before `position` that equal the end of `context`."""
        tokens = self._tokens
        most = min(position, len(context), LONGEST_MATCH)
        length = 0
        while length < most and tokens[position - 1 - length] == context[-1 - length]:
            length += 1
        return length


def _hash(first: int, second: int, third: int) -> int:
    return (first * _FACTORS[0] + second * _FACTORS[1] + third * _FACTORS[2]) & _MASK
