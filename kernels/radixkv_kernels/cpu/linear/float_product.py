# SPDX-License-Identifier: Apache-2.0
"""Products of float32 rows with float32, bfloat16 or float16 weights on a CPU, for small models' matrices.

    y = x W^T + b        PackedFloat.multiply(x, y)               y += ... with add=True
    y = silu(x G^T + g) * (x U^T + u)        PackedGate.multiply(x, y)

Weights lie in panels of a few vectors of columns, in the order the loop reads them: [panel][input][column].
A tile of rows x vectors keeps its sums in registers and reads the panel once: with few rows, weights stream
through at memory speed (one or two rows take several panels at once, a larger tile prefetches the next
panel); with many, a panel stays in the core's own cache. Bias, residual and SiLU are
applied while the sums are in the L1 cache.

A function may change an item's sums in between: an adapter's part of the product.

Weights of 16 bits stay so in memory and are widened in the tile, once for all of its rows: half of the memory
to read, for which few rows wait, and the same float32 sums for many.

Each sum adds its products in the order of the inputs, one fused multiply-add each, whatever the number of
rows: a row's bits depend on that row only. Libraries that choose another kernel for another number of rows
don't promise that.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.isa import widens_float16
from radixkv_kernels.cpu.linear.launch import ArgumentBlock
from radixkv_kernels.cpu.memory import (
    aligned,
    call,
    emit_prefetch,
    f32_row,
    i64,
    pointer,
    take,
)
from radixkv_kernels.cpu.vectors import LANES, Emitter, exp2

# Places in the int64 argument block.
(
    COUNTER,
    ROWS,
    DEPTH,
    PANELS,
    WIDTH,
    INPUT,
    INPUT_STRIDE,
    WEIGHT,
    BIAS,
    GATE_WEIGHT,
    GATE_BIAS,
    OUTPUT,
    OUTPUT_STRIDE,
    ADD,
    ROWS_PER_ITEM,
    PANEL_BYTES,
    GROUP,
    CHANGES,
) = range(18)
_NUM_ARGUMENTS = 18
#: Vectors of a panel and rows of a tile: their product in accumulators, beside the loaded operands, fits 32
#: registers of 16 floats (AVX-512), or 16 of 8.
_VECTORS, _TILE_ROWS = (3, 8) if LANES == 16 else (2, 6)
COLUMNS = _VECTORS * LANES
#: Bytes of a panel that both tiles of an item go through before the next, so that the second finds them in
#: the L1 cache, and how far ahead memory is read. Wide vectors leave the processor time to do that itself.
_PART = 16_384
_READS_AHEAD = LANES == 8
#: Rows of one work item: enough to use a panel often, few enough to share a product out among many threads.
_ITEM_ROWS = 8 * _TILE_ROWS
#: Multiplications below which waking the other threads costs more than they save.
_SMALL = 32_768
_UNROLL = 4
#: Storage kinds of weights, and bytes of an element.
FLOAT32, BFLOAT16, FLOAT16 = range(3)
SIZES = (4, 2, 2)
#: Whether a word of a bfloat16 panel holds a column of one vector and one of the next: one load for both.
_PAIRED = _VECTORS % 2 == 0
_STORAGE = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_LONG = ir.IntType(64)
_LOG2E = np.float32(1.4426950408889634)


def can_store(dtype: torch.dtype) -> bool:
    """Return True if weights of this dtype are multiplied as stored; float16 needs widening instructions."""
    return dtype in _STORAGE and (dtype != torch.float16 or widens_float16())


def storage_kind(dtype: torch.dtype) -> int:
    """The number of a dtype that `can_store` knows.

    Raises:
        ValueError: it is another one.
    """
    if not can_store(dtype):
        raise ValueError(f"products with {dtype} weights are not known here")
    return _STORAGE[dtype]


def _group(rows: int) -> int:
    """Panels that one or two rows multiply at once: a multiply-add waits for the one before it in its sum, so
    that a core with few sums is not busy and has little of memory under way."""
    return max(1, 4 // max(1, rows))


def _widened(e: Emitter, storage: int, panel: Any) -> list[Any]:
    """The vectors of a panel's row as float32."""
    b = e.builder
    floats = ir.VectorType(ir.FloatType(), LANES)
    words = ir.VectorType(ir.IntType(32), LANES)
    if storage == FLOAT32:
        return [e.load(e.at(panel, v * LANES * 4), LANES) for v in range(_VECTORS)]
    if storage == BFLOAT16 and _PAIRED:
        found = []
        for v in range(0, _VECTORS, 2):
            pair = b.load(b.inttoptr(e.at(panel, v * LANES * 2), words.as_pointer()), align=4)
            found += [b.shl(pair, ir.Constant(words, [16] * LANES))]
            found += [b.and_(pair, ir.Constant(words, [0xFFFF0000] * LANES))]
        return [b.bitcast(each, floats) for each in found]
    stored = ir.VectorType(ir.IntType(16) if storage == BFLOAT16 else ir.HalfType(), LANES).as_pointer()
    narrow = [b.load(b.inttoptr(e.at(panel, v * LANES * 2), stored), align=2) for v in range(_VECTORS)]
    if storage == FLOAT16:
        return [b.fpext(each, floats) for each in narrow]
    return [
        b.bitcast(b.shl(b.zext(each, words), ir.Constant(words, [16] * LANES)), floats) for each in narrow
    ]


