# SPDX-License-Identifier: Apache-2.0
"""Recorded steps: what recording takes at the start, and what it saves steps with chunks of prompts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.gpu_parts import Report
from benchmarks.paged_bench import BLOCK, Sizes
from radixkv.model.cuda_graphs import StepGraphs, max_padded_rows
from radixkv.model.loading.loader import LoadedModel
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.model.warm_up import idle_batch

#: Runs a step and measures it: milliseconds.
Timer = Callable[[Callable[[], object]], float]


def run_again(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands for CUDA's recording where there is no GPU: a replay runs the step again."""
    result = run().clone()

    def replay() -> None:
        result.copy_(run())

    return replay, result


def graphs_of(runner: ModelRunner) -> StepGraphs:
    """A runner's graphs; where there is no GPU, stand-ins."""
    limits = runner.backend.config
    return runner.graphs or StepGraphs(
        *(runner.model, runner.kv, runner.backend),
        max_rows=max_padded_rows(limits.max_num_tokens, limits.max_num_seqs),
        record=run_again,
        states=runner.states,
    )


def recording(loaded: LoadedModel, timed: Timer, sizes: Sizes, report: Report) -> None:
    """Seconds and bytes of all recordings; then steps with chunks of prompts, eager and replayed."""
    context, num_decodes = (64, 2) if sizes.small else (2048, 64)
    blocks = (num_decodes + 8) * context // BLOCK
    spec = loaded.attention.layout(blocks, BLOCK, loaded.dtype, loaded.device)
    runner = ModelRunner(
        loaded,
        spec,
        StepLimits(64 if sizes.small else 8192, 4 if sizes.small else 256, 4 * context),
        backend="triton" if sizes.device.type == "cuda" else "cpu",
    )
    graphs = graphs_of(runner)
    runner.graphs = None
    started = time.perf_counter()
    runner.warm_up()
    compiled = time.perf_counter()
    free = torch.cuda.mem_get_info()[0] if sizes.device.type == "cuda" else 0
    with torch.inference_mode():
        for _ in graphs.capture():
            pass
    taken = free - torch.cuda.mem_get_info()[0] if sizes.device.type == "cuda" else 0
    recorded = time.perf_counter() - compiled
    report(warm_up="recording", compile_s=compiled - started, s=recorded, bytes=taken, graphs=graphs.captured)
    for chunk in (8, 24) if sizes.small else (32, 192, 448):
        lengths = [1] * num_decodes + [chunk]
        batch = idle_batch(lengths, [context] * len(lengths), blocks, BLOCK)
        batch.logit_rows = batch.query_starts[1:].astype("int64") - 1
        runner.graphs = None
        eager = timed(lambda batch=batch: runner.execute(batch))  # type: ignore[misc]
        runner.graphs = graphs
        before = graphs.replayed
        replayed = timed(lambda batch=batch: runner.execute(batch))  # type: ignore[misc]
        report(
            load=f"{num_decodes} decodes x {context} and a chunk of {chunk}",
            ms=replayed,
            eager_ms=eager,
            ok=graphs.replayed > before,
        )
