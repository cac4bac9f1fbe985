# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel between a gated MLP's two products: activation of the gate, times the up projection.

Both are halves of one product's rows. It rounds where torch's operators do.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Literal, overload

import torch
import triton
import triton.language as tl

from radixkv_kernels.triton.fp8_rows import Fp8Rows, rounding_block, rounding_warps, store_rounded

#: Activations that the kernel knows, by the number it knows them by.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation of float32 values; KIND: one of `ACTIVATIONS`."""
    if KIND == 0:
        x = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        # tanh by an exponential that can't overflow. sqrt(2 / pi) = 0.7978...
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        e = tl.exp(-2.0 * tl.abs(y))
        tanh = (1.0 - e) / (1.0 + e)
        x = 0.5 * x * (1.0 + tl.where(y < 0, -tanh, tanh))
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def gated_kernel(
    gate_up_ptr, out_ptr, scales_ptr, stride, scale_stride, factor, N: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid (rows, ceil(N / BLOCK)); KIND: one of `ACTIVATIONS`. GROUP: numbers that share a scale in results
    of 8 bits, or 0. SCALED: gates are multiplied by `factor` first."""
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    at = gate_up_ptr + row * stride + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        x = (x * factor).to(dtype).to(tl.float32)
    x = activate(x, KIND)
    x = (x.to(dtype).to(tl.float32) * up).to(dtype)
    if GROUP:
        start = tl.program_id(1) * BLOCK
        store_rounded(x.to(tl.float32), row, start, out_ptr, scales_ptr, scale_stride, N, BLOCK, GROUP)
    else:
        tl.store(out_ptr + row * N + column, x, mask=inside)


@overload
def gate_rows(
    gate_up: torch.Tensor, activation: str, *, group: Literal[0] = 0, factor: float = 1.0
) -> torch.Tensor: ...
@overload
def gate_rows(
    gate_up: torch.Tensor, activation: str, *, group: int, factor: float = 1.0
) -> torch.Tensor | Fp8Rows: ...
def gate_rows(
    gate_up: torch.Tensor, activation: str, *, group: int = 0, factor: float = 1.0
) -> torch.Tensor | Fp8Rows:
    """[T, 2 N], gates followed by gated values -> [T, N]: activation(gate) * up.

    Args:
        group: numbers that share a scale in rows of 8 bits; 0: the result is not rounded to these.
        factor: of gates, before their activation.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    block = min(1024, triton.next_power_of_2(width))
    out: torch.Tensor | Fp8Rows
    if group:
        out = Fp8Rows.empty(rows, width, group, gate_up)
        codes, scales, block = out.codes, out.scales, rounding_block(width, group)
    else:
        out = codes = scales = gate_up.new_empty(rows, width)
    if rows:
        gated_kernel[(rows, -(-width // block))](
            gate_up,
            codes,
            scales,
            gate_up.stride(0),
            scales.stride(1),
            factor,
            N=width,
            BLOCK=block,
            KIND=ACTIVATIONS[activation],
            GROUP=group,
            SCALED=factor != 1.0,
            num_warps=rounding_warps(block),
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def gate_heads_kernel(
    rows_ptr, gates_ptr, token_stride, head_stride, element_stride, H: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, ceil(H D / BLOCK)): rows times the sigmoid of their gates."""
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H * D
    at = rows_ptr + row * H * D + column
    gate_at = gates_ptr + row * token_stride + column // D * head_stride + column % D * element_stride
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(at, (x * gate).to(dtype), mask=inside)


def gate_heads(rows: torch.Tensor, gates: torch.Tensor) -> None:
    """`rows *= sigmoid(gates)` in place; [T, H, D], rows contiguous, gates in any layout."""
    tokens, heads, size = rows.shape
    if tokens:
        block = min(1024, triton.next_power_of_2(heads * size))
        gate_heads_kernel[(tokens, -(-heads * size // block))](
            *(rows, gates, *gates.stride()),
            H=heads, D=size, BLOCK=block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
