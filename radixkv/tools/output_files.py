"""Looking early whether a command's result can be written."""

from __future__ import annotations

import os
from pathlib import Path

from radixkv.errors import ConfigError


def check_writable(flag: str, path: Path) -> None:
    """Look before a long run whether its result can be written.

    Raises:
        ConfigError: the path is a folder, or lies in none, or may not be written.
    """
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: a folder; name a file in it")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: may not be written; name another file")
