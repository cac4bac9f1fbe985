# SPDX-License-Identifier: Apache-2.0
"""The Triton source, interpreted: against the float64 reference, and bit for bit against itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from attention_batches import Batch, assert_close, fill_nan, make_batch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import by_day

from radixkv_kernels import KVSpec, PagedKV, make_backend
from radixkv_kernels.contiguous import CausalAttention, causal_attention
from radixkv_kernels.kv_cache import quantize
from radixkv_kernels.triton import backend as triton_backend
from radixkv_kernels.triton import merge, unified_attention
from radixkv_kernels.triton.backend import TritonBackend
from radixkv_kernels.triton.tiles import Tile, Tiling, bucket

MIXED = [(1, 130), (20, 70), (0, 40), (1, 1), (5, 129)]
SEGMENT = 64


class SmallTiling(Tiling):
    """Segments of 64 and tiles of 32 keys: several of each within contexts the interpreter can afford."""

    segment = SEGMENT

    def choose(self, kind: str) -> Tile:
        rows = max(16 if kind == "short" else 32, self.group)
        return dataclasses.replace(super().choose(kind), rows=1 << (rows - 1).bit_length(), keys=32)


class HalvedTiling(SmallTiling):
    """As if every layer had features that need a tile of half as many rows."""

    def launched(self, planned: Tile, featured: bool) -> Tile:
        return dataclasses.replace(planned, rows=planned.rows // 2)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "Tiling", SmallTiling)


def sharing(batch: Batch, share: bool) -> TritonBackend:
    return TritonBackend(dataclasses.replace(batch.backend.config, share_prefixes=share))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_batch(dtype: torch.dtype) -> None:
    batch = make_batch("triton", MIXED, heads=(4, 2), head_size=32, dtype=dtype)
    assert_close(batch.attend(), batch.reference())


@pytest.mark.parametrize(
    ("heads", "head_size"),
    [((3, 1), 64), ((2, 2), 80), ((4, 1), 96), ((2, 1), 128), ((2, 1), 192), ((2, 1), 256)],
)
def test_head_shapes(heads: tuple[int, int], head_size: int) -> None:
    batch = make_batch("triton", [(1, 70), (9, 33)], heads=heads, head_size=head_size)
    assert_close(batch.attend(), batch.reference())


#: Query and KV heads, key and value sizes, quantisation: a key in two parts beside values that are its first
#: part, are no power of two, or are stored beside it; several programs for the heads of one KV head.
WIDE = [
    ((34, 1), 576, 512, True, None),
    ((3, 1), 288, 256, True, "fp8_e4m3"),
    ((4, 2), 40, 32, True, None),
    ((2, 1), 72, 48, True, "int8"),
    ((4, 2), 192, 128, False, "fp8_e4m3"),
    ((2, 2), 24, 16, False, None),
    ((2, 1), 512, 512, False, None),
]


@pytest.mark.parametrize(("heads", "key_size", "value_size", "value_in_key", "quantization"), WIDE)
def test_keys_and_values_of_two_sizes(
    heads: tuple[int, int], key_size: int, value_size: int, value_in_key: bool, quantization: str | None
) -> None:
    """In items of a step and from partials, which are merged."""
    batch = make_batch(
        "triton",
        [(1, 70), (3, 33)],
        heads=heads,
        head_size=key_size,
        value_size=value_size,
        value_in_key=value_in_key,
        quantization=quantization,
    )
    out = batch.attend()
    assert out.shape == (4, heads[0], value_size)
    assert_close(out, batch.reference(), factor=1.0 if quantization is None else 2.0)


def test_wide_values_are_refused() -> None:
    with pytest.raises(ValueError, match="values of up to 512 elements, not of 576"):
        make_batch("triton", [(1, 8)], heads=(1, 1), head_size=576)


@pytest.mark.parametrize(
    "features",
    [
        {"window": 20},
        {"window": 1},
        {"softcap": 2.0},
        {"sinks": torch.linspace(-2, 4, 4)},
        {"window": 70, "softcap": 5.0, "sinks": torch.linspace(-2, 4, 4)},
    ],
)
def test_features(features: dict[str, Any]) -> None:
    batch = make_batch("triton", MIXED, heads=(4, 2), head_size=32)
    assert_close(batch.attend(**features), batch.reference(**features))


@pytest.mark.parametrize("quantization", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("size", [2.0**-40, 2.0**40])
def test_quantized_caches_of_many_magnitudes(quantization: str, size: float) -> None:
    """Queries beyond float16's range; values of tokens that differ by 2 ** 20, and one that is zero."""
    batch = make_batch(
        "triton",
        [(1, 70), (6, 40)],
        heads=(4, 2),
        head_size=32,
        dtype=torch.bfloat16,
        quantization=quantization,
    )
    batch.query, batch.scale = batch.query * size, batch.scale / size
    assert batch.kv.value_scale is not None
    batch.kv.value_scale.mul_(torch.exp2(-20 * torch.rand(batch.kv.value_scale.shape)))
    block = int(batch.block_tables[0][1])
    batch.kv.value[0][:, block, 3], batch.kv.value_scale[0][:, block, 3] = 0, 1.0
    expected = batch.reference()
    error = (batch.attend().double() - expected).abs().max()
    # Half of what bfloat16's weights would leave; results are rounded to it.
    assert error <= 6e-3 * expected.abs().max()


