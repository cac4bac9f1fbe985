# SPDX-License-Identifier: Apache-2.0
"""The matrices of a LoRA adapter, read from a folder of PEFT and checked against its base model.

    y = x W^T  +  (x A^T) B^T        A [rank, inputs], B [outputs, rank], PEFT's scale already in B

All arithmetic is numpy's: the folder may be read by a thread beside the engine's, and torch would keep a
second set of worker threads for it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from radixkv.errors import AdapterLoadError, ModelLoadError
from radixkv.model.adapters.base_modules import BaseModules
from radixkv.model.adapters.peft_config import CONFIG_NAME, PeftConfig
from radixkv.model.loading.folder_checks import check_links

WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HEADER_BYTES = 64 << 20  # beyond the numbers themselves
_IDENTITY_DIGITS = 32
_SETTLED_SECONDS = 2.0  # clocks of file systems tick coarsely
_PARTS = {"lora_A": 0, "lora_B": 1}

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one linear layer.

    Attributes:
        down: float32 [rank, inputs].
        up: float32 [outputs, rank], with the scale in it.
    """

    down: Matrix
    up: Matrix


@dataclass(frozen=True, slots=True)
class FilesStamp:
    """Inodes, sizes and times of an adapter's two files, by which unchanged ones are known again.

    Attributes:
        stats: device, inode, size, and times of the last change of each, in nanoseconds.
    """

    stats: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, folder: Path) -> FilesStamp | None:
        """Look at a folder's files; None: one is missing, or so new that a later change may look the same."""
        try:
            found = [(folder / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
        except (OSError, ValueError):
            return None
        if max(each.st_ctime for each in found) > time.time() - _SETTLED_SECONDS:
            return None
        return cls(
            tuple(
                (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found
            )
        )


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """Identity of the adapter that these files held."""

    identity: str
    files: FilesStamp


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An adapter in memory.

    Attributes:
        identity: digest of all that it computes: adapters of one identity give the same K/V.
        rank: the largest of its matrices.
        modules: path in the base model -> change.
        invocation: see `PeftConfig`.
        files: the files that it was read from; None: they can't be known again.
    """

    identity: str
    rank: int
    modules: Mapping[str, LowRank]
    invocation: tuple[int, ...] = ()
    files: FilesStamp | None = None


def read_adapter(
    folder: Path, base: BaseModules, max_rank: int, known: KnownFiles | None = None
) -> LoraWeights:
    """Read an adapter's folder; nothing is kept of one that is refused.

    Args:
        max_rank: largest rank taken.
        known: result of an earlier reading of this folder; where its files are the same, their numbers are
            not checked and digested again.

    Raises:
        AdapterLoadError: the folder is incomplete or damaged, or its adapter does not fit the base.
    """
    files = FilesStamp.of(folder)
    is_known = known is not None and files is not None and known.files == files
    try:
        check_links(folder, [folder / CONFIG_NAME, folder / WEIGHTS_NAME])
    except ModelLoadError as error:
        raise AdapterLoadError(str(error)) from None
    config = PeftConfig.read(folder)
    config.check_base(base)
    if config.invocation and not base.takes_activated:
        raise AdapterLoadError(
            "it is an activated adapter (alora_invocation_tokens), which models with state layers can't "
            "compute; train it without them, on whole prompts."
        )
    paths = config.check_targets(base)
    ranks = {path: config.rank_of(path) for path in paths}
    path = max(ranks, key=ranks.__getitem__)
    if ranks[path] > max_rank:
        raise AdapterLoadError(
            f"the adapter has rank {ranks[path]} at {path}, above the largest taken, {max_rank} "
            "(--max-lora-rank)."
        )
    size = sum(sum(base.shapes[path]) * rank for path, rank in ranks.items())
    tensors = _read_tensors(folder / WEIGHTS_NAME, 4 * size + _HEADER_BYTES)
    pairs = _pairs(tensors, base)
    missing = next((path for path in paths if path not in pairs), None)
    if missing is not None:
        raise AdapterLoadError(
            f"{folder / WEIGHTS_NAME} lacks the matrices of {missing}, a target of its own."
        )
    extra = next((path for path in pairs if path not in ranks), None)
    if extra is not None:
        raise AdapterLoadError(
            f"{folder / WEIGHTS_NAME} has matrices of {extra}, which {CONFIG_NAME} leaves out."
        )
    modules = {
        path: _checked(path, pairs[path], base.shapes[path], ranks[path], config.scale_of(path), is_known)
        for path in sorted(paths)
    }
    if files != FilesStamp.of(folder):  # they changed meanwhile
        if is_known:
            return read_adapter(folder, base, max_rank)
        files = None
    identity = known.identity if is_known and known else _identity(modules, config.invocation)
    return LoraWeights(identity, max(ranks.values()), modules, config.invocation, files)


def _read_tensors(path: Path, most: int) -> list[tuple[str, dict[str, Any]]]:
    try:
        if not path.is_file():
            raise AdapterLoadError(
                f"{path} is missing: only weights in safetensors are read (save_pretrained writes them)."
            )
        if path.stat().st_size > most:
            raise AdapterLoadError(f"{path} is larger than its configuration says ({most} bytes at most).")
        found: list[tuple[str, dict[str, Any]]] = deserialize(path.read_bytes())
    except OSError as error:
        raise AdapterLoadError(f"{path} can't be read: {error.strerror or error}.") from None
    except SafetensorError as error:
        raise AdapterLoadError(f"{path} is damaged ({error}); copy it again.") from None
    return found


def _pairs(tensors: list[tuple[str, dict[str, Any]]], base: BaseModules) -> dict[str, list[Matrix | None]]:
    """The two matrices of each path, as far as the file has them."""
    pairs: dict[str, list[Matrix | None]] = {}
    for name, tensor in tensors:
        path, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if "magnitude" in name:
            raise AdapterLoadError(f"the adapter has {name:.200}: DoRA is not served.")
        is_pair = name.startswith(_PREFIX) and name.endswith(".weight") and part in _PARTS
        if not is_pair or path not in base.shapes:
            raise AdapterLoadError(
                f"the adapter has weights {name!r:.200}, which belong to no linear layer of the base's "
                "attention or MLP; only LoRA matrices of these are served."
            )
        pairs.setdefault(path, [None, None])[_PARTS[part]] = _matrix(name, tensor)
    return pairs


def _matrix(name: str, tensor: Mapping[str, Any]) -> Matrix:
    kind, data = tensor["dtype"], tensor["data"]
    if kind == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif kind in ("F32", "F16"):
        values = np.frombuffer(data, "<f4" if kind == "F32" else "<f2").astype(np.float32, copy=False)
    else:
        raise AdapterLoadError(f"the adapter's {name:.200} is of type {kind}; F32, F16 and BF16 are read.")
    return values.reshape(tensor["shape"])


def _checked(
    path: str, pair: list[Matrix | None], shape: tuple[int, int], rank: int, scale: float, is_known: bool
) -> LowRank:
    down, up = pair
    if down is None or up is None:
        raise AdapterLoadError(f"the adapter has one of the two matrices of {path}; it is damaged.")
    inputs, outputs = shape
    if down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise AdapterLoadError(
            f"the adapter's matrices of {path} have the shapes {down.shape} and {up.shape}, where rank "
            f"{rank} and the base need {(rank, inputs)} and {(outputs, rank)}: it is damaged, or of another "
            "base model."
        )
    with np.errstate(over="ignore"):
        up = up * np.float32(scale)
    if not is_known and not (np.isfinite(down).all() and np.isfinite(up).all()):
        raise AdapterLoadError(f"the adapter's matrices of {path} hold values that are no finite numbers.")
    return LowRank(np.ascontiguousarray(down), np.ascontiguousarray(up))


def _identity(modules: Mapping[str, LowRank], invocation: tuple[int, ...]) -> str:
    digest = hashlib.sha256(f"from {invocation}\n".encode() if invocation else b"")
    for path, change in modules.items():
        digest.update(f"{path} {change.down.shape} {change.up.shape}\n".encode())
        digest.update(change.down.data)
        digest.update(change.up.data)
    return digest.hexdigest()[:_IDENTITY_DIGITS]
