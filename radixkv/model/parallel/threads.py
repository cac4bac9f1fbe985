# SPDX-License-Identifier: Apache-2.0
"""Number of threads that a rank computes with."""

from __future__ import annotations

import os

import psutil

from radixkv.engine.config import EngineConfig


def threads_of_rank(config: EngineConfig) -> int:
    """Return the value of `--threads`, or an equal part of the cores of this process; at least one."""
    if config.threads is not None:
        return config.threads
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(psutil.cpu_count(logical=False) or usable, usable)
    return max(1, cores // config.tensor_parallel)
