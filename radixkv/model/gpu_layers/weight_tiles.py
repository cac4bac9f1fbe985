# SPDX-License-Identifier: Apache-2.0
"""Stored weights of checkpoints in the forms that a GPU's kernels read by tiles. No number is rounded.

    GroupWeight     2 to 4 bits as 4, others as 8; inputs in activation order are sorted by their groups
    AffineWeight    2 to 4 bits as 4, 5 and 6 with a plane of the upper bits, others as 8
    CodebookWeight  4 bits and their table, where rows are whole blocks
    Fp4Weight       MXFP4, NVFP4
    Fp8Weight       floats of 8 bits; Int8Weight: whole numbers of 8
    BlockWeight     blocks of GGUF files (`block_tiles`)

Codes are rearranged on the device that reads them; what is decided by a weight's values is decided before,
where it was read: nothing waits for a GPU, and torch's `meta`, which has no values, takes all forms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixkv.model.gpu_layers.block_tiles import pairs, plane, tiled_blocks
from radixkv.model.stored_weights.affine_weight import AffineWeight
from radixkv.model.stored_weights.block_weight import BlockWeight
from radixkv.model.stored_weights.codebook_weight import CodebookWeight
from radixkv.model.stored_weights.fp4_weight import Fp4Weight
from radixkv.model.stored_weights.group_weight import GroupWeight
from radixkv.model.stored_weights.scaled_weight import ScaledWeight
from radixkv.model.stored_weights.stored_weight import StoredWeight
from radixkv_kernels.triton.tiled_weight import E2M1, TABLE, TiledWeight

#: Columns of a group in activation order, where groups are of several sizes: they are filled up to that.
_FILLED = 32
#: dtypes of scales that kernels read as they are.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def tiled(weight: StoredWeight, device: torch.device | None = None) -> TiledWeight | None:
    """Return a weight's tile form on a device (None: where it is), or None if it has none."""
    if not weight.out_features or not weight.in_features:
        return None
    device = weight.tensors[0].device if device is None else device
    if isinstance(weight, ScaledWeight):
        weight = weight.to(device)
        zeros = None if weight.zeros is None else weight.zeros.to(torch.int16)
        return TiledWeight.scaled(weight.codes, _floats(weight.scales), weight.block, zeros)
    if isinstance(weight, BlockWeight):
        return tiled_blocks(weight.to(device))
    if weight.in_features % 2:  # two codes are a byte
        return None
    if isinstance(weight, GroupWeight):
        return _of_groups(weight, device)
    if isinstance(weight, CodebookWeight):
        return _of_codebook(weight, device)
    if isinstance(weight, AffineWeight):
        return _of_affine(weight.to(device))
    return _of_fp4(weight.to(device)) if isinstance(weight, Fp4Weight) else None


def needs_float8(weight: TiledWeight) -> bool:
    """Return True if codes or scales are floats of 8 bits, which GPUs before Ada don't convert."""
    return any(each.is_floating_point() and each.dtype.itemsize == 1 for each in weight.tensors)


def _floats(scales: Tensor) -> Tensor:
    return scales if scales.dtype in _FLOATS else scales.to(torch.float32)


def _of_groups(weight: GroupWeight, device: torch.device) -> TiledWeight | None:
    codes = weight.codes.to(device).rows(range(weight.out_features))
    scales, zeros, size = _floats(weight.scales).to(device), weight.zeros, weight.group_size
    if zeros is not None and bool((zeros == weight.middle).all()):
        zeros = None
    zeros = None if zeros is None else zeros.to(device, torch.int16 if weight.bits == 8 else torch.uint8)
    more: dict[str, Any] = {"zero": weight.middle if zeros is None else 0}
    if weight.group_of is not None:
        order, groups, size = _sorted(weight.group_of, weight.scales.shape[1])
        order, groups = order.to(device), groups.to(device)
        more |= {"order": order.to(torch.int32), "in_features": weight.in_features}
        codes = codes[:, order.clamp_min(0)]
        scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
    narrow = weight.bits <= 4
    if narrow and size % 2:
        return None
    return TiledWeight.scaled(
        pairs(codes) if narrow else codes, scales, (1, size), zeros, packed=narrow, **more
    )


def _sorted(group_of: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
    """Inputs in the order of their groups, -1 for none; the groups in that order; and their one size."""
    order = group_of.argsort(stable=True)
    sizes = group_of.bincount(minlength=count)
    used = sizes.nonzero().flatten()
    size = int(sizes[used].max())
    if bool((sizes[used] == size).all()) and size % 2 == 0:
        return order, used, size
    blocks = -(-sizes // _FILLED)
    places = torch.arange(len(order), device=order.device)
    starts = sizes.cumsum(0) - sizes  # of each group among the sorted inputs, and among filled blocks
    filled = (blocks.cumsum(0) - blocks) * _FILLED
    own = group_of[order]
    whole = torch.full((int(blocks.sum()) * _FILLED,), -1, dtype=order.dtype, device=order.device)
    whole[filled[own] + places - starts[own]] = order
    return whole, torch.arange(count, device=order.device).repeat_interleave(blocks), _FILLED


def _of_affine(weight: AffineWeight) -> TiledWeight | None:
    bits, codes = weight.bits, weight.code_rows(range(weight.out_features))
    narrow = bits <= 6
    if narrow and weight.group_size % 2:
        return None
    more: dict[str, Any] = {}
    if bits in (5, 6):
        more = {"plane": plane(codes, bits - 4), "plane_bits": bits - 4}
    return TiledWeight.scaled(
        pairs(codes & 15) if narrow else codes.contiguous(),
        _floats(weight.scales),
        (1, weight.group_size),
        _floats(weight.biases),
        packed=narrow,
        has_leasts=True,
        **more,
    )


def _of_fp4(weight: Fp4Weight) -> TiledWeight:
    if weight.scales.dtype == torch.float8_e8m0fnu and weight.factor is None:
        return TiledWeight.mxfp4(weight.codes, weight.scales.view(torch.uint8))
    scales = weight.scales
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.to(torch.float32)
    factor = torch.ones((), device=scales.device) if weight.factor is None else weight.factor
    supers = (1 / factor if weight.divides else factor).expand(weight.out_features, 1)
    return TiledWeight.of_pairs(E2M1, weight.codes, scales, weight.group_size, supers=supers.contiguous())


def _of_codebook(weight: CodebookWeight, device: torch.device) -> TiledWeight | None:
    if weight.in_features % weight.block_size or weight.block_size % 2:
        return None  # blocks go on from row to row
    codes = weight.codes.to(device).view(weight.out_features, -1)
    scales = weight.scales.to(device).view(weight.out_features, -1)
    table = weight.table.tolist()
    return TiledWeight.of_pairs(TABLE, (codes >> 4) | (codes << 4), scales, weight.block_size, table)
