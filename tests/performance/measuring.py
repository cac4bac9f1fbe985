# SPDX-License-Identifier: Apache-2.0
"""Two measures of a call that do not depend on how fast or how busy the machine is.

`count_work` counts Python's own instructions and the calls into C: the same on every run. It does not see how
long a call into C takes; `relative_time` does, as the smallest CPU time of the path over the
smallest one of a reference that runs beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import xxhash


@dataclass(frozen=True)
class Work:
    """Bytecode instructions executed, and calls of functions written in C."""

    instructions: int
    c_calls: int


def count_work(run: Callable[[], object], *, warm_up: int = 2) -> Work:
    """What one call of `run` executes, once what is made on first use is there."""
    for _ in range(warm_up):
        run()
    instructions = c_calls = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal instructions
        if event == "call":
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode":
            instructions += 1
        return trace

    def profile(_: FrameType, event: str, __: Any) -> None:
        nonlocal c_calls
        c_calls += event == "c_call"

    tracer, profiler = sys.gettrace(), sys.getprofile()
    try:
        sys.setprofile(profile)
        run()
        sys.setprofile(profiler)
        sys.settrace(trace)
        run()
    finally:
        sys.settrace(tracer)
        sys.setprofile(profiler)
    return Work(instructions, c_calls)


class _Item:
    def __init__(self, number: int) -> None:
        self.number = number
        self.seen = 0


_ITEMS = [_Item(i) for i in range(256)]
_TEXT = bytes(range(256)) * 32


def reference() -> int:
    """A mixture like that of the hot paths: attributes, a dictionary, calls, bytes hashed and compared."""
    found: dict[int, _Item] = {}
    total = 0
    for item in _ITEMS:
        item.seen += 1
        found[item.number * 7 & 255] = item
        total += len(_TEXT[item.number : item.number + 64])
    for i in range(16):
        total += xxhash.xxh3_64_intdigest(_TEXT, seed=i) & 1
        total += bytes(_TEXT[i:]) == _TEXT
    return total + len(found)


def relative_time(run: Callable[[], object], repeats: int, *, rounds: int = 20) -> float:
    """The smallest CPU time of `run` over the smallest one of `reference`, run in turns.

    Args:
        repeats: calls timed together: few, so that some of the rounds run undisturbed.
    """
    ours = theirs = float("inf")
    for _ in range(rounds):
        ours = min(ours, _time(run, repeats))
        theirs = min(theirs, _time(reference, 4))
    return (ours / repeats) / (theirs / 4)


def _time(run: Callable[[], object], repeats: int) -> float:
    started = time.thread_time()
    for _ in range(repeats):
        run()
    return time.thread_time() - started
