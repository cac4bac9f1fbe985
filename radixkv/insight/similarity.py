"""How much of two prompts is the same after the place where they part.

    cached   ... 08:01. You are the assistant of a harbour. Ships are ...
    new      ... 10:17:30. You are the assistant of a harbour. Ships are ...
                           |--------------- the same, further on ----------

These tokens would have been found, had what differs come after them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Shorter runs of equal tokens are chance, or a template's own.
MIN_RUN = 16
_STARTS = (0, 4, 8, 16, 32, 64, 128, 256)  # tokens after the break from which on a common run is sought

Tokens = npt.NDArray[np.int32]


def same_later(new: Tokens, cached: Tokens) -> int:
    """Tokens of `new` that are in `cached`, too, in runs: at equal places, or moved by what is longer in one.

    Args:
        new, cached: how two prompts go on after what they share. [tokens] int32

    A lower bound: of several places that differ in length only what one of them moved is counted. O(n).
    """
    best = _in_runs(new, cached)
    data = cached.tobytes()
    for start in _STARTS:
        probe = new[start : start + MIN_RUN]
        if len(probe) < MIN_RUN:
            break
        at = _find(data, probe.tobytes())
        if at >= 0 and at != start:
            back = min(start, at)
            best = max(best, _in_runs(new[start - back :], cached[at - back :]))
    return best


def _in_runs(one: Tokens, other: Tokens) -> int:
    """Tokens at equal places that are the same, in runs of `MIN_RUN` and more."""
    count = min(len(one), len(other))
    if count < MIN_RUN:
        return 0
    differs = np.flatnonzero(one[:count] != other[:count])
    runs = np.diff(differs, prepend=-1, append=count) - 1
    return int(runs[runs >= MIN_RUN].sum())


def _find(data: bytes, sought: bytes) -> int:
    """Index of the first token where `sought` is in `data`, both of int32; -1: nowhere."""
    at = data.find(sought)
    while at % 4 and at >= 0:
        at = data.find(sought, at + 1)
    return at // 4 if at >= 0 else -1
