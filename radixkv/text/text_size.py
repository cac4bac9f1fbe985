"""How much text a conversation holds, found before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def text_size(*values: Any, limit: int) -> int:
    """Characters in all strings of JSON-like data, keys included, with one more for each other value.

    A lower bound of what a chat template makes of it, if it shows all. Looking ends beyond `limit`.
    O(min(values, limit)) time.

    >>> text_size([{"role": "user", "content": "hello"}], {"a": [1, 2]}, limit=1000)
    27
    >>> text_size(["x" * 100, "y"], limit=10)
    101
    """
    size = 0
    left: list[Any] = list(values)
    while left and size <= limit:
        value = left.pop()
        if isinstance(value, str):
            size += len(value)
            continue
        size += 1
        if isinstance(value, Mapping):
            left.extend(value)
            left.extend(value.values())
        elif isinstance(value, Sequence):
            left.extend(reversed(value))
    return size
