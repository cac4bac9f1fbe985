# SPDX-License-Identifier: Apache-2.0
"""Amount of text in a conversation, found before any work on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def text_size(*values: Any, limit: int) -> int:
    """Characters in all strings of JSON-like data, keys included, with one more for each other value.

    A lower bound of the rendered chat, if its template shows everything. Looking ends beyond `limit`. Objects
    that give pairs of name and value when iterated over, as pydantic's models do, count as their pairs.
    O(min(values, limit)) time, O(depth) space.

    >>> text_size([{"role": "user", "content": "hello"}], {"a": [1, 2]}, limit=1000)
    27
    >>> text_size(["x" * 100, "y"], limit=10)
    101
    """
    size = 0
    left: list[Iterator[Any]] = [iter(values)]
    while left and size <= limit:
        for value in left[-1]:
            if isinstance(value, str):
                size += len(value)
            else:
                size += 1
                if isinstance(value, Mapping):
                    left += [iter(value.values()), iter(value)]
                    break
                if isinstance(value, Iterable) and not isinstance(value, bytes):
                    left.append(iter(value))
                    break
            if size > limit:
                break
        else:
            left.pop()
    return size
