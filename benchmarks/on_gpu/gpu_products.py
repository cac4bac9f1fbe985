# SPDX-License-Identifier: Apache-2.0
"""Experts and products of stored weights: numbers beside float32, rows alone, and times beside torch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_machine import read_rate
from benchmarks.gpu_parts import Report
from benchmarks.paged_bench import Sizes, milliseconds
from radixkv.model.gpu_layers.products import KINDS, quantized
from radixkv.model.gpu_layers.weight_tiles import tiled
from radixkv.model.stored_weights.block_weight import BlockWeight
from radixkv_kernels.triton.experts import Gate, combine, run_experts
from radixkv_kernels.triton.fp8_rows import round_rows
from radixkv_kernels.triton.gated import gate_rows
from radixkv_kernels.triton.router import SOFTMAX, Routing, route_rows
from radixkv_kernels.triton.scaled_product import ScaledProduct, scaled_product
from radixkv_kernels.triton.stored_product import multiply_stored
from radixkv_kernels.triton.tiled_weight import TiledWeight

#: Name -> experts, choices, hidden size, inner size.
SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880)}
TOY = {"toy": (4, 2, 128, 128)}
FORMS = ("bf16", "fp8", "int4", "mxfp4")
#: Largest error beside float32, relative to the largest result.
_ERROR = 1.5e-2


#: Formats of GGUF files by their number: 8, 4 and 6 bits.
BLOCKS = {"GGUF Q8_0": 8, "GGUF Q4_K": 12, "GGUF Q6_K": 14}
#: Where their blocks have floats: scales, and least values.
_SCALES = {8: (0,), 12: (0, 2), 14: (208,)}
#: Forms of a linear layer's weight: of each output, of 128 x 128 numbers, of groups, and of files' blocks.
LINEAR_FORMS = ("fp8", "int8", "fp8 blocks", "int4", "mxfp4", *BLOCKS)


def each_form(report: Report, name: str, forms: Sequence[str], measure: Callable[[str], None]) -> None:
    """Measure forms one by one; one that fails is a line, and the next one may still tell something."""
    for form in forms:
        try:
            measure(form)
        except ModuleNotFoundError as error:
            report(shape=name, form=form, error=f"the package {error.name} is not installed")
        except Exception as error:
            report(shape=name, form=form, ok=False, error=f"{type(error).__name__}: {str(error)[:400]}")


def numbers(sizes: Sizes, report: Report) -> None:
    """Experts and products of every form beside float32, and a row alone beside it among others."""

    def expert(form: str) -> None:
        for name, shape in (TOY if sizes.small else SHAPES).items():
            made = RandomExperts(form, shape, 3, sizes)
            got = made.run(3)
            error = _deviation(got, made.wanted(3))
            report(shape=name, form=form, error=error, ok=error < _ERROR)
            alone = made.run(1, first=2)
            report(shape=name, form=form, compared="row alone", ok=torch.equal(alone[0], got[2]))

    def product(form: str) -> None:
        for name, (inputs, outputs) in linear_shapes(sizes).items():
            x = random_rows(20, inputs, sizes)
            stored, plain = linear_weight(form, outputs, inputs, sizes.device)
            wanted = x.float() @ plain.float().t()
            error = _deviation(multiply_stored(x, stored), wanted)
            report(shape=name, form=form, error=error, ok=error < _ERROR)
            fixed, alone = (multiply_stored(each, stored, fixed_rows=True) for each in (x, x[7:8]))
            report(shape=name, form=form, compared="row alone", ok=torch.equal(alone[0], fixed[7]))
            scaled = scaled_product(stored)
            if scaled is not None:  # by torch, with rows of 8 bits
                rounded = round_rows(x, scaled.group)
                error = _deviation(scaled.multiply(rounded), scaled.reference(rounded).float())
                report(
                    shape=name, form=form, compared="torch's scaled product", error=error, ok=error < _ERROR
                )

    each_form(report, "experts", FORMS, expert)
    each_form(report, "linear", LINEAR_FORMS, product)


def experts(sizes: Sizes, report: Report) -> None:
    """Every form at every shape: a line of times for each number of rows, beside torch's grouped products."""
    all_rows, read = (3,) if sizes.small else (1, 32, 128, 512), read_rate(sizes)
    for name, shape in (TOY if sizes.small else SHAPES).items():

        def measure(form: str, name: str = name, shape: tuple[int, ...] = shape) -> None:
            made = RandomExperts(form, shape, max(all_rows), sizes)
            for rows in all_rows:
                runs: dict[str, Callable[[], Any]] = {"ms": partial(made.run, rows)}
                if form == "bf16":
                    runs["grouped_mm ms"] = partial(made.grouped, rows)
                    runs["router ms"] = partial(route_rows, made.x[:rows], made.router, made.routing)
                times = milliseconds(runs, sizes)
                rate = made.bytes_of(rows) / times["ms"] * 1e3
                shares = {"TB/s": rate / 1e12, "of the read's": rate / read}
                report(shape=name, form=form, rows=rows, **times, **shares)

        each_form(report, name, FORMS, measure)