@pytest.mark.parametrize("quantization", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", by_day([torch.float32, torch.bfloat16, torch.float16], torch.bfloat16))
def test_quantized(quantization: str, dtype: torch.dtype) -> None:
    batch = make_batch(
        "triton", [(1, 70), (6, 40)], heads=(4, 2), head_size=32, dtype=dtype, quantization=quantization
    )
    assert_close(batch.attend(), batch.reference(), factor=2.0)


@settings(max_examples=examples(4), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 150)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 2)]),
    block_size=st.sampled_from([8, 16, 32, 64]),
    window=st.sampled_from([None, 1, 9, 64]),
    deterministic=st.booleans(),
    seed=st.integers(0, 5),
)
def test_random_batches(lengths, heads, block_size, window, deterministic, seed) -> None:  # type: ignore[no-untyped-def]
    shared = {1: (0, min(lengths[0][1], lengths[1][1]) // block_size)} if len(lengths) > 1 else None
    batch = make_batch(
        "triton",
        [(n, n + cached) for n, cached in lengths],
        heads=heads,
        head_size=16,
        block_size=block_size,
        seed=seed,
        deterministic=deterministic,
        shared=shared,
    )
    if batch.query.shape[0]:
        assert_close(batch.attend(window=window), batch.reference(window=window))


# Four requests share 9 blocks, two of them 14: two depths; one outsider, one chunk on a shared prefix.
SHARED = {1: (0, 9), 2: (0, 14), 3: (0, 9), 5: (0, 9)}
DECODES = [(1, 230), (2, 200), (1, 226), (1, 170), (1, 150), (12, 180)]


@pytest.mark.parametrize(
    "features",
    [
        {},
        *(
            pytest.param(x, marks=pytest.mark.nightly)
            for x in ({"window": 100}, {"sinks": torch.linspace(-1, 2, 4)})
        ),
    ],
)
def test_shared_equals_plain_and_batch_order(features: dict[str, Any]) -> None:
    batch = make_batch("triton", DECODES, heads=(4, 1), head_size=16, shared=SHARED, deterministic=True)
    shared, plain = sharing(batch, True), sharing(batch, False)
    plan = shared.plan(batch.query_starts, batch.context_lengths, batch.block_tables)
    assert plan.work(features.get("window")).num_groups > 1
    result = batch.attend(shared, **features)
    assert torch.equal(result, batch.attend(plain, **features))
    order = [3, 5, 0, 4]
    part = batch.rows(order)
    reordered = part.attend(shared, **features)
    for i, r in enumerate(order):
        mine = reordered[part.query_starts[i] : part.query_starts[i + 1]]
        assert torch.equal(mine, result[batch.query_starts[r] : batch.query_starts[r + 1]])


def test_the_rows_of_a_draft_are_those_of_single_decodes() -> None:
    """1 + k rows of a speculative step, 2 and 9: each has the bits it would have as a decode of its own."""
    wanted = [(rows, 40 + 17 * rows) for rows in (2, 9)]
    batch = make_batch("triton", wanted, heads=(4, 2), head_size=16, deterministic=True)
    together = batch.attend()
    assert_close(together, batch.reference())
    for r, (rows, length) in enumerate(wanted):
        for row in (0, rows - 1):
            at = length - rows + row
            alone = batch.chunk(r, at, at + 1).attend()
            assert torch.equal(alone[0], together[int(batch.query_starts[r]) + row]), (rows, row)


@pytest.mark.parametrize(
    ("heads", "window"), by_day([((4, 2), 30), ((3, 1), None), ((4, 1), None)], ((4, 2), 30), ((3, 1), None))
)
def test_drafts_of_any_length_beside_each_other(heads: tuple[int, int], window: int | None) -> None:
    """1 to 8 rows: tokens of groups of 2 to 4 heads fill tiles that they don't divide."""
    wanted = [(rows, 9 * rows + 31) for rows in (3, 8, 1, 5)]
    batch = make_batch("triton", wanted, heads=heads, head_size=16, deterministic=True)
    together = batch.attend(window=window)
    assert_close(together, batch.reference(window=window))
    for r, (rows, length) in enumerate(wanted):
        at = length - 1 - rows // 2  # from the middle
        alone = batch.chunk(r, at, at + 1).attend(window=window)
        row = int(batch.query_starts[r]) + rows - 1 - rows // 2
        assert torch.equal(alone[0], together[row]), (rows, heads)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.nightly), 50])
