# SPDX-License-Identifier: Apache-2.0
"""Recorded texts made safe to show: no lone surrogate anywhere, no control character on a terminal."""

from __future__ import annotations

from typing import Any


def without_surrogates(value: Any) -> Any:
    """Return JSON data with U+FFFD for each lone surrogate, and halves that meet joined. O(its size).

    UTF-8 has none, so that a single one makes everything that is shown with it unreadable.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return value
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(item) for item in value]
    return value


def printable(text: str) -> str:
    """Return a text for one line of a terminal, on which no character of it acts. O(n)."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _in_place_of(one) for one in text)


def _in_place_of(char: str) -> str:
    return "⏎" if char == "\n" else char.encode("unicode_escape").decode()
