# SPDX-License-Identifier: Apache-2.0
"""Values and tensors of a GGUF file: its header is read in one pass, its tensors are mapped.

The reader of the gguf package makes an array for each string of a vocabulary, which takes ten times as long.
A file has passed `check_header` before it is opened here. Reading values alone needs no other package.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.model.loading.gguf_parts import parts_of

if TYPE_CHECKING:
    from numpy import ndarray

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
#: Formats of tensors that are plain numbers; all others are blocks.
_NUMBERS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, slots=True, repr=False)
class FileTensor:
    """One tensor of a file.

    Attributes:
        name: llama.cpp's name of it.
        shape: sizes, those of columns first.
        tensor_type: format, a `GGMLQuantizationType` of the gguf package.
        data: [..., rows, columns] numbers, or [..., rows, bytes] uint8 of blocks; mapped from the file.
    """

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    data: ndarray[Any, Any]

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.nbytes)


@dataclass(frozen=True, slots=True, repr=False)
class GGUFFile:
    """An open file, or all parts of a model that is split into several.

    Attributes:
        path: of the file, or of the first part.
        values: key -> number, string or list of them; of the first part.
        tensors: name -> tensor, of all parts.
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, FileTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return str(self.values.get("general.architecture"))

    def dequantised(self, name: str) -> ndarray[Any, Any]:
        """A tensor as float32 in the shape of its rows."""
        import gguf  # slow to import
        import numpy as np

        tensor = self.tensors[name]
        return np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def open_gguf(path: Path) -> GGUFFile:
    """Read the header of a file and map its tensors: 0.3 s for a vocabulary of 128,000 with its merges.

    Raises:
        ModelLoadError: a part of a split model is missing.
        OSError, ValueError, KeyError, struct.error: the file can't be read.
    """
    parts = parts_of(path)
    values, tensors = _open_part(parts[0])
    for part in parts[1:]:
        tensors |= _open_part(part)[1]
    return GGUFFile(parts[0], values, tensors)


def read_values(path: Path) -> dict[str, Any]:
    """The values of a file: key -> number, string or list of them.

    Raises:
        OSError, ValueError, KeyError, struct.error: the file can't be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _values(data)[0]


def _open_part(path: Path) -> tuple[dict[str, Any], dict[str, FileTensor]]:
    import numpy as np  # heavy
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        values, at = _values(data)
        (count,) = struct.unpack_from("<Q", data, 8)
        stored = []
        for _ in range(count):
            name, at = _string(data, at)
            (dimensions,) = struct.unpack_from("<I", data, at)
            shape = struct.unpack_from(f"<{dimensions}Q", data, at + 4)
            at += 4 + 8 * dimensions
            stored.append((name, shape, *struct.unpack_from("<IQ", data, at)))
            at += 12
    alignment = values.get("general.alignment", 32)
    start = -(-at // alignment) * alignment
    mapped = np.memmap(path, np.uint8, "r").view(np.ndarray)
    tensors = {}
    for name, shape, number, offset in stored:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        begin = start + offset
        own = mapped[begin : begin + math.prod(shape) // block * block_bytes]
        row = (shape[0] // block * block_bytes,)
        rows = own.reshape(*reversed(shape[1:]), *row)
        numbers = _NUMBERS.get(kind.name)
        tensors[name] = FileTensor(name, shape, kind, rows if numbers is None else rows.view(numbers))
    return values, tensors


def _values(data: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The values and the offset after them."""
    (count,) = struct.unpack_from("<Q", data, 16)
    values, at = {}, 24
    for _ in range(count):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        values[key], at = _value(data, at + 4, kind)
    return values, at


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind != _ARRAY:
        form = "<" + _CODES[kind]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    element, count = struct.unpack_from("<IQ", data, at)
    if element == _STRING:
        return _strings(data, at + 12, count)
    form = f"<{count}{_CODES[element]}"
    return list(struct.unpack_from(form, data, at + 12)), at + 12 + struct.calcsize(form)


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (text,), end = _strings(data, at, 1)
    return text, end


def _strings(data: mmap.mmap, at: int, count: int) -> tuple[list[str], int]:
    length_at, found = _LENGTH.unpack_from, []
    for _ in range(count):
        start = at + 8
        at = start + length_at(data, at)[0]
        found.append(data[start:at].decode())
    return found, at
