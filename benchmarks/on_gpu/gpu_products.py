# SPDX-License-Identifier: Apache-2.0
"""Experts and products of stored weights: numbers beside float32, rows alone, then time beside torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_parts import Report
from benchmarks.paged_bench import Sizes, milliseconds
from radixkv.model.gpu_products import KINDS, quantized
from radixkv_kernels.triton.experts import Gate, combine, run_experts
from radixkv_kernels.triton.gated import gate_rows
from radixkv_kernels.triton.router import SOFTMAX, Routing, route_rows
from radixkv_kernels.triton.stored_product import multiply_stored
from radixkv_kernels.triton.tiled_weight import TiledWeight

#: Name -> experts, choices, hidden size, inner size.
SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880)}
TOY = {"toy": (4, 2, 128, 128)}
FORMS = ("bf16", "fp8", "int4", "mxfp4")
#: Largest error beside float32, relative to the largest result.
_ERROR = 1.5e-2


def experts(sizes: Sizes, report: Report) -> None:
    """Every form at every shape: a line of numbers, then a line of times for each number of rows."""
    all_rows = (3,) if sizes.small else (1, 32, 128, 512)
    for name, (count, choices, hidden, inner) in (TOY if sizes.small else SHAPES).items():
        torch.manual_seed(0)
        x = torch.randn(max(all_rows), hidden, device=sizes.device).to(torch.bfloat16)
        router = (torch.randn(count, hidden, device=sizes.device) * 0.05).to(torch.bfloat16)
        routing = Routing(choices, SOFTMAX, rounds_weights=True)
        gate = Gate("silu")
        for form in FORMS:
            try:
                gate_up, first = random_weight(form, count, 2 * inner, hidden, sizes.device)
                down, second = random_weight(form, count, hidden, inner, sizes.device)
                _, weights, ids = route_rows(x, router, routing)
                weights = weights.float()
                some = slice(0, 3)
                got = run_experts(x[some], ids[some], weights[some], gate_up, down, gate)
                wanted = plain_experts(x[some], ids[some], weights[some], first, second)
                error = float((got.float() - wanted).abs().max() / wanted.abs().max())
                alone = run_experts(x[2:3], ids[2:3], weights[2:3], gate_up, down, gate)
                report(shape=name, form=form, error=error, ok=error < _ERROR)
                report(shape=name, form=form, compared="row alone", ok=torch.equal(alone[0], got[2]))
            except Exception as raised:  # the next form may still tell something
                report(shape=name, form=form, ok=False, error=f"{type(raised).__name__}: {str(raised)[:400]}")
                continue
            for rows in all_rows:
                own = x[:rows], ids[:rows], weights[:rows]
                runs: dict[str, Callable[[], Any]] = {"ms": partial(run_experts, *own, gate_up, down, gate)}
                if form == "bf16":
                    runs["grouped_mm ms"] = partial(grouped, *own, first, second)
                    runs["router ms"] = partial(route_rows, own[0], router, routing)
                times = milliseconds(runs, sizes)
                hit = len(ids[:rows].unique())
                moved = hit * (gate_up.codes[0].nbytes + down.codes[0].nbytes)
                report(shape=name, form=form, rows=rows, **times, **{"TB/s": moved / times["ms"] / 1e9})


def products(sizes: Sizes, report: Report) -> None:
    """A layer's largest products, in each form beside bfloat16: a line of numbers, then a line of times."""
    shapes = {"toy": (128, 96)} if sizes.small else {"gate and up": (4096, 28672), "down": (14336, 4096)}
    for name, (inputs, outputs) in shapes.items():
        torch.manual_seed(0)
        x = torch.randn(20 if sizes.small else 512, inputs, device=sizes.device).to(torch.bfloat16)
        plain = (torch.randn(outputs, inputs, device=sizes.device) * 0.05).to(torch.bfloat16)
        for form in ("fp8", "int8", "int4", "mxfp4"):
            try:
                if form in KINDS:
                    stored = quantized(plain, form, None)
                    assert stored.scales is not None
                    numbers = stored.codes.float() * stored.scales
                else:
                    many, all_numbers = random_weight(form, 1, outputs, inputs, sizes.device)
                    stored, numbers = one_of(many), all_numbers[0].float()
                got, wanted = multiply_stored(x[:20], stored), x[:20].float() @ numbers.t()
                error = float((got.float() - wanted).abs().max() / wanted.abs().max())
                report(shape=name, form=form, error=error, ok=error < _ERROR)
                fixed, alone = (multiply_stored(each, stored, fixed_rows=True) for each in (x[:20], x[7:8]))
                report(shape=name, form=form, compared="row alone", ok=torch.equal(alone[0], fixed[7]))
            except Exception as raised:  # the next form may still tell something
                report(shape=name, form=form, ok=False, error=f"{type(raised).__name__}: {str(raised)[:400]}")
                continue
            for rows in (3,) if sizes.small else (1, 32, 128, 512):
                runs: dict[str, Callable[[], Any]] = {
                    "ms": partial(multiply_stored, x[:rows], stored),
                    "bfloat16 ms": partial(F.linear, x[:rows], plain),
                }
                times = milliseconds(runs, sizes)
                rate = stored.codes.nbytes / times["ms"] / 1e9
                report(shape=name, form=form, rows=rows, **times, **{"TB/s": rate})


