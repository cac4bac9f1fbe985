# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of a layer's routed experts: no sort, no wait for the device, padding computes nothing.

    list_pairs_kernel  each expert's (row, choice) pairs, in order
    experts_kernel     gates and ups with the activation; then the last product, times the route's weight
    combine_kernel     each row's choices summed up in their order, and a shared expert's result

An expert's rows are taken in tiles of `TILE_ROWS`. A row's sums go over its inputs in one order, whatever
tile it is in and beside whatever rows: its bits depend on itself only.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from radixkv_kernels.triton.gated import ACTIVATIONS, activate
from radixkv_kernels.triton.tiled_weight import FIXED_ROWS, TiledWeight
from radixkv_kernels.triton.weight_tiles import multiply_tile

#: Rows of a tile, a fixed number: other tiles may have other instructions, and so other bits.
TILE_ROWS = FIXED_ROWS
#: Rows that are computed at a time, at most: their gates and results take memory.
MAX_ROWS = 512
#: Programs that share an expert's tiles of rows, at most.
_MAX_PARTS = 4
#: Choices of rows that a program looks at together.
_LISTED = 1024
#: gpt-oss: both are clamped, the gate is gate * sigmoid(alpha * gate), and one is added to the up.
CLAMPED = 3


@dataclass(frozen=True)
class Gate:
    """Function of gates and ups.

    Attributes:
        activation: one of `ACTIVATIONS`, or "clamped".
        alternate: gates and ups are outputs in turns; else all gates come first.
        limit, alpha: of "clamped".
        scales_inputs: a route's weight multiplies its row before the first product, not after the last.
        identities: so many experts behind those with weights give a row back as it is.
    """

    activation: str
    alternate: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    scales_inputs: bool = False
    identities: int = 0

    @property
    def kind(self) -> int:
        return CLAMPED if self.activation == "clamped" else ACTIVATIONS[self.activation]