def products(sizes: Sizes, report: Report) -> None:
    """A layer's largest products: a line of times for each form and number of rows, beside bfloat16's."""
    all_rows, read = (3,) if sizes.small else (1, 32, 128, 512), read_rate(sizes)
    for name, (inputs, outputs) in linear_shapes(sizes).items():
        x = random_rows(max(all_rows), inputs, sizes)
        plain = (torch.randn(outputs, inputs, device=sizes.device) * 0.05).to(torch.bfloat16)

        def measure(form: str, name: str = name, x: torch.Tensor = x, plain: torch.Tensor = plain) -> None:
            stored, _ = linear_weight(form, plain.shape[0], plain.shape[1], sizes.device)
            scaled = scaled_product(stored)
            for rows in all_rows:
                own = x[:rows]
                runs: dict[str, Callable[[], Any]] = {
                    "ms": partial(multiply_stored, own, stored),
                    "bfloat16 ms": partial(F.linear, own, plain),
                }
                if scaled is not None:
                    runs["torch's ms"] = partial(_multiply_scaled, own, scaled)
                times = milliseconds(runs, sizes)
                rate = stored.nbytes / times["ms"] * 1e3
                shares = {"TB/s": rate / 1e12, "of the read's": rate / read}
                report(shape=name, form=form, rows=rows, **times, **shares)

        each_form(report, name, LINEAR_FORMS, measure)


def linear_shapes(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of Llama-3.1-8B's largest products, by name."""
    if sizes.small:
        return {"toy": (256, 96)}
    return {"gate and up": (4096, 28672), "down": (14336, 4096)}


def random_rows(count: int, width: int, sizes: Sizes) -> torch.Tensor:
    """Rows of bfloat16."""
    torch.manual_seed(0)
    return torch.randn(count, width, device=sizes.device).to(torch.bfloat16)


def linear_weight(
    form: str, outputs: int, inputs: int, device: torch.device
) -> tuple[TiledWeight, torch.Tensor]:
    """A random weight in one of `LINEAR_FORMS`, and the numbers that it stands for [out, in]."""
    torch.manual_seed(1)
    if form in KINDS:
        plain = (torch.randn(outputs, inputs, device=device) * 0.05).to(torch.bfloat16)
        stored = quantized(plain, form, None)
        assert stored.scales is not None
        return stored, stored.codes.float() * stored.scales
    if form in BLOCKS:
        stored = block_tiles(BLOCKS[form], outputs, inputs, device)
        return stored, stored.numbers()
    many, numbers = random_weight(form.removesuffix(" blocks"), 1, outputs, inputs, device)
    return one_of(many), numbers[0]


def block_tiles(number: int, outputs: int, inputs: int, device: torch.device) -> TiledWeight:
    """Random blocks of a GGUF format, as they are read from a file.

    Raises:
        ModuleNotFoundError: gguf is not installed.
    """
    import gguf  # not on every machine with a GPU

    kind = gguf.GGMLQuantizationType(number)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    units = inputs // numbers
    random = torch.randint(0, 256, (outputs, units, size), dtype=torch.uint8)
    # The scales of a block are its only floats: small ones, whatever the codes are.
    halves = torch.full((outputs, units, 1), 2.0**-9, dtype=torch.float16).view(torch.uint8)
    for at in _SCALES[number]:
        random[..., at : at + 2] = halves.view(outputs, units, 2)
    tiles = tiled(BlockWeight(random.view(outputs, -1).to(device), kind))
    assert tiles is not None
    return tiles


@dataclasses.dataclass
class RandomExperts:
    """A layer's experts with random weights, and rows with their routes.

    Args:
        form: one of `FORMS`.
        shape: experts, choices, hidden size, inner size.
        count: rows.
    """

    form: str
    shape: tuple[int, ...]
    count: int
    sizes: Sizes

    def __post_init__(self) -> None:
        experts, choices, hidden, inner = self.shape
        device = self.sizes.device
        self.x = random_rows(self.count, hidden, self.sizes)
        self.router = (torch.randn(experts, hidden, device=device) * 0.05).to(torch.bfloat16)
        self.routing = Routing(choices, SOFTMAX, rounds_weights=True)
        self.gate_up, self._first = random_weight(self.form, experts, 2 * inner, hidden, device)
        self.down, self._second = random_weight(self.form, experts, hidden, inner, device)
        _, weights, self.ids = route_rows(self.x, self.router, self.routing)
        self.weights = weights.float()

    def run(self, rows: int, first: int = 0) -> torch.Tensor:
        """The experts' results of some rows, by the kernels."""
        own = slice(first, first + rows)
        return run_experts(
            self.x[own], self.ids[own], self.weights[own], self.gate_up, self.down, Gate("silu")
        )

    def grouped(self, rows: int) -> torch.Tensor:
        """The same by torch's grouped products."""
        return grouped(self.x[:rows], self.ids[:rows], self.weights[:rows], self._first, self._second)

    def wanted(self, rows: int) -> torch.Tensor:
        """The same in float32."""
        return plain_experts(self.x[:rows], self.ids[:rows], self.weights[:rows], self._first, self._second)

    def bytes_of(self, rows: int) -> int:
        """Bytes of the weights of the experts that some rows chose."""
        return len(self.ids[:rows].unique()) * (self.gate_up.nbytes + self.down.nbytes) // self.shape[0]


def _multiply_scaled(rows: torch.Tensor, scaled: ScaledProduct) -> torch.Tensor:
    return scaled.multiply(round_rows(rows, scaled.group))


def _deviation(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest deviation, relative to the largest result."""
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


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
    return combine(results, ids, len(gate_up), x)