def _tile_intrinsic(
    typing_context: Any, num_rows: Any, num_panels: Any, kind: Any, x: Any, stride: Any, weight: Any,
    panel_bytes: Any, depth: Any, ahead: Any, out: Any,
) -> Any:  # fmt: skip
    """A tile with panels of `COLUMNS`."""
    panels, storage = num_panels.literal_value, kind.literal_value
    heights = [rows for rows in range(1, _TILE_ROWS + 1) if panels in (1, _group(rows))]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for rows in heights:
            with builder.if_then(builder.icmp_signed("==", args[0], _LONG(rows))):
                _emit_tile(Emitter(builder), rows, panels, storage, *args[3:])
        return context.get_dummy_value()

    return types.void(num_rows, num_panels, kind, x, stride, weight, panel_bytes, depth, ahead, out), codegen


def _emit_tile(
    e: Emitter, rows: int, panels: int, storage: int, x: Any, stride: Any, weight: Any, panel_bytes: Any,
    depth: Any, ahead: Any, out: Any,
) -> None:  # fmt: skip
    builder, size = e.builder, SIZES[storage]
    floats = ir.VectorType(ir.FloatType(), LANES)
    places = [
        [
            e.at(out, ((p * rows + r) * COLUMNS + v * LANES) * 4)
            for p in range(panels)
            for v in range(_VECTORS)
        ]
        for r in range(rows)
    ]
    sums = [[e.variable(floats, e.load(place, LANES)) for place in own] for own in places]
    bases = [builder.add(x, builder.mul(stride, _LONG(r))) for r in range(rows)]
    starts = [builder.add(weight, builder.mul(panel_bytes, _LONG(p))) for p in range(panels)]

    def step(number: Any) -> None:
        at = e.scaled(number, COLUMNS * size)
        columns = [column for start in starts for column in _widened(e, storage, e.at(start, at))]
        for base, own in zip(bases, sums, strict=True):
            value = e.splat(e.scalar(e.at(base, e.scaled(number, 4))), LANES)
            for column, place in zip(columns, own, strict=True):
                builder.store(e.call("fma", value, column, builder.load(place)), place)

    whole = builder.udiv(depth, _LONG(_UNROLL))
    with e.loop(whole) as index:
        at = e.scaled(index, _UNROLL)
        if panels == 1 and _READS_AHEAD:
            # While a tile of many rows computes, too few loads are under way to keep memory busy.
            with builder.if_then(builder.icmp_signed("!=", ahead, _LONG(0))):
                next_part = e.at(e.at(weight, e.scaled(at, COLUMNS * size)), ahead)
                for line in range(0, _UNROLL * COLUMNS * size, 64):
                    emit_prefetch(builder, e.at(next_part, line))
        for k in range(_UNROLL):
            step(builder.add(at, _LONG(k)))
    done = e.scaled(whole, _UNROLL)
    with e.loop(builder.sub(depth, done)) as index:
        step(builder.add(done, index))
    for own, row in zip(sums, places, strict=True):
        for total, place in zip(own, row, strict=True):
            e.store(builder.load(total), place)


#: tile(rows, panels, storage, x, stride, weight, panel_bytes, depth, ahead, out):
#: out[panels, rows, COLUMNS] += x[rows, depth] . panels. At most `_TILE_ROWS` rows; panels and storage are
#: constants; x, weight, out: addresses; stride: bytes from row to row of x; panel_bytes: from panel to panel;
#: ahead: bytes from the panel being read to the one prefetched, or 0. All int64.
_tile: Any = intrinsic(prefer_literal=True)(_tile_intrinsic)
_ONE_ROW, _TWO_ROWS = _group(1), _group(2)


