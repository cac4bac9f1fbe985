# SPDX-License-Identifier: Apache-2.0
"""GGUF files parsed once, and without an array per string, for all that transformers reads of them.

transformers reads a file's fields again for the configuration, the tokenizer and the weights, through two
readers: its own and the gguf package's. Each takes slices of a memory map per string of the vocabulary and
of the merges, which cost ten times as much as the string. It also builds the table of tensor names again for
every module of the model. The values that come out are the same.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from radixkv.model.loading.gguf_metadata import known_metadata
from radixkv.model.loading.gguf_parts import parts_of

_lock = threading.RLock()
#: Shorter lists keep the gguf package's form: an array per element.
_LONG = 64


@contextmanager
def gguf_parsed_once() -> Iterator[None]:
    """While it lasts, transformers parses each GGUF file once.

    It changes functions of modules, so it is one thread's at a time: others that enter wait.
    """
    try:
        import gguf
        from transformers import modeling_gguf_pytorch_utils as reading
    except ImportError:  # then transformers says what is missing, if it comes to a GGUF file
        yield
        return
    with _lock, ExitStack() as changes:
        changes.callback(known_metadata.cache_clear)

        def replace(module: Any, name: str, value: Any) -> None:
            changes.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)

        replace(gguf, "GGUFReader", functools.cache(_plain_reader(gguf.GGUFReader)))
        replace(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        replace(reading, "load_gguf_checkpoint", _kept(reading.load_gguf_checkpoint))
        replace(reading, "_gguf_parse_value", _parsed(reading._gguf_parse_value))
        for module in _own_readers():
            replace(module, "read_gguf_metadata", _read_gguf_metadata)
        yield


def _own_readers() -> list[Any]:
    """Modules with transformers' own reader; older versions have none."""
    try:
        from transformers.integrations import gguf as own
    except ImportError:
        return []
    return [own, own.reader] if hasattr(own, "read_gguf_metadata") else []


def _plain_reader(reader: Any) -> Any:
    """The reader with plain arrays over its memory map, long lists as they are, and tensors of all parts."""

    class PlainReader(reader):
        def __init__(self, path: Any, mode: Any = "r") -> None:
            self._known = known_metadata(Path(path))
            super().__init__(path, mode)
            parts = parts_of(Path(path))
            if Path(path) == parts[0]:
                for part in parts[1:]:
                    self.tensors.extend(PlainReader(part, mode).tensors)

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            import numpy as np

            self._plain = mapped.view(np.ndarray)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            items, end = self._known.arrays.get(orig_offs, ((), 0))
            if len(items) < _LONG:
                return super()._get_field_parts(orig_offs, raw_type)
            from gguf import GGUFValueType

            kinds = [GGUFValueType(int(kind)) for kind in (raw_type, self._get(orig_offs, "uint32")[0])]
            return end - orig_offs, list(items), list(range(len(items))), kinds

    return PlainReader


def _parsed(parse: Any) -> Any:
    """`_gguf_parse_value` that leaves values of lists that have been read already."""

    def parse_value(value: Any, kind: Any) -> Any:
        return value if isinstance(value, (str, int, float)) else parse(value, kind)

    return parse_value


def _read_gguf_metadata(gguf_path: Any, string_arrays: Container[str] = ()) -> Any:
    """Do as transformers' function: lists of strings are given as their lengths, unless asked for."""
    known = known_metadata(Path(gguf_path))
    values = {
        key: len(value) if key in known.strings and key not in string_arrays else copy.copy(value)
        for key, value in known.values.items()
    }
    return values, tuple(known.tensors)


def _kept(load: Any) -> Any:
    """`load_gguf_checkpoint` with a memory of the fields of a file read without its tensors."""
    kept: dict[Path, Any] = {}

    @functools.wraps(load)
    def load_once(path: Any, return_tensors: bool = False, **rest: Any) -> Any:
        if return_tensors or rest:
            return load(path, return_tensors=return_tensors, **rest)
        key = Path(path).resolve()
        if key not in kept:
            kept[key] = load(path)
        # Values are numbers, strings and flat lists of them.
        return {group: {k: copy.copy(v) for k, v in values.items()} for group, values in kept[key].items()}

    return load_once
