"""Products of float32 rows with float32, bfloat16 or float16 weights on a CPU, for small models' matrices.

    y = x W^T + b        PackedFloat.multiply(x, y)               y += ... with add=True
    y = silu(x G^T + g) * (x U^T + u)        PackedGate.multiply(x, y)

Weights lie in panels of a few vectors of columns, in the order the loop reads them: [panel][input][column].
A tile of rows x vectors keeps its sums in registers and reads the panel once: with few rows, weights stream
through at memory speed; with many, a panel stays in the core's own cache. What comes after the sums (bias,
residual, SiLU) is done while they are in the L1 cache.

Weights of 16 bits stay so in memory and are widened in the tile, once for all of its rows: half of the memory
to read, which is what few rows wait for, and the same float32 sums for many.

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

from radixkv_kernels.cpu.isa import widens_float16
from radixkv_kernels.cpu.linear.launch import ArgumentBlock
from radixkv_kernels.cpu.memory import aligned, compile_kernel, f32_row, pointer, take
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
) = range(16)
_NUM_ARGUMENTS = 16
#: Vectors of a panel and rows of a tile: their product in accumulators, beside what a step loads, fits 32
#: registers of 16 floats (AVX-512), or 16 of 8.
_VECTORS, _TILE_ROWS = (3, 8) if LANES == 16 else (2, 6)
COLUMNS = _VECTORS * LANES
#: Rows of one work item: enough to use a panel often, few enough to share a product out among many threads.
_ITEM_ROWS = 8 * _TILE_ROWS
#: Multiplications below which waking the other threads costs more than they save.
_SMALL = 32_768
_UNROLL = 4
#: What weights are stored as, and bytes of an element.
FLOAT32, BFLOAT16, FLOAT16 = range(3)
SIZES = (4, 2, 2)
_STORAGE = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_LONG = ir.IntType(64)
_LOG2E = np.float32(1.4426950408889634)


def can_store(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype can be multiplied as they are; float16 needs instructions to widen it."""
    return dtype in _STORAGE and (dtype != torch.float16 or widens_float16())


def storage_kind(dtype: torch.dtype) -> int:
    """The number of a dtype that `can_store` knows.

    Raises:
        ValueError: it is another one.
    """
    if not can_store(dtype):
        raise ValueError(f"products with {dtype} weights are not known here")
    return _STORAGE[dtype]


def _widened(e: Emitter, storage: int, address: Any) -> Any:
    """A vector of the panel's columns as float32."""
    if storage == FLOAT32:
        return e.load(address, LANES)
    b = e.builder
    stored = ir.VectorType(ir.IntType(16) if storage == BFLOAT16 else ir.HalfType(), LANES)
    narrow = b.load(b.inttoptr(address, stored.as_pointer()), align=2)
    floats = ir.VectorType(ir.FloatType(), LANES)
    if storage == FLOAT16:
        return b.fpext(narrow, floats)
    words = ir.VectorType(ir.IntType(32), LANES)
    return b.bitcast(b.shl(b.zext(narrow, words), ir.Constant(words, [16] * LANES)), floats)


def _tile_intrinsic(
    typing_context: Any, num_rows: Any, kind: Any, x: Any, stride: Any, weight: Any, depth: Any, out: Any
) -> Any:
    # Taller tiles than the registers hold are never asked for.
    rows, storage = min(num_rows.literal_value, _TILE_ROWS), kind.literal_value
    size = SIZES[storage]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emitter(builder)
        x, stride, weight, depth, out = args[2:]
        floats = ir.VectorType(ir.FloatType(), LANES)
        sums = [[e.variable(floats, e.constant(0.0, floats)) for _ in range(_VECTORS)] for _ in range(rows)]
        bases = [builder.add(x, builder.mul(stride, _LONG(r))) for r in range(rows)]

        def step(number: Any) -> None:
            panel = e.at(weight, e.scaled(number, COLUMNS * size))
            columns = [_widened(e, storage, e.at(panel, v * LANES * size)) for v in range(_VECTORS)]
            for base, own in zip(bases, sums, strict=True):
                value = e.splat(e.scalar(e.at(base, e.scaled(number, 4))), LANES)
                for column, place in zip(columns, own, strict=True):
                    builder.store(e.call("fma", value, column, builder.load(place)), place)

        whole = builder.udiv(depth, _LONG(_UNROLL))
        with e.loop(whole) as index:
            at = e.scaled(index, _UNROLL)
            for k in range(_UNROLL):
                step(builder.add(at, _LONG(k)))
        done = e.scaled(whole, _UNROLL)
        with e.loop(builder.sub(depth, done)) as index:
            step(builder.add(done, index))
        for r, own in enumerate(sums):
            for v, place in enumerate(own):
                e.store(builder.load(place), e.at(out, (r * COLUMNS + v * LANES) * 4))
        return context.get_dummy_value()

    return types.void(num_rows, kind, x, stride, weight, depth, out), codegen


#: tile(rows, storage, x, stride, weight, depth, out): out[rows, COLUMNS] = x[rows, depth] . panel. The first
#: two are constants; x, weight, out: addresses; stride: bytes from row to row of x. All int64.
_tile: Any = intrinsic(prefer_literal=True)(_tile_intrinsic)


