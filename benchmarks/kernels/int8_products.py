# SPDX-License-Identifier: Apache-2.0
"""Ways to multiply by int8 weights on this CPU, next to float32: the table behind `--quantization int8`.

Each way multiplies activations that are quantised already, at the shapes of the embedded model's layers, on
one thread, in turns; the clock is the thread's CPU time, so that other programs disturb little. Every layer
has as many weights as the model, so that they come from where they come from in the model.

    python -m benchmarks.int8_products
    python -m benchmarks.int8_products --json benchmarks/results/int8_products.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.figures import write_figures
from radixkv.model.cpu_layers.packed_linear import PackedLinear
from radixkv.model.cpu_layers.quantized_linear import quantize_weight
from radixkv.model.cpu_layers.rewrite import has_int8_products

# (inputs, outputs, layers): q, k and v together; output; gate and up together; down; lm_head.
SHAPES = ((576, 960, 30), (576, 576, 30), (576, 3072, 30), (1536, 576, 30), (576, 49152, 1))
ROWS = (1, 8, 64, 512)
REPEATS = 7
Way = Callable[[int], object]


def own_products(weights: list[tuple[torch.Tensor, torch.Tensor]], inputs: torch.Tensor) -> Way:
    # These need numba.
    from radixkv_kernels.cpu.linear.int8_product import PackedInt8
    from radixkv_kernels.cpu.linear.int8_rows import Int8Rows

    products = [PackedInt8(weight, scales) for weight, scales in weights]
    rows, scales = Int8Rows().quantize(inputs, products[0].row_width)
    out = torch.empty(len(inputs), products[0].out_features)
    return lambda i: products[i].multiply(rows, scales, out)


def onednn_products(weights: list[tuple[torch.Tensor, torch.Tensor]], rows: torch.Tensor) -> Way:
    """oneDNN's: unsigned activations, whose offset would still have to be taken off."""
    shifted = (rows.to(torch.int16) + 128).to(torch.uint8)
    packed = [torch.ops.onednn.qlinear_prepack(weight.contiguous(), None) for weight, _ in weights]
    zeros = torch.zeros(len(weights[0][1]), dtype=torch.int64)
    empty: list[float] = []
    return lambda i: torch.ops.onednn.qlinear_pointwise(
        shifted, 1.0, 0, packed[i], weights[i][1], zeros, None, 1.0, 0, torch.float32, "none", empty, ""
    )


@torch.inference_mode()
def rates(inputs: int, outputs: int, layers: int, rows: int) -> dict[str, float]:
    """Multiplications and additions per second of each way, 1e9."""
    linears = [nn.Linear(inputs, outputs, bias=False) for _ in range(layers)]
    packed = [PackedLinear(linear) for linear in linears]
    weights = [quantize_weight(linear.weight) for linear in linears]
    x = torch.randn(rows, inputs)
    narrow = (x / (x.abs().amax(1, keepdim=True) / 127)).round().to(torch.int8)
    ways: dict[str, Way] = {
        "float32, packed": lambda i: packed[i](x),
        "torch._int_mm": lambda i: torch._int_mm(narrow, weights[i][0].t()),
        "oneDNN int8": onednn_products(weights, narrow),
    }
    if has_int8_products():
        ways["radixkv int8"] = own_products(weights, x)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, way in ways.items():
            started = time.thread_time()
            for i in range(layers):
                way(i)
            if repeat:
                times[name].append(time.thread_time() - started)
    work = 2 * rows * inputs * outputs * layers
    return {name: work / statistics.median(own) / 1e9 for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[dict[str, Any]] = []
    for rows in ROWS:
        for inputs, outputs, layers in SHAPES:
            if outputs < 16384 or rows <= 8:  # only sampled rows reach lm_head
                size = {"rows": rows, "inputs": inputs, "outputs": outputs, "layers": layers}
                figures.append({**size, "gops": rates(inputs, outputs, layers, rows)})
    console = Console(width=110)
    table = Table(title="Products on one thread, GOP/s (activations quantised already)")
    names = list(figures[0]["gops"])
    for column in ("rows", "layer", *names):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for one in figures:
        layer = f"{one['layers']} x [{one['inputs']} -> {one['outputs']}]"
        table.add_row(str(one["rows"]), layer, *(f"{one['gops'][name]:.0f}" for name in names))
    console.print(table)
    write_figures(args.json, "int8_products", {"figures": figures})


if __name__ == "__main__":
    main()
