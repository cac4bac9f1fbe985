# SPDX-License-Identifier: Apache-2.0
"""Checks besides the numbers: large caches, slots, copies, replays; and memory errors."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_numbers import attended, compare, limit
from benchmarks.gpu_parts import Report, Skip
from benchmarks.paged_bench import BLOCK, Bench, Sizes, make_backend
from radixkv_kernels import PagedKV


def edges(sizes: Sizes, report: Report) -> None:
    """Slots that are skipped, copied blocks, a cache of more than 2^31 elements, replayed steps."""
    bench = Bench(sizes, [40, 33])
    skipped_slots(bench, report)
    copied_blocks(bench, report)
    large_cache(sizes, report)
    replays(sizes, report)


def skipped_slots(bench: Bench, report: Report) -> None:
    """Rows with slot -1 are written nowhere."""
    spec, device = bench.kv.spec, bench.kv.spec.device
    before = bench.kv.key.clone()
    rows = torch.randn(2, 3, spec.num_kv_heads, spec.head_size, device=device, dtype=spec.dtype)
    slots = torch.tensor([-1, 5, -1], device=device)
    bench.backend.write(bench.kv, 0, rows[0], rows[1], slots)
    written = before.clone()
    written[0].flatten(1, 2)[:, 5] = rows[0, 1]
    report(check="slot -1 is written nowhere", ok=torch.equal(bench.kv.key, written))


def copied_blocks(bench: Bench, report: Report) -> None:
    """The first slots of a block, and a whole one, in one call."""
    kv = bench.kv
    before = [t.clone() for t in kv.tensors()]
    bench.backend.copy_blocks(kv, [(0, 1, BLOCK), (2, 3, 5)])
    ok = True
    for old, new in zip(before, kv.tensors(), strict=True):
        old[:, :, 1] = old[:, :, 0]
        old[:, :, 3, :5] = old[:, :, 2, :5]
        ok = ok and torch.equal(old, new)
    report(check="copied blocks", ok=ok)


def large_cache(sizes: Sizes, report: Report) -> None:
    """The last blocks of a layer of more than 2^31 elements; on a CPU, pages not touched take no memory."""
    few = Bench(sizes, [18], dtype=torch.float16, heads=(2, 1, 256))
    # 2^19 blocks of 16 tokens of 256 numbers are 2^31.
    total = (1 << 19) + 8
    spec = dataclasses.replace(few.kv.spec, num_blocks=total)
    large, table = PagedKV(spec), np.array([total - 1, total - 5], dtype=np.int32)
    position = np.arange(18)

    def slots(blocks: np.ndarray) -> torch.Tensor:
        places = blocks[position // BLOCK].astype(np.int64) * BLOCK + position % BLOCK
        return torch.as_tensor(places, device=sizes.device)

    key, value = (
        t[0].flatten(1, 2)[:, slots(few.tables[0])].transpose(0, 1) for t in (few.kv.key, few.kv.value)
    )
    backend = make_backend(sizes, dataclasses.replace(few.backend.config, spec=spec))
    backend.write(large, 0, key, value, slots(table))
    plan = backend.plan(few.starts, few.contexts, [table])

    def attend() -> tuple[torch.Tensor, torch.Tensor, float]:
        result = backend.attend(large, 0, few.query, plan, scale=few.scale)
        return result, few.reference(), limit(few)

    compare(sizes, report, f"a layer of {total * BLOCK * 256} elements", attend)


def replays(sizes: Sizes, report: Report) -> None:
    """Logits of replayed steps beside those of eager ones, with other plans between."""
    # These need transformers, which the other checks do without.
    from benchmarks.gpu_graphs import graphs_of
    from benchmarks.gpu_steps import TOY_SHAPES, EngineStep, loaded_model, random_model

    dtype = torch.bfloat16 if sizes.device.type == "cuda" else torch.float32
    loaded = loaded_model(random_model(TOY_SHAPES["toy"], sizes.device, dtype), "toy")
    step = EngineStep(loaded, 4, 200, 0)
    graphs = graphs_of(step.runner)
    for context in (200, 190, 181, 200):
        step.context = context
        step.runner.graphs = None
        eager = step.run().clone()
        step.runner.graphs = graphs
        # Eager, recorded, replayed.
        for _ in range(3):
            replayed = step.run()
        compare(
            *(sizes, report, f"replayed and eager logits at {context}"),
            lambda a=replayed, b=eager: (a, b, 1e-2 if dtype == torch.bfloat16 else 1e-5),
        )
    report(check="steps were replayed", ok=graphs.replayed >= 4, captured=graphs.captured)


def toy(sizes: Sizes, report: Report) -> None:
    """A little of everything that reads or writes memory."""
    toys = Sizes(True, sizes.device)
    bench = Bench(toys, [70, 33], tokens=[1, 5], quantization="int8")
    bench.attend(window=40)()
    bench = Bench(toys, [80 + r for r in range(3)], shared=64)
    compare(toys, report, "shared groups", lambda: attended(bench))
    skipped_slots(bench, report)
    copied_blocks(bench, report)


def sanitized(sizes: Sizes, report: Report) -> None:
    """compute-sanitizer over `toy`; on a CPU, where there is none, `toy` by itself.

    Raises:
        Skip: it is not installed.
    """
    if sizes.device.type == "cpu":
        toy(sizes, report)
        return
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        raise Skip("compute-sanitizer is not installed")
    command = [program, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(
        [*command, "--small", "--part", "toy"], env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("=========")]
    report(
        check="no memory errors",
        ok=result.returncode == 0,
        sanitizer=" ".join(lines[-1:]),
        **({} if result.returncode == 0 else {"trace": (result.stdout + result.stderr)[-3000:]}),
    )
