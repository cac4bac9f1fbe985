# SPDX-License-Identifier: Apache-2.0
"""Text that clients send back in later turns: text that an answer has hidden, results of providers' tools."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

_TEXTS = ("text", "input_text", "output_text")


def hide(text: str, mark: str) -> str:
    """Encode a text for clients, who send it back unchanged: not encrypted, with the mark before it."""
    return mark + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode("ascii")


def unhide(given: object, mark: str) -> str:
    """Decode the result of `hide`; empty for anything else."""
    if not isinstance(given, str) or not given.startswith(mark):
        return ""
    try:
        return base64.b64decode(given[len(mark) :], altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return ""


def result_text(value: Any) -> str:
    """Return a result as text: texts unchanged, lists joined by line breaks, all else as sorted JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(result_text, value))
    if isinstance(value, dict) and value.get("type") in _TEXTS and isinstance(value.get("text"), str):
        return str(value["text"])
    return json.dumps(_readable(value), ensure_ascii=False, sort_keys=True)


def _readable(value: Any) -> Any:
    """Return the value without parts that only the provider can read."""
    if isinstance(value, dict):
        return {name: _readable(item) for name, item in value.items() if not _is_sealed(name, item)}
    return [_readable(item) for item in value] if isinstance(value, list) else value


def _is_sealed(name: str, value: Any) -> bool:
    return value is None or name.startswith("encrypted_") or name in ("cache_control", "citations")
