# SPDX-License-Identifier: Apache-2.0
"""Kernels of routers and experts, interpreted: near float64, each row on its own, padding untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nightly import by_day
from torch import Tensor

from radixkv_kernels.triton.experts import Gate, run_experts
from radixkv_kernels.triton.router import LOGITS, SIGMOID, SOFTMAX, SPARSE, Routing, route_rows
from radixkv_kernels.triton.tiled_weight import TiledWeight

ROWS, WIDTH, INNER, EXPERTS, CHOICES = 5, 96, 64, 4, 2
#: Largest error against float64, relative to the largest result.
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CLAMPED = Gate("clamped", alternate=True, limit=1.0, alpha=1.702)


def exact_gate(gate_up: Tensor, gate: Gate) -> Tensor:
    first, second = (gate_up[::2], gate_up[1::2]) if gate.alternate else gate_up.chunk(2)
    if gate.activation == "clamped":
        first, second = first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit)
        return (second + 1) * first * torch.sigmoid(first * gate.alpha)
    kind = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    return kind[gate.activation](first) * second


def exact(x: Tensor, ids: Tensor, route: Tensor, gate_up: Any, down: Any, gate: Gate) -> Tensor:
    """Of weights [E, out, in] and biases, in float64 but for the rounding of activations."""
    rows = []
    for row, own, weights in zip(x, ids.tolist(), route.double(), strict=True):
        total = torch.zeros(down[0].shape[1], dtype=torch.float64)
        for expert, weight in zip(own, weights, strict=True):
            if expert < 0:
                continue
            inner = gate_up[0][expert].double() @ row.double()
            if gate_up[1] is not None:
                inner = inner + gate_up[1][expert].double()
            result = down[0][expert].double() @ exact_gate(inner, gate).to(x.dtype).double()
            if down[1] is not None:
                result = result + down[1][expert].double()
            total += weight * result
        rows.append(total)
    return torch.stack(rows)


def stored(form: str, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[TiledWeight, Tensor]:
    """Random weights of experts in a form, and the numbers that they stand for."""
    shape = (EXPERTS, outputs, inputs)
    if form in ("plain", "inputs first"):
        weight = (torch.randn(shape) * 0.1).to(dtype)
        if form == "plain":
            return TiledWeight.plain(weight), weight
        return TiledWeight.plain(weight.transpose(1, 2).contiguous(), inputs_first=True), weight
    if form == "mxfp4":
        codes = torch.randint(0, 16, shape)
        exponents = torch.randint(119, 124, (EXPERTS, outputs, inputs // 32))
        numbers = E2M1[codes] * torch.exp2(exponents - 127.0).repeat_interleave(32, -1)
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        return TiledWeight.mxfp4(packed, exponents.to(torch.uint8)), numbers
    height, width = {"fp8": (32, 32), "int8": (1, inputs), "int4": (1, 32)}[form]
    grid = (EXPERTS, -(-outputs // height), -(-inputs // width))
    scales = torch.rand(grid) * 0.02 + 0.01
    spread = scales.repeat_interleave(height, 1)[:, :outputs].repeat_interleave(width, 2)[..., :inputs]
    if form == "fp8":
        eight = (torch.randn(shape) * 5).to(torch.float8_e4m3fn)
        return TiledWeight.scaled(eight, scales, (height, width)), eight.float() * spread
    if form == "int8":
        whole = torch.randint(-127, 128, shape, dtype=torch.int8)
        return TiledWeight.scaled(whole, scales / 16, (height, width)), whole * spread / 16
    codes = torch.randint(0, 16, shape)
    zeros = torch.randint(0, 16, grid).float()
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    weight = TiledWeight.scaled(packed, scales, (height, width), zeros, packed=True)
    return weight, (codes - zeros.repeat_interleave(width, 2)) * spread


def rows_and_routes(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH).to(dtype)
    route, ids = torch.rand(ROWS, EXPERTS).topk(CHOICES)
    return x, ids.to(torch.int32), route


FORMS = [
    ("plain", "silu", torch.bfloat16),
    ("plain", "gelu_tanh", torch.float32),
    pytest.param("plain", "gelu", torch.float16, marks=pytest.mark.nightly),
    ("inputs first", "clamped", torch.bfloat16),
    ("mxfp4", "clamped", torch.bfloat16),
    ("fp8", "silu", torch.bfloat16),
    pytest.param("int8", "silu", torch.bfloat16, marks=pytest.mark.nightly),
    ("int4", "silu", torch.bfloat16),
]


@pytest.mark.parametrize(("form", "activation", "dtype"), FORMS)
def test_experts(form: str, activation: str, dtype: torch.dtype) -> None:
    """Near float64 in any form of weights; a row alone is the row among others, bit for bit."""
    torch.manual_seed(0)
    gate = CLAMPED if activation == "clamped" else Gate(activation)
    x, ids, route = rows_and_routes(dtype)
    gate_up, gate_numbers = stored(form, 2 * INNER, WIDTH, dtype)
    down, down_numbers = stored(form, WIDTH, INNER, dtype)
    biases: list[Tensor | None] = [None, None]
    if activation == "clamped":
        biases = [torch.randn(EXPERTS, width).to(dtype) * 0.2 for width in (2 * INNER, WIDTH)]
        gate_up = gate_up.with_bias(biases[0])
        down = down.with_bias(biases[1])
    wanted = exact(x, ids, route, (gate_numbers, biases[0]), (down_numbers, biases[1]), gate)
    got = run_experts(x, ids, route, gate_up, down, gate)
    assert got.dtype == dtype
    assert (got.double() - wanted).abs().max().item() <= ERRORS[dtype] * wanted.abs().max().item()
    for row in (0, ROWS - 1):
        own = slice(row, row + 1)
        alone = run_experts(x[own], ids[own], route[own], gate_up, down, gate)
        assert torch.equal(alone[0], got[row])
    shifted = run_experts(x.roll(1, 0), ids.roll(1, 0), route.roll(1, 0), gate_up, down, gate)
    assert torch.equal(shifted.roll(-1, 0), got)


def test_padding_and_experts_of_other_ranks_count_for_nothing() -> None:
    torch.manual_seed(1)
    x, ids, route = rows_and_routes(torch.bfloat16)
    weights = [stored("plain", *sizes, torch.bfloat16)[0] for sizes in ((2 * INNER, WIDTH), (WIDTH, INNER))]
    whole = run_experts(x, ids, route, *weights, Gate("silu"))
    ids[3], ids[1, 0] = -1, EXPERTS
    x[3] = float("nan")
    got = run_experts(x, ids, route, *weights, Gate("silu"))
    assert torch.equal(got[3], torch.zeros(WIDTH, dtype=x.dtype))
    assert torch.equal(got[[0, 2, 4]], whole[[0, 2, 4]])
    assert run_experts(x[:0], ids[:0], route[:0], *weights, Gate("silu")).shape == (0, WIDTH)


def test_many_rows_of_one_expert() -> None:
    """Several tiles of rows, and a shared expert's result with its gate."""
    torch.manual_seed(2)
    rows = 35
    x = torch.randn(rows, WIDTH)
    ids = torch.tensor([[2, 0 if row % 7 else 3] for row in range(rows)], dtype=torch.int32)
    route = torch.rand(rows, CHOICES)
    (gate_up, first), (down, second) = (
        stored("plain", *sizes, torch.float32) for sizes in ((2 * INNER, WIDTH), (WIDTH, INNER))
    )
    shared, gate = torch.randn(rows, WIDTH), torch.randn(rows)
    got = run_experts(x, ids, route, gate_up, down, Gate("silu"), shared, gate)
    wanted = exact(x, ids, route, (first, None), (second, None), Gate("silu"))
    wanted += torch.sigmoid(gate.double())[:, None] * shared.double()
    assert (got.double() - wanted).abs().max().item() <= 4e-6 * wanted.abs().max().item()


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[8, 3\]"):
        TiledWeight.scaled(torch.zeros(1, 8, 24, dtype=torch.int8), torch.ones(1, 8, 2), (1, 8))
    codes = torch.zeros(1, 8, 12, dtype=torch.uint8)
    with pytest.raises(ValueError, match="within a byte"):
        TiledWeight.scaled(codes, torch.ones(1, 8, 8), (1, 3), packed=True)
    with pytest.raises(ValueError, match=r"expected \[8, 2\]"):
        TiledWeight.mxfp4(torch.zeros(1, 8, 24, dtype=torch.uint8), torch.ones(1, 8, 1, dtype=torch.uint8))


