# SPDX-License-Identifier: Apache-2.0
"""How fast this machine multiplies matrices and reads memory, and how close the model comes to both.

Three parts, one report:

    products   float32 rate of every linear layer's shape at 1 to 512 rows: torch's `F.linear`, and weights
               packed once as radixkv uses them
    memory     bandwidth of reading a buffer that no cache holds
    steps      `ModelRunner` on hand-made batches: a prompt chunk of 512 tokens, decodes at batch 1 and 8

The floor of a step is the time its matrix products take alone, each measured at its own shape with the
faster of the two ways, in a loop over as many weights as the model has layers (so that weights come from
where they come from in the model). Reading the keys and values once at the memory's bandwidth is added. What
a step takes beyond that floor is everything else: norms, rope, attention, Python.

    python -m benchmarks.roofline
    python -m benchmarks.roofline --json benchmarks/results/roofline.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.figures import write_figures
from radixkv.cli.bench.server_process import machine
from radixkv.engine.config import EngineConfig
from radixkv.model.cpu_layers.packed_linear import PackedLinear
from radixkv.model.loading.loader import load_model
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.scheduling.batch import Batch

ROWS = (1, 8, 64, 512)


@dataclass(frozen=True)
class Shape:
    """A linear layer's size, and how many of that size the model has; `on_all_rows` is False for lm_head."""

    inputs: int
    outputs: int
    count: int
    on_all_rows: bool

    @property
    def name(self) -> str:
        return f"{self.count} x [{self.inputs} -> {self.outputs}]"

    def flops(self, rows: int) -> int:
        return 2 * rows * self.inputs * self.outputs * self.count


@dataclass(frozen=True)
class Step:
    """One kind of step: its entries as (tokens already cached, tokens to compute)."""

    name: str
    entries: tuple[tuple[int, int], ...]


STEPS = (
    Step("prefill 512, empty context", ((0, 512),)),
    Step("prefill 512 after 1,024", ((1024, 512),)),
    Step("decode, batch 1, context 256", ((255, 1),)),
    Step("decode, batch 8, context 256", ((255, 1),) * 8),
    Step("decode, batch 8, context 1,550", ((1549, 1),) * 8),
)


def linear_shapes(model: nn.Module) -> list[Shape]:
    """The float32 linear layers of a model, counted by size."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    inner = Counter(
        (layer.in_features, layer.out_features)
        for layer in model.modules()
        if isinstance(layer, nn.Linear) and layer is not head
    )
    shapes = [Shape(inputs, outputs, count, True) for (inputs, outputs), count in inner.items()]
    return [*shapes, Shape(head.in_features, head.out_features, 1, False)]


def median_time(call: Callable[[], object], *, seconds: float = 0.4, least: int = 5) -> float:
    """Median seconds of a call, after one unmeasured."""
    call()
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < ends:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@torch.inference_mode()
def product_times(shape: Shape) -> dict[int, dict[str, float]]:
    """Seconds for all layers of a shape together, per number of rows and way."""
    layers = [nn.Linear(shape.inputs, shape.outputs, bias=False) for _ in range(shape.count)]
    packed = [PackedLinear(layer) for layer in layers]
    times: dict[int, dict[str, float]] = {}
    for rows in ROWS:
        x = torch.randn(rows, shape.inputs)
        times[rows] = {
            "linear": median_time(lambda x=x: [F.linear(x, layer.weight) for layer in layers]),  # type: ignore[misc]
            "packed": median_time(lambda x=x: [layer(x) for layer in packed]),  # type: ignore[misc]
        }
    return times


def memory_bandwidth() -> float:
    """Bytes per second of summing 1 GiB, all threads."""
    buffer = torch.ones(1 << 28)
    return buffer.nbytes / median_time(lambda: buffer.sum(), seconds=2)


def hand_made_batch(step: Step, block_size: int, vocab_size: int) -> Batch:
    """A batch whose requests own blocks one after the other; the last row of each is sampled."""
    source = np.random.default_rng(0)
    counts = np.array([count for _, count in step.entries])
    starts = np.array([cached for cached, _ in step.entries])
    contexts = starts + counts
    blocks = -(-contexts // block_size)
    firsts = np.concatenate([[0], np.cumsum(blocks)[:-1]])
    tables = [np.arange(f, f + n, dtype=np.int32) for f, n in zip(firsts, blocks, strict=True)]
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    owners = np.repeat(np.arange(len(counts)), counts)
    query_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Batch(
        entries=[],
        token_ids=source.integers(0, vocab_size, len(positions), dtype=np.int64),
        positions=positions.astype(np.int64),
        query_starts=query_starts,
        context_lengths=contexts.astype(np.int32),
        block_tables=tables,
        write_slots=(firsts[owners] * block_size + positions).astype(np.int64),
        write_rows=None,
        logit_rows=(query_starts[1:] - 1).astype(np.int64),
        copy_groups=[],
    )


def floor_of(
    step: Step, times: dict[Shape, dict[int, dict[str, float]]], kv_bytes: int, bandwidth: float
) -> float:
    """Seconds that the matrix products and one reading of the step's keys and values take."""
    tokens = sum(count for _, count in step.entries)
    contexts = sum(cached + count for cached, count in step.entries)
    total = contexts * kv_bytes / bandwidth
    for shape, own in times.items():
        total += min(own[tokens if shape.on_all_rows else len(step.entries)].values())
    return total


