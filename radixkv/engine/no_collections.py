# SPDX-License-Identifier: Apache-2.0
"""A pause of the garbage collector while a process starts.

Most of the objects that imports and a model make stay. Looking for cycles among them again and again takes a
sixth of the CPU time of a start.
"""

from __future__ import annotations

import gc
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
