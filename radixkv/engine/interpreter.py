# SPDX-License-Identifier: Apache-2.0
"""Settings of Python's interpreter while a process starts, and once it serves.

Most of the objects that imports and a model make stay. Looking for cycles among them again and again takes a
sixth of the CPU time of a start.
"""

from __future__ import annotations

import atexit
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector off until the last block that any thread is in has ended.

    A collector that the program has turned off stays off.
    """
    global _pauses
    with _lock:
        is_ours = bool(_pauses) or gc.isenabled()
        _pauses += is_ours
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= is_ours
            if is_ours and not _pauses:
                gc.enable()


def settle_process() -> None:
    """Set the interpreter of a process that serves from now on: for programs, once their engine is made.

    The objects so far stay: the garbage collector does not look at them again before the end. Threads get the
    interpreter after 0.5 ms: with the default of 5 ms, a busy event loop could hold up each tensor operation
    of the engine's thread.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
    sys.setswitchinterval(min(sys.getswitchinterval(), 0.0005))