def measure() -> dict[str, Any]:
    loaded = load_model(EngineConfig())
    shapes = linear_shapes(loaded.model)
    times = {shape: product_times(shape) for shape in shapes}
    bandwidth = memory_bandwidth()
    spec = loaded.attention.layout(1024, 16, loaded.dtype, loaded.device)
    runner = ModelRunner(loaded, spec, StepLimits(512, 8, 4096), backend="cpu")
    kv_bytes = spec.bytes_per_block // spec.block_size
    steps = []
    for step in STEPS:
        batch = hand_made_batch(step, spec.block_size, loaded.vocab_size)
        took = median_time(lambda batch=batch: runner.execute(batch), seconds=4)  # type: ignore[misc]
        floor = floor_of(step, times, kv_bytes, bandwidth)
        flops = sum(
            shape.flops(batch.num_tokens if shape.on_all_rows else len(step.entries)) for shape in shapes
        )
        steps.append(
            {
                "step": step.name,
                "tokens": batch.num_tokens,
                "time_s": took,
                "floor_s": floor,
                "over_floor": took / floor,
                "tokens_per_s": batch.num_tokens / took,
                "product_gflops": flops / took / 1e9,
            }
        )
    return {
        "machine": {**machine(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "memory_gb_per_s": bandwidth / 1e9,
        "weights_packed": any(isinstance(layer, PackedLinear) for layer in loaded.model.modules()),
        "products": [
            {
                "shape": shape.name,
                "rows": rows,
                **{f"{way}_gflops": shape.flops(rows) / taken / 1e9 for way, taken in ways.items()},
            }
            for shape, own in times.items()
            for rows, ways in own.items()
        ],
        "steps": steps,
    }


def show(result: dict[str, Any]) -> None:
    console = Console(width=110)
    table = Table(title="Matrix products, GFLOP/s: F.linear | packed")
    for column in ("layers", *(f"{rows} rows" for rows in ROWS)):
        table.add_column(column, justify="right" if "rows" in column else "left")
    for name in dict.fromkeys(one["shape"] for one in result["products"]):
        own: Sequence[dict[str, Any]] = [one for one in result["products"] if one["shape"] == name]
        table.add_row(name, *(f"{one['linear_gflops']:.0f} | {one['packed_gflops']:.0f}" for one in own))
    console.print(table)
    console.print(f"memory: {result['memory_gb_per_s']:.1f} GB/s; packed: {result['weights_packed']}")
    table = Table(title="Steps of the model")
    for column in ("", "ms", "floor ms", "x floor", "of the floor's rate", "tokens/s", "GFLOP/s"):
        table.add_column(column, justify="right" if column else "left")
    for one in result["steps"]:
        table.add_row(
            one["step"],
            f"{one['time_s'] * 1e3:.1f}",
            f"{one['floor_s'] * 1e3:.1f}",
            f"{one['over_floor']:.2f}",
            f"{1 / one['over_floor']:.0%}",
            f"{one['tokens_per_s']:,.0f}",
            f"{one['product_gflops']:.0f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    result = measure()
    show(result)
    write_figures(args.json, "roofline", result)


if __name__ == "__main__":
    main()
