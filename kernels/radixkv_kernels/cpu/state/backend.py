# SPDX-License-Identifier: Apache-2.0
"""CpuStates: state layers on a CPU, each step of a layer one call of a compiled kernel on torch's threads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from radixkv_kernels.cpu.linear.launch import ArgumentBlock
from radixkv_kernels.cpu.state import arguments as at
from radixkv_kernels.cpu.state import conv, scan
from radixkv_kernels.cpu.state.delta import delta_kernel
from radixkv_kernels.cpu.state.kda import kda_kernel
from radixkv_kernels.cpu.state.ssd import ssd_kernel
from radixkv_kernels.state_interface import StateBackend, StatePlan
from radixkv_kernels.states import LayerStates, PagedStates, rounded

#: Numbers of an input below which waking the other threads costs more than they save.
_SMALL = 16_384
#: Kinds whose state is a matrix for each head.
_HEAD_KERNELS = {"delta": delta_kernel, "ssd": ssd_kernel, "kda": kda_kernel}


class CpuStates(StateBackend):
    """See `StateBackend`. Inputs of any dtype are computed in float32."""

    def __init__(self) -> None:
        self._block = ArgumentBlock(at.NUM_ARGUMENTS)
        self._empty = torch.zeros(1)

    def mix(
        self,
        states: PagedStates,
        layer: int,
        kind: str,
        plan: StatePlan,
        inputs: tuple[torch.Tensor, ...],
        constants: tuple[Any, ...] = (),
    ) -> torch.Tensor:
        memory = states.of(layer, kind)
        if kind == "conv":
            return self._conv(memory, plan, inputs[0], *constants)
        sizes = memory.shape.sizes
        if kind == "lru":
            units = -(-sizes[0] // scan.BLOCK)
            out = self._run(scan.lru_kernel(), memory, plan, inputs, (), inputs[0].shape, sizes, units)
            return self._remember(memory, plan, out)
        if kind == "scan":
            units = -(-sizes[0] // scan.BLOCK)
            rate = _numbers(constants[0])
            out = self._run(scan.scan_kernel(), memory, plan, inputs, (rate,), inputs[0].shape, sizes, units)
            return self._remember(memory, plan, out)
        value = inputs[2].shape[2]
        padded = tuple(_padded(each) if each.ndim == 3 else each for each in inputs)
        shape = padded[2].shape
        heads = (sizes[0], sizes[0]) if kind == "kda" else sizes[:2]
        numbers = (*heads, padded[0].shape[2], shape[2], inputs[0].shape[2])
        return self._run(_HEAD_KERNELS[kind](), memory, plan, padded, (), shape, numbers, sizes[0])[
            ..., :value
        ]

    def _conv(
        self,
        memory: LayerStates,
        plan: StatePlan,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        channels, taps = memory.shape.sizes
        sizes = (channels, taps, int(bias is not None), int(activation == "silu"))
        constants = (_numbers(weight), self._empty if bias is None else _numbers(bias))
        units = -(-channels // conv.BLOCK)
        return self._run(conv.conv_kernel(), memory, plan, (x,), constants, x.shape, sizes, units)

    def _run(
        self,
        kernel: Any,
        memory: LayerStates,
        plan: StatePlan,
        inputs: tuple[torch.Tensor, ...],
        constants: tuple[torch.Tensor, ...],
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
        units: int,
    ) -> torch.Tensor:
        rows = tuple(_numbers(each) for each in inputs)
        out = torch.empty(shape)
        if len(out) > plan.num_rows:
            out[plan.num_rows :] = 0
        a = self._block.values
        a[at.OPERATIONS], a[at.NUM_OPERATIONS] = plan.operations.ctypes.data, len(plan.operations)
        a[at.UNITS], a[at.NUM_ROWS] = units, len(out)
        a[at.NUM_SLOTS], a[at.NUM_RINGS] = len(memory.slots), len(memory.lengths)
        a[at.SLOTS], a[at.LENGTHS] = memory.slots.data_ptr(), memory.lengths.data_ptr()
        a[at.OUTPUT] = out.data_ptr()
        for first, tensors in ((at.RING, memory.rings), (at.INPUT, rows), (at.CONSTANT, constants)):
            a[first : first + len(tensors)] = [each.data_ptr() for each in tensors]
        a[at.SIZE : at.SIZE + len(sizes)] = sizes
        self._block.run(kernel, on_all_threads=units > 1 and out.numel() >= _SMALL)
        return out

    def _remember(self, memory: LayerStates, plan: StatePlan, out: torch.Tensor) -> torch.Tensor:
        """Note the tokens that the states at the rings' ends sum up from now on."""
        for code, _, count, ring, place, _ in plan.operations.tolist():
            if code == 0:
                memory.lengths[ring] = place + count
        return out


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32).contiguous()


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with heads of a size that kernels take, zeros added."""
    size = tensor.shape[-1]
    return tensor if size % 8 == 0 else F.pad(tensor, (0, rounded(size) - size))