def exact_routes(x: Tensor, weight: Tensor, routing: Routing, bias: Any, choice_bias: Any) -> tuple[Any, Any]:
    logits = F.linear(x.float(), weight.float(), bias)
    if routing.rounds_logits:
        logits = logits.to(x.dtype).float()
    if routing.scores == LOGITS:
        top, ids = logits.topk(routing.choices)
        return top.softmax(-1) * routing.factor, ids
    if routing.scores == SPARSE:
        return phi_routes(logits.to(x.dtype), routing)
    scores = logits.softmax(-1) if routing.scores == SOFTMAX else logits.sigmoid()
    choice = scores if choice_bias is None else scores + choice_bias
    if routing.kept_groups < routing.groups:
        groups = choice.unflatten(1, (routing.groups, -1))
        kept = groups.topk(routing.best_of_group).values.sum(-1).topk(routing.kept_groups).indices
        mask = torch.zeros(groups.shape[:2]).scatter(1, kept, 1.0).bool()
        choice = groups.masked_fill(~mask[..., None], float("-inf")).flatten(1)
    ids = choice.topk(routing.choices).indices
    weights = scores.gather(1, ids)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon).clamp_min(routing.least)
    return weights * routing.factor, ids


def phi_routes(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Phi-MoE's: each choice among logits that are near it."""
    weights, ids, left = [], [], logits
    for _ in range(routing.choices):
        top, best = left.max(-1, keepdim=True)
        far = (top - logits) / logits.abs().clamp(min=top) > routing.margin
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, best))
        ids.append(best)
        left = left.scatter(-1, best, float("-inf"))
    return torch.cat(weights, -1).float(), torch.cat(ids, -1)