@njit(inline="always")
def _sums(
    storage: int, n: int, group: int, x: int, stride: int, weight: int, panel_bytes: int, depth: int,
    ahead: int, out: int,
) -> None:  # fmt: skip
    """The tile of n rows for a storage type, with a group of panels or one."""
    if group == 1:
        _tile(n, 1, storage, x, stride, weight, panel_bytes, depth, ahead, out)
    elif n == 1:
        _tile(n, _ONE_ROW, storage, x, stride, weight, panel_bytes, depth, ahead, out)
    else:
        _tile(n, _TWO_ROWS, storage, x, stride, weight, panel_bytes, depth, ahead, out)


@njit(inline="always")
def _item_sums(
    storage: int, n: int, group: int, x: int, stride: int, weight: int, panel_bytes: int, depth: int, out: int
) -> None:
    """The sums of n rows with a panel, or of a tile's rows with a group of them: [group, n, COLUMNS]."""
    f32_row(out, group * n * COLUMNS)[:] = np.float32(0.0)
    tiles = (n + _TILE_ROWS - 1) // _TILE_ROWS
    row_bytes = COLUMNS * SIZES[storage]
    # With more than two tiles, reading costs little beside computing.
    ahead = _PART if tiles <= 2 else 0
    # Whole rounds of the unrolled loop.
    part = _PART // row_bytes // _UNROLL * _UNROLL if tiles == 2 and _READS_AHEAD else depth
    for k in range(0, depth, part):
        begin = 0
        for tile in range(tiles):
            # Tiles of about one height: a low one has too few sums to be busy.
            end = n * (tile + 1) // tiles
            _sums(
                storage, end - begin, group, x + begin * stride + 4 * k, stride, weight + k * row_bytes,
                panel_bytes, min(part, depth - k), ahead, out + begin * COLUMNS * 4,
            )  # fmt: skip
            begin = end


# numpy's error model: Python's would test every divisor for zero, and the loop could not use vectors.
@njit(error_model="numpy", forceinline=True)
def _gate(gates: Any, gate_bias: Any, ups: Any, up_bias: Any, out: Any) -> None:
    """out = silu(gates + gate_bias) * (ups + up_bias), through exp of a non-positive argument."""
    for c in range(len(out)):
        gate, up = gates[c] + gate_bias[c], ups[c] + up_bias[c]
        e = exp2(-abs(gate) * _LOG2E)
        numerator = gate if gate >= np.float32(0.0) else gate * e
        out[c] = numerator * up / (np.float32(1.0) + e)


