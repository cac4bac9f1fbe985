# SPDX-License-Identifier: Apache-2.0
"""Kernels that a decoder layer launches on a GPU: as transformers wrote it, and fused.

    TRITON_INTERPRET=1 python -m benchmarks.layer_launches deepseek-v3 falcon

Tiny random models of the tests run in Triton's interpreter: a prompt of eight tokens, and a decode of four
rows. Operators of torch and Triton's kernels count alike; copies of a step's plan in the first layer don't.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from radixkv.engine.config import EngineConfig
from radixkv.model import rewritten_model
from radixkv.model.loading.loader import load_model
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.scheduling.batch import Batch, BatchStates
from radixkv_kernels.states import StateSpec
from tests.support.kernel_count import kernels_by_module
from tests.support.tiny_configs import FAMILIES, HYBRID_FAMILIES, SHAPES
from tests.support.tiny_models import save_tiny_model

_BLOCK, _ROWS, _PROMPT = 16, 4, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*FAMILIES, *SHAPES, *HYBRID_FAMILIES]
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"some of {', '.join(names)}")
    parser.add_argument("--kernels", action="store_true", help="what a decode of the last layer launches")
    options = parser.parse_args()
    print("| family | prompt | decode | prompt, fused | decode, fused |\n|---|---|---|---|---|")
    for family in options.families or names:
        with tempfile.TemporaryDirectory() as folder:
            save_tiny_model(Path(folder), family)
            plain, fused = (launches(Path(folder), fused=fused) for fused in (False, True))
        print(f"| {family} | {' | '.join(_span(each) for each in (*plain, *fused))} |", flush=True)
        if options.kernels:
            print(dict(fused[1][-1]))


def launches(folder: Path, *, fused: bool) -> list[list[Counter[str]]]:
    """What each layer launches in a prompt's step and in a decode's."""
    loaded = load_model(EngineConfig(model=str(folder), device="cpu"), show_progress=False)
    spec = loaded.attention.layout(2 * _ROWS, _BLOCK, loaded.dtype, loaded.device)
    states = None
    if loaded.attention.states:
        states = StateSpec(loaded.attention.states, num_slots=4, num_rings=_ROWS, keeps_values=True)
    limits = StepLimits(64, _ROWS, 64)
    as_it_is = nullcontext() if fused else mock.patch.object(rewritten_model, "rewrite_layers")
    with as_it_is:
        runner = ModelRunner(loaded, spec, limits, backend="triton", states=states)
    for tensor in runner.kv.tensors():
        tensor.view(torch.uint8).zero_()
    found = []
    with kernels_by_module(_decoder_layers(runner.model)) as counted:
        for starts, ends in (([0], [_PROMPT]), ([0] * _ROWS, [1] * _ROWS)):
            runner.execute(_batch(starts, ends))
            found.append(counted[1:])  # the first layer's copies of the plan are the step's
            counted.clear()
    return found


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    return max(lists, key=lambda layers: sum(1 for _ in layers.modules()))


def _batch(starts: list[int], ends: list[int]) -> Batch:
    """Tokens [start, end) of requests with a block each."""
    counts = np.subtract(ends, starts)
    positions = np.concatenate([np.arange(*each) for each in zip(starts, ends, strict=True)])
    states = BatchStates.empty(len(starts))
    states.ring_rows[:] = np.arange(len(starts))
    return Batch(
        entries=[],
        token_ids=3 + 7 * np.arange(len(positions)) % 200,
        positions=positions,
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        context_lengths=np.asarray(ends, np.int32),
        block_tables=[np.array([r], np.int32) for r in range(len(starts))],
        write_slots=np.repeat(np.arange(len(starts)) * _BLOCK, counts) + positions,
        write_rows=None,
        logit_rows=np.arange(len(positions)),
        copy_groups=[],
        states=states,
    )


def _span(layers: list[Counter[str]]) -> str:
    """The smallest and the largest number of launches."""
    totals: list[Any] = sorted({each.total() for each in layers})
    return "-" if not totals else str(totals[0]) if len(totals) == 1 else f"{totals[0]} - {totals[-1]}"


if __name__ == "__main__":
    main()