ROUTINGS = {
    "minimax-m2": (Routing(3, SIGMOID), 12),
    "ernie": (Routing(3, SOFTMAX, rounds_logits=False, rounds_weights=True, least=1e-12), 12),
    "ernie, small sums": (Routing(2, SOFTMAX, rounds_logits=False, least=0.9), 12),
    "phi": (Routing(2, SPARSE, rounds_weights=True, normalised=False, margin=0.02), 16),
    "phi, wide": (Routing(2, SPARSE, rounds_weights=True, normalised=False, margin=0.6), 16),
    "mixtral": (Routing(2, SOFTMAX), 8),
    "qwen": (Routing(3, SOFTMAX, normalised=False, rounds_weights=True), 12),
    "gpt-oss": (Routing(4, LOGITS, rounds_weights=True), 32),
    "deepseek-v2": (
        Routing(3, SOFTMAX, rounds_logits=False, normalised=False, factor=16.0, groups=4, kept_groups=2),
        20,
    ),
    "deepseek-v3": (
        Routing(
            *(4, SIGMOID),
            rounds_logits=False,
            epsilon=1e-20,
            factor=2.5,
            groups=3,
            kept_groups=2,
            best_of_group=2,
        ),
        18,
    ),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_router(name: str, dtype: torch.dtype) -> None:
    """torch's choice and weights; rows alone, too; padding has no experts."""
    torch.manual_seed(3)
    routing, experts = ROUTINGS[name]
    x, weight = torch.randn(ROWS, WIDTH).to(dtype), (torch.randn(experts, WIDTH) * 0.3).to(dtype)
    bias = torch.randn(experts) if name == "gpt-oss" else None
    choice_bias = torch.randn(experts) * 0.3 if name in ("deepseek-v3", "minimax-m2", "ernie") else None
    wanted, wanted_ids = exact_routes(x, weight, routing, bias, choice_bias)
    is_row = torch.ones(ROWS, dtype=torch.int64)
    is_row[2] = 0
    _, weights, ids = route_rows(x, weight, routing, bias, choice_bias, is_row)
    real = is_row.bool()
    assert torch.equal(ids[real].long(), wanted_ids[real])
    assert ids[2].tolist() == [-1] * routing.choices
    tolerance = 1e-2 if routing.rounds_weights and dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(weights[real].float(), wanted[real], rtol=tolerance, atol=tolerance)
    _, alone, alone_ids = route_rows(x[4:], weight, routing, bias, choice_bias)
    assert torch.equal(alone_ids[0], ids[4])
    assert torch.equal(alone[0], weights[4])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns of operations on NaN
@pytest.mark.parametrize("name", by_day(ROUTINGS, "deepseek-v3"))
def test_routers_of_rows_that_are_no_numbers_name_experts_that_exist(name: str) -> None:
    routing, experts = ROUTINGS[name]
    x = torch.full((1, WIDTH), float("nan"))
    _, _, ids = route_rows(x, torch.randn(experts, WIDTH), routing)
    assert 0 <= ids.min().item() <= ids.max().item() < experts
