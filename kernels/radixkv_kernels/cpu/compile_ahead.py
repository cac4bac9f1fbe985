# SPDX-License-Identifier: Apache-2.0
"""Compilation of the kernels of float32 models in a process beside the one that loads a model.

It happens on the first start alone. Numba compiles with Python's lock held, so a thread would gain nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from radixkv_kernels.cpu.compiling import cache_folder

# Of the embedded model, and of many others; a head size and a block size of their own take two small kernels.
_HEAD_SIZE, _BLOCK_SIZE = 64, 16


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Compile kernels beside the block, where these sources have none compiled yet and a core is free for it.

    Kernels that the block needs before they are ready it compiles itself, or waits for the one in progress.
    """
    process = _start() if _is_first_start() else None
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            process.wait()


def _is_first_start() -> bool:
    """Return True if this process makes the folder of compiled kernels; only one of several does."""
    if (os.cpu_count() or 1) < 2 or torch.get_num_threads() < 2:
        return False
    folder = cache_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError:  # it exists, or can't be written
        return False
    return True


def _start() -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None


def compile_kernels() -> None:
    """Compile the kernels of a plain float32 model, the slowest first."""
    # Slow imports, which the process that loads the model meanwhile does without.
    from radixkv_kernels.cpu.attention.kv_write import FloatWriter
    from radixkv_kernels.cpu.attention.launcher import AttentionLauncher
    from radixkv_kernels.cpu.linear.float_product import PackedFloat, PackedGate
    from radixkv_kernels.cpu.linear.row_kernels import RowKernels
    from radixkv_kernels.interface import BackendConfig
    from radixkv_kernels.kv_cache import KVSpec, PagedKV

    spec = KVSpec(1, 1, _BLOCK_SIZE, 1, _HEAD_SIZE, torch.float32, torch.device("cpu"))
    AttentionLauncher(BackendConfig(1, spec, torch.float32, _BLOCK_SIZE, 1, _BLOCK_SIZE))
    weight = torch.zeros(_HEAD_SIZE, _HEAD_SIZE)
    PackedGate(weight, weight)
    PackedFloat(weight)
    RowKernels()
    FloatWriter(PagedKV(spec))


if __name__ == "__main__":
    compile_kernels()
