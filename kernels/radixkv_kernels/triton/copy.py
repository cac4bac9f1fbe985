# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that copies blocks of the cache, and its launcher."""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from radixkv_kernels.kv_cache import PagedKV, indexable

_CHUNK = 1024


@triton.jit
def copy_kernel(
    data_ptr, copies_ptr, plane_size,
    SLOT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (copies, planes, chunks): copy the first slots of one block in one (layer, head) plane.

    `data` holds planes of `plane_size` elements, a plane holds blocks of BLOCK slots of SLOT elements.
    """
    copy = copies_ptr + tl.program_id(0) * 3
    source = tl.load(copy).to(tl.int64)
    target = tl.load(copy + 1).to(tl.int64)
    count = tl.load(copy + 2) * SLOT
    plane = data_ptr + tl.program_id(1).to(tl.int64) * plane_size
    at = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = at < count
    x = tl.load(plane + source * (BLOCK * SLOT) + at, mask=inside)
    tl.store(plane + target * (BLOCK * SLOT) + at, x, mask=inside)


def copy_blocks(kv: PagedKV, copies: Sequence[tuple[int, int, int]]) -> None:
    """See `AttentionBackend.copy_blocks`."""
    if not copies:
        return
    sources, targets = {c[0] for c in copies}, {c[1] for c in copies}
    if sources & targets:
        # Some source is also a target: read all before writing any.
        for t in map(indexable, kv.tensors()):
            read = [t[:, :, source, :count].clone() for source, _, count in copies]
            for (_, target, count), data in zip(copies, read, strict=True):
                t[:, :, target, :count] = data
        return
    listed = torch.tensor(copies, dtype=torch.int32).to(kv.spec.device, non_blocking=True)
    spec = kv.spec
    for t in kv.tensors():
        slot = t.shape[4] if t.dim() == 5 else 1
        planes = spec.num_layers * spec.num_kv_heads
        chunks = triton.cdiv(spec.block_size * slot, _CHUNK)
        copy_kernel[(len(copies), planes, chunks)](
            indexable(t),
            listed,
            spec.num_blocks * spec.block_size * slot,
            SLOT=slot,
            BLOCK=spec.block_size,
            CHUNK=_CHUNK,
        )
