# SPDX-License-Identifier: Apache-2.0
"""Recorded texts made safe to show: no lone surrogate anywhere, no control character on a terminal."""

from __future__ import annotations

from typing import Any

#: Codecs call back for each lone surrogate, and hold the interpreter meanwhile: seconds for a long text.
_SHORT_CHARS = 1024


def without_surrogates(value: Any) -> Any:
    """Return JSON data with U+FFFD for each lone surrogate, and halves that meet joined. O(its size).

    UTF-8 has none, so that a single one makes everything that is shown with it unreadable.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return _repaired(value)
        return value
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(item) for item in value]
    return value


def _repaired(text: str) -> str:
    """Return a text without lone surrogates, and with the halves that meet joined. O(n)."""
    if len(text) <= _SHORT_CHARS:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    import numpy as np  # heavy

    codes = np.array([text], f"<U{len(text)}").view("<u4").copy()
    is_lead, is_trail = codes & 0xFFFFFC00 == 0xD800, codes & 0xFFFFFC00 == 0xDC00
    (joined,) = np.nonzero(is_lead[:-1] & is_trail[1:])
    leads, trails = codes[joined], codes[joined + 1]
    codes[is_lead | is_trail] = 0xFFFD
    codes[joined] = 0x10000 + ((leads & 0x3FF) << 10) + (trails & 0x3FF)
    return np.delete(codes, joined + 1).tobytes().decode("utf-32-le")


def printable(text: str) -> str:
    """Return a text for one line of a terminal, on which no character of it acts. O(n)."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _in_place_of(one) for one in text)


def _in_place_of(char: str) -> str:
    return "⏎" if char == "\n" else char.encode("unicode_escape").decode()
