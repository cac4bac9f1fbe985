"""Moving rows and blocks in a paged cache on the CPU, by torch's operators, whatever the dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv_kernels.kv_cache import PagedKV, indexable, quantize


def write_rows(
    kv: PagedKV,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """See `AttentionBackend.write`."""
    if int(slots.min()) < 0:
        valid = (slots >= 0).nonzero().squeeze(1)
        slots = slots.index_select(0, valid)
        rows = valid if rows is None else rows.index_select(0, valid)
    if rows is not None:
        key, value = key.index_select(0, rows), value.index_select(0, rows)
    quantization = kv.spec.quantization
    for data, scales, new in (
        (kv.key[layer], kv.key_scale, key),
        (kv.value[layer], kv.value_scale, value),
    ):
        if quantization is not None and scales is not None:
            stored, scale = quantize(new, quantization)
            scales[layer].flatten(1).index_copy_(1, slots, scale.transpose(0, 1))
        else:
            stored = new.to(data.dtype)
        indexable(data).flatten(1, 2).index_copy_(1, slots, indexable(stored).transpose(0, 1))


def copy_blocks(kv: PagedKV, copies: Sequence[tuple[int, int, int]]) -> None:
    """See `AttentionBackend.copy_blocks`."""
    read = [
        (t, target, t[:, :, source, :count].clone())
        for source, target, count in copies
        for t in map(indexable, kv.tensors())
    ]
    for t, target, data in read:
        t[:, :, target, : data.shape[2]] = data