def one_of(many: TiledWeight) -> TiledWeight:
    """The first expert's weight."""
    scales, zeros = (None if each is None else each[0] for each in (many.scales, many.zeros))
    return dataclasses.replace(many, codes=many.codes[0], scales=scales, zeros=zeros)


def random_weight(
    form: str, count: int, outputs: int, inputs: int, device: torch.device
) -> tuple[TiledWeight, torch.Tensor]:
    """Weights of experts in a form, and the numbers that they stand for in bfloat16 [E, out, in]."""
    shape, bf16 = (count, outputs, inputs), torch.bfloat16
    if form == "bf16":
        weight = torch.randn(shape, device=device, dtype=bf16) * 0.05
        return TiledWeight.plain(weight), weight
    if form == "fp8":
        eight = torch.randn(shape, device=device, dtype=bf16).to(torch.float8_e4m3fn)
        grid = count, -(-outputs // 128), -(-inputs // 128)
        scales = torch.full(grid, 0.05, device=device)
        return TiledWeight.scaled(eight, scales, (128, 128)), (eight.to(bf16).float() * 0.05).to(bf16)
    packed = torch.randint(0, 256, (count, outputs, inputs // 2), device=device, dtype=torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    if form == "int4":
        group = 128 if inputs % 128 == 0 else 32
        grid = count, outputs, inputs // group
        scales, zeros = torch.full(grid, 0.01, device=device), torch.full(grid, 8.0, device=device)
        stored = TiledWeight.scaled(packed, scales, (1, group), zeros, packed=True)
        return stored, ((codes.to(bf16) - 8).float() * 0.01).to(bf16)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device, dtype=bf16)
    table = torch.cat((table, -table)) * 2.0**-6
    exponents = torch.full((count, outputs, inputs // 32), 121, device=device, dtype=torch.uint8)
    return TiledWeight.mxfp4(packed, exponents), table[codes.int()]


def plain_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """In float32, but for the rounding of activations; for a few rows."""
    rows = []
    for row, own, routes in zip(x, ids.tolist(), weights, strict=True):
        total = torch.zeros(down.shape[1], device=x.device)
        for expert, route in zip(own, routes, strict=True):
            first, second = (gate_up[expert].float() @ row.float()).chunk(2)
            inner = (F.silu(first) * second).to(x.dtype).float()
            total += route * (down[expert].float() @ inner)
        rows.append(total)
    return torch.stack(rows)


def grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The same by torch's grouped products of sorted rows."""
    own, order = ids.flatten().sort(stable=True)
    numbers = torch.arange(len(gate_up), dtype=torch.int32, device=x.device)
    ends = torch.searchsorted(own, numbers, right=True, out_int32=True)
    inner = F.grouped_mm(x[order // ids.shape[1]], gate_up.transpose(1, 2), offs=ends)
    outer = F.grouped_mm(gate_rows(inner, "silu"), down.transpose(1, 2), offs=ends)
    results = torch.empty(outer.shape, dtype=torch.float32, device=x.device)
    results[order] = outer * weights.flatten()[order, None]
    return combine(results, ids, len(gate_up), x.dtype)
