# SPDX-License-Identifier: Apache-2.0
"""Compilation of the CPU's kernels by numba: once, and again when any of their sources changes."""

from __future__ import annotations

import functools
import gc
import getpass
import os
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from numba import cfunc, config

from radixkv_kernels.cpu.isa import level
from radixkv_kernels.cpu.memory import FAST

_SETTING_LOCK = threading.RLock()  # numba's setting is the whole process's


def compile_kernel(function: Any, *, parameters: int | None = None, fast: bool = False) -> Any:
    """A C function `void (int64 *arguments)`, cached on disk where a folder can be written.

    With `parameters` it takes as many int64 instead. `fast` lets the compiler reorder sums.
    """
    signature = "void(voidptr)" if parameters is None else f"void({', '.join(['int64'] * parameters)})"
    options: dict[str, Any] = {"fastmath": FAST} if fast else {}
    with _one_process_at_a_time(function), _without_garbage_collection(), _cache_of_these_sources():
        try:
            return cfunc(signature, cache=True, **options)(function)
        except RuntimeError:
            # No folder to cache in: every process compiles again.
            return cfunc(signature, **options)(function)


@functools.cache
def _checksum() -> str:
    """Return a checksum of the sources beside this file and of the instruction set."""
    checksum = zlib.crc32(str(level()).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        checksum = zlib.crc32(source.read_bytes(), checksum)
    return f"{checksum:08x}"


def cache_folder() -> Path:
    """Return the folder of these sources' compiled kernels, made or not: in NUMBA_CACHE_DIR, or beside the
    package."""
    settings: Any = config
    with _SETTING_LOCK:
        return Path(settings.CACHE_DIR or Path(__file__).parent / "__pycache__", f"kernels-{_checksum()}")


@contextmanager
def _cache_of_these_sources() -> Iterator[None]:
    """Have numba cache in the folder of these sources.

    By itself it looks at the file of the compiled function alone, and would load a kernel into which another
    version of a helper was compiled. Where the folder can't be written, it takes the user's.
    """
    settings: Any = config
    with _SETTING_LOCK:
        before = settings.CACHE_DIR
        settings.CACHE_DIR = str(cache_folder())
        try:
            yield
        finally:
            settings.CACHE_DIR = before


@contextmanager
def _one_process_at_a_time(function: Any) -> Iterator[None]:
    """Let one process compile a function, and the others load it from the cache, instead of compiling in each
    of the ranks and workers that start together.

    Processes do not wait for the lock longer than compiling takes.
    """
    cells = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    name = f"{function.__module__}.{function.__qualname__}({', '.join(cells)})"
    user = getpass.getuser() if os.name == "nt" else os.getuid()
    path = Path(tempfile.gettempdir(), f"radixkv-{user}-{zlib.crc32(name.encode()):08x}.lock")
    lock = FileLock(path, timeout=60)
    try:
        lock.acquire()
    except (Timeout, OSError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while compiling: looking for garbage takes a fifth of a compiler's time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
