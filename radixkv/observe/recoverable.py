# SPDX-License-Identifier: Apache-2.0
"""Recoverable part of a miss: what follows a break and is equal to cached text again, in long runs.

It would have been found, had the part that differs (a timestamp, a request id, a user's name) come later:

    cached   ... 08:01. You are the assistant of a harbour. Ships are ...
    new      ... 10:17:30. You are the assistant of a harbour. Ships are ...
                           |------------------ recoverable -------------
"""

from __future__ import annotations

import re

from radixkv.cache.keys import TOKEN_BYTES, TokenIds, encode_tokens

#: Shorter runs of equal tokens are chance, or a template's own.
MIN_RUN = 16
_STARTS = (0, 4, 8, 16, 32, 64, 128, 256)  # tokens after the break from which on a common run is sought
_ZEROS = re.compile(b"\\0*")


def recoverable_tokens(new: TokenIds, cached: TokenIds) -> int:
    """Count tokens of `new` that are in `cached`, too, in runs at equal places, or moved by one insertion.

    Args:
        new, cached: the continuations of two prompts after their common prefix.

    A lower bound: of several places that differ in length only one shift is counted. O(n).
    """
    return _recoverable(encode_tokens(new), encode_tokens(cached), TOKEN_BYTES)


def recoverable_characters(new: str, cached: str) -> int:
    """As `recoverable_tokens`, in characters of texts."""
    for encoding, width in (("latin-1", 1), ("utf-16-le", 2)):
        try:
            one, other = (text.encode(encoding) for text in (new, cached))
        except UnicodeEncodeError:
            continue
        if len(one) == len(new) * width and len(other) == len(cached) * width:
            return _recoverable(one, other, width)
    one, other = (text.encode("utf-32-le", "surrogatepass") for text in (new, cached))
    return _recoverable(one, other, 4)


def _recoverable(one: bytes, other: bytes, width: int) -> int:
    best, shifts = _in_runs(one, other, width), {0}
    for start in (width * token for token in _STARTS):
        probe = one[start : start + MIN_RUN * width]
        if len(probe) < MIN_RUN * width:
            break
        at = _find(other, probe, width)
        if at >= 0 and at - start not in shifts:
            shifts.add(at - start)
            back = min(start, at)
            best = max(best, _in_runs(one[start - back :], other[at - back :], width))
    return best


def _in_runs(one: bytes, other: bytes, width: int) -> int:
    """Count equal tokens, of this size in bytes, at equal places in runs of `MIN_RUN` and more. O(n)."""
    size = min(len(one), len(other))
    differs = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    zeros = differs.to_bytes(size, "little")
    run = bytes(MIN_RUN * width)  # as many equal bytes as a run has at least; they need not begin at a token
    tokens, start = 0, zeros.find(run)
    while start >= 0:
        match = _ZEROS.match(zeros, start)
        assert match is not None  # it may be empty
        end = match.end()
        length = end // width + -start // width  # of the whole tokens in it
        tokens += length if length >= MIN_RUN else 0
        start = zeros.find(run, end)
    return tokens


def _find(data: bytes, sought: bytes, width: int) -> int:
    """Return the position of the tokens `sought` in `data`; -1: not found."""
    at = data.find(sought)
    while at % width and at >= 0:
        at = data.find(sought, at + 1)
    return at
