# SPDX-License-Identifier: Apache-2.0
"""Caches of layers that differ in shape: places, bytes, copies, and each layer's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_batches import assert_close

from radixkv_kernels import (
    GroupedKV,
    KVGroup,
    KVLayout,
    PagedKV,
    make_backend,
    make_kv,
    reference_attention,
    registry,
)

CPU = torch.device("cpu")
#: Two local layers, a global one with other heads, latents, and a layer that reads the first one's keys.
GROUPS = (
    KVGroup((0, 3), 4, 2, 16, 16),
    KVGroup((2,), 4, 1, 24, 16),
    KVGroup((5,), 2, 1, 40, 32, value_in_key=True),
)


def layout(quantization: str | None = None, **changes: Any) -> KVLayout:
    whole = KVLayout(6, 8, GROUPS, torch.float32, CPU, quantization, {4: 0})
    return replace(whole, **changes)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_bytes_are_those_of_the_tensors(quantization: str | None) -> None:
    kv = make_kv(layout(quantization))
    assert isinstance(kv, GroupedKV)
    assert sum(tensor.nbytes for tensor in kv.tensors()) == 6 * kv.spec.bytes_per_block
    if quantization is None:
        numbers = 2 * 2 * (16 + 16) + (24 + 16) + 40
        assert kv.spec.bytes_per_slot == 4 * numbers


def test_blocks_of_all_groups_are_saved_and_loaded() -> None:
    source, target = make_kv(layout("fp8_e4m3")), make_kv(layout("fp8_e4m3"))
    for kv in (source, target):
        for tensor in kv.tensors():
            tensor.view(torch.uint8).random_(generator=torch.Generator().manual_seed(len(tensor.shape)))
    rows = source.save_blocks([4, 1])
    read = source.block_reader()
    row = np.zeros(source.spec.bytes_per_block, np.uint8)
    read(1, row)
    assert (row == rows[1]).all()
    target.clear(6)
    target.load_blocks([0, 5], list(rows))
    assert (target.save_blocks([0, 5]) == rows).all()
    with pytest.raises(ValueError, match="the K/V of 1 blocks is 1 times"):
        target.load_blocks([0], [rows[0][:-1]])


def test_like_layers_from_zero_on_are_plain() -> None:
    whole = KVLayout(4, 8, (KVGroup((0, 1), 4, 2, 16, 16),), torch.float32, CPU)
    assert isinstance(make_kv(whole), PagedKV)
    assert isinstance(make_kv(replace(whole, groups=(KVGroup((1, 3), 4, 2, 16, 16),))), GroupedKV)
    assert isinstance(make_kv(replace(whole, aliases={2: 1})), GroupedKV)


def test_layers_in_two_groups_or_none_are_refused() -> None:
    with pytest.raises(ValueError, match="each layer must be in one group"):
        layout(groups=(GROUPS[0], GROUPS[0]))
    with pytest.raises(ValueError, match=r"the K/V of layers \[7\] are read, but not stored"):
        layout(aliases={4: 7})


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.nightly)])
def test_each_layer_attends_to_its_own_keys(quantization: str | None) -> None:
    spec = layout(quantization)
    kv: Any = make_kv(spec)
    backend = make_backend(
        "cpu", spec=spec, compute_dtype=torch.float32, max_num_tokens=64, max_num_seqs=4, max_model_len=64
    )
    table = np.array([3, 0, 5], np.int32)
    slots = torch.from_numpy(np.repeat(table.astype(np.int64), 8) * 8 + np.tile(np.arange(8), 3))[:19]
    plan = backend.plan(np.array([0, 19]), np.array([19]), [table])
    generator = torch.Generator().manual_seed(1)
    stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in (0, 2, 3, 4, 5):
        group = next(g for g in GROUPS if spec.aliases.get(layer, layer) in g.layers)
        query = torch.randn(19, group.num_query_heads, group.key_size, generator=generator)
        key = torch.randn(19, group.num_kv_heads, group.key_size, generator=generator)
        value = torch.randn(19, group.num_kv_heads, group.value_size, generator=generator)
        if group.value_in_key:
            value = key[..., : group.value_size]
        backend.write(kv, layer, key, value, slots)
        # A layer that reads another one's keys stores none of its own.
        stored[layer] = stored.get(spec.aliases.get(layer, layer), (key, value))
        window = 5 if layer == 3 else None
        out = backend.attend(kv, layer, query, plan, scale=0.2, window=window)
        key, value = stored[layer] if quantization is None else kv.read(layer, table, 19)
        assert out.shape == (19, group.num_query_heads, group.value_size)
        assert_close(
            out, reference_attention(query, [key], [value], np.array([0, 19]), scale=0.2, window=window)
        )
    backend.copy_blocks(kv, [(3, 1, 8)])
    rows = kv.save_blocks([3, 1])
    assert (rows[0] == rows[1]).all()


def test_blocks_before_a_window_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of four window blocks serves 19 tokens of context that see eight each; what is past is NaN."""
    groups = (KVGroup((0,), 4, 2, 16, 16, window=8), KVGroup((1,), 4, 2, 16, 16))
    spec = KVLayout(6, 8, groups, torch.float32, CPU, num_window_blocks=4)
    assert spec.bytes_per_block == spec.bytes_per_window_block == 8 * 4 * 2 * (16 + 16)
    assert (spec.window, spec.window_layers) == (8, {0})
    assert GroupedKV(spec).save_blocks([5]).shape == (1, spec.bytes_per_block)
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(19, heads, 16, generator=generator) for heads in (4, 2, 2))
    starts, wanted = np.array([0, 19]), {}
    for window in (8, None):
        wanted[window] = reference_attention(query, [key], [value], starts, scale=0.3, window=window)
    for has_numba in (True, False):
        monkeypatch.setattr(registry, "numba_available", lambda has=has_numba: has)
        kv: Any = make_kv(spec)
        for tensor in kv.tensors():
            tensor.fill_(float("nan"))
        limits: dict[str, Any] = {"max_num_tokens": 64, "max_num_seqs": 4, "max_model_len": 64}
        backend: Any = make_backend("cpu", spec=spec, compute_dtype=torch.float32, **limits)
        table, windows = np.array([3, 0, 5], np.int32), np.array([0, 3, 1], np.int32)
        for layer, own, first in ((0, windows, 8), (1, table, 0)):
            at = torch.arange(first, 19)
            slots = torch.from_numpy(own.astype(np.int64))[at // 8] * 8 + at % 8
            backend.write(kv, layer, key[first:], value[first:], slots)
        plan = backend.plan_with_windows(np.array([0, 4]), np.array([19]), [table], [windows])
        for layer, window in ((0, 8), (1, None)):
            out = backend.attend(kv, layer, query[15:], plan, scale=0.3, window=window)
            assert_close(out, wanted[window][15:])
        backend.copy_blocks(
            kv, [(3, 4, 8)]
        )  # of tables for layers that see all: there is no such window block


def test_requests_that_share_a_window_block_read_their_own_ones_before_it() -> None:
    """Equal ids at the end of a segment say nothing of the blocks before, of which one request needs more."""
    groups = (KVGroup((0,), 4, 2, 16, 16, window=200), KVGroup((1,), 4, 2, 16, 16))
    spec = KVLayout(1, 64, groups, torch.float32, CPU, num_window_blocks=20)
    kv: Any = make_kv(spec)
    limits: dict[str, Any] = {"max_num_tokens": 8, "max_num_seqs": 4, "max_model_len": 1024}
    backend: Any = make_backend("cpu", spec=spec, compute_dtype=torch.float32, **limits)
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(704, 2, 16, generator=generator) for _ in range(2))
    query = torch.randn(2, 4, 16, generator=generator)
    first, second = np.array([0] * 7 + [7, 8, 9, 10], np.int32), np.array([0] * 5 + [5, 6, 7, 11], np.int32)
    kv.groups[0].key.fill_(9.0)
    kv.groups[0].value.fill_(9.0)
    for table, held in ((first, range(7, 11)), (second, range(5, 9))):
        for block in held:
            at = torch.arange(block * 64, block * 64 + 64)
            backend.write(kv, 0, key[at], value[at], int(table[block]) * 64 + at % 64)
    starts, lengths = np.array([0, 1, 2]), np.array([700, 560])
    plan = backend.plan_with_windows(starts, lengths, [first * 0, second * 0], [first, second])
    out = backend.attend(kv, 0, query, plan, scale=0.3, window=200)
    keys, values = ([each[:700], each[:560]] for each in (key, value))
    assert_close(out, reference_attention(query, keys, values, starts, scale=0.3, window=200))
