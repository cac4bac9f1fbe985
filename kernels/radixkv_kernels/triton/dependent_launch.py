# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: a kernel begins while the one before it ends.

    kernel before     gdc_launch_dependents()     the next one may begin once all programs have come here
    kernel after      reads its plan; gdc_wait()  all of the kernel before is done and can be read

Both are instructions of compute capability 9.0 and up, in branches that a constant of the kernel closes
elsewhere. The kernel after is launched with `launch_pdl`, which CUDA graphs keep. What it reads before it
waits must have been written before the kernel before began.
"""

from __future__ import annotations

import torch
import triton.language as tl

from radixkv_kernels.triton.tiles import capability_of


def launches_early(device: torch.device) -> bool:
    """Return True if the device and the installed Triton have it; an interpreter has not."""
    has_instructions = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return device.type == "cuda" and capability_of(device) >= 90 and has_instructions
