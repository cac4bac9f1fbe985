"""How much of two prompts is the same after the place where they part.

    cached   ... 08:01. You are the assistant of a harbour. Ships are ...
    new      ... 10:17:30. You are the assistant of a harbour. Ships are ...
                           |--------------- the same, further on ----------

These tokens would have been found, had what differs come after them.
"""

from __future__ import annotations

import re

from radixkv.cache.keys import TOKEN_BYTES, TokenIds, encode_tokens

#: Shorter runs of equal tokens are chance, or a template's own.
MIN_RUN = 16
_STARTS = (0, 4, 8, 16, 32, 64, 128, 256)  # tokens after the break from which on a common run is sought

#: As many equal bytes as such a run has at least; they need not begin at a token.
_EQUAL_RUN = re.compile(b"\\0{%d,}" % (MIN_RUN * TOKEN_BYTES))


def same_later(new: TokenIds, cached: TokenIds) -> int:
    """Tokens of `new` that are in `cached`, too, in runs: at equal places, or moved by what is longer in one.

    Args:
        new, cached: how two prompts go on after what they share.

    A lower bound: of several places that differ in length only what one of them moved is counted. O(n).
    """
    one, other = encode_tokens(new), encode_tokens(cached)
    best = _in_runs(one, other)
    for start in (TOKEN_BYTES * token for token in _STARTS):
        probe = one[start : start + MIN_RUN * TOKEN_BYTES]
        if len(probe) < MIN_RUN * TOKEN_BYTES:
            break
        at = _find(other, probe)
        if at >= 0 and at != start:
            back = min(start, at)
            best = max(best, _in_runs(one[start - back :], other[at - back :]))
    return best


def _in_runs(one: bytes, other: bytes) -> int:
    """Tokens at equal places that are the same, in runs of `MIN_RUN` and more. O(n)."""
    size = min(len(one), len(other))
    differs = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    tokens = 0
    for run in _EQUAL_RUN.finditer(differs.to_bytes(size, "little")):
        length = run.end() // TOKEN_BYTES + -run.start() // TOKEN_BYTES  # of the whole tokens in it
        tokens += length if length >= MIN_RUN else 0
    return tokens


def _find(data: bytes, sought: bytes) -> int:
    """Where the tokens `sought` begin in `data`; -1: nowhere."""
    at = data.find(sought)
    while at % TOKEN_BYTES and at >= 0:
        at = data.find(sought, at + 1)
    return at
