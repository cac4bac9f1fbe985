"""The files of a model folder: are they whole, and what identifies them. Read without torch."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

from radixkv.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000  # the limit that the safetensors format sets
_SAMPLE_SIZE = 1 << 16
_SAMPLES_PER_FILE = 64


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model.

    Raises:
        ModelLoadError: there is no config.json, no weights, or a part of them is missing.
    """
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"{folder} is not a model folder: it has no config.json. Give a folder as transformers' "
            "save_pretrained writes it, or a .gguf file."
        )
    if (folder / _INDEX).is_file():
        try:
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{folder / _INDEX} can't be read ({error}); fetch it again.") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{len(missing)} of {len(names)} weight files are missing from {folder}, the first is "
                f"{missing[0]}. The download or copy is incomplete; fetch it again."
            )
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise ModelLoadError(_no_weights(folder))


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
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        return f"it can't be read ({error.strerror or error})"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return "its header is not that of a safetensors file"
    expected = 8 + header_size + max(ends, default=0)
    return None if size == expected else f"it has {size:,} bytes, its header says {expected:,}"


def fingerprint_files(folder: Path, names: list[str] | None, *facts: str) -> str:
    """32 hex digits that identify a model: configuration, weights, and `facts` such as the dtype.

    Of each weight file its size, its header and up to 64 samples of 64 KB spread over it are hashed: other
    weights differ everywhere, so this tells models apart without reading all of their gigabytes. The folder's
    name and place do not enter.

    Args:
        names: the weight files; None: those of a safetensors folder, and its config.json.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    for fact in facts:
        add(fact.encode())
    if names is None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for volatile in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
            config.pop(volatile, None)
        add(json.dumps(config, sort_keys=True).encode())
        paths = weight_files(folder)
    else:
        paths = [folder / name for name in names]
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            add(str(size).encode())
            step = max(_SAMPLE_SIZE, size // _SAMPLES_PER_FILE)
            for offset in range(0, size, step):
                file.seek(offset)
                add(file.read(_SAMPLE_SIZE))
    return digest.hexdigest()