@functools.cache
def _kernel(storage: int, gated: bool) -> Any:
    def product(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (_NUM_ARGUMENTS,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        rows, depth, width = arg[ROWS], arg[DEPTH], arg[WIDTH]
        stride, per_item, out_stride = arg[INPUT_STRIDE], arg[ROWS_PER_ITEM], arg[OUTPUT_STRIDE]
        sums, gates = aligned(_ITEM_ROWS * COLUMNS), aligned(_ITEM_ROWS * COLUMNS * gated)
        sums_at, gates_at = np.int64(sums.ctypes.data), np.int64(gates.ctypes.data)
        parts, panels, panel_bytes = (rows + per_item - 1) // per_item, arg[PANELS], arg[PANEL_BYTES]
        groups = (panels + arg[GROUP] - 1) // arg[GROUP]
        while True:
            item = take(counter)
            if item >= groups * parts:
                break
            begin = item % parts * per_item
            n = min(rows - begin, per_item)
            panel = item // parts * arg[GROUP]
            end = min(panels, panel + arg[GROUP])
            group = arg[GROUP] if end - panel == arg[GROUP] else 1
            for first in range(panel, end, group):
                x, weight = arg[INPUT] + begin * stride, arg[WEIGHT] + first * panel_bytes
                _item_sums(storage, n, group, x, stride, weight, panel_bytes, depth, sums_at)
                if gated:
                    weight = arg[GATE_WEIGHT] + first * panel_bytes
                    _item_sums(storage, n, group, x, stride, weight, panel_bytes, depth, gates_at)
                if arg[CHANGES]:
                    change = i64(arg[CHANGES])
                    if gated:
                        call(change, (arg[CHANGES], begin, n, first, group, gates_at))
                    call(change, (arg[CHANGES], begin, n, first + gated * panels, group, sums_at))
                for place in range(group * n):
                    base, i = (first + place // n) * COLUMNS, place % n
                    count = min(COLUMNS, width - base)
                    bias = f32_row(arg[BIAS] + base * 4, COLUMNS)
                    out = f32_row(arg[OUTPUT] + (begin + i) * out_stride + base * 4, count)
                    own = sums[place * COLUMNS : place * COLUMNS + count]
                    if gated:
                        gate_bias = f32_row(arg[GATE_BIAS] + base * 4, COLUMNS)
                        _gate(gates[place * COLUMNS : (place + 1) * COLUMNS], gate_bias, own, bias, out)
                    elif arg[ADD]:
                        for c in range(count):
                            out[c] += own[c] + bias[c]
                    else:
                        for c in range(count):
                            out[c] = own[c] + bias[c]

    return compile_kernel(product)


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [panels, in, COLUMNS], zeros after the last column."""
    outputs, inputs = weight.shape
    count = -(-outputs // COLUMNS)
    packed = torch.empty(count, inputs, COLUMNS, dtype=weight.dtype)
    for panel, own in enumerate(packed):
        rows = weight[panel * COLUMNS : (panel + 1) * COLUMNS]
        own[:, : len(rows)] = rows.t()
        own[:, len(rows) :] = 0
        if weight.dtype == torch.bfloat16 and _PAIRED:
            pairs = own.view(inputs, _VECTORS // 2, 2, LANES).transpose(2, 3)
            own.copy_(pairs.contiguous().view(inputs, COLUMNS))
    return packed


class _Packed:
    """The argument block that both kinds of product share; not thread-safe."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._block = ArgumentBlock(_NUM_ARGUMENTS)
        a = self._arguments = self._block.values
        self._kept: list[torch.Tensor] = []
        a[DEPTH], a[WIDTH] = self.in_features, self.out_features
        a[PANELS], a[ROWS_PER_ITEM] = -(-self.out_features // COLUMNS), _ITEM_ROWS
        a[WEIGHT], a[BIAS] = self._keep(weight, bias)
        packed = self._kept[0]
        a[PANEL_BYTES] = packed.stride(0) * packed.element_size()
        self._storage = storage_kind(weight.dtype)
        self._kernel: Any = None

    def _keep(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int]:
        packed = _panels(weight.detach())
        padded = torch.zeros(packed.shape[0] * COLUMNS)
        if bias is not None:
            padded[: self.out_features] = bias.detach()
        self._kept += [packed, padded]
        return packed.data_ptr(), padded.data_ptr()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept)

    def _run(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        a, count = self._arguments, rows.shape[0]
        a[ROWS], a[INPUT], a[INPUT_STRIDE] = count, rows.data_ptr(), 4 * rows.stride(0)
        a[OUTPUT], a[OUTPUT_STRIDE] = out.data_ptr(), 4 * out.stride(0)
        group = _group(count)
        # Threads have to find enough items.
        a[GROUP] = group if a[PANELS] >= 4 * group * torch.get_num_threads() else 1
        work = count * self.out_features * self.in_features
        self._block.run(self._kernel, on_all_threads=work >= _SMALL)
        return out


class PackedFloat(_Packed):
    """`y = x W^T + b`.

    Args:
        weight: [out, in], of a dtype that `can_store` knows.
        bias: [out], or None; kept as float32.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._kernel = _kernel(self._storage, gated=False)

    def multiply(
        self, rows: torch.Tensor, out: torch.Tensor, *, add: bool = False, changes: int = 0
    ) -> torch.Tensor:
        """Multiply rows [T, in] into out [T, out], or with `add` onto the values of `out`; return `out`.

        Both float32, last dimension contiguous.

        Args:
            changes: address of a block that begins with that of a function, which adds to the sums of an item
                before they are used (`radixkv_kernels.cpu.linear.low_rank`); 0: nothing.
        """
        self._arguments[ADD], self._arguments[CHANGES] = add, changes
        return self._run(rows, out)


class PackedGate(_Packed):
    """`y = silu(x G^T + g) * (x U^T + u)`: the first half of a Llama MLP.

    Args:
        gate, up: [out, in], of one dtype that `can_store` knows.
        gate_bias, up_bias: [out], or None; kept as float32.

    Raises:
        ValueError: another dtype.
    """

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__(up, up_bias)
        self._arguments[GATE_WEIGHT], self._arguments[GATE_BIAS] = self._keep(gate, gate_bias)
        self._kernel = _kernel(self._storage, gated=True)

    def multiply(self, rows: torch.Tensor, out: torch.Tensor, *, changes: int = 0) -> torch.Tensor:
        """Multiply rows [T, in] into out [T, out]; return `out`.

        Both float32, last dimension contiguous.

        Args:
            changes: see `PackedFloat.multiply`; of the gates first, then, from the next whole panel, of the
                ups.
        """
        self._arguments[CHANGES] = changes
        return self._run(rows, out)