@njit(inline="always")
def _sums(storage: int, n: int, x: int, stride: int, weight: int, depth: int, out: int) -> None:
    """The tile of n rows, by what weights are stored as."""
    if n == 8:
        _tile(8, storage, x, stride, weight, depth, out)
    elif n == 1:
        _tile(1, storage, x, stride, weight, depth, out)
    elif n == 2:
        _tile(2, storage, x, stride, weight, depth, out)
    elif n == 3:
        _tile(3, storage, x, stride, weight, depth, out)
    elif n == 4:
        _tile(4, storage, x, stride, weight, depth, out)
    elif n == 5:
        _tile(5, storage, x, stride, weight, depth, out)
    elif n == 6:
        _tile(6, storage, x, stride, weight, depth, out)
    else:
        _tile(7, storage, x, stride, weight, depth, out)


@functools.cache
def _plain_kernel(storage: int) -> Any:
    def product(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (16,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        rows, depth, width = arg[ROWS], arg[DEPTH], arg[WIDTH]
        stride, per_item, out_stride = arg[INPUT_STRIDE], arg[ROWS_PER_ITEM], arg[OUTPUT_STRIDE]
        sums = aligned(_TILE_ROWS * COLUMNS)
        sums_at = np.int64(sums.ctypes.data)
        parts = (rows + per_item - 1) // per_item
        while True:
            item = take(counter)
            if item >= arg[PANELS] * parts:
                break
            panel = item // parts
            begin = (item - panel * parts) * per_item
            weight = arg[WEIGHT] + panel * arg[PANEL_BYTES]
            base = panel * COLUMNS
            count = min(COLUMNS, width - base)
            bias = f32_row(arg[BIAS] + base * 4, COLUMNS)
            for r in range(begin, min(rows, begin + per_item), _TILE_ROWS):
                n = min(_TILE_ROWS, rows - r)
                _sums(storage, n, arg[INPUT] + r * stride, stride, weight, depth, sums_at)
                for i in range(n):
                    out = f32_row(arg[OUTPUT] + (r + i) * out_stride + base * 4, count)
                    own = sums[i * COLUMNS : i * COLUMNS + count]
                    if arg[ADD]:
                        for c in range(count):
                            out[c] += own[c] + bias[c]
                    else:
                        for c in range(count):
                            out[c] = own[c] + bias[c]

    return compile_kernel(product)


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
def _gate_kernel(storage: int) -> Any:
    def product(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (16,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        rows, depth, width = arg[ROWS], arg[DEPTH], arg[WIDTH]
        stride, per_item, out_stride = arg[INPUT_STRIDE], arg[ROWS_PER_ITEM], arg[OUTPUT_STRIDE]
        ups, gates = aligned(_TILE_ROWS * COLUMNS), aligned(_TILE_ROWS * COLUMNS)
        ups_at, gates_at = np.int64(ups.ctypes.data), np.int64(gates.ctypes.data)
        parts = (rows + per_item - 1) // per_item
        while True:
            item = take(counter)
            if item >= arg[PANELS] * parts:
                break
            panel = item // parts
            begin = (item - panel * parts) * per_item
            offset, base = panel * arg[PANEL_BYTES], panel * COLUMNS
            count = min(COLUMNS, width - base)
            up_bias = f32_row(arg[BIAS] + base * 4, COLUMNS)
            gate_bias = f32_row(arg[GATE_BIAS] + base * 4, COLUMNS)
            for r in range(begin, min(rows, begin + per_item), _TILE_ROWS):
                n = min(_TILE_ROWS, rows - r)
                x = arg[INPUT] + r * stride
                _sums(storage, n, x, stride, arg[WEIGHT] + offset, depth, ups_at)
                _sums(storage, n, x, stride, arg[GATE_WEIGHT] + offset, depth, gates_at)
                for i in range(n):
                    out = f32_row(arg[OUTPUT] + (r + i) * out_stride + base * 4, count)
                    at = i * COLUMNS
                    _gate(gates[at : at + COLUMNS], gate_bias, ups[at : at + COLUMNS], up_bias, out)

    return compile_kernel(product)


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [panels, in, COLUMNS], zeros behind the last column."""
    outputs, inputs = weight.shape
    count = -(-outputs // COLUMNS)
    packed = torch.empty(count, inputs, COLUMNS, dtype=weight.dtype)
    for panel in range(count):
        rows = weight[panel * COLUMNS : (panel + 1) * COLUMNS]
        packed[panel, :, : len(rows)] = rows.t()
        packed[panel, :, len(rows) :] = 0
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
        self._kernel = _plain_kernel(self._storage)

    def multiply(self, rows: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """rows [T, in] -> out [T, out], or with `add` added to what `out` holds; returns `out`.

        Both float32, last dimension contiguous.
        """
        self._arguments[ADD] = add
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
        self._kernel = _gate_kernel(self._storage)

    def multiply(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """rows [T, in] -> out [T, out]; both float32, last dimension contiguous. Returns `out`."""
        return self._run(rows, out)
