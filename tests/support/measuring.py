# SPDX-License-Identifier: Apache-2.0
"""A measure of work that depends neither on the machine's speed nor on its load.

Counts compare calls within one process: from version to version of Python they differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True)
class Work:
    """Bytecode instructions executed, and calls of functions written in C."""

    instructions: int
    c_calls: int


def count_work(run: Callable[[], object], *, warm_up: int = 2) -> Work:
    """Count what one call of `run` executes, after `warm_up` calls that make what the first use needs."""
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
