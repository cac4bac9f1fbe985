# SPDX-License-Identifier: Apache-2.0
"""The memory of a model's adapters, for the device that computes the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.model.adapters.adapter_memory import AdapterMemory
from radixkv.model.adapters.base_modules import BaseModules

if TYPE_CHECKING:
    from radixkv.model.loading.loader import LoadedModel


def make_adapter_memory(
    loaded: LoadedModel, base: BaseModules, by_triton: bool, num_tokens: int, num_seqs: int, max_rank: int
) -> AdapterMemory:
    """Prepare a model whose layers have been rewritten; once.

    Args:
        base: the model before that.
        by_triton: its kernels are Triton's; else numba's or torch's, on a CPU.
        num_tokens, num_seqs, max_rank: most rows and requests of a step, and ranks of an adapter.
    """
    if not by_triton:
        return AdapterMemory.attached(loaded.model, base)
    from radixkv.model.adapters.gpu_adapters import GpuAdapterMemory, GpuLimits

    limits = GpuLimits(num_tokens, num_seqs, max_rank)
    return GpuAdapterMemory.on_gpu(loaded.model, base, loaded.device, loaded.dtype, limits)
