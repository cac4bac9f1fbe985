# SPDX-License-Identifier: Apache-2.0
"""What the machine has and can do: versions, and the speeds that targets are shares of."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_parts import Report
from benchmarks.paged_bench import Sizes, milliseconds

PACKAGES = ("torch", "triton", "transformers", "numpy", "vllm")


def machine(sizes: Sizes, report: Report) -> None:
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    report(python=platform.python_version(), cuda=torch.version.cuda, cpus=os.cpu_count(), **versions)
    if sizes.device.type == "cuda":
        about = torch.cuda.get_device_properties(sizes.device)
        report(
            device=about.name,
            capability=f"{about.major}.{about.minor}",
            multiprocessors=about.multi_processor_count,
            memory_gib=about.total_memory / 2**30,
            l2_mib=about.L2_cache_size / 2**20,
        )
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit"
        found = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        report(driver_clocks_power=found.stdout.strip())
    for name, rate in (("copy TB/s", copy_rate), ("read TB/s", read_rate), ("matmul TFLOP/s", matmul_rate)):
        report(**{name: rate(sizes) / 1e12})


def copy_rate(sizes: Sizes) -> float:
    """Bytes a second that a large copy reads and writes together."""
    source = torch.empty(1 << 16 if sizes.small else 2 << 30, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), sizes)


def read_rate(sizes: Sizes) -> float:
    """Bytes a second that a large sum reads, as a decode does that writes next to nothing.

    A copy is the wrong measure of a decode: it writes as much as it reads, and memory turns around for it.
    """
    source = torch.zeros(1 << 14 if sizes.small else 1 << 29, dtype=torch.float32, device=sizes.device)
    return source.nbytes / _seconds(source.sum, sizes)


def matmul_rate(sizes: Sizes) -> float:
    """Operations a second of a large product of bfloat16 matrices."""
    n = 64 if sizes.small else 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=sizes.device) for _ in range(2))
    return 2 * n**3 / _seconds(lambda: a @ b, sizes)


def _seconds(run: Callable[[], Any], sizes: Sizes) -> float:
    return milliseconds({"": run}, sizes)[""] / 1e3
