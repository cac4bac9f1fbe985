# SPDX-License-Identifier: Apache-2.0
"""Large pages for weights: less time to fill memory first, and fewer misses of address translation later."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

_LARGE = 1 << 21
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)


def ask_for_large_pages(memory: torch.Tensor) -> None:
    """Ask the system to back new memory by pages of 2 MB; elsewhere than on Linux, do nothing.

    Only whole large pages within the tensor are meant: its neighbours in memory stay as they are.

    Args:
        memory: a CPU tensor that nothing has been written to.
    """
    start = -(-memory.data_ptr() // _LARGE) * _LARGE
    end = (memory.data_ptr() + memory.nbytes) // _LARGE * _LARGE
    if _MADV_HUGEPAGE is None or start >= end:
        return
    with contextlib.suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(start, end - start, _MADV_HUGEPAGE)
