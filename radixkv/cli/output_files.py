# SPDX-License-Identifier: Apache-2.0
"""Files with a command's result: looked at before a long run, written after it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError


def check_writable(flag: str, path: Path | None) -> None:
    """Look before a long run whether its result can be written; None: there will be no file.

    Raises:
        ConfigError: the path is a folder, or lies in none, or may not be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: a folder; name a file in it")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: may not be written; name another file")


def write_json(path: Path | None, value: Any) -> None:
    """Write the file of `--json`, if there is to be one.

    Raises:
        ConfigError: it can't be written.
    """
    if path is not None:
        try:
            path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {path}: {error.strerror or error}") from error
