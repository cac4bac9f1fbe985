# SPDX-License-Identifier: Apache-2.0
"""TritonStates: state layers on a GPU; a step's tables are uploaded once, and nothing waits for the device.

Also runs on CPU tensors under Triton's interpreter, as the attention backend does.
"""

from __future__ import annotations

from typing import Any

import torch

from radixkv_kernels.gated_heads import GatedHeads
from radixkv_kernels.state_interface import StateBackend, StatePlan
from radixkv_kernels.states import LayerStates, PagedStates
from radixkv_kernels.triton.state.conv import conv_rows, factored_rows, rows_of_heads
from radixkv_kernels.triton.state.heads import head_rows
from radixkv_kernels.triton.state.keep import keep_rows, leave_rows
from radixkv_kernels.triton.state.scan import scan_rows
from radixkv_kernels.triton.state.tables import StepTables, TableBuffer


class TritonStates(StateBackend):
    """See `StateBackend`. Products have operands of 16 bits and more, and are added up in float32.

    Args:
        deterministic: rows of heads always come in chunks, so that their outputs have the same bits however
            they come. Without it, a few rows (decodes) are computed over the ring; states have the same bits.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self._tables: StepTables | None = None
        self._buffer: TableBuffer | None = None

    def stage(self, plan: StatePlan, rows: int, max_rows: int, *, large: bool, device: torch.device) -> bool:
        """See `StateBackend`. In deterministic mode all steps have chunks: none needs launches of its own."""
        if self._deterministic and large:
            return False
        tables = StepTables(plan, deterministic=self._deterministic)
        if not tables.fits(rows, large=large):
            return False
        if self._buffer is None:
            self._buffer = TableBuffer(max_rows, device, deterministic=self._deterministic)
        self._buffer.load(tables, rows, large=large)
        self._tables = tables
        return True

    def mix(
        self,
        states: PagedStates,
        layer: int,
        kind: str,
        plan: StatePlan,
        inputs: tuple[torch.Tensor, ...],
        constants: tuple[Any, ...] = (),
    ) -> torch.Tensor:
        memory, tables = states.of(layer, kind), self._staged(plan, inputs[0].device)
        inputs = tuple(each if _has_whole_rows(each) else each.contiguous() for each in inputs)
        shape = inputs[0 if kind in ("conv", "scan", "lru") else 2].shape
        out = torch.empty(shape, dtype=torch.float32, device=inputs[0].device)
        if tables.grids["walks"]:
            _compute(memory, tables, kind, inputs, constants, out)
        else:
            out.zero_()
        return out

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
        """See `StateBackend`."""
        tables = self._staged(plan, mixed.device)
        if not tables.grids["walks"]:
            return torch.zeros(len(mixed), of.value_width, dtype=gate.dtype, device=gate.device)
        conv, memory = states.of(layer, "conv"), states.of(layer, of.kind)
        inputs, values = rows_of_heads(conv, tables, of, mixed, logits, betas)
        shape = len(mixed), of.heads, of.value_size
        out = torch.empty(shape, dtype=torch.float32, device=mixed.device)
        kept = head_rows(memory, tables, inputs, out, clears_padding=False)
        return leave_rows(tables, of, out, gate, values, [(mixed, conv.rings[0]), *kept])

    def mix_factored(
        self,
        states: PagedStates,
        layer: int,
        plan: StatePlan,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        row: torch.Tensor,
    ) -> torch.Tensor:
        """See `StateBackend`."""
        tables, memory = self._staged(plan, row.device), states.of(layer, "conv")
        if not tables.grids["walks"]:
            return torch.zeros(len(row), weight.shape[1], dtype=row.dtype, device=row.device)
        out, inputs = factored_rows(memory, tables, weight, bias, row)
        keep_rows(tables, [(inputs, memory.rings[0])])
        return out

    def _staged(self, plan: StatePlan, device: torch.device) -> StepTables:
        """The tables of a plan, which a step's layers share."""
        if self._tables is None or self._tables.plan is not plan:
            self._tables = StepTables(plan, deterministic=self._deterministic)
            self._tables.upload(device)
        return self._tables


def _compute(
    memory: LayerStates,
    tables: StepTables,
    kind: str,
    inputs: tuple[torch.Tensor, ...],
    constants: tuple[Any, ...],
    out: torch.Tensor,
) -> None:
    rings = memory.rings
    if kind == "conv":
        weight, bias, activation = constants
        conv_rows(memory, tables, inputs[0], weight.contiguous(), bias, activation, out)
        kept = [(inputs[0], rings[0])]
    elif kind == "scan":
        scan_rows(memory, tables, inputs, constants[0].contiguous(), out)
        kept = list(zip(inputs[:3], rings[:3], strict=True))
    elif kind == "lru":
        scan_rows(memory, tables, inputs, None, out)
        kept = list(zip(inputs, rings[:2], strict=True))
    else:
        kept = head_rows(memory, tables, inputs, out)
    keep_rows(tables, kept)


def _has_whole_rows(tensor: torch.Tensor) -> bool:
    """Return True if the numbers of a row follow one another; rows may lie anywhere."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
