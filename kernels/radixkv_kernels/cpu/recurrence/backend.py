# SPDX-License-Identifier: Apache-2.0
"""CpuStates: state layers on a CPU, each step of a layer one call of a compiled kernel on torch's threads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from radixkv_kernels.cpu.linear.launch import ArgumentBlock
from radixkv_kernels.cpu.recurrence import arguments as at
from radixkv_kernels.cpu.recurrence import conv, scan
from radixkv_kernels.cpu.recurrence.delta import delta_kernel
from radixkv_kernels.cpu.recurrence.kda import kda_kernel
from radixkv_kernels.cpu.recurrence.ssd import ssd_kernel
from radixkv_kernels.state_interface import StateBackend, StatePlan
from radixkv_kernels.states import LayerStates, PagedStates, rounded

#: Numbers of an input below which waking the other threads costs more than they save.
_SMALL = 16_384
#: Kinds whose state is a matrix for each head.
_HEAD_KERNELS = {"delta": delta_kernel, "ssd": ssd_kernel, "kda": kda_kernel}


class CpuStates(StateBackend):
    """See `StateBackend`. Inputs of any dtype are computed in float32."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[LayerStates, ArgumentBlock]] = {}
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
        key = inputs[0].shape[2]
        if key % 8 or value % 8:
            inputs = tuple(_padded(each) if each.ndim == 3 else each for each in inputs)
        shape = inputs[2].shape
        heads = (sizes[0], sizes[0]) if kind == "kda" else sizes[:2]
        numbers = (*heads, inputs[0].shape[2], shape[2], key)
        out = self._run(_HEAD_KERNELS[kind](), memory, plan, inputs, (), shape, numbers, sizes[0])
        return out if shape[2] == value else out[..., :value]

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
        tensors = [_numbers(each) for each in inputs]
        out = torch.empty(shape)
        if len(out) > plan.num_rows:
            out[plan.num_rows :] = 0
        block, places = self._block_of(memory, units, sizes), [tensor.data_ptr() for tensor in tensors]
        a = block.values
        a[at.OPERATIONS : at.NUM_OPERATIONS + 1] = plan.address, len(plan.operations)
        a[at.NUM_ROWS] = len(out)
        a[at.OUTPUT : at.INPUT + len(places)] = [out.data_ptr(), *places]
        for n, constant in enumerate(constants):
            a[at.CONSTANT + n] = constant.data_ptr()
        block.run(kernel, on_all_threads=units > 1 and out.numel() >= _SMALL)
        return out

    def _block_of(self, memory: LayerStates, units: int, sizes: tuple[int, ...]) -> ArgumentBlock:
        """Return the argument block of a layer's calls, with the addresses of its memory."""
        known = self._blocks.get(id(memory))
        if known is None:
            block = ArgumentBlock(at.NUM_ARGUMENTS)
            a, rings = block.values, [ring.data_ptr() for ring in memory.rings]
            a[at.SLOTS], a[at.LENGTHS] = memory.slots.data_ptr(), memory.lengths.data_ptr()
            a[at.NUM_SLOTS], a[at.NUM_RINGS] = len(memory.slots), len(memory.lengths)
            a[at.RING : at.RING + len(rings)] = rings
            a[at.UNITS], a[at.SIZE : at.SIZE + len(sizes)] = units, sizes
            known = self._blocks[id(memory)] = memory, block  # what is kept cannot have its id taken
        return known[1]

    def _remember(self, memory: LayerStates, plan: StatePlan, out: torch.Tensor) -> torch.Tensor:
        """Note the tokens that the states at the rings' ends sum up from now on."""
        for code, _, count, ring, place, _ in plan.operations.tolist():
            if code == 0:
                memory.lengths[ring] = place + count
        return out


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.float32 and tensor.is_contiguous():
        return tensor
    return tensor.to(torch.float32).contiguous()


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with heads of a size that kernels take, zeros added."""
    size = tensor.shape[-1]
    return tensor if size % 8 == 0 else F.pad(tensor, (0, rounded(size) - size))
