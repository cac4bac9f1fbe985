# SPDX-License-Identifier: Apache-2.0
"""Kernels are cached by all of their sources, whichever threads compile them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

numba = pytest.importorskip("numba")

from radixkv_kernels.cpu import compiling  # noqa: E402


def _kernel(constant: int) -> Any:
    def kernel(first: int) -> int:
        return first + constant

    return kernel


def test_threads_compile_into_one_folder_and_leave_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []
    both = threading.Barrier(2)

    def record(*_: Any, **__: Any) -> Callable[[Any], Any]:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # where two threads could come here at once, they do
        folders.append(numba.config.CACHE_DIR)
        return lambda function: function

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "cfunc", record)
    kernels = [_kernel(1), _kernel(2)]
    threads = [threading.Thread(target=compiling.compile_kernel, args=(kernel,)) for kernel in kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert str(tmp_path) == numba.config.CACHE_DIR
    assert len(folders) == 2
    assert len(set(folders)) == 1
    assert Path(folders[0]).parent == tmp_path
