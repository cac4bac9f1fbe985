# SPDX-License-Identifier: Apache-2.0
"""GGUF files parsed once, and without numpy's slowest part, for all that transformers reads of them.

transformers reads a file's fields again for the configuration, the tokenizer and
the weights. Each time, the reader takes one slice of a memory map per string of the vocabulary: subclassed
arrays, which cost ten times as much as the string. It also builds the table of tensor names again for every
module of the model. The values that come out are the same.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_lock = threading.RLock()


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
    with (
        _lock,
        _replaced(gguf, "GGUFReader", functools.cache(_plain_reader(gguf.GGUFReader))),
        _replaced(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        _replaced(reading, "load_gguf_checkpoint", _kept(reading.load_gguf_checkpoint)),
    ):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _plain_reader(reader: Any) -> Any:
    """The reader with the file as a plain array over the same memory map."""

    class PlainReader(reader):
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            import numpy as np

            self._plain = mapped.view(np.ndarray)

    return PlainReader


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
        return copy.deepcopy(kept[key])

    return load_once
