# SPDX-License-Identifier: Apache-2.0
"""Kernels are cached by all of their sources, whichever threads and processes compile them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

numba = pytest.importorskip("numba")

from tiny_models import save_tiny_model  # noqa: E402

from radixkv_kernels.cpu import compile_ahead, compiling  # noqa: E402


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


class _Process:
    """A process that records its end."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def terminate(self) -> None:
        self.ended.append("terminated")

    def wait(self) -> None:
        self.ended.append("reaped")


def test_first_start_alone_compiles_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[_Process] = []

    def start(*_: Any, **__: Any) -> _Process:
        started.append(_Process())
        return started[-1]

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for _ in range(2):
        with compile_ahead.compiled_ahead():
            assert len(started) == 1
    assert started[0].ended == ["terminated", "reaped"]


@pytest.mark.nightly
def test_plain_model_finds_all_its_kernels_compiled(tmp_path: Path) -> None:
    cache, home = tmp_path / "cache", tmp_path / "home"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "HOME": str(home)}
    model = save_tiny_model(
        tmp_path / "model",
        "llama",
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
    )
    run = "import sys; from radixkv import LLM; LLM(sys.argv[1], num_blocks=64)"
    subprocess.run([sys.executable, "-m", compile_ahead.__name__], check=True, env=environment)
    compiled = {path.name for path in cache.rglob("*.nbc")}
    subprocess.run([sys.executable, "-c", run, str(model)], check=True, env=environment)
    assert compiled
    assert {path.name for path in cache.rglob("*.nbc")} == compiled
