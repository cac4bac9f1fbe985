"""The API key that a client command sends."""

from __future__ import annotations

import os
from pathlib import Path

from radixkv.errors import ConfigError

KEY_VARIABLE = "RADIXKV_API_KEY"


def read_key(path: Path | None) -> str | None:
    """The API key in a file, or in the environment; None: there is none.

    Raises:
        ConfigError: the file can't be read, or holds no key.
    """
    if path is None:
        return os.environ.get(KEY_VARIABLE, "").strip() or None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or error}") from None
    if not key or len(key.split()) > 1:
        raise ConfigError(f"--api-key-file {path} must hold one key and nothing else")
    return key
