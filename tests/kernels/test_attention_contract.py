# SPDX-License-Identifier: Apache-2.0
"""What every attention backend owes, against the float64 reference: features, dtypes, ragged batches,
writes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_batches import assert_close, fill_nan, make_batch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import by_day

from radixkv_kernels import Ahead, KVSpec, PagedKV, make_backend
from radixkv_kernels.cpu.torch_backend import TorchBackend

MIXED = [(1, 300), (33, 113), (0, 40), (1, 1), (20, 20), (7, 290), (1, 17), (64, 200)]
#: The numba kernel, and torch's operators, which serve where numba is not installed.
PATHS = ["numba", "torch"]
#: Query and KV heads and the head size; a kernel is compiled for each size.
OTHER_SHAPES = [((8, 1), 80), ((32, 8), 128), ((6, 2), 96), ((4, 2), 256)]
DTYPES = by_day([torch.float32, torch.bfloat16, torch.float16], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_mixed_batch(dtype: torch.dtype, path: str) -> None:
    batch = make_batch(path, MIXED, dtype=dtype)
    assert_close(batch.attend(), batch.reference())


@pytest.mark.parametrize(
    ("heads", "head_size"),
    [
        ((4, 4), 64),
        *(pytest.param(*shape, marks=pytest.mark.nightly) for shape in OTHER_SHAPES),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_head_shapes(heads: tuple[int, int], head_size: int, path: str) -> None:
    batch = make_batch(path, MIXED[:5], heads=heads, head_size=head_size)
    assert_close(batch.attend(), batch.reference())


@pytest.mark.parametrize("block_size", [8, 32, 256])
@pytest.mark.parametrize("path", PATHS)
def test_block_sizes(block_size: int, path: str) -> None:
    batch = make_batch(path, MIXED, block_size=block_size)
    assert_close(batch.attend(), batch.reference())


@pytest.mark.parametrize("features", ["window", "softcap", "sinks", "window+softcap+sinks"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", by_day([torch.float32, torch.bfloat16], torch.float32))
def test_features(features: str, path: str, dtype: torch.dtype) -> None:
    values = {
        "window": 45,
        "softcap": 2.0,
        "sinks": torch.linspace(-2, 6, 9),
    }
    chosen = {f: values[f] for f in features.split("+")}
    batch = make_batch(path, MIXED, dtype=dtype)
    assert_close(batch.attend(**chosen), batch.reference(**chosen))


@pytest.mark.parametrize("features", [{}, {"window": 45}, {"window": 5, "softcap": 2.0}])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tokens_that_see_each_other(features: dict[str, Any], path: str, quantization: str | None) -> None:
    """At a chunk's start, inside it, over two segments, and with a prefix that has a part of them."""
    batch = make_batch(path, MIXED, quantization=quantization)
    spans = [(1, 90, 105), (4, 0, 20), (5, 275, 290), (7, 136, 170), (7, 171, 200)]
    batch = batch.see_each_other(*spans)
    assert_close(batch.attend(**features), batch.reference(**features))
    assert (batch.attend(**features) - replace(batch, ahead=None).attend(**features)).abs().max() > 0.1
    some = batch.see_each_other(*spans, in_windows_only=True)
    assert_close(some.attend(**features), some.reference(**features))
    assert torch.equal(some.attend(), replace(batch, ahead=None).attend())


def test_no_row_sees_beyond_its_context() -> None:
    batch = make_batch("cpu", MIXED)
    counts = np.zeros(len(batch.query), np.int32)
    counts[-1] = 1
    with pytest.raises(ValueError, match="as far as their request's context"):
        replace(batch, ahead=Ahead(counts)).attend()


@pytest.mark.parametrize("quantization", by_day(["int8", "fp8_e4m3", "fp8_e5m2"], "int8"))
@pytest.mark.parametrize("path", PATHS)
def test_quantized(quantization: str, path: str) -> None:
    batch = make_batch(path, MIXED, head_size=16, quantization=quantization)
    # The reference dequantises the same stored values: the error is arithmetic only.
    assert_close(batch.attend(), batch.reference())
    exact = make_batch("cpu", MIXED, head_size=16)
    # Against the unquantised cache: a few units of the format's last place (2^-8, 2^-4, 2^-3 relative).
    limit = {"int8": 0.02, "fp8_e4m3": 0.06, "fp8_e5m2": 0.12}[quantization]
    relative = (batch.attend().double() - exact.reference()).norm() / exact.reference().norm()
    assert relative < limit


