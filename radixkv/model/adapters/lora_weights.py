# SPDX-License-Identifier: Apache-2.0
"""The matrices of a LoRA adapter, read from a folder of PEFT and checked against its base model.

    y = x W^T  +  (x A^T) (s B)^T        A [rank, inputs], B [outputs, rank], s: PEFT's scale

A file is read once into memory, and its matrices are views of it. Facts that the first reading has found
(`KnownFiles`) spare later ones all checks while the file is unchanged. All arithmetic is numpy's: the
folder may be read by a thread beside the engine's, and torch would keep other worker threads for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from radixkv.errors import AdapterLoadError, ModelLoadError
from radixkv.model.adapters.peft_config import CONFIG_NAME, PeftConfig
from radixkv.model.loading.folder_checks import check_links
from radixkv.model.vision.families import is_in_tower
from radixkv.regular_file import open_regular

if TYPE_CHECKING:
    from radixkv.model.adapters.base_modules import BaseModules

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
        stored_up: float32 [outputs, rank], as stored in the file.
        scale: factor of the change.
    """

    down: Matrix
    stored_up: Matrix
    scale: float = 1.0

    @property
    def up(self) -> Matrix:
        """Float32 [outputs, rank], with the scale in it: a new array."""
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(self.stored_up * np.float32(self.scale))


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
class StoredMatrix:
    """A matrix in a file of safetensors.

    Attributes:
        kind: number type, as the file spells it.
        begin, end: place in the file, in bytes.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self, data: npt.NDArray[np.uint8]) -> Matrix:
        """Return the matrix in float32, from the bytes of the file; a view of them if it is that already."""
        own = data[self.begin : self.end]
        if self.kind == "BF16":
            values = (own.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif self.kind in ("F32", "F16"):
            values = own.view("<f4" if self.kind == "F32" else "<f2").astype(np.float32, copy=False)
        else:
            raise AdapterLoadError(
                f"the adapter's {self.name:.200} is of type {self.kind}; F32, F16 and BF16 are read."
            )
        return values.reshape(self.shape)


#: path in the base model -> where A and B are, and the scale.
Plan = Mapping[str, tuple[StoredMatrix, StoredMatrix, float]]


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """Facts about checked files: enough to read them again while they are unchanged."""

    identity: str
    rank: int
    invocation: tuple[int, ...]
    plan: Plan
    stamp: FilesStamp

    def read_again(self, folder: Path) -> LoraWeights | None:
        """Read the matrices again; None: the files have changed, or can't be read."""
        if FilesStamp.of(folder) != self.stamp:
            return None
        try:
            data = _bytes_of(folder / WEIGHTS_NAME)
            modules = _modules(self.plan, data)
        except (OSError, ValueError):  # it has become shorter
            return None
        if FilesStamp.of(folder) != self.stamp:  # they changed meanwhile
            return None
        return LoraWeights(self.identity, self.rank, modules, self.invocation, self)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An adapter in memory.

    Attributes:
        identity: digest of all that it computes: adapters of one identity give the same K/V.
        rank: the largest of its matrices.
        modules: path in the base model -> change.
        invocation: see `PeftConfig`.
        files: facts to read it by again; None: the files are too new to be known again.
    """

    identity: str
    rank: int
    modules: Mapping[str, LowRank]
    invocation: tuple[int, ...] = ()
    files: KnownFiles | None = None


def read_adapter(
    folder: Path, base: BaseModules, max_rank: int, known: KnownFiles | None = None
) -> LoraWeights:
    """Read an adapter's folder; nothing is kept of one that is refused.

    Args:
        max_rank: largest rank taken.
        known: result of an earlier reading of this folder for this base.

    Raises:
        AdapterLoadError: the folder is incomplete or damaged, or its adapter does not fit the base.
    """
    again = known.read_again(folder) if known is not None else None
    if again is not None:
        return again
    stamp = FilesStamp.of(folder)
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
            "(max_lora_rank)."
        )
    size = sum(sum(base.shapes[path]) * rank for path, rank in ranks.items())
    data, matrices = _read_file(folder / WEIGHTS_NAME, 4 * size + _HEADER_BYTES)
    pairs = _pairs(matrices, base)
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
    plan = {
        path: (*_checked(path, pairs[path], base.shapes[path], ranks[path]), config.scale_of(path))
        for path in sorted(paths)
    }
    modules = _modules(plan, data)
    _check_numbers(modules)
    identity, most = _identity(modules, config.invocation), max(ranks.values())
    files = None
    if stamp is not None and stamp == FilesStamp.of(folder):  # they have not changed meanwhile
        files = KnownFiles(identity, most, config.invocation, plan, stamp)
    return LoraWeights(identity, most, modules, config.invocation, files)


def _bytes_of(path: Path) -> npt.NDArray[np.uint8]:
    """All bytes of a file; numpy's memory comes in large pages."""
    with open_regular(path) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
        view = data.data
        while view:
            count = file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"{path} ends early")
            view = view[count:]
    return data


