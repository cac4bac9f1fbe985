# SPDX-License-Identifier: Apache-2.0
"""Run a compiled function on the threads torch already has.

torch's CPU operators run on a pool of OpenMP threads, which stay awake for a while after each parallel
region. A second pool beside it would compete for the same cores with threads that spin. `GOMP_parallel` is
the entry point that compilers emit for `#pragma omp parallel`; called on the library torch has loaded, it
runs our function on torch's own pool, with a start-up cost of microseconds. Where no such library is found
(macOS), plain Python threads do the work: the compiled function holds no lock.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _gomp_parallel() -> Callable[..., None] | None:
    """`GOMP_parallel` of the OpenMP library in this process, or None."""
    try:
        with open("/proc/self/maps") as maps:
            paths = dict.fromkeys(re.findall(r"(/\S*lib[gi]?omp\S*\.so\S*)$", maps.read(), re.MULTILINE))
    except OSError:
        return None
    # torch's own copy first: another package may have loaded a second one.
    for path in sorted(paths, key=lambda p: "/torch" not in p):
        try:
            entry = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        entry.restype = None
        return entry
    return None


@functools.cache
def gomp_address() -> int:
    """Address of `GOMP_parallel(function, argument, threads, 0)`, or 0 where there is none."""
    entry: Any = _gomp_parallel()
    return 0 if entry is None else ctypes.cast(entry, ctypes.c_void_p).value or 0


@functools.cache
def _python_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="radixkv-attention")


@functools.cache
def _callable(function: int) -> Callable[[int], None]:
    return _FUNCTION(function)


def run_here(function: int, argument: int) -> None:
    """Call `void function(void *argument)` once, on this thread."""
    _callable(function)(argument)


def run_parallel(function: int, argument: int) -> None:
    """Call `void function(void *argument)` once on each of torch's threads; return when all have.

    Args:
        function: address of compiled code that shares the work out among its callers, and never raises.
        argument: address passed to each call.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        _callable(function)(argument)
        return
    parallel = _gomp_parallel()
    if parallel is not None:
        parallel(function, argument, threads, 0)
        return
    futures = [_python_pool(threads).submit(_callable(function), argument) for _ in range(threads - 1)]
    _callable(function)(argument)
    for future in futures:
        future.result()