@settings(max_examples=examples(30), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 280)), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 2), (8, 1)]),
    block_size=st.sampled_from([8, 16, 64]),
    window=st.sampled_from([None, 1, 7, 64]),
    softcap=st.sampled_from([None, 3.0]),
    path=st.sampled_from(PATHS),
    seed=st.integers(0, 10),
)
def test_random_batches(lengths, heads, block_size, window, softcap, path, seed) -> None:  # type: ignore[no-untyped-def]
    batch = make_batch(
        path,
        [(n, n + cached) for n, cached in lengths],
        heads=heads,
        head_size=16,
        block_size=block_size,
        seed=seed,
        shared={1: (0, min(lengths[0][1], lengths[1][1]) // block_size)} if len(lengths) > 1 else None,
    )
    features = {"window": window, "softcap": softcap}
    if batch.query.shape[0]:
        assert_close(batch.attend(**features), batch.reference(**features))
    else:
        assert batch.attend(**features).shape == (0, heads[0], 16)


def test_padding_rows_of_out_are_untouched_and_of_new_tensors_zero() -> None:
    batch = make_batch("cpu", MIXED)
    expected = batch.attend()
    total = batch.query.shape[0]
    batch.query = torch.cat([batch.query, torch.full((5, 9, 64), float("nan"))])
    padded = batch.attend()
    torch.testing.assert_close(padded[:total], expected)
    assert (padded[total:] == 0).all()
    out = torch.full_like(batch.query, 7.0)
    assert batch.attend(out=out) is out
    assert (out[total:] == 7.0).all()


def test_strided_queries_and_two_dimensional_tables() -> None:
    batch = make_batch("cpu", MIXED)
    expected = batch.attend()
    width = max(len(t) for t in batch.block_tables)
    batch.block_tables = np.stack(
        [np.pad(t, (0, width - len(t)), constant_values=10**6) for t in batch.block_tables]
    )
    batch.query = torch.stack([batch.query, batch.query], dim=2)[:, :, 1]
    torch.testing.assert_close(batch.attend(), expected)


@pytest.mark.parametrize("quantization", [None, "int8", "fp8_e4m3"])
def test_write_rows_and_slots(quantization: str | None) -> None:
    spec = KVSpec(2, 2, 16, 2, 16, torch.float32, torch.device("cpu"), quantization)
    kv = PagedKV(spec)
    fill_nan(kv)
    backend = make_backend(
        "cpu",
        num_query_heads=4,
        spec=spec,
        compute_dtype=torch.float32,
        max_num_tokens=16,
        max_num_seqs=4,
        max_model_len=32,
    )
    key, value = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    # Row 0 to two slots, row 2 nowhere, one entry skipped.
    slots = torch.tensor([3, 17, -1, 30, 9])
    rows = torch.tensor([0, 0, 2, 3, 1])
    backend.write(kv, 1, key, value, slots, rows)
    k, v = kv.read(1, np.arange(2, dtype=np.int32), 32, torch.float32)
    tolerance = {None: 0.0, "int8": 0.02, "fp8_e4m3": 0.15}[quantization]
    for slot, row in ((3, 0), (17, 0), (30, 3), (9, 1)):
        assert (k[slot] - key[row]).abs().max() <= tolerance
        assert (v[slot] - value[row]).abs().max() <= tolerance
    untouched = [s for s in range(32) if s not in (3, 17, 30, 9)]
    assert k[untouched].isnan().all()
    assert kv.read(0, np.arange(2, dtype=np.int32), 32)[0].isnan().all()
    # The same through fused projections, whose rows are strided views.
    fused = torch.randn(4, 3, 2, 16)
    backend.write(kv, 0, fused[:, 1], fused[:, 2], torch.tensor([0, 1, 2, 3]))
    assert (kv.read(0, np.arange(2, dtype=np.int32), 4, torch.float32)[0] - fused[:, 1]).abs().max() <= 0.2


@pytest.mark.parametrize("quantization", [None, "int8", "fp8_e4m3"])
def test_copy_blocks(quantization: str | None) -> None:
    batch = make_batch("cpu", [(1, 64), (1, 64)], head_size=16, quantization=quantization)
    first, second = batch.block_tables
    before = [t.clone() for t in batch.kv.tensors()]
    # A swap must read both sources first; a partial copy leaves the other slots.
    batch.backend.copy_blocks(
        batch.kv, [(first[0], second[0], 16), (second[0], first[0], 16), (first[1], second[1], 5)]
    )
    for old, new in zip(before, batch.kv.tensors(), strict=True):
        old, new = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (old, new))
        assert torch.equal(new[0, :, first[0]], old[0, :, second[0]])
        assert torch.equal(new[0, :, second[0]], old[0, :, first[0]])
        assert torch.equal(new[0, :, second[1], :5], old[0, :, first[1], :5])
        assert torch.equal(new[0, :, second[1], 5:], old[0, :, second[1], 5:])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_was_saved_can_be_loaded_into_other_blocks(quantization: str | None) -> None:
    batch = make_batch("cpu", [(1, 64), (1, 64)], head_size=16, quantization=quantization)
    first, second = (table.tolist() for table in batch.block_tables)
    batch.kv.load_blocks(second, batch.kv.save_blocks(first))
    batch.query[1] = batch.query[0]
    result = batch.attend()
    assert torch.equal(result[0], result[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", [None, "int8", "fp8_e4m3", "fp8_e5m2"])
def test_saved_blocks_come_back_bit_by_bit(dtype: torch.dtype, quantization: str | None) -> None:
    spec = KVSpec(3, 7, 8, 2, 24, dtype, torch.device("cpu"), quantization)
    generator = torch.Generator().manual_seed(3)

    def filled() -> PagedKV:
        kv = PagedKV(spec)
        for tensor in kv.tensors():  # any bits, those of NaN among them
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
        return kv

    def bits(kv: PagedKV, block: int) -> list[torch.Tensor]:
        return [tensor.view(torch.uint8)[:, :, block].clone() for tensor in kv.tensors()]

    def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))

    source, target = filled(), filled()
    before = [bits(target, block) for block in range(spec.num_blocks)]
    saved = source.save_blocks([5, 0, 3])
    assert saved.shape == (3, spec.bytes_per_block)
    assert saved.dtype == np.uint8
    target.load_blocks([1, 6, 4], [saved[0], saved[1].tobytes(), memoryview(saved[2])])
    for block in range(spec.num_blocks):
        origin = {1: 5, 6: 0, 4: 3}.get(block)
        assert same(bits(target, block), before[block] if origin is None else bits(source, origin))


def test_blocks_are_not_loaded_from_data_of_another_size() -> None:
    kv = PagedKV(KVSpec(1, 4, 8, 1, 8, torch.float32, torch.device("cpu")))
    kv.clear(4)
    saved = kv.save_blocks([0, 1]) + np.uint8(1)
    for blocks, data in (([2], saved), ([2, 3], saved[:, :-1]), ([2, 3], [saved[0], b""])):
        with pytest.raises(ValueError, match=r"the K/V of \d blocks is"):
            kv.load_blocks(blocks, data)
    assert not any(tensor.any() for tensor in kv.tensors())


def test_bytes_per_block() -> None:
    def spec(quantization: str | None) -> KVSpec:
        return KVSpec(30, 10, 16, 3, 64, torch.float32, torch.device("cpu"), quantization)

    assert spec(None).bytes_per_block == 30 * 2 * 3 * 16 * 64 * 4
    for quantization in ("int8", "fp8_e4m3"):
        kv = PagedKV(spec(quantization))
        assert kv.spec.bytes_per_block * 10 == sum(t.nbytes for t in kv.tensors())


def test_a_numba_that_can_not_be_imported_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that does not know the numpy which is installed."""
    (tmp_path / "numba.py").write_text('raise ImportError("Numba needs NumPy 2.2 or less")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    spec = KVSpec(1, 4, 16, 1, 16, torch.float32, torch.device("cpu"))
    backend = make_backend(
        "cpu",
        num_query_heads=1,
        spec=spec,
        compute_dtype=torch.float32,
        max_num_tokens=1,
        max_num_seqs=1,
        max_model_len=16,
    )
    assert isinstance(backend, TorchBackend)
    assert "Numba needs NumPy 2.2 or less" in caplog.text


def test_errors_name_what_is_wrong() -> None:
    batch = make_batch("cpu", [(1, 20)])
    with pytest.raises(ValueError, match="block table 0 holds 1 blocks"):
        batch.backend.plan(np.array([0, 1]), np.array([20]), [np.zeros(1, np.int32)])
    with pytest.raises(ValueError, match="query starts"):
        batch.backend.plan(np.array([0]), np.array([20]), batch.block_tables)
    with pytest.raises(ValueError, match="block_size"):
        KVSpec(1, 1, 17, 1, 64, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="quantization"):
        KVSpec(1, 1, 16, 1, 64, torch.float32, torch.device("cpu"), "int4")
    with pytest.raises(ValueError, match="unknown attention backend 'x'"):
        make_backend(
            "x",
            num_query_heads=3,
            spec=batch.kv.spec,
            compute_dtype=torch.float32,
            max_num_tokens=1,
            max_num_seqs=1,
            max_model_len=1,
        )
