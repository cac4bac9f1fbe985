# SPDX-License-Identifier: Apache-2.0
"""Small state layers of each kind, and steps over their states, for the tests of every backend."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from radixkv_kernels.state_interface import StateBackend, StatePlan, plan_states
from radixkv_kernels.states import GRID, PagedStates, StateShape, StateSpec

LENGTH = 3 * GRID + 11
Inputs = tuple[torch.Tensor, ...]


def layer_inputs(
    kind: str, length: int = LENGTH, seed: int = 0, *, tiny: bool = False
) -> tuple[Inputs, tuple[Any, ...]]:
    """Inputs and constants of a small layer; head sizes are no multiples of 8."""
    wide, channels, heads, groups, key, value = (20, 20, 2, 1, 5, 12) if tiny else (150, 70, 4, 2, 10, 75)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    t = length
    if kind == "conv":
        return (normal(t, wide),), (normal(4, wide), normal(wide), "silu")
    if kind == "scan":
        inputs = normal(t, channels), uniform(t, channels), normal(t, 2, 5), normal(t, 2, 5)
        return inputs, (-uniform(channels, 5),)
    if kind == "lru":
        return (uniform(t, channels), normal(t, channels)), ()
    if kind == "kda":
        heads -= 1
        key_shape = t, heads, key
        inputs = normal(*key_shape), normal(*key_shape), normal(t, heads, value), -uniform(*key_shape)
        return (*inputs, uniform(t, heads)), ()
    inputs = normal(t, groups, key), normal(t, groups, key), normal(t, heads, value), -0.2 * uniform(t, heads)
    return (*inputs, uniform(t, heads)) if kind == "delta" else inputs, ()


class Cursor:
    """One sequence's cursor over its inputs, with the slots that a scheduler would give it."""

    def __init__(
        self, inputs: Inputs, ring: int, slots: tuple[int, int], base: int = 0, slot: int = -1
    ) -> None:
        self.inputs, self.ring, self.slots = inputs, ring, slots
        self.base, self.slot, self.start = base, slot, base

    def plan_values(self, count: int) -> tuple[int, ...]:
        """Start, base slot, base, ring, target slot and position of the next `count` rows."""
        end = self.start + count
        position = max(self.base, (end - 1) // GRID * GRID)
        target = -1 if position == self.base else self.slots[self.slots[0] == self.slot]
        return self.start, self.slot, self.base, self.ring, target, position

    def done(self, values: tuple[int, ...], accepted: int) -> None:
        if values[4] >= 0:
            self.slot, self.base = values[4], values[5]
        self.start += accepted


class Layer:
    """One layer's states, all of their memory NaN at first, and steps over them."""

    def __init__(
        self,
        kind: str,
        shape: StateShape,
        constants: tuple[Any, ...],
        backend: StateBackend,
        *,
        keeps_values: bool = False,
    ) -> None:
        self.kind, self.constants, self.backend = kind, constants, backend
        self.states = PagedStates(StateSpec((shape,), num_slots=8, num_rings=4, keeps_values=keeps_values))
        memory = self.states.of(0, kind)
        memory.slots[:8] = memory.slots[9:] = float("nan")
        for ring in memory.rings:
            ring[:] = float("nan")

    def slot(self, index: int) -> torch.Tensor:
        return self.states.of(0, self.kind).slots[index]

    def plan(
        self, rows: Sequence[tuple[Cursor, Inputs]], saves: Sequence[tuple[int, int, int]] = ()
    ) -> StatePlan:
        """The plan of rows of several sequences."""
        starts = np.cumsum([0, *(len(inputs[0]) for _, inputs in rows)])
        values = [one.plan_values(len(inputs[0])) for one, inputs in rows]
        start, slot, base, ring, target, position = (np.array(column) for column in zip(*values, strict=True))
        return plan_states(self.states.spec, starts, start, slot, base, ring, target, position, saves)

    def step(
        self,
        rows: Sequence[tuple[Cursor, Inputs]],
        saves: Sequence[tuple[int, int, int]] = (),
        padding: int = 0,
    ) -> list[torch.Tensor]:
        """Rows of several sequences in one call, and rows of padding; the caller moves their cursors."""
        starts = np.cumsum([0, *(len(inputs[0]) for _, inputs in rows)])
        plan = self.plan(rows, saves)
        columns_of_inputs = zip(*(inputs for _, inputs in rows), strict=True)
        joined = tuple(
            torch.cat([*parts, parts[0].new_full((padding, *parts[0].shape[1:]), float("nan"))])
            for parts in columns_of_inputs
        )
        out = self.backend.mix(self.states, 0, self.kind, plan, joined, self.constants)
        assert not out[starts[-1] :].any()
        return [out[a:b] for a, b in itertools.pairwise(starts)]

    def run(
        self, one: Cursor, cuts: Sequence[int], saves: Sequence[tuple[int, int, int]] = ()
    ) -> torch.Tensor:
        """One sequence from its cursor, in steps that end at `cuts`."""
        outputs = []
        for end in cuts:
            values = one.plan_values(end - one.start)
            inputs = tuple(each[one.start : end] for each in one.inputs)
            here = [save for save in saves if one.base < save[1] <= end]
            outputs.extend(self.step([(one, inputs)], here))
            one.done(values, end - one.start)
        return torch.cat(outputs)
