# SPDX-License-Identifier: Apache-2.0
"""The weight files of a model folder: which they are, and whether they are whole. Read without torch."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a safetensors header lists it.

    Attributes:
        dtype: in the format's spelling, as `BF16`, `F8_E4M3` or `I32`.
        num_dimensions: length of its shape.
    """

    dtype: str
    num_dimensions: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return a model's tensors by their names, after checking each file's length against its header.

    Headers are read, the tensors themselves are not.

    Raises:
        ModelLoadError: a file is missing, cut off or not safetensors.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        try:
            tensors |= _tensors_of(path)
        except _DamagedFile as damage:
            raise ModelLoadError(
                f"{path} is damaged: {damage}. The download or copy was probably interrupted; fetch it again."
            ) from None
    return tensors


class _DamagedFile(Exception):
    """The file is damaged; the message completes a sentence about it."""


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    malformed = _DamagedFile("its header is not that of a safetensors file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _DamagedFile(f"it has only {size} bytes")
            (header_size,) = struct.unpack("<Q", prefix)
            if header_size > min(_LARGEST_HEADER, size - 8):
                raise _DamagedFile("it does not begin with a safetensors header, or ends within it")
            header = json.loads(file.read(header_size))
    except OSError as error:
        raise _DamagedFile(f"it can't be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise malformed from None
    if not isinstance(header, dict):
        raise malformed
    header.pop("__metadata__", None)
    end, tensors = 0, {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or not _is_span(entry.get("data_offsets")):
            raise malformed
        end = max(end, entry["data_offsets"][1])
        shape = entry.get("shape")
        tensors[name] = StoredTensor(str(entry.get("dtype")), len(shape) if isinstance(shape, list) else 0)
    expected = 8 + header_size + end
    if size != expected:
        raise _DamagedFile(f"it has {size:,} bytes, its header says {expected:,}")
    return tensors


def _is_span(offsets: Any) -> bool:
    return (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(type(offset) is int and offset >= 0 for offset in offsets)
    )
