# SPDX-License-Identifier: Apache-2.0
"""Store new float32 keys and values in the paged cache, compiled by numba: one pass, one call per layer.

A cache of bfloat16 or float16 gets them rounded to nearest, ties to even, as torch rounds.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from radixkv_kernels.cpu.attention.stored_rows import BFLOAT16, FLOAT16, FLOAT32
from radixkv_kernels.cpu.compiling import compile_kernel
from radixkv_kernels.cpu.isa import widens_float16
from radixkv_kernels.cpu.memory import pointer, take
from radixkv_kernels.cpu.openmp import run_here, run_parallel
from radixkv_kernels.cpu.vectors import ELEMENT_SIZES, GROUP, Emitter
from radixkv_kernels.kv_cache import PagedKV

# Places in the int64 argument block. Strides are in bytes.
(
    COUNTER,
    COUNT,
    SLOTS,
    SOURCE_ROWS,
    NUM_KV_HEADS,
    HEAD_SIZE,
    HEAD_BYTES,
    KEY,
    KEY_TOKEN_STRIDE,
    KEY_HEAD_STRIDE,
    VALUE,
    VALUE_TOKEN_STRIDE,
    VALUE_HEAD_STRIDE,
    CACHED_KEY,
    CACHED_VALUE,
    NUM_SLOTS,
    REFUSED,
    VALUE_SIZE,
    VALUE_HEAD_BYTES,
) = range(19)
_NUM_ARGUMENTS = 19
#: Tokens a thread takes at a time.
_CHUNK = 16
#: Tokens below which waking the other threads costs more than they save.
_SMALL = 64
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def _store_intrinsic(typing_context: Any, kind: Any, source: Any, target: Any, size: Any) -> Any:
    storage = kind.literal_value

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e, b = Emitter(builder), builder
        _, source, target, size = args
        words = ir.VectorType(ir.IntType(32), GROUP)

        def constant(value: int) -> Any:
            return ir.Constant(words, [value] * GROUP)

        with e.loop(b.udiv(size, ir.IntType(64)(GROUP))) as index:
            value = e.load(e.at(source, e.scaled(index, GROUP * 4)), GROUP)
            if storage == FLOAT16:
                value = b.fptrunc(value, ir.VectorType(ir.HalfType(), GROUP))
            elif storage == BFLOAT16:
                bits = b.bitcast(value, words)
                high = b.lshr(bits, constant(16))
                half = b.add(constant(0x7FFF), b.and_(high, constant(1)))
                rounded = b.lshr(b.add(bits, half), constant(16))
                quiet = b.or_(high, constant(0x40))
                chosen = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
                value = b.trunc(chosen, ir.VectorType(ir.IntType(16), GROUP))
            place = e.at(target, e.scaled(index, GROUP * ELEMENT_SIZES[storage]))
            b.store(value, b.inttoptr(place, value.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(kind, source, target, size), codegen


#: store(kind, source, target, size): `size` float32, a multiple of 8, to elements of a constant kind.
_store: Any = intrinsic(prefer_literal=True)(_store_intrinsic)


@functools.cache
def _kernel(kind: int) -> Any:
    size_of = ELEMENT_SIZES[kind]

    def write(address):  # type: ignore[no-untyped-def]
        arg = carray(address, (19,), np.int64)
        counter = pointer(arg[COUNTER], np.int64)
        count, size, value_size = arg[COUNT], arg[HEAD_SIZE], arg[VALUE_SIZE]
        slots = carray(pointer(arg[SLOTS], np.int64), (count,))
        while True:
            first = take(counter) * _CHUNK
            if first >= count:
                break
            for i in range(first, min(first + _CHUNK, count)):
                slot = slots[i]
                if slot < 0:
                    continue
                if slot >= arg[NUM_SLOTS]:
                    arg[REFUSED] = slot
                    continue
                row = i
                if arg[SOURCE_ROWS]:
                    row = carray(pointer(arg[SOURCE_ROWS], np.int64), (count,))[i]
                for h in range(arg[NUM_KV_HEADS]):
                    target = h * arg[HEAD_BYTES] + slot * size * size_of
                    key = arg[KEY] + row * arg[KEY_TOKEN_STRIDE] + h * arg[KEY_HEAD_STRIDE]
                    _store(kind, key, arg[CACHED_KEY] + target, size)
                    target = h * arg[VALUE_HEAD_BYTES] + slot * value_size * size_of
                    value = arg[VALUE] + row * arg[VALUE_TOKEN_STRIDE] + h * arg[VALUE_HEAD_STRIDE]
                    _store(kind, value, arg[CACHED_VALUE] + target, value_size)

    return compile_kernel(write)


class FloatWriter:
    """Writes to one cache on the CPU that is not quantised; not thread-safe."""

    def __init__(self, kv: PagedKV) -> None:
        spec = kv.spec
        self.kv = kv
        self._counter = np.zeros(1, dtype=np.int64)
        a = self._arguments = np.zeros(_NUM_ARGUMENTS, dtype=np.int64)
        a[COUNTER] = self._counter.ctypes.data
        a[NUM_KV_HEADS], a[HEAD_SIZE] = spec.num_kv_heads, spec.head_size
        a[HEAD_BYTES] = kv.key.element_size() * kv.key.stride(1)
        # Values that are part of the keys have been written with them.
        a[VALUE_SIZE] = 0 if spec.value_in_key else spec.value_size
        a[VALUE_HEAD_BYTES] = kv.value.element_size() * kv.value.stride(1)
        a[NUM_SLOTS] = spec.num_blocks * spec.block_size
        self._layers = [
            (key.data_ptr(), value.data_ptr()) for key, value in zip(kv.key, kv.value, strict=True)
        ]
        self._address = a.ctypes.data
        self._run = _kernel(_KINDS[kv.key.dtype]).address

    @staticmethod
    def accepts(kv: PagedKV, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Return True if the rows are contiguous float32 and the cache holds them without scales."""
        return (
            kv.key.dtype in _KINDS
            and (kv.key.dtype != torch.float16 or widens_float16())
            and key.dtype == torch.float32
            and value.dtype == torch.float32
            and key.stride(2) == 1
            and value.stride(2) == 1
        )

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> None:
        """See `AttentionBackend.write`.

        Raises:
            IndexError: a slot lies outside the cache; the others have been written.
        """
        a = self._arguments
        slots = slots.contiguous()
        rows = None if rows is None else rows.contiguous()
        count = slots.shape[0]
        a[COUNT], a[SLOTS], a[SOURCE_ROWS] = count, slots.data_ptr(), 0 if rows is None else rows.data_ptr()
        token, head, _ = key.stride()
        a[KEY], a[KEY_TOKEN_STRIDE], a[KEY_HEAD_STRIDE] = key.data_ptr(), 4 * token, 4 * head
        token, head, _ = value.stride()
        a[VALUE], a[VALUE_TOKEN_STRIDE], a[VALUE_HEAD_STRIDE] = value.data_ptr(), 4 * token, 4 * head
        a[CACHED_KEY], a[CACHED_VALUE] = self._layers[layer]
        a[REFUSED] = self._counter[0] = 0
        (run_here if count < _SMALL else run_parallel)(self._run, self._address)
        if a[REFUSED]:
            raise IndexError(f"slot {a[REFUSED]} of a cache with {a[NUM_SLOTS]} slots")
