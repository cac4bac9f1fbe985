# SPDX-License-Identifier: Apache-2.0
"""What the host of this machine does in a step of 256 requests: `host_scale`, without a model."""

from __future__ import annotations

import torch

from benchmarks.gpu_parts import Report
from benchmarks.host_scale import SITUATIONS, measure_steps
from benchmarks.paged_bench import Sizes


def host(sizes: Sizes, report: Report) -> None:
    """A line for each situation and part of a step, the device's idle gap among them."""
    torch.set_num_threads(1)  # the toy logits that stand for a GPU's
    running, cached, steps = (8, 200, 4) if sizes.small else (256, 100_000, 100)
    for situation in SITUATIONS:
        found = measure_steps(
            situation,
            num_cached=cached,
            num_running=running,
            num_waiting=running * 5,
            num_steps=steps,
            policy="prefix",
        )
        for part, ms in found["parts_ms"].items():
            report(
                load=f"{situation}, {running} running",
                of=part,
                median_ms=ms["median"],
                mean_ms=ms["mean"],
                p95_ms=ms["p95"],
            )
