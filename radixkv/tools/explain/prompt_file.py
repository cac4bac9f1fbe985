"""A prompt in a file: a text, or a chat as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

_PROMPTS = ("messages", "prompt", "compare")


def read_prompt(path: Path) -> dict[str, Any]:
    """The fields of the request that a file holds: as JSON, as a list of messages, or as plain text.

    Raises:
        ConfigError: the file can't be read, is empty, or is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}); "
            "give a text file or a chat as JSON"
        ) from None
    if not text:
        raise ConfigError(f"{path} is empty")
    return _chat_of(text) or {"prompt": text}


def _chat_of(text: str) -> dict[str, Any] | None:
    """The request that a text is, if it is one."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and any(name in value for name in _PROMPTS):
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return {"messages": value}
    return None
