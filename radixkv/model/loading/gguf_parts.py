# SPDX-License-Identifier: Apache-2.0
"""GGUF models split into several files, `NAME-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from pathlib import Path

from radixkv.errors import ModelLoadError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 1000


def parts_of(path: Path) -> list[Path]:
    """The files of a model, the first one first, by the name of any of them; one that is not split is alone.

    Raises:
        ModelLoadError: a part is missing.
    """
    found = _PART.fullmatch(path.name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]) <= _MAX_PARTS:
        return [path]
    count = int(found[3])
    parts = [path.with_name(f"{found[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of the {count} parts of {path} are missing, the first is {missing[0]}. All "
            "of them must lie in the same folder."
        )
    return parts


def name_of(path: Path) -> str:
    """Name of the model in a file, without the number of its part."""
    found = _PART.fullmatch(path.name)
    return path.stem if found is None else found[1]
