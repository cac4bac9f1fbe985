# SPDX-License-Identifier: Apache-2.0
"""Sources of the last bits of K/V besides the model: the machine and the libraries."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_CPU_FIELDS = (
    *("vendor_id", "cpu family", "model", "model name", "flags"),
    *("CPU implementer", "CPU part", "Features"),  # as ARM's are described
)


def computed_by(device: torch.device, backend: str, num_ranks: int = 1) -> str:
    """Return one line that is equal wherever the same batch gives the same bits.

    Args:
        backend: attention backend.
        num_ranks: number of ranks, which decides the order of sums.
    """
    parts = [f"torch {torch.__version__}", backend, platform.machine()]
    if num_ranks > 1:
        parts.append(f"{num_ranks} ranks")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        parts += [properties.name, f"{properties.major}.{properties.minor}", f"CUDA {torch.version.cuda}"]
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        parts += [capability, f"{torch.get_num_threads()} threads", *_processor()]
    return "; ".join(parts)


def _processor() -> list[str]:
    """Return the processor's maker, model and instructions, as Linux knows them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return [platform.processor()]
    first, _, _ = text.partition("\n\n")
    return [line for line in first.splitlines() if line.partition(":")[0].strip() in _CPU_FIELDS]
