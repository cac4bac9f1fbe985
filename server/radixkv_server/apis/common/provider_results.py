# SPDX-License-Identifier: Apache-2.0
"""Results of tools that ran at a provider, as text, the same each time that a client sends them."""

from __future__ import annotations

import json
from typing import Any

_TEXTS = ("text", "input_text", "output_text")


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
