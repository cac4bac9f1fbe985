# SPDX-License-Identifier: Apache-2.0
"""State layers: outputs beside the float64 recurrence, and the bits of a sequence that comes in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_machine import read_rate
from benchmarks.gpu_parts import Report
from benchmarks.paged_bench import Sizes, milliseconds
from radixkv_kernels.registry import make_state_backend
from radixkv_kernels.state_interface import plan_states
from radixkv_kernels.state_reference import reference_mix, shape_of
from radixkv_kernels.states import GRID, PagedStates, StateSpec

#: Largest error against float64, relative to the spread of the outputs, by the type of the inputs.
_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
#: The same where inputs of any type are operands of 16 bits and more.
_ERRORS_OF_HEADS = 2e-4
_HEADS = ("ssd", "delta", "kda")
#: Tokens in the ring of a decode.
RINGS = (0, 32, GRID - 1)
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
                decodes = run(kind, inputs, constants, ends, deterministic=False)
                short = float((decodes - expected).abs().max() / expected.std())
            except Exception as raised:
                # The next kind may still tell something.
                report(kind=kind, ok=False, error=f"{type(raised).__name__}: {str(raised)[:400]}")
                continue
            name = f"{kind} {str(dtype).removeprefix('torch.')}"
            limit = _ERRORS_OF_HEADS if kind in _HEADS else limit
            report(kind=name, error=max(error, short), ok=max(error, short) < limit)
            report(kind=name, compared="pieces", ok=torch.equal(pieces, whole))


def speed(sizes: Sizes, report: Report) -> None:
    """Milliseconds of a prompt, of a batch of decodes by tokens in their rings, and the decodes' bytes a
    second."""
    rows, requests = (GRID + 2, 2) if sizes.small else (4096, 64)
    read = read_rate(sizes)
    for kind in TOY_KINDS if sizes.small else KINDS:
        inputs, constants = layer(kind, rows, sizes)
        timed = Timed(kind, tuple(each.to(torch.bfloat16) for each in inputs), constants, requests)
        calls = {"prompt ms": timed.prompt(rows)}
        calls |= {f"decode ms, ring {held}": timed.decodes(requests, held) for held in RINGS}
        times = milliseconds(calls, sizes)
        rate = timed.bytes_of(requests) / times[f"decode ms, ring {RINGS[1]}"] / 1e9
        shares = {"TB/s": rate, "of the read's": rate * 1e12 / read}
        report(kind=kind, rows=rows, requests=requests, **times, **shares)


def real_layer(sizes: Sizes, report: Report) -> None:
    """A gated delta net of Qwen3.5-35B's size: numbers first, then prompts and decodes, beside
    flash-linear-attention's where that is installed (fla-core)."""
    groups, heads, size = (1, 2, 16) if sizes.small else (16, 32, 128)
    lengths, batches = ((GRID + 2,), (2,)) if sizes.small else ((1024, 4096, 16_384), (1, 64))
    draw = torch.Generator(sizes.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=sizes.device).bfloat16()

    def uniform(rows: int) -> torch.Tensor:
        return torch.rand(rows, heads, generator=draw, device=sizes.device)

    def inputs_of(rows: int) -> tuple[torch.Tensor, ...]:
        keys, values = (rows, groups, size), (rows, heads, size)
        return normal(*keys), normal(*keys), normal(*values), -0.2 * uniform(rows), uniform(rows)

    theirs, read = _flash_linear_attention(), read_rate(sizes)
    short = inputs_of(GRID + 2 if sizes.small else 3 * GRID + 5)
    expected, _ = reference_mix("delta", short)
    found = {"ours": lambda: run("delta", short, (), [len(short[0])])}
    if theirs is not None:
        found["fla"] = lambda: theirs(short)
    for name, call in found.items():
        error = float((call() - expected).abs().max() / expected.std())
        # Theirs has operands of bfloat16.
        report(compared=name, error=error, ok=error < (_ERRORS_OF_HEADS if name == "ours" else 0.1))
    timed = Timed("delta", inputs_of(max(*lengths, *batches)), (), max(batches))
    for rows in lengths:
        calls = {"prompt ms": timed.prompt(rows)}
        if theirs is not None:
            part = tuple(each[:rows] for each in timed.inputs)
            calls["fla ms"] = functools.partial(theirs, part)
        report(rows=rows, **milliseconds(calls, sizes))
    for requests in batches:
        for held in RINGS:
            took = milliseconds({"decode ms": timed.decodes(requests, held)}, sizes)["decode ms"]
            rate = timed.bytes_of(requests) / took / 1e9
            shares = {"TB/s": rate, "of the read's": rate * 1e12 / read}
            report(requests=requests, ring=held, **{"decode ms": took}, **shares)


