# SPDX-License-Identifier: Apache-2.0
"""Files of the console's page: the static ones, and the vocabulary of reasons as a module."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

from radixkv.observe.causes import CAUSES

#: `REASONS`: reason -> [label, meaning].
REASONS_MODULE = "reasons.js"


def page_files() -> dict[str, bytes]:
    """Return the contents of all files by path below `/console`. O(bytes)."""
    files = dict(_files_in(resources.files("radixkv_server.console") / "static", ""))
    words = {code: [cause.label, cause.sentence] for code, cause in CAUSES.items() if cause.below is None}
    files[REASONS_MODULE] = f"export const REASONS = {json.dumps(words, indent=2)};\n".encode()
    return files


def _files_in(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _files_in(item, f"{prefix}{item.name}/")
        else:
            yield prefix + item.name, item.read_bytes()
