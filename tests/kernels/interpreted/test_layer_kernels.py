# SPDX-License-Identifier: Apache-2.0
"""The kernels between a layer's products, interpreted: as torch's operators, and near a float64 reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nightly import by_day

from radixkv_kernels import (
    KVSpec,
    LatentRotation,
    Norm,
    PagedKV,
    Pairs,
    QueryGrowth,
    RotaryTurn,
    Rotation,
    make_backend,
)
from radixkv_kernels.interface import AttentionBackend
from radixkv_kernels.triton.gated import gate_rows
from radixkv_kernels.triton.residual_norm import add_and_norm_rows, add_rows, norm_rows

DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)]
#: Largest error against float64, relative to the largest result.
ERRORS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
#: Neighbouring numbers of a type.
CLOSE = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-4},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
}
KINDS = {
    "llama": {},
    "gemma": {"offset": True, "wide": True},
    "olmo": {"wide": True},
    "cohere": {"wide": True, "centered": True},
}


def exact_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x = x.double()
    if norm.centered:
        x = x - x.mean(-1, keepdim=True)
    assert norm.weight is not None
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight.double() + norm.offset)


def assert_near(got: torch.Tensor, wanted: torch.Tensor, factor: float = 1.0) -> None:
    limit = factor * ERRORS[got.dtype] * float(wanted.abs().max())
    assert (got.double() - wanted).abs().max().item() <= limit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    for rows, width in ((3, 96), (1, 64), (2, 515)):
        # Rows of a wider tensor, as a slice has them.
        x = torch.randn(rows, width + 5).to(dtype)[:, :width] * 3
        norm = Norm(torch.randn(width).to(dtype), 1e-5, **KINDS[kind])
        got = norm_rows(x, norm)
        assert_near(got, exact_norm(x, norm))
        # The same but for a rounding here and there, from another order of the sum.
        torch.testing.assert_close(got, norm.apply(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_and_norm(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(1)
    norm, after = (Norm(torch.randn(80).to(dtype), 1e-6, **KINDS[kind]) for _ in range(2))
    states, added = torch.randn(2, 4, 80).to(dtype)
    whole = states.clone()
    got = add_and_norm_rows(whole, added, norm)
    assert torch.equal(whole, states + added)
    torch.testing.assert_close(got, norm.apply(states + added))
    scaled = states.clone()
    add_rows(scaled, added, multiplier=0.25)
    assert torch.equal(scaled, states + added * 0.25)
    normed = states.clone()
    got = add_and_norm_rows(normed, added, norm, multiplier=0.5, after=after)
    sums = states.double() + 0.5 * exact_norm(added, after)
    assert_near(normed, sums, 2.0)
    assert_near(got, exact_norm(normed, norm))
    torch.testing.assert_close(normed, states + after.apply(added) * 0.5)


def test_a_row_is_normed_alike_beside_any_others() -> None:
    torch.manual_seed(2)
    x, norm = torch.randn(7, 200), Norm(torch.randn(200), 1e-5)
    whole = norm_rows(x, norm)
    for r in (0, 3, 6):
        assert torch.equal(norm_rows(x[r : r + 1], norm)[0], whole[r])
    assert norm_rows(x[:0], norm).shape == (0, 200)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_gate(dtype: torch.dtype, activation: str, function: Any) -> None:
    torch.manual_seed(3)
    for rows, width in ((3, 96), (1, 1100)):
        gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
        gate, up = gate_up.chunk(2, dim=-1)
        got = gate_rows(gate_up, activation)
        assert_near(got, function(gate.double()) * up.double(), 2.0)
        torch.testing.assert_close(got, function(gate) * up)


def backend_and_caches(
    heads: tuple[int, int], head_size: int, dtype: torch.dtype, quantization: str | None
) -> tuple[AttentionBackend, PagedKV, PagedKV]:
    spec = KVSpec(2, 8, 8, heads[1], head_size, dtype, torch.device("cpu"), quantization)
    caches = (PagedKV(spec), PagedKV(spec))
    for kv in caches:
        for tensor in kv.tensors():
            tensor.view(torch.uint8).zero_()
    limits = {"max_num_tokens": 64, "max_num_seqs": 4, "max_model_len": 64}
    backend = make_backend("triton", num_query_heads=heads[0], spec=spec, compute_dtype=dtype, **limits)
    return backend, *caches


def rotation_of(tokens: int, turned: int, head_size: int, dtype: torch.dtype, kind: str | None) -> Rotation:
    angles = torch.randn(tokens, turned // 2)
    norms = [None, None]
    if kind is not None:
        norms = [Norm(torch.randn(head_size).to(dtype), 1e-5, **KINDS[kind]) for _ in range(2)]
    return Rotation(RotaryTurn(angles.cos().to(dtype), angles.sin().to(dtype), turned), *norms)


#: Slots of entries and the rows that they take: fewer entries than rows, and rows taken twice or not at all.
WRITES = [
    ([3, -1, 40, 63], None),
    ([1, 9, 17, 33, 2, 50], [0, 0, 3, 4, 2, 1]),
]


@pytest.mark.parametrize("quantization", by_day([None, "int8", "fp8_e4m3", "fp8_e5m2"], None, "int8"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_size", "turned"),
    by_day(
        [((6, 3), 24, 24), ((9, 1), 80, 80), ((4, 2), 16, 8), ((4, 4), 40, 16)],
        ((6, 3), 24, 24),
        ((4, 2), 16, 8),
    ),
)
def test_rotate_and_write_bit_for_bit(
    heads: tuple[int, int], head_size: int, turned: int, dtype: torch.dtype, quantization: str | None
) -> None:
    """Without norms: exactly what torch's operators and the write kernel make of it."""
    torch.manual_seed(4)
    backend, kv, plain = backend_and_caches(heads, head_size, dtype, quantization)
    merged = torch.randn(5, (heads[0] + 2 * heads[1]) * head_size).to(dtype)
    rotation = rotation_of(5, turned, head_size, dtype, None)
    for slots, rows in WRITES:
        where = torch.tensor(slots), None if rows is None else torch.tensor(rows)
        query = backend.rotate_and_write(kv, 1, merged, rotation, *where)
        assert torch.equal(
            query, AttentionBackend.rotate_and_write(backend, plain, 1, merged, rotation, *where)
        )
        for got, one in zip(kv.tensors(), plain.tensors(), strict=True):
            assert torch.equal(got.view(torch.uint8), one.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turned", [32, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_before_they_turn(dtype: torch.dtype, turned: int, kind: str) -> None:
    torch.manual_seed(5)
    backend, kv, _ = backend_and_caches((6, 2), 32, dtype, None)
    merged = torch.randn(3, 10 * 32).to(dtype)
    rotation = rotation_of(3, turned, 32, dtype, kind)
    slots = torch.tensor([5, 60, 17])
    query = backend.rotate_and_write(kv, 0, merged, rotation, slots)
    heads = merged.view(3, 10, 32)
    stored = kv.key[0].flatten(1, 2)[:, slots].transpose(0, 1)
    half = turned // 2
    cosines, sines = (each.double()[:, None, :half] for each in (rotation.turn.cosines, rotation.turn.sines))
    for got, given, norm in (
        (query, heads[:, :6], rotation.query_norm),
        (stored, heads[:, 6:8], rotation.key_norm),
    ):
        assert norm is not None
        x = exact_norm(given, norm)
        first, second = x[..., :half], x[..., half:turned]
        turned_parts = [first * cosines - second * sines, second * cosines + first * sines, x[..., turned:]]
        assert_near(got, torch.cat(turned_parts, -1), 2.0)
        torch.testing.assert_close(got, rotation.turn.apply(norm.apply(given)))
    assert torch.equal(kv.value[0].flatten(1, 2)[:, slots].transpose(0, 1), heads[:, 8:])


#: How a row of the product differs from a plain one, heads of 16 and 4:2 of them.
LAYOUTS: dict[str, dict[str, Any]] = {
    "neighbours": {"pairs": Pairs.NEIGHBOURS, "wide": True},
    "gathered": {"pairs": Pairs.GATHERED},
    "complex": {"pairs": Pairs.NEIGHBOURS, "step": 2},
    "nothing turns": {"turned": 0, "query_norm": (16,), "key_norm": (16,)},
    "gated": {"gated": True, "query_norm": (16,), "key_norm": (16,), "turned": 4},
    "over all heads": {"query_norm": (64,), "key_norm": (32,)},
    "a weight a head": {"query_norm": (4, 16), "key_norm": (2, 16), "centered": True},
    "values are keys": {"shared": True, "key_norm": (16,), "value_norm": None},
    "values normed": {"value_norm": (16,)},
    "turned before norms": {"turns_first": True, "query_norm": (16,), "key_norm": (16,), "turned": 12},
    "neighbours before norms": {
        "turns_first": True, "query_norm": None, "key_norm": (2, 16), "pairs": Pairs.NEIGHBOURS,
    },
    "keys scaled": {"key_factor": 0.37, "key_norm": (16,)},
    "queries grow": {"growth": (0.4, 3.0, 1.0, False), "turned": 0},
    "queries grow by rounded factors": {"growth": (0.4, 3.0, 0.0, True), "query_norm": (16,)},
}  # fmt: skip


@pytest.mark.parametrize("quantization", by_day([None, "int8"], None))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_rows(name: str, dtype: torch.dtype, quantization: str | None) -> None:
    """What torch's operators make of them, to the order of a norm's sum."""
    torch.manual_seed(6)
    options = dict(LAYOUTS[name])
    step, turned = options.pop("step", 1), options.pop("turned", 16)
    centered = options.pop("centered", False)
    angles = torch.randn(5, 8 * step)[:, ::step]
    turn = RotaryTurn(
        *(each.to(dtype)[:, ::step] for each in (angles.cos().repeat_interleave(step, 1),
                                                 angles.sin().repeat_interleave(step, 1))),
        turned, options.pop("pairs", Pairs.HALVES), options.pop("wide", False),
    )  # fmt: skip
    positions = torch.tensor([0, 2, 3, 10, 10_000_000])
    if "growth" in options:
        grows = options.pop("growth")
        options["growth"] = QueryGrowth(positions, *grows)
    for key in ("query_norm", "key_norm", "value_norm"):
        if key in options:
            shape = options[key]
            weight = None if shape is None else torch.randn(shape).to(dtype)
            options[key] = Norm(weight, 1e-6, wide=True, centered=centered)
    backend, kv, plain = backend_and_caches((4, 2), 16, dtype, quantization)
    rotation = Rotation(turn, **options)
    merged = torch.randn(5, rotation.width(4, 2, 16)).to(dtype)
    slots = torch.tensor([3, 9, -1, 40, 63])
    query = backend.rotate_and_write(kv, 1, merged, rotation, slots)
    wanted = AttentionBackend.rotate_and_write(backend, plain, 1, merged, rotation, slots)
    torch.testing.assert_close(query, wanted)
    for got, one in zip(kv.tensors(), plain.tensors(), strict=True):
        limit = {"atol": 1.0, "rtol": 0.0} if got.dtype == torch.int8 else {}
        torch.testing.assert_close(got, one, **limit)
    own = RotaryTurn(turn.cosines[3:4], turn.sines[3:4], turned, turn.pairs, turn.wide)
    if "growth" in options:
        options["growth"] = QueryGrowth(positions[3:4], *grows)
    alone = backend.rotate_and_write(kv, 0, merged[3:4].clone(), Rotation(own, **options), slots[3:4])
    assert torch.equal(alone[0], query[3])


#: Heads, plain and turned elements of a query, of a latent, and pairs that turn; 0: nothing turns.
LATENTS: dict[str, tuple[int, int, int, int, Pairs | None]] = {
    "gathered": (4, 16, 8, 32, Pairs.GATHERED),
    "halves": (20, 24, 16, 28, Pairs.HALVES),
    "neighbours": (3, 8, 8, 24, Pairs.NEIGHBOURS),
    "nothing turns": (5, 8, 8, 20, None),
}


@pytest.mark.parametrize("quantization", by_day([None, "int8", "fp8_e4m3"], None, "int8"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", by_day(LATENTS, "gathered", "halves"))
def test_latents_are_written_and_their_queries_turn(
    name: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """What torch's operators make of them, to the order of a norm's sum; queries bit for bit."""
    torch.manual_seed(8)
    heads, plain, rest, latent, pairs = LATENTS[name]
    value = -(-latent // 8) * 8
    size = -(-max(latent + rest, value) // 8) * 8
    spec = KVSpec(
        2, 8, 8, 1, size, dtype, torch.device("cpu"), quantization, value_size=value, value_in_key=True
    )
    limits = {"max_num_tokens": 64, "max_num_seqs": 4, "max_model_len": 64}
    backend = make_backend("triton", num_query_heads=heads, spec=spec, compute_dtype=dtype, **limits)
    wide = torch.randn(5, heads * (plain + rest) + latent + rest).to(dtype)
    query = wide[:, : heads * (plain + rest)].unflatten(1, (heads, -1))
    latents = wide[:, heads * (plain + rest) :]
    angles = torch.randn(5, rest // 2)
    turned, kind = (0, Pairs.HALVES) if pairs is None else (rest, pairs)
    turn = RotaryTurn(angles.cos().to(dtype), angles.sin().to(dtype), turned, kind)
    rotation = LatentRotation(turn, Norm(torch.randn(latent).to(dtype), 1e-6), latent, rest)
    for slots, rows in WRITES:
        where = torch.tensor(slots), None if rows is None else torch.tensor(rows)
        found, wanted = [], []
        for results, method in (
            (found, backend.write_latents),
            (wanted, partial(AttentionBackend.write_latents, backend)),
        ):
            kv, folded = PagedKV(spec), torch.full((5, heads, size), 7.0, dtype=dtype)
            for tensor in kv.tensors():
                tensor.view(torch.uint8).zero_()
            method(kv, 1, query, folded, latents, rotation, *where)
            results += [folded, *kv.tensors()]
        assert torch.equal(found[0], wanted[0])
        assert (found[0][..., :latent] == 7).all()
        for got, one in zip(found[1:], wanted[1:], strict=True):
            assert got.float().abs().max() > 0
            limit: dict[str, float] = {}
            if got.dtype == torch.int8:
                limit = {"atol": 1.0, "rtol": 0.0}
            elif got.dtype.itemsize == 1:
                limit = {"atol": 1e-3, "rtol": 0.13}
            torch.testing.assert_close(got.float(), one.float(), **(limit or CLOSE[dtype]))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_of_latents_grow(dtype: torch.dtype, rounded: bool) -> None:
    """Folded queries, too, to their last columns."""
    torch.manual_seed(9)
    heads, plain, rest, latent = 3, 8, 8, 72
    spec = KVSpec(1, 8, 8, 1, 80, dtype, torch.device("cpu"), None, value_size=72, value_in_key=True)
    limits = {"max_num_tokens": 64, "max_num_seqs": 4, "max_model_len": 64}
    backend = make_backend("triton", num_query_heads=heads, spec=spec, compute_dtype=dtype, **limits)
    query = torch.randn(4, heads, plain + rest).to(dtype)
    latents, folded = torch.randn(4, latent + rest).to(dtype), torch.randn(4, heads, 80).to(dtype)
    angles = torch.randn(4, rest // 2)
    turn = RotaryTurn(angles.cos().to(dtype), angles.sin().to(dtype), rest, Pairs.GATHERED)
    growth = QueryGrowth(torch.tensor([0, 7, 8, 9000]), 0.5, 8.0, 0.0, rounded)
    norm = Norm(torch.randn(latent).to(dtype), 1e-6)
    rotation = LatentRotation(turn, norm, latent, rest, growth)
    found = []
    for method in (backend.write_latents, partial(AttentionBackend.write_latents, backend)):
        kv, own = PagedKV(spec), folded.clone()
        kv.key.zero_()
        method(kv, 0, query, own, latents, rotation, torch.tensor([3, 9, 40, 63]))
        found.append((own, kv.key))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE[dtype])
    assert torch.equal(found[0][0][:2, :, :latent], folded[:2, :, :latent])
    assert not torch.equal(found[0][0][2:, :, :latent], folded[2:, :, :latent])


def test_two_branches_a_factor_and_a_bias() -> None:
    torch.manual_seed(7)
    states, added, other = torch.randn(3, 4, 80)
    whole, factor = states.clone(), torch.tensor([0.75])
    add_rows(whole, added, other=other, factor=factor)
    assert torch.equal(whole, (states + added + other) * factor)
    norm = Norm(torch.randn(80), 1e-5, wide=True, centered=True, bias=torch.randn(80))
    wanted = F.layer_norm(states, (80,), norm.weight, norm.bias, 1e-5)
    torch.testing.assert_close(norm_rows(states, norm), wanted)
    after = Norm(None, 1e-5)
    got = add_and_norm_rows(states.clone(), added, norm, after=after)
    torch.testing.assert_close(got, norm.apply(states + after.apply(added)))