def _read_file(path: Path, most: int) -> tuple[npt.NDArray[np.uint8], list[StoredMatrix]]:
    """The bytes of a file and its tensors."""
    try:
        if not path.is_file():
            raise AdapterLoadError(
                f"{path} is missing: only weights in safetensors are read (save_pretrained writes them)."
            )
        if path.stat().st_size > most:
            raise AdapterLoadError(f"{path} is larger than its configuration says ({most} bytes at most).")
        data = _bytes_of(path)
        deserialize(data.tobytes())  # checks that header and matrices fit each other and the file
    except OSError as error:
        raise AdapterLoadError(f"{path} can't be read: {error.strerror or error}.") from None
    except (SafetensorError, ValueError) as error:
        raise AdapterLoadError(f"{path} is damaged ({error}); copy it again.") from None
    first = 8 + int.from_bytes(data[:8].tobytes(), "little")
    try:
        header = json.loads(data[8:first].tobytes(), object_pairs_hook=_without_repetition)
        header.pop("__metadata__", None)
        found = [_stored(name, entry, first) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise AdapterLoadError(f"{path} is damaged (its header); copy it again.") from None
    return data, found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a header; a name twice would let two readers see different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError
    return found


def _stored(name: str, entry: Any, first: int) -> StoredMatrix:
    begin, end = entry["data_offsets"]
    return StoredMatrix(name, str(entry["dtype"]), tuple(entry["shape"]), first + begin, first + end)


def _pairs(matrices: list[StoredMatrix], base: BaseModules) -> dict[str, list[StoredMatrix | None]]:
    """The two matrices of each path, as far as the file has them."""
    pairs: dict[str, list[StoredMatrix | None]] = {}
    for matrix in matrices:
        name = matrix.name
        path, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if "magnitude" in name:
            raise AdapterLoadError(f"the adapter has {name:.200}: DoRA is not served.")
        is_pair = name.startswith(_PREFIX) and name.endswith(".weight") and part in _PARTS
        if is_in_tower(path):
            raise AdapterLoadError(
                f"the adapter changes the tower that encodes images ({name:.200}); adapters of the text's "
                "layers alone are served: train it without the tower (PEFT's exclude_modules)."
            )
        if not is_pair or path not in base.shapes:
            raise AdapterLoadError(
                f"the adapter has weights {name!r:.200}, which belong to no linear layer of the base's "
                "attention or MLP; only LoRA matrices of these are served."
            )
        pairs.setdefault(path, [None, None])[_PARTS[part]] = matrix
    return pairs


def _checked(
    path: str, pair: list[StoredMatrix | None], shape: tuple[int, int], rank: int
) -> tuple[StoredMatrix, StoredMatrix]:
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
    return down, up


def _modules(plan: Plan, data: npt.NDArray[np.uint8]) -> dict[str, LowRank]:
    return {path: LowRank(down.read(data), up.read(data), scale) for path, (down, up, scale) in plan.items()}


def _check_numbers(modules: Mapping[str, LowRank]) -> None:
    for path, change in modules.items():
        if not (np.isfinite(change.down).all() and np.isfinite(change.up).all()):
            raise AdapterLoadError(
                f"the adapter's matrices of {path} hold values that are no finite numbers."
            )


def _identity(modules: Mapping[str, LowRank], invocation: tuple[int, ...]) -> str:
    digest = hashlib.sha256(f"from {invocation}\n".encode() if invocation else b"")
    for path, change in modules.items():
        digest.update(f"{path} {change.down.shape} {change.stored_up.shape}\n".encode())
        digest.update(np.ascontiguousarray(change.down).data)
        digest.update(change.up.data)
    return digest.hexdigest()[:_IDENTITY_DIGITS]