def _flash_linear_attention() -> Callable[[tuple[torch.Tensor, ...]], torch.Tensor] | None:
    """Its delta rule over the same inputs; None: it is not installed, or can't be used here."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # a yardstick, not a dependency
    except Exception:  # whatever an import that does not fit this triton raises
        return None

    def call(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        q, k, v, decay, beta = inputs
        per = v.shape[1] // q.shape[1]
        q, k = (each.repeat_interleave(per, 1)[None] for each in (q, k))
        out = chunk_gated_delta_rule(
            q, k, v[None], g=decay[None], beta=beta[None].bfloat16(), use_qk_l2norm_in_kernel=True
        )[0]
        result: torch.Tensor = out[0].float()
        return result

    return call


class Timed:
    """Calls of one layer over prompts and decodes of it."""

    def __init__(
        self, kind: str, inputs: tuple[torch.Tensor, ...], constants: tuple[Any, ...], requests: int
    ) -> None:
        self.kind, self.inputs, self.constants = kind, inputs, constants
        spec = StateSpec((shape_of(0, kind, inputs, constants),), 2 * requests, requests, keeps_values=True)
        self.memory = PagedStates(spec, inputs[0].device)
        for part in (self.memory.of(0, kind).slots, *self.memory.of(0, kind).rings):
            part.zero_()

    def prompt(self, rows: int) -> Callable[[], Any]:
        """A prompt from its beginning."""
        last = (rows - 1) // GRID * GRID
        target = 0 if last else -1
        return self._call(np.array([0, rows]), [np.array([x]) for x in (0, -1, 0, 0, target, last)], rows)

    def decodes(self, requests: int, held: int) -> Callable[[], Any]:
        """A row of each of some requests with so many tokens in their rings."""
        each, none = np.arange(requests), np.full(requests, -1)
        start, base = np.full(requests, GRID + held), np.full(requests, GRID)
        return self._call(np.arange(requests + 1), [start, each, base, each, none, base], requests)

    def bytes_of(self, requests: int) -> int:
        """Bytes of the states that so many decodes read."""
        return requests * self.memory.spec.bytes_per_slot

    def _call(self, starts: np.ndarray, columns: list[np.ndarray], count: int) -> Callable[[], Any]:
        plan = plan_states(self.memory.spec, starts, *columns)
        # A backend has the tables of one plan, which a recorded launch goes on reading.
        backend = make_state_backend("triton")
        part = tuple(each[:count] for each in self.inputs)
        return lambda: backend.mix(self.memory, 0, self.kind, plan, part, self.constants)


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
    kind: str,
    inputs: tuple[torch.Tensor, ...],
    constants: tuple[Any, ...],
    ends: list[int],
    *,
    deterministic: bool = True,
) -> torch.Tensor:
    """One sequence in steps that end at `ends`."""
    memory = PagedStates(
        StateSpec((shape_of(0, kind, inputs, constants),), 2, 1, keeps_values=True), inputs[0].device
    )
    backend, outputs = make_state_backend("triton", deterministic=deterministic), []
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