@triton.jit
def list_pairs_kernel(ids_ptr, lists_ptr, counts_ptr, pairs, capacity, BLOCK: tl.constexpr):
    """Grid (experts): indices of the pairs whose id is the program's, in order, and how many there are."""
    expert = tl.program_id(0)
    count = 0
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        own = (tl.load(ids_ptr + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(own, 0) - 1
        tl.store(lists_ptr + expert * capacity + place, pair, mask=own > 0)
        count += tl.sum(own, 0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def experts_kernel(
    x_ptr,
    lists_ptr,
    counts_ptr,
    w_ptr,
    plane_ptr,
    s_ptr,
    z_ptr,
    super_ptr,
    order_ptr,
    bias_ptr,
    route_ptr,
    out_ptr,
    capacity,
    limit,
    alpha,
    CHOICES: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    KIND: tl.constexpr,
    ALTERNATE: tl.constexpr,
    FORM: tl.constexpr,
    ROUTED: tl.constexpr,
):
    """Grid (ceil(N / BN), experts, parts). Gated (KIND >= 0): out [pairs, N], x by row, weights of 2 N
    outputs. Else out float32 [pairs, N] = weights x_pair + bias. ROUTED: times the route's weight, the
    product or, gated, gates and ups."""
    GATED: tl.constexpr = KIND >= 0
    expert = tl.program_id(1)
    count = tl.load(counts_ptr + expert)
    tiles = tl.cdiv(count, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    first = 2 * n if GATED and ALTERNATE else n
    second = 2 * n + 1 if ALTERNATE else n + N
    far = expert.to(tl.int64)
    w = (
        w_ptr + far * FORM.experts[0],
        plane_ptr + far * FORM.experts[1],
        s_ptr + far * FORM.experts[2],
        z_ptr + far * FORM.experts[3],
        super_ptr + far * FORM.experts[4],
        order_ptr + far * FORM.experts[5],
        bias_ptr + far * FORM.experts[6],
    )
    for tile in range(tl.program_id(2), tiles, tl.num_programs(2)):
        place = tile * BM + tl.arange(0, BM)
        on = place < count
        pair = tl.load(lists_ptr + expert * capacity + place, mask=on, other=0)
        row = pair // CHOICES if GATED else pair
        acc, up = multiply_tile(x_ptr, row, on, w, first, second, inside, BM, BN, BK, FORM, GATED)
        at = out_ptr + pair.to(tl.int64)[None, :] * N + n[:, None]
        if ROUTED:
            weight = tl.load(route_ptr + pair, mask=on, other=0.0)[None, :]
            acc *= weight
            if GATED:
                up *= weight
        if KIND == 3:
            acc = tl.minimum(acc, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            acc = (up + 1.0) * (acc / (1.0 + tl.exp(-acc * alpha)))
        elif GATED:
            acc = activate(acc, KIND) * up
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & on[None, :])


@triton.jit
def combine_kernel(
    y_ptr, ids_ptr, shared_ptr, gate_ptr, x_ptr, route_ptr, out_ptr, experts, x_stride, multiplier,
    CHOICES: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    IDENTITIES: tl.constexpr,
):  # fmt: skip
    """Grid (rows, ceil(N / BN)): out [T, N] = the sum of a row's choices, and of a shared expert's result,
    times a number. IDENTITIES: as many experts behind the others give the row back."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = n < N
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros((BN,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = row * CHOICES + choice
        expert = tl.load(ids_ptr + pair)
        if (expert >= 0) & (expert < experts):
            total += tl.load(y_ptr + pair * N + n, mask=inside, other=0.0)
        if IDENTITIES:  # noqa: SIM102, a constant
            if (expert >= experts) & (expert < experts + IDENTITIES):
                x = tl.load(x_ptr + row * x_stride + n, mask=inside, other=0.0).to(tl.float32)
                total += (x * tl.load(route_ptr + pair)).to(dtype).to(tl.float32)
    if SHARED:
        added = tl.load(shared_ptr + row * N + n, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            gate = tl.load(gate_ptr + row).to(tl.float32)
            gate = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
            added = (gate * added).to(dtype).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + added
    tl.store(out_ptr + row * N + n, (total * multiplier).to(dtype), mask=inside)


def run_experts(
    states: torch.Tensor,
    ids: torch.Tensor,
    route: torch.Tensor,
    gate_up: TiledWeight,
    down: TiledWeight,
    gate: Gate,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    *,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """Route rows through their experts, whose activation is rounded to the rows' dtype, all else in float32.

    Args:
        states: [T, H], contiguous.
        ids: int32 [T, K], each row's experts; any that does not exist counts for nothing, such as -1.
        route: float32 [T, K], their weights.
        gate_up: [E, 2 I, H]; down: [E, H, I].
        shared: [T, H], added; `shared_gate` [T], whose sigmoid multiplies it before.
        multiplier: of the sum.

    Returns:
        [T, H].
    """
    parts = []
    for start in range(0, len(states), MAX_ROWS):
        own = slice(start, start + MAX_ROWS)
        added, added_gate = (None if each is None else each[own] for each in (shared, shared_gate))
        parts.append(
            _run(states[own], ids[own], route[own], gate_up, down, gate, added, added_gate, multiplier)
        )
    if not parts:
        return states.new_empty(0, down.out_features)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _run(
    states: torch.Tensor,
    ids: torch.Tensor,
    route: torch.Tensor,
    gate_up: TiledWeight,
    down: TiledWeight,
    gate: Gate,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    multiplier: float,
) -> torch.Tensor:
    rows, choices = ids.shape
    experts = gate_up.codes.shape[0]
    lists, counts = list_pairs(ids, experts)
    inner = states.new_empty(rows * choices, down.in_features)
    results = states.new_empty(rows * choices, down.out_features, dtype=torch.float32)
    parts = min(_MAX_PARTS, -(-rows // TILE_ROWS))
    for rows_in, weight, out, kind in ((states, gate_up, inner, gate.kind), (inner, down, results, -1)):
        tile = weight.tile(states.dtype, TILE_ROWS, two=kind >= 0)
        width = out.shape[1]
        experts_kernel[(-(-width // tile["BN"]), experts, parts)](
            rows_in,
            lists,
            counts,
            *weight.arguments(),
            route,
            out,
            rows,
            gate.limit,
            gate.alpha,
            CHOICES=choices,
            N=width,
            KIND=kind,
            ALTERNATE=gate.alternate,
            FORM=weight.form,
            ROUTED=gate.scales_inputs == (kind >= 0),
            **tile,
        )
    extras: Any = {"identities": gate.identities, "multiplier": multiplier}
    return combine(results, ids, experts, states, shared, shared_gate, route, **extras)


def list_pairs(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each expert's pairs: int32 [E, T], as many of each as int32 [E] says."""
    rows, choices = ids.shape
    lists, counts = ids.new_empty(experts, rows), ids.new_empty(experts)
    list_pairs_kernel[(experts,)](
        ids, lists, counts, rows * choices, rows, BLOCK=min(_LISTED, triton.next_power_of_2(rows * choices))
    )
    return lists, counts


def combine(
    results: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    states: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    route: torch.Tensor | None = None,
    *,
    identities: int = 0,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """Sum up a row's choices in their order: float32 [T * K, H] -> [T, H]; see `run_experts` and `Gate`."""
    (rows, choices), width = ids.shape, results.shape[1]
    out = states.new_empty(rows, width)
    block = min(1024, triton.next_power_of_2(width))
    options: dict[str, Any] = {"SHARED": shared is not None, "GATED": shared_gate is not None}
    combine_kernel[(rows, -(-width // block))](
        results,
        ids,
        results if shared is None else shared,
        results if shared_gate is None else shared_gate,
        states,
        results if route is None else route,
        out,
        experts,
        states.stride(0),
        multiplier,
        CHOICES=choices,
        N=width,
        BN=block,
        IDENTITIES=identities,
        num_warps=4,
        enable_fp_fusion=False,
        **options,
    )
    return out
