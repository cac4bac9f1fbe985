# SPDX-License-Identifier: Apache-2.0
"""State layers: outputs beside the float64 recurrence, and the bits of a sequence that comes in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts import Report
from benchmarks.paged_bench import Sizes, milliseconds
from radixkv_kernels.registry import make_state_backend
from radixkv_kernels.state_interface import plan_states
from radixkv_kernels.state_reference import reference_mix, shape_of
from radixkv_kernels.states import GRID, PagedStates, StateSpec

#: Largest error against float64, relative to the spread of the outputs, by the type of the inputs.
_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
KINDS, TOY_KINDS = ("lru", "conv", "scan", "ssd", "delta", "kda"), ("lru", "conv")


def states(sizes: Sizes, report: Report) -> None:
    """Every kind of state: a whole sequence and the same in pieces, decodes among them."""
    length = GRID + 3 if sizes.small else 5 * GRID + 11
    ends = [GRID - 1, GRID, GRID + 1, length]
    for kind in TOY_KINDS if sizes.small else KINDS:
        for dtype, limit in _ERRORS.items():
            try:
                inputs, constants = layer(kind, length, sizes)
                inputs = tuple(each.to(dtype) for each in inputs)
                whole = run(kind, inputs, constants, [length])
                expected, _ = reference_mix(kind, inputs, constants)
                error = float((whole - expected).abs().max() / expected.std())
                pieces = run(kind, inputs, constants, ends)
            except Exception as raised:
                # The next kind may still tell something.
                report(kind=kind, ok=False, error=f"{type(raised).__name__}: {str(raised)[:400]}")
                continue
            name = f"{kind} {str(dtype).removeprefix('torch.')}"
            report(kind=name, error=error, ok=error < limit)
            report(kind=name, compared="pieces", ok=torch.equal(pieces, whole))


def speed(sizes: Sizes, report: Report) -> None:
    """Milliseconds of a prompt and of a batch of decodes, and the decodes' bytes a second."""
    rows, requests = (GRID + 2, 2) if sizes.small else (4096, 64)
    for kind in TOY_KINDS if sizes.small else KINDS:
        inputs, constants = layer(kind, rows, sizes)
        inputs = tuple(each.to(torch.bfloat16) for each in inputs)
        shape = shape_of(0, kind, inputs, constants)
        memory = PagedStates(StateSpec((shape,), 2 * requests, requests, keeps_values=True), inputs[0].device)
        last = (rows - 1) // GRID * GRID

        def mix(
            starts: np.ndarray, columns: list[np.ndarray], count: int, kind: str = kind, inputs: Any = inputs
        ) -> Any:
            plan = plan_states(memory.spec, starts, *columns)  # noqa: B023
            # A backend has the tables of one plan, which a recorded launch goes on reading.
            backend = make_state_backend("triton")
            part = tuple(each[:count] for each in inputs)
            return lambda: backend.mix(memory, 0, kind, plan, part, constants)  # noqa: B023

        prompt = mix(np.array([0, rows]), [np.array([x]) for x in (0, -1, 0, 0, 0, last)], rows)
        each = np.arange(requests)
        same = [np.full(requests, x) for x in (GRID + 1, GRID)]
        columns = [same[0], each, same[1], each, np.full(requests, -1), same[1]]
        decode = mix(np.arange(requests + 1), columns, requests)
        times = milliseconds({"prompt ms": prompt, "decode ms": decode}, sizes)
        moved = requests * memory.spec.bytes_per_slot
        report(kind=kind, rows=rows, requests=requests, **times, **{"TB/s": moved / times["decode ms"] / 1e9})


def layer(kind: str, length: int, sizes: Sizes) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Inputs and constants of a layer."""
    draw = torch.Generator(sizes.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=sizes.device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=draw, device=sizes.device)

    t, channels = length, 20 if sizes.small else 2560
    if kind == "conv":
        return (normal(t, channels),), (normal(4, channels), normal(channels), "silu")
    if kind == "lru":
        return (uniform(t, channels), normal(t, channels)), ()
    if kind == "scan":
        inputs = normal(t, channels), uniform(t, channels), normal(t, 1, 16), normal(t, 1, 16)
        return inputs, (-uniform(channels, 16),)
    if kind == "kda":
        keys = t, 16, 128
        inputs = normal(*keys), normal(*keys), normal(*keys), -uniform(*keys)
        return (*inputs, uniform(t, 16)), ()
    inputs = normal(t, 8, 128), normal(t, 8, 128), normal(t, 16, 64), -0.2 * uniform(t, 16)
    return (*inputs, uniform(t, 16)) if kind == "delta" else inputs, ()


def run(
    kind: str, inputs: tuple[torch.Tensor, ...], constants: tuple[Any, ...], ends: list[int]
) -> torch.Tensor:
    """One sequence in steps that end at `ends`."""
    memory = PagedStates(
        StateSpec((shape_of(0, kind, inputs, constants),), 2, 1, keeps_values=True), inputs[0].device
    )
    backend, outputs = make_state_backend("triton", deterministic=True), []
    start, base, slot = 0, 0, -1
    for end in ends:
        target = (end - 1) // GRID * GRID
        new = int(slot == 0) if target > base else -1
        columns = [np.array([x]) for x in (start, slot, base, 0, new, target)]
        plan = plan_states(memory.spec, np.array([0, end - start]), *columns)
        part = tuple(each[start:end] for each in inputs)
        outputs.append(backend.mix(memory, 0, kind, plan, part, constants))
        start = end
        if new >= 0:
            base, slot = target, new
    return torch.cat(outputs)
