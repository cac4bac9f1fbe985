# SPDX-License-Identifier: Apache-2.0
"""Checks of a GGUF file's header, before a reader trusts it and allocates memory by it.

    "GGUF" version  number of tensors  number of values
    values          key, type, value; a value is a number, a string or an array of them
    tensors         name, dimensions, format, offset
    data            from the next multiple of the alignment

Every count and length must fit the file, every tensor must lie in its data, and sizes of the model must be
plausible. Reads the header only: a tenth of a second for a large vocabulary.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any

from radixkv.errors import ModelLoadError

#: Sizes of numbers by their type in the file; strings and arrays come without one.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_WHOLE_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_STRING, _ARRAY = 8, 9
#: More elements than any vocabulary or list of merges has; a reader makes an object of each.
_MAX_ELEMENTS = 2**21
#: More tensors, values and bytes of a name than any model has.
_MAX_TENSORS, _MAX_VALUES, _LONGEST_NAME = 2**17, 2**16, 2**16
#: Keys whose number is a width or a count of parts of the model, and more than any model has.
_WIDTHS = re.compile(
    r"\.(embedding_length|feed_forward_length|vocab_size|expert_count|head_count|head_count_kv"
    r"|key_length|value_length|dimension_count|expert_feed_forward_length)$"
)
_LARGEST_WIDTH = 2**21
_PARTS = re.compile(r"\.(expert_count|head_count|head_count_kv)$")
_MAX_PARTS = 2**13
_MAX_GUESSING = 8
_LAYER = re.compile(rb"blk\.(\d{1,9})\.")


#: Value of `general.type` -> what such a file holds, and what to give instead.
_NO_MODELS = {
    "adapter": "holds an adapter and no model; serve its base with the adapter's PEFT folder for --lora",
    "imatrix": "holds an importance matrix and no model; give the model's file",
    "mmproj": "holds the encoder of images that belongs to a model; give the model's own file",
}


class _NoModel(Exception):
    """The file is whole and holds something else; the message completes a sentence about the file."""


class _Damage(Exception):
    """The header is damaged; the message completes a sentence about the file."""


def check_header(path: Path) -> None:
    """Refuse a GGUF file with a header that contradicts itself or the file's size.

    Raises:
        ModelLoadError: it does, the file holds no model, or its version or byte order can't be read.
        OSError: the file can't be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            _Header(data).check()
        except _NoModel as error:
            raise ModelLoadError(f"{path} {error}.") from None
        except (_Damage, struct.error) as error:
            reason = str(error) if isinstance(error, _Damage) else "it ends within its header"
            raise ModelLoadError(
                f"{path} is a damaged GGUF file: {reason}. The download or copy was probably interrupted, or "
                "the file was tampered with; fetch it again from a source you trust."
            ) from None


