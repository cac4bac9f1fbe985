# SPDX-License-Identifier: Apache-2.0
"""Repairs of Triton's interpreter, without which it would test the wrong arithmetic.

- bfloat16 values are kept as their raw 16 bits, and `tl.dot` multiplies those as integers.
- float32 to bfloat16 and to 8-bit floats truncates, where hardware rounds to nearest.
- `tl.dot` calls BLAS, whose rows depend on their place in the matrix: bitwise comparisons fail although the
  kernel is right. einsum adds in one order.
- One-element arrays become loop bounds by `int()`, which newer numpy refuses.
- Every nested jit call (tl.sum, tl.max) patches the language module again, which takes most of the time.
- The types and shapes of all values are checked and spelled out anew, which takes half of the rest.
- Sums and products of integers are computed once more by Triton's own operations, to find overflows that are
  then ignored: a fifth of all time. Here numpy finds them, and an overflow of int32, as of an address, is an
  error.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_TORCH_FLOATS = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


def _decode(handle: Any) -> np.ndarray:
    """A tensor's values as float32."""
    dtype = _TORCH_FLOATS.get(handle.dtype.scalar)
    if dtype is None:
        return handle.data.astype(np.float32)
    bits = np.ascontiguousarray(handle.data)
    raw = bits.view(np.uint8 if dtype.itemsize == 1 else np.int16)
    return torch.from_numpy(raw.copy()).view(dtype).float().numpy().reshape(bits.shape)


def _encode(values: np.ndarray, dtype: Any) -> np.ndarray:
    """float32 values in the interpreter's storage of a narrow float, rounded to nearest even."""
    narrow = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(_TORCH_FLOATS[dtype])
    if narrow.dtype.itemsize == 1:
        return narrow.view(torch.uint8).numpy()
    return narrow.view(torch.int16).numpy().view(np.uint16)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    product = np.einsum("mk,kn->mn", _decode(a), _decode(b))
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


_original_cast = interpreter.InterpreterBuilder.cast_impl


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if source in _TORCH_FLOATS and target.is_floating():
        values = _decode(src)
    elif target in _TORCH_FLOATS:
        values = src.data.astype(np.float32)
    else:
        return _original_cast(self, src, dst_type)
    if target in _TORCH_FLOATS:
        return interpreter.TensorHandle(_encode(values, target), target)
    return interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(dst_type)), target)


def _fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    return _cast(self, src, dst_type)


_original_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _original_patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_original_patch = interpreter._patch_lang
_patched: set[int] = set()


class _Restore:
    """Undo a patch, and forget the modules it added."""

    def __init__(self, scope: Any, modules: set[int]) -> None:
        self._scope, self._modules = scope, modules

    def restore(self) -> None:
        if self._scope is not None:
            _patched.difference_update(self._modules)
            self._scope.restore()


def _patch_once(fn: Any) -> Any:
    """Patch the language modules a function sees, unless a caller's patch is in force."""
    modules = {id(m) for m in fn.__globals__.values() if m is tl or m is tl.core}
    added = modules - _patched
    if not added:
        return _Restore(None, set())
    scope = _original_patch(fn)
    _patched.update(added)
    return _Restore(scope, added)


@functools.lru_cache(maxsize=None, typed=True)
def _shape_of_block(*sizes: int) -> tuple[Any, int, str]:
    """What all block types of a shape have in common: the shape, the number of elements, the shape's text."""
    block = _original_block_type(*sizes)
    return block.shape, block.numel, str(block.shape)


@functools.lru_cache(maxsize=None, typed=True)
def _shape_of_tensor(*sizes: int) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _original_block_type(*sizes: int) -> Any:
    block = object.__new__(tl.block_type)
    _original_block_init(block, tl.int32, list(sizes))
    return block


_original_block_init = tl.block_type.__init__
_original_tensor_init = tl.tensor.__init__


def _block_init(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
    self.element_ty = element_ty
    self.shape, self.numel, text = _shape_of_block(*sizes)
    self.name = f"<{text}, {element_ty}>"


def _tensor_init(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of_tensor(*(type.shape.values if type.is_block() else ()))


_original_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, Any] = {}


def _np_dtype(dtype: Any) -> Any:
    name = (dtype.element_ty if isinstance(dtype, tl.block_type) else dtype).name
    if name not in _np_dtypes:
        _np_dtypes[name] = _original_np_dtype(dtype)
    return _np_dtypes[name]


_original_unwrap = tl.core._unwrap_if_constexpr
_original_dtype_eq = tl.dtype.__eq__
_original_broadcast = TritonSemantic.broadcast_impl_value
_original_computation_type = TritonSemantic.computation_type_impl
_computation_types: dict[tuple[str, bool, str, bool, bool], Any] = {}


def _unwrap(value: Any) -> Any:
    """The value of a constant; what comes most often first."""
    kind = type(value)
    if kind is tl.tensor or kind is int:
        return value
    return value.value if kind is tl.constexpr else _original_unwrap(value)


def _dtype_eq(self: Any, other: Any) -> bool:
    return self is other or _original_dtype_eq(self, other)


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """Leave two tensors of one shape as they are; blocks of one shape share it, see `_shape_of_block`."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    return _original_broadcast(self, lhs, rhs)


def _computation_type(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, div_or_mod: bool) -> Any:
    key = (a.name, a_scalar, b.name, b_scalar, div_or_mod)
    if key not in _computation_types:
        _computation_types[key] = _original_computation_type(self, a, a_scalar, b, b_scalar, div_or_mod)
    return _computation_types[key]


_WIDE_OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _find_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """Raise OverflowError where a sum, difference or product of int32 numbers does not fit int32."""
    if lhs.dtype.name != "int32" or rhs.dtype.name != "int32":
        return
    wide = _WIDE_OPERATIONS[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
    if wide.size and (wide.max() > 2**31 - 1 or wide.min() < -(2**31)):
        raise OverflowError(f"int32 overflow in {operation.__name__}")


def _fill_alike(kind: Any, init: Any, ours: Any, *arguments: Any) -> bool:
    """Whether two constructors give an object of this kind the same attributes."""
    one, other = object.__new__(kind), object.__new__(kind)
    init(one, *arguments)
    ours(other, *arguments)
    return {name: str(value) for name, value in vars(one).items()} == {
        name: str(value) for name, value in vars(other).items()
    }


def install() -> None:
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _create_dot
    builder.cast_impl = _cast
    builder.create_fp_to_fp = _fp_to_fp
    interpreter._patch_lang = _patch_once
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter._get_np_dtype = _np_dtype
    tl.core._unwrap_if_constexpr = _unwrap
    tl.dtype.__eq__ = _dtype_eq
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.computation_type_impl = _computation_type
    TritonSemantic.binary_op_sanitize_overflow_impl = _find_overflow
    # These two only save time; of another triton they may leave out an attribute.
    block = tl.block_type(tl.float32, [2, 4])
    if _fill_alike(tl.block_type, _original_block_init, _block_init, tl.float32, [2, 4]):
        tl.block_type.__init__ = _block_init
    if all(_fill_alike(tl.tensor, _original_tensor_init, _tensor_init, None, t) for t in (tl.int32, block)):
        tl.tensor.__init__ = _tensor_init