def test_cold_equals_hit(window: int | None) -> None:
    batch = make_batch("triton", [(150, 150)], heads=(2, 1), head_size=16, deterministic=True)
    cold = batch.attend(window=window)
    assert_close(cold, batch.reference(window=window))
    for cut in (63,) if examples(1) == 1 else (1, 63, 64, 112):
        assert torch.equal(batch.chunk(0, cut, 150).attend(window=window), cold[cut:]), f"cut at {cut}"
    for size in (41,) if examples(1) == 1 else (41, 64):
        for first in range(0, 150, size):
            end = min(first + size, 150)
            part = batch.chunk(0, first, end).attend(window=window)
            assert torch.equal(part, cold[first:end]), (size, first)


def test_split_long_contexts_merge_to_the_same_bits() -> None:
    batch = make_batch("triton", [(1, 290), (3, 270)], heads=(2, 1), head_size=16, deterministic=True)
    results = []
    for parallel in (1, 4, 1000):
        backend = sharing(batch, False)
        backend.settings = dataclasses.replace(backend.settings, parallel=parallel)
        results.append(batch.attend(backend))
        assert len(
            backend.plan(batch.query_starts, batch.context_lengths, batch.block_tables)
            .work(None)
            .merge_tokens
        ) == (0 if parallel == 1 else 4)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_programs_that_share_an_item() -> None:
    """A layer whose features need a smaller tile runs the same plan, on several programs per item."""
    batch = make_batch("triton", DECODES, heads=(3, 1), head_size=16, shared=SHARED, deterministic=True)
    config = batch.backend.config
    assert torch.equal(batch.attend(TritonBackend(config, HalvedTiling(config))), batch.attend())


def test_padding_rows_are_untouched() -> None:
    batch = make_batch("triton", MIXED, heads=(2, 1), head_size=16)
    total = batch.query.shape[0]
    batch.query = torch.cat([batch.query, torch.full((3, 2, 16), float("nan"))])
    out = torch.full_like(batch.query, 7.0)
    batch.attend(out=out)
    assert (out[total:] == 7.0).all()
    assert not out[:total].isnan().any()
    assert (batch.attend()[total:] == 0).all()


def test_plans_do_not_disturb_each_other() -> None:
    batch = make_batch("triton", MIXED, heads=(2, 1), head_size=16)
    first = batch.backend.plan(batch.query_starts, batch.context_lengths, batch.block_tables)
    expected = batch.backend.attend(batch.kv, 0, batch.query, first, scale=batch.scale)
    part = batch.rows([1])
    part.attend()
    again = batch.backend.attend(batch.kv, 0, batch.query, first, scale=batch.scale)
    assert torch.equal(expected, again)


class Recorder:
    """Stands in for a kernel: launches it, and keeps the launches, as a CUDA graph would."""

    def __init__(self, kernel: Any, log: list[Any]) -> None:
        self.kernel, self.log = kernel, log

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.log.append(lambda: self.kernel[grid](*args, **kwargs))
            self.log[-1]()

        return launch