class _Header:
    """Reads one header, at a position that moves on."""

    def __init__(self, data: Any) -> None:
        self._data, self._at, self._size = data, 4, len(data)
        self._alignment = 32
        self._numbers: dict[str, int] = {}
        self._type = ""

    def check(self) -> None:
        version = self._number("<I")
        if version not in (2, 3):
            swapped = struct.unpack(">I", struct.pack("<I", version))[0] in (2, 3)
            kind = "big-endian" if swapped else f"of version {version}"
            raise _Damage(f"it is {kind}, and only little-endian versions 2 and 3 can be read")
        tensors, values = self._number("<Q"), self._number("<Q")
        if tensors > _MAX_TENSORS or values > _MAX_VALUES:
            raise _Damage(f"it claims to have {tensors} tensors and {values} values")
        for _ in range(values):
            self._value()
        if self._type in _NO_MODELS:
            raise _NoModel(_NO_MODELS[self._type])
        layers = self._tensors(tensors)
        for key, number in self._numbers.items():
            most = _MAX_PARTS if _PARTS.search(key) else _LARGEST_WIDTH
            if _WIDTHS.search(key) and not 0 <= number <= most:
                raise _Damage(f"its {key} is {number}")
            split = self._numbers.get("split.count", 0) > 1  # other layers are in other parts
            # Layers that guess tokens are counted, and may have been left out.
            guessing = self._numbers.get(key.replace(".block_count", ".nextn_predict_layers"), 0)
            most = layers + min(max(guessing, 0), _MAX_GUESSING)
            if key.endswith(".block_count") and tensors and not split and not 0 <= number <= most:
                raise _Damage(f"its {key} is {number}, and it has tensors of {layers} layers")

    def _number(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(number)

    def _skip(self, count: int) -> None:
        if count > self._size - self._at:
            raise _Damage(f"a length in its header is {count}, more than the rest of the file")
        self._at += count

    def _name(self, what: str) -> bytes:
        length = self._number("<Q")
        if length > _LONGEST_NAME:
            raise _Damage(f"the name of a {what} has {length} bytes")
        start = self._at
        self._skip(length)
        return bytes(self._data[start : self._at])

    def _value(self) -> None:
        key = self._name("value").decode("utf-8", "replace")
        kind = self._number("<I")
        if kind in _WHOLE_NUMBERS:
            number = self._number(_WHOLE_NUMBERS[kind])
            self._numbers[key] = number
            if key == "general.alignment":
                if not 1 <= number <= 2**20 or number & (number - 1):
                    raise _Damage(f"its alignment is {number}")
                self._alignment = number
            return
        if kind in _SIZES:
            self._skip(_SIZES[kind])
        elif kind == _STRING and key in ("general.type", "general.architecture"):
            text = self._name("type").decode("utf-8", "replace")
            if key == "general.type" or text == "clip":  # older files of encoders state no type
                self._type = "mmproj" if text == "clip" else text
        elif kind == _STRING:
            self._skip(self._number("<Q"))
        elif kind == _ARRAY:
            self._array(key)
        else:
            raise _Damage(f"the value {key!r:.80} is of the unknown type {kind}")

    def _array(self, key: str) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        if count > _MAX_ELEMENTS:
            raise _Damage(f"the list {key!r:.80} has {count} elements")
        if kind in _SIZES:
            self._skip(count * _SIZES[kind])
        elif kind == _STRING:
            length_at, at, last = struct.Struct("<Q").unpack_from, self._at, self._size
            for _ in range(count):
                (length,) = length_at(self._data, at)
                at += 8 + length
                if at > last:
                    raise _Damage(f"a length in its header is {length}, more than the rest of the file")
            self._at = at
        else:
            raise _Damage(f"the list {key!r:.80} is of the unknown type {kind}")

    def _tensors(self, count: int) -> int:
        """Check the tensors; returns how many layers they belong to."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # slow to import

        sizes = {
            int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES
        }
        names: set[bytes] = set()
        ends: list[tuple[bytes, int]] = []
        layers: set[int] = set()
        for _ in range(count):
            name = self._name("tensor")
            shown = _shown(name)
            if name in names:
                raise _Damage(f"the tensor {shown} is in it twice")
            names.add(name)
            found = _LAYER.match(name)
            if found:
                layers.add(int(found[1]))
            dimensions = self._number("<I")
            if not 1 <= dimensions <= 4:
                raise _Damage(f"the tensor {shown} has {dimensions} dimensions")
            shape = [self._number("<Q") for _ in range(dimensions)]
            kind, offset = self._number("<I"), self._number("<Q")
            if kind not in sizes:
                raise _Damage(f"the tensor {shown} has the unknown format {kind}")
            elements = 1
            for size in shape:
                elements *= size
            block, block_bytes = sizes[kind]
            if not elements or shape[0] % block:
                raise _Damage(f"the tensor {shown} has the shape {shape}, in blocks of {block}")
            if offset % self._alignment:
                raise _Damage(f"the tensor {shown} begins at {offset}, not a multiple of {self._alignment}")
            ends.append((name, offset + elements // block * block_bytes))
        start = -(-self._at // self._alignment) * self._alignment
        for name, end in ends:
            if start + end > self._size:
                raise _Damage(
                    f"the tensor {_shown(name)} ends {start + end - self._size} bytes after the file"
                )
        return len(layers)


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "replace")[:80]
