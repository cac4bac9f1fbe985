# SPDX-License-Identifier: Apache-2.0
"""Helpers that numba lacks: typed views of addresses, prefetch, an atomic counter.

The compiled kernels take one int64 argument block full of addresses (`void (int64 *arguments)`), so that a
launch costs no boxing of arrays and runs on threads that Python does not know.
"""

# Kernel source is typed by numba; mypy's view of numpy scalars does not apply to it.
# mypy: disable-error-code="call-overload,operator,arg-type,type-var,var-annotated,call-arg"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu.isa import features

features()  # numba's first decorator fixes what it compiles for

#: Flags that let the compiler reorder and fuse, for kernels whose bits need not agree with another's.
FAST = {"contract", "nsz", "arcp", "reassoc"}


def _pointer_intrinsic(typing_context: Any, address: Any, element: Any) -> Any:
    """An integer address as a typed pointer."""
    signature = types.CPointer(element.dtype)(address, element)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return signature, codegen


def _take_intrinsic(typing_context: Any, counter: Any) -> Any:
    """Atomic fetch-and-add of 1 on the int64 at a pointer."""
    signature = types.int64(counter)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return signature, codegen


def _as_float_intrinsic(typing_context: Any, bits: Any) -> Any:
    """The float32 with the given int32 bits."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


def emit_prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at an address, for reading, into all levels."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, byte), word(0), word(3), word(1)])


def _prefetch_intrinsic(typing_context: Any, address: Any) -> Any:
    """`emit_prefetch` of an int64 address, which may lie anywhere."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _call_intrinsic(typing_context: Any, address: Any, arguments: Any) -> Any:
    """A call of the C function `void (int64, ...)` at an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kinds = sig.args[1]
        values = [
            context.cast(builder, builder.extract_value(args[1], place), kind, types.int64)
            for place, kind in enumerate(kinds)
        ]
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(values))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(address, arguments), codegen


#: call(address, (a, b, ...)): call a function that `compile_kernel` made with parameters.
call: Any = intrinsic(_call_intrinsic)
pointer: Any = intrinsic(_pointer_intrinsic)
prefetch: Any = intrinsic(_prefetch_intrinsic)
take: Any = intrinsic(_take_intrinsic)
as_float: Any = intrinsic(_as_float_intrinsic)


@njit(forceinline=True)
def i32(address: int) -> Any:
    """The int32 at an address, as int64."""
    return np.int64(carray(pointer(address, np.int32), (1,))[0])


@njit(forceinline=True)
def i64(address: int) -> Any:
    """The int64 at an address."""
    return carray(pointer(address, np.int64), (1,))[0]


@njit(forceinline=True)
def f32(address: int) -> Any:
    """A view of the float32 at an address."""
    return carray(pointer(address, np.float32), (1,))


@njit(forceinline=True)
def f32_row(address: int, size: int) -> Any:
    """A view of `size` float32 at an address."""
    return carray(pointer(address, np.float32), (size,))


@njit(forceinline=True)
def aligned(size: int) -> Any:
    """`size` uninitialised float32 from a cache line's start: vectors of a whole line then load in one
    access."""
    buffer = np.empty(size + 16, np.float32)
    skip = (-np.int64(buffer.ctypes.data) % 64) // 4
    return buffer[skip : skip + size]
