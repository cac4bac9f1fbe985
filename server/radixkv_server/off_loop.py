# SPDX-License-Identifier: Apache-2.0
"""off_loop: decides which work leaves the event loop for a thread.

While work runs on the event loop, every stream of the server stands still. Work on little input takes less
time than a thread costs; all other work goes to a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Largest inputs of work on the loop: tokens to describe, characters to render, bytes of JSON to read.
INLINE_TOKENS = 1024
INLINE_CHARS = 4096
INLINE_BYTES = 32 * 1024


async def off_loop(
    work: Callable[[], T],
    *,
    tokens: int | None = None,
    chars: int | None = None,
    num_bytes: int | None = None,
) -> T:
    """Return the result of `work`, done in a thread unless its input is known to be small."""
    sizes = ((tokens, INLINE_TOKENS), (chars, INLINE_CHARS), (num_bytes, INLINE_BYTES))
    known = [(size, most) for size, most in sizes if size is not None]
    if known and all(size <= most for size, most in known):
        return work()
    return await asyncio.to_thread(work)
