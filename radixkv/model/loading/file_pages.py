# SPDX-License-Identifier: Apache-2.0
"""Gives back the memory of weights that are mapped from a file, once they have been read.

Weights of safetensors files are mapped into memory, not copied. Packing or quantising them reads every page,
and a page that has been read stays resident although only the packed copy is used from then on: the model
would take its memory twice. A released page is not lost; if it is read again it comes back from the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_MADV_DONTNEED = 4
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* +(/.*)$")


Range = tuple[int, int]


def address_ranges(weights: Iterable[torch.Tensor]) -> list[Range]:
    """First and last address of each CPU tensor's storage; holds no reference to the tensors."""
    storages = (weight.untyped_storage() for weight in weights if weight.device.type == "cpu")
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]


def release_mapped_pages(address: int, size: int) -> None:
    """Release the whole pages of an address range: a read-only mapping of a file, or memory without use."""
    with contextlib.suppress(OSError, AttributeError):
        _release(_madvise(), address, address + size)


def release_file_pages(ranges: Iterable[Range]) -> int:
    """Release the pages of address ranges that lie in unchanged mappings of weight files. Linux only.

    Args:
        ranges: see `address_ranges`; ranges no longer mapped from a weight file are left alone.

    Returns:
        Bytes released.
    """
    released = 0
    with contextlib.suppress(OSError, AttributeError):
        mappings = _unchanged_mappings()
        madvise = _madvise()
        for start, end in ranges:
            if not any(first <= start and end <= last for first, last in mappings):
                continue
            released += _release(madvise, start, end)
    return released


def copy_from_files(tensors: Iterable[torch.Tensor]) -> None:
    """Give tensors that are mapped from weight files memory of their own. Linux only.

    A file that is written over while it is mapped changes the tensors, and one that becomes shorter ends the
    process. Tensors that share memory still do.
    """
    with contextlib.suppress(OSError):
        mappings = [(first, last) for first, last, _ in _weight_mappings("/proc/self/maps")]
        copies: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if tensor.device.type != "cpu" or not any(first <= address < last for first, last in mappings):
                continue
            if address not in copies:
                copies[address] = storage.clone()
            own = torch.empty(0, dtype=tensor.dtype)
            tensor.data = own.set_(copies[address], tensor.storage_offset(), tensor.shape, tensor.stride())


def _madvise() -> Any:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def _release(madvise: Any, start: int, end: int) -> int:
    """Bytes of the whole pages in a range, once they are released; 0: none were."""
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    return end - start if start < end and madvise(start, end - start, _MADV_DONTNEED) == 0 else 0


def _unchanged_mappings() -> list[Range]:
    """Address ranges of this process that map weight files and hold no page that was written to.

    A written page of a private mapping exists nowhere else: releasing it would lose the change.
    """
    if ".safetensors" not in Path("/proc/self/maps").read_text():
        return []  # smaps takes the kernel a fifth of a second where gigabytes are mapped
    found = _weight_mappings("/proc/self/smaps")
    return [(first, last) for first, last, anonymous in found if anonymous == "0"]


def _weight_mappings(path: str) -> list[tuple[int, int, str | None]]:
    """Return each mapping of a weight file: its first and last address, and the kB written to, if told."""
    found: list[tuple[int, int, str | None]] = []
    is_weights = False
    with open(path) as lines:
        for line in lines:
            mapping = _MAPPING.match(line)
            if mapping is not None:
                is_weights = mapping[3].endswith(".safetensors")
                if is_weights:
                    found.append((int(mapping[1], 16), int(mapping[2], 16), None))
            elif is_weights and line.startswith("Anonymous:"):
                found[-1] = (*found[-1][:2], line.split()[1])
                is_weights = False  # lines of mappings without a file may follow
    return found
