# SPDX-License-Identifier: Apache-2.0
"""The weight files of a model folder: which they are, and whether they are whole. Read without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path, PurePosixPath
from typing import Any

from radixkv.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000  # the limit that the safetensors format sets


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model.

    Raises:
        ModelLoadError: there is no config.json, no weights, or a part of them is missing.
    """
    if not (folder / "config.json").is_file():
        own = sorted(path.name for path in folder.glob("*.gguf") if path.is_file())
        found = f" It has GGUF files: name one of them, such as {folder / own[0]}." if own else ""
        raise ModelLoadError(
            f"{folder} is not a model folder: it has no config.json. Give a folder as transformers' "
            f"save_pretrained writes it, or a .gguf file.{found}"
        )
    if (folder / _SINGLE).is_file():  # transformers prefers it, too
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise ModelLoadError(_no_weights(folder))
    names = _names_in_index(folder / _INDEX)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of {len(names)} weight files are missing from {folder}, the first is "
            f"{missing[0]}. The download or copy is incomplete; fetch it again."
        )
    return [folder / name for name in names]


def _names_in_index(path: Path) -> list[str]:
    """The files that an index names, sorted; each must be a plain name below the index's own folder."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} can't be read ({error}); fetch it again.") from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise ModelLoadError(f"{path} has no weight_map from tensors to files; fetch it again.")
    for name in names.values():
        if not isinstance(name, str) or not _is_plain(name):
            raise ModelLoadError(
                f"{path} names {name!r:.100} as a weight file, which is not the name of a file in "
                "that folder. It may have been tampered with: fetch the model again from a source you trust."
            )
    return sorted(set(names.values()))


def _is_plain(name: str) -> bool:
    """A relative path that stays in its folder and is a safetensors file."""
    path = PurePosixPath(name)
    return (
        path.suffix == ".safetensors"
        and not path.is_absolute()
        and ".." not in path.parts
        and not set(name) & {"\\", ":", "\0"}
    )


def _no_weights(folder: Path) -> str:
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return f"{folder} holds no {_SINGLE}, but GGUF files: give the path of one, such as {gguf[0]}."
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return (
            f"{folder} holds its weights as pickles (.bin, .pt), which can run code when they are loaded, so "
            "radixkv does not read them. Convert them to safetensors once: load the model with transformers "
            "and save it with save_pretrained."
        )
    return f"{folder} has a config.json but no weights: {_SINGLE} (or {_INDEX} with its parts) is missing."


def check_weight_files(folder: Path) -> None:
    """See that every weight file is there and as long as its header says; reads headers only.

    Raises:
        ModelLoadError: a file is missing, cut off or not safetensors.
    """
    for path in weight_files(folder):
        problem = _safetensors_problem(path)
        if problem is not None:
            raise ModelLoadError(
                f"{path} is damaged: {problem}. The download or copy was probably interrupted; fetch it "
                "again."
            )


def _safetensors_problem(path: Path) -> str | None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                return f"it has only {size} bytes"
            (header_size,) = struct.unpack("<Q", prefix)
            if header_size > min(_LARGEST_HEADER, size - 8):
                return "it does not begin with a safetensors header, or ends within it"
            header = json.loads(file.read(header_size))
    except OSError as error:
        return f"it can't be read ({error.strerror or error})"
    except (ValueError, RecursionError):
        return "its header is not that of a safetensors file"
    end = _end_of_tensors(header)
    if end is None:
        return "its header is not that of a safetensors file"
    expected = 8 + header_size + end
    return None if size == expected else f"it has {size:,} bytes, its header says {expected:,}"


def _end_of_tensors(header: Any) -> int | None:
    """The largest offset in a safetensors header; None: the header is malformed."""
    if not isinstance(header, dict):
        return None
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2:
            return None
        if not all(type(offset) is int and offset >= 0 for offset in offsets):
            return None
        end = max(end, offsets[1])
    return end