@pytest.mark.parametrize("rows", [pytest.param(0, marks=pytest.mark.nightly), 6])
def test_recorded_launches_replay_with_other_plans(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """What a CUDA graph does: the launches of one step, untouched by the host, run later steps as well.

    Padded to a number of rows, they run all steps of as many, whatever their contexts are.
    """
    decodes = [(1, 230), (1, 200), (1, 226), (1, 170), (1, 150)]
    shared = {1: (0, 9), 3: (0, 9), 4: (2, 8)}
    batch = make_batch("triton", decodes, heads=(4, 1), head_size=16, shared=shared)
    backend, log = batch.backend, []
    lengths, order = batch.context_lengths, np.arange(5)
    tables = batch.block_tables
    plan = backend.plan(batch.query_starts, lengths, tables)
    out = torch.zeros(6, 4, 16)
    query = torch.cat([batch.query, batch.query[:1]])
    with monkeypatch.context() as patch:
        for module, name in ((unified_attention, "attention_kernel"), (merge, "merge_kernel")):
            patch.setattr(module, name, Recorder(getattr(module, name), log))
        if rows:
            backend.pad(plan, [None], rows, every_kernel=True)
        backend.stage(plan, [None])
        key = backend.launch_key(plan, [None])
        backend.attend(batch.kv, 0, query, plan, scale=batch.scale, out=out)
    assert len(log) >= 2
    replays = 0
    for count, shorter in ((5, 3), (5, 17), (4, 0), (5, 60), (5, 0)):
        order = np.random.default_rng(shorter).permutation(5)[:count]
        other = backend.plan(
            np.arange(count + 1, dtype=np.int32), lengths[order] - shorter, [tables[r] for r in order]
        )
        if rows:
            backend.pad(other, [None], rows, every_kernel=True)
        backend.stage(other, [None])
        if backend.launch_key(other, [None]) != key:
            continue
        replays += 1
        query[:count] = batch.query[order]
        out.fill_(7.0)
        for launch in log:
            launch()
        expected = backend.attend(batch.kv, 0, query[:count], other, scale=batch.scale)
        assert torch.equal(out[:count], expected)
        assert (out[count:] == 7.0).all()
    assert replays == 5 if rows else replays >= 2


def test_partials_loaded_ahead_change_no_bit() -> None:
    """Merges in rounds of one partial, of many heads a program, and as a GPU has them: of 16, one head."""
    heads, size, counts = 6, 20, (1, 3, 16, 21)
    draw = torch.Generator().manual_seed(0)
    ends = np.concatenate([[0], np.cumsum(counts)])
    places = np.random.default_rng(0).permutation(ends[-1])
    header = np.zeros(16, np.int32)
    header[[2, 5, 8, 9]] = len(counts), 16, 16 + len(counts), 17 + 2 * len(counts)
    blob = torch.from_numpy(np.concatenate([header, [2, 0, 3, 1], ends, places]).astype(np.int32))
    rows = torch.randn(ends[-1], heads, size, generator=draw)
    stats = torch.rand(ends[-1], heads, 2, generator=draw) + 0.1
    stats[places[2], 0, 0], stats[places[2], 0, 1], rows[places[2], 0] = float("-inf"), 0, 0  # saw nothing
    sinks, results = torch.randn(heads, generator=draw), []
    for is_interpreted in (True, False):
        constants = merge.merge_constants(heads, 32, is_interpreted=is_interpreted)
        results.append(torch.zeros(4, heads, size))
        grid = len(counts) + 2, heads // constants["BH"]
        merge.merge_kernel[grid](
            results[-1], rows, stats, blob, sinks, V=size, SINKS=True, EARLY=False, **constants
        )
    assert torch.equal(*results)
    for row, begin, end in zip((2, 0, 3, 1), ends, ends[1:], strict=False):
        own = places[begin:end]
        weights = stats[own, :, 0].double().exp2()
        total = (weights * stats[own, :, 1]).sum(0) + sinks.double().exp()
        expected = (weights[..., None] * rows[own]).sum(0) / total[:, None]
        torch.testing.assert_close(results[0][row].double(), expected, atol=1e-6, rtol=1e-5)


def test_padded_steps_have_two_keys_for_each_number_of_rows() -> None:
    """With the kernel for chunks and shared prefixes and without it, whatever the contexts are."""
    rng = np.random.default_rng(3)
    keys: dict[bool, set[Any]] = {False: set(), True: set()}
    batch = make_batch("triton", [(1, 230)] * 6, heads=(4, 1), head_size=16)
    for _ in range(60):
        requests = int(rng.integers(1, 7))
        lengths = np.where(rng.random(requests) < 0.3, rng.integers(1, 40, requests), 1)
        contexts = rng.integers(40, 230, requests)
        plan = batch.backend.plan(
            np.concatenate([[0], lengths.cumsum()]).astype(np.int32),
            contexts.astype(np.int32),
            [batch.block_tables[r] for r in rng.permutation(6)[:requests]],
        )
        batch.backend.pad(plan, [None, 64], 256, every_kernel=False)
        key = batch.backend.launch_key(plan, [None, 64])
        assert key == batch.backend.launch_key(plan, [64, None])
        keys[bool(len(plan.work(None).long_items) or len(plan.work(64).long_items))].add(key)
    assert [len(own) for own in keys.values()] == [1, 1]


@pytest.mark.parametrize("quantization", [None, "int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("use_rows", "heads", "head_size"), [(False, 3, 24), (True, 3, 24), (False, 1, 256)])
def test_write(
    quantization: str | None, dtype: torch.dtype, use_rows: bool, heads: int, head_size: int
) -> None:
    spec = KVSpec(2, 4, 8, heads, head_size, dtype, torch.device("cpu"), quantization)
    kv = PagedKV(spec)
    fill_nan(kv)
    backend = make_backend(
        "triton",
        num_query_heads=heads,
        spec=spec,
        compute_dtype=dtype,
        max_num_tokens=16,
        max_num_seqs=4,
        max_model_len=64,
    )
    fused = torch.randn(4, 2, heads, head_size).to(dtype)
    fused[3, 0, -1] = 0.0
    key, value = fused[:, 0], fused[:, 1]
    slots = torch.tensor([3, -1, 30, 9])
    rows = torch.tensor([2, 0, 2, 3]) if use_rows else None
    backend.write(kv, 1, key, value, slots, rows)
    written = {3: 2, 30: 2, 9: 3} if use_rows else {3: 0, 30: 2, 9: 3}
    for tensor, scales, new in ((kv.key, kv.key_scale, key), (kv.value, kv.value_scale, value)):
        for slot, row in written.items():
            stored = tensor[1].flatten(1, 2)[:, slot]
            if quantization is None:
                assert torch.equal(stored, new[row])
            else:
                data, scale = quantize(new[row], quantization)
                assert torch.equal(stored.view(torch.uint8), data.view(torch.uint8))
                assert scales is not None
                assert torch.equal(scales[1].flatten(1)[:, slot], scale)
    k, _ = kv.read(1, np.arange(4, dtype=np.int32), 32)
    untouched = [s for s in range(32) if s not in written]
    assert k[untouched].isnan().all()
    assert kv.read(0, np.arange(4, dtype=np.int32), 32)[0].isnan().all()


@pytest.mark.parametrize(("value_size", "value_in_key"), [(8, False), (16, True)])
def test_write_values_of_another_size(value_size: int, value_in_key: bool) -> None:
    spec = KVSpec(
        *(1, 2, 8, 2, 24, torch.float32, torch.device("cpu")),
        value_size=value_size,
        value_in_key=value_in_key,
    )
    kv = PagedKV(spec)
    fill_nan(kv)
    limits = {"max_num_tokens": 16, "max_num_seqs": 4, "max_model_len": 64}
    backend = make_backend("triton", num_query_heads=2, spec=spec, compute_dtype=torch.float32, **limits)
    key, value = torch.randn(2, 2, 24), torch.randn(2, 2, value_size)
    backend.write(kv, 0, key, key[..., :value_size] if value_in_key else value, torch.tensor([9, 2]))
    for slot, row in ((9, 0), (2, 1)):
        assert torch.equal(kv.key[0].flatten(1, 2)[:, slot], key[row])
        stored = kv.value[0].flatten(1, 2)[:, slot]
        assert torch.equal(stored, key[row, :, :value_size] if value_in_key else value[row])
    assert kv.key[0].flatten(1, 2)[:, [0, 1, 3, 15]].isnan().all()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_copy_blocks(quantization: str | None) -> None:
    batch = make_batch(
        "triton", [(1, 64), (1, 64)], heads=(2, 2), head_size=24, block_size=32, quantization=quantization
    )
    first, second = (t.tolist() for t in batch.block_tables)
    for copies in (
        [(first[0], second[0], 32), (first[1], second[1], 5)],
        [(first[0], second[1], 32), (second[1], first[0], 32)],
    ):
        before = [t.clone() for t in batch.kv.tensors()]
        batch.backend.copy_blocks(batch.kv, copies)
        for old, new in zip(before, batch.kv.tensors(), strict=True):
            for source, target, count in copies:
                assert torch.equal(new[0, :, target, :count], old[0, :, source, :count])
                torch.testing.assert_close(
                    new[0, :, target, count:], old[0, :, target, count:], equal_nan=True, rtol=0, atol=0
                )


def test_addresses_beyond_two_to_the_31() -> None:
    """The last block of a cache of more than 2^31 elements per layer; only the pages touched take memory."""
    spec = KVSpec(1, 1 << 20, 16, 1, 256, torch.float16, torch.device("cpu"))
    kv = PagedKV(spec)
    assert kv.key.numel() > 2**31
    backend = make_backend(
        "triton",
        num_query_heads=1,
        spec=spec,
        compute_dtype=torch.float16,
        max_num_tokens=8,
        max_num_seqs=1,
        max_model_len=64,
    )
    table = np.array([spec.num_blocks - 1], np.int32)
    key, value = torch.randn(9, 1, 256).half(), torch.randn(9, 1, 256).half()
    slots = torch.arange(9) + (spec.num_blocks - 1) * 16
    backend.write(kv, 0, key, value, slots)
    query = torch.randn(1, 1, 256).half()
    plan = backend.plan(np.array([0, 1]), np.array([9]), [table])
    weights = (query[0, 0].double() @ key[:, 0].double().T / 16).softmax(0)
    result = backend.attend(kv, 0, query, plan, scale=1 / 16)
    assert_close(result[0, 0], weights @ value[:, 0].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lengths",
    [
        [(40, 40)],
        [(40, 110)],
        [(1, 130), (40, 70), (0, 40), (1, 1), (50, 50), (5, 129)],
        [(33, 100), (1, 9), (1, 12)],
    ],
)
def test_long_chunks_by_torchs_attention(lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """First chunks, chunks behind a prefix, other rows before, between and after them."""
    batch = make_batch("triton", lengths, heads=(4, 2), head_size=32, dtype=dtype)
    batch.backend = TritonBackend(batch.backend.config, long_rows=32)
    plan = batch.backend.plan(batch.query_starts, batch.context_lengths, batch.block_tables)
    assert plan.long_chunks is not None
    assert len(plan.long_chunks.chunks) == sum(rows >= 32 for rows, _ in lengths)
    assert_close(batch.attend(), batch.reference())
    # Layers with other scores have the kernel, in the same step.
    for features in ({"window": 24}, {"softcap": 5.0}, {"sinks": torch.randn(4)}):
        assert_close(batch.attend(**features), batch.reference(**features))
    assert_close(batch.attend(), batch.reference())


def test_values_narrower_than_keys_in_long_chunks() -> None:
    batch = make_batch("triton", [(40, 70), (1, 5)], heads=(4, 2), head_size=48, value_size=32)
    batch.backend = TritonBackend(batch.backend.config, long_rows=32)
    assert_close(batch.attend(), batch.reference())


@pytest.mark.parametrize(
    ("window", "options"),
    [
        (None, {}),
        (24, {}),
        pytest.param(50, {"quantization": "int8"}, marks=pytest.mark.nightly),
        pytest.param(24, {"deterministic": True}, marks=pytest.mark.nightly),
    ],
)
def test_tokens_that_see_each_other(window: int | None, options: dict[str, Any]) -> None:
    lengths = [(1, 130), (40, 70), (5, 129), (30, 100)]
    causal = make_batch("triton", lengths, heads=(4, 2), head_size=32, **options)
    spans = [(1, 45, 66), (2, 127, 129), (3, 60, 100)]
    batch = causal.see_each_other(*spans)
    assert_close(batch.attend(window=window), batch.reference(window=window))
    some = causal.see_each_other(*spans, in_windows_only=True)
    assert torch.equal(some.attend(window=24), causal.see_each_other(*spans).attend(window=24))
    assert torch.equal(some.attend(), causal.attend())


def test_tokens_that_see_each_other_have_the_same_bits_in_any_chunk() -> None:
    batch = make_batch("triton", [(150, 150)], heads=(2, 1), head_size=16, deterministic=True)
    batch = batch.see_each_other((0, 40, 90))
    whole = batch.attend(window=50)
    assert_close(whole, batch.reference(window=50))
    for first, end in ((0, 90), (70, 90), (89, 120)):
        assert torch.equal(batch.chunk(0, first, end).attend(window=50), whole[first:end]), (first, end)


def test_long_chunks_whose_tokens_see_each_other_are_the_kernels() -> None:
    batch = make_batch("triton", [(40, 70), (1, 9), (50, 50)], heads=(4, 2), head_size=32)
    batch.backend = TritonBackend(batch.backend.config, long_rows=32)
    for in_windows_only in (False, True):
        own = batch.see_each_other((0, 40, 60), in_windows_only=in_windows_only)
        plan = batch.backend.plan(own.query_starts, own.context_lengths, own.block_tables, own.ahead)
        assert plan.long_chunks is not None
        assert len(plan.long_chunks.chunks) == 1 + in_windows_only
        assert_close(own.attend(), own.reference())
        assert_close(own.attend(window=24), own.reference(window=24))


@pytest.mark.parametrize("options", [{"deterministic": True}, {"quantization": "int8"}])
def test_the_kernel_keeps_long_chunks(options: dict[str, Any]) -> None:
    batch = make_batch("triton", [(40, 70)], heads=(4, 2), head_size=32, **options)
    batch.backend = TritonBackend(batch.backend.config, long_rows=32)
    plan = batch.backend.plan(batch.query_starts, batch.context_lengths, batch.block_tables)
    assert plan.long_chunks is None
    assert batch.backend.scratch_bytes == 0


def _of_a_missing_kernel(query: torch.Tensor, *_: Any) -> torch.Tensor:
    raise NotImplementedError("no kernel for this device")


def _from_the_first_key(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """A mask that begins at the first key, not at the chunk's."""
    return causal_attention(query, key[:, : len(query)], value[:, : len(query)], scale)


@pytest.mark.parametrize(
    ("attention", "fault"),
    [(_of_a_missing_kernel, "NotImplementedError: no kernel"), (_from_the_first_key, "its trial is")],
)
def test_the_kernel_takes_long_chunks_where_torchs_attention_is_not_right(
    attention: CausalAttention, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = make_batch("triton", [(40, 70), (1, 5)], heads=(6, 2), head_size=32)
    for _ in range(2):  # tried and said once
        batch.backend = TritonBackend(batch.backend.config, long_rows=32, long_attention=attention)
    [line] = caplog.messages
    assert "6:2 heads of 32" in line
    assert fault in line
    plan = batch.backend.plan(batch.query_starts, batch.context_lengths, batch.block_tables)
    assert plan.long_chunks is None
    assert batch.backend.scratch_bytes == 0
    assert_close(batch.attend(), batch.reference())


def test_torchs_function_for_a_gpu_takes_our_arguments() -> None:
    """On the meta device, which computes shapes alone."""
    query = torch.empty(40, 8, 64, device="meta", dtype=torch.bfloat16)
    key, value = (torch.empty(2, 70, size, device="meta", dtype=torch.bfloat16) for size in (64, 48))
    out = causal_attention(query, key, value, 0.1)
    assert out.shape == (40, 8, 48)
    assert out.dtype == torch.bfloat16


def test_buckets() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 100)] == [
        0,
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        12,
        12,
        16,
        128,
    ]
    assert all(n <= bucket(n) <= max(1, n * 3 // 2) for n in range(1, 3000))
