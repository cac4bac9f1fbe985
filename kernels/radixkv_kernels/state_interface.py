# SPDX-License-Identifier: Apache-2.0
"""StatePlan and StateBackend: a step's operations on states, decided once and carried out by every layer.

A step's rows are cut at the grid, so that each piece lies in one ring::

    ROWS  compute rows [first, first + count) at places r, r + 1 ... of a ring, over a state
    FOLD  write the state after a full ring into another slot
    COPY  copy a state

A fold comes when the token after a full ring does, not before: until then its last tokens may be guesses.
Every kind of state carries out the same list, and computes row r of a ring in the same way whatever pieces
the rows came in. So the bits of outputs and states do not depend on chunks, on the batch, or on the
cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from radixkv_kernels.gated_heads import GatedHeads
from radixkv_kernels.states import GRID, PagedStates, StateSpec

ROWS, FOLD, COPY = range(3)
#: Values of an operation: its code, then
#: ROWS first row, rows, ring, place in the ring, state; FOLD ring, state, new state; COPY state, new state.
OPERATION_SIZE = 6


@dataclass(frozen=True)
class StatePlan:
    """Operations of one step, in order.

    Attributes:
        operations: int64 [n, OPERATION_SIZE], request after request.
        request_starts: [R + 1], the operations of each request.
        num_rows: rows of the step; more rows of a layer's input are padding.
        spec: of the states that it is a plan for.
    """

    operations: np.ndarray
    request_starts: np.ndarray
    num_rows: int
    spec: StateSpec

    @cached_property
    def address(self) -> int:
        """Of the operations."""
        return int(self.operations.ctypes.data)


def plan_states(
    spec: StateSpec,
    query_starts: np.ndarray,
    starts: np.ndarray,
    base_slots: np.ndarray,
    base_positions: np.ndarray,
    ring_rows: np.ndarray,
    target_slots: np.ndarray,
    target_positions: np.ndarray,
    saves: Iterable[tuple[int, int, int]] = (),
) -> StatePlan:
    """Decide a step's operations; O(rows / GRID + requests + saves).

    Args:
        query_starts: [R + 1], the rows of each request.
        starts: [R], position of each request's first row.
        base_slots, base_positions: [R], slot of a state, and its number of tokens; -1: no token, zero state.
        ring_rows: [R], ring of each request, which holds the tokens from base to start.
        target_slots, target_positions: [R], slot for a state, and its number of tokens: the last grid point
            below the end of the rows. -1: it is the base.
        saves: (request, position, slot): more states to keep, base < position <= end of the rows.
    """
    zero, passing = spec.num_slots, (spec.num_slots + 1, spec.num_slots + 2)
    wanted: dict[tuple[int, int], list[int]] = {}
    for r, (slot, position) in enumerate(zip(target_slots.tolist(), target_positions.tolist(), strict=True)):
        if slot >= 0:
            wanted[r, position] = [slot]
    for r, position, slot in saves:
        wanted.setdefault((int(r), int(position)), []).append(int(slot))
    operations: list[tuple[int, ...]] = []
    request_starts = [0]

    def fold(ring: int, state: int, targets: list[int]) -> int:
        target = targets[0] if targets else passing[state == passing[0]]
        operations.append((FOLD, ring, state, target, 0, 0))
        operations.extend((COPY, target, other, 0, 0, 0) for other in targets[1:])
        return target

    rows = query_starts.tolist()
    columns = zip(
        starts.tolist(), base_slots.tolist(), base_positions.tolist(), ring_rows.tolist(), strict=True
    )
    for r, (position, slot, base, ring) in enumerate(columns):
        row, end = rows[r], position + rows[r + 1] - rows[r]
        assert 0 <= position - base <= GRID, f"request {r}: {position - base} tokens in a ring of {GRID}"
        state = zero if slot < 0 else slot
        while position < end:
            if position - base == GRID:
                state = fold(ring, state, wanted.get((r, position), []))
                base = position
            count = min(end - position, base + GRID - position)
            operations.append((ROWS, row, count, ring, position - base, state))
            row, position = row + count, position + count
        if end - base == GRID and (r, end) in wanted:
            fold(ring, state, wanted[r, end])
        request_starts.append(len(operations))
    table = np.array(operations, np.int64).reshape(-1, OPERATION_SIZE)
    return StatePlan(table, np.array(request_starts), rows[-1], spec)


class StateBackend(ABC):
    """Computes state layers. Not thread-safe."""

    def stage(self, plan: StatePlan, rows: int, max_rows: int, *, large: bool, device: torch.device) -> bool:
        """Bring a plan to where recorded launches of `rows` rows read it, for the calls of `mix` with it.

        Args:
            rows: rows of the layers' inputs, those of the plan and padding.
            max_rows: most rows of any plan that is ever staged.
            large: launches that were recorded for steps with chunks of prompts, which have more programs.

        Returns:
            False if the plan needs more programs than such launches have; nothing was staged.
        """
        return True

    @abstractmethod
    def mix(
        self,
        states: PagedStates,
        layer: int,
        kind: str,
        plan: StatePlan,
        inputs: tuple[torch.Tensor, ...],
        constants: tuple[Any, ...] = (),
    ) -> torch.Tensor:
        """Compute a layer's rows and carry the plan out on its states.

        Args:
            kind, inputs, constants: as in `radixkv_kernels.state_reference.reference_mix`; T rows.

        Returns:
            float32 [T, ...]. Padding rows are zero.
        """

    def mix_gated(
        self,
        states: PagedStates,
        layer: int,
        plan: StatePlan,
        of: GatedHeads,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        logits: torch.Tensor,
        betas: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a layer of heads between its products, and carry the plan out on its two states.

        Args:
            of: the layer.
            mixed: [T, C], the channels that are convolved; rows may lie anywhere, here and below.
            gate: [T, heads * value size].
            logits: [T, of.num_logits], of decays; `betas` [T, heads], of betas: None for `ssd`.

        Returns:
            [T, heads * value size] in the gate's dtype. Padding rows are zero.

        Raises:
            NotImplementedError: the backend (a CPU's) has no kernels for it; `mix` computes the same.
        """
        raise NotImplementedError(f"{type(self).__name__} has no kernels for gates and norms")

    def mix_factored(
        self,
        states: PagedStates,
        layer: int,
        plan: StatePlan,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        row: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a gated short convolution (LFM2's) between its products, and carry the plan out on its
        state.

        Args:
            weight, bias: [taps, C] and [C], of the convolution.
            row: [T, 3 C]: factors of its input, factors of its output, and its input.

        Returns:
            [T, C] in the dtype of `row`. Padding rows are zero.

        Raises:
            NotImplementedError: as `mix_gated`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no kernels for factors of a convolution")
