# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of heads whose state is a matrix: gated delta rules (Qwen, Kimi) and linear attention.

    S = decay S                       a decay of the head, or (kda) of each channel of the key
    u = beta (v - k S)                delta rules; in linear attention u is an input
    S = S + k u
    o = q S

A program carries some columns of one head's state, in registers, from a request's base through its ring to
its last row. Every element is one chain of roundings in the order of the tokens, whatever steps they come
in: a ring's u enters the state again as it did when it was computed. Queries and keys of the delta rules are
normed beforehand, by `norm_kernel`.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.states import GRID, LayerStates, rounded
from radixkv_kernels.triton.state.tables import StepTables

#: Numbers of a state that a program, one warp, keeps in registers.
STATE_NUMBERS = 2048
#: Tokens whose inputs are being loaded at a time.
_STAGES = tl.constexpr(3)
_GRID = tl.constexpr(GRID)
_LOG2E = tl.constexpr(1.4426950408889634)
_EPSILON = tl.constexpr(1e-6)


@triton.jit
def norm_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_stride, k_stride, scale, G: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    """Queries, times `scale`, and keys of length 1, float32 [T, G, K]. Grid (rows, groups)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.arange(0, KP)
    inside = key < K
    target = (row * G + group) * K + key
    q = tl.load(q_ptr + row * q_stride + group * K + key, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row * k_stride + group * K + key, mask=inside, other=0.0).to(tl.float32)
    tl.store(q_out_ptr + target, q * (tl.rsqrt(tl.sum(q * q, 0) + _EPSILON) * scale), mask=inside)
    tl.store(k_out_ptr + target, k * tl.rsqrt(tl.sum(k * k, 0) + _EPSILON), mask=inside)


@triton.jit
def _faded(s, decay_at, key, is_key, CHANNELS: tl.constexpr):
    """The state times the decay of the next token, whose logarithm is at an address."""
    if CHANNELS:
        decay = tl.load(decay_at + key, mask=is_key, other=0.0).to(tl.float32)
        return s * tl.exp2(decay * _LOG2E)[:, None]
    return s * tl.exp2(tl.load(decay_at).to(tl.float32) * _LOG2E)


@triton.jit
def heads_kernel(
    requests_ptr, folds_ptr, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, slots_ptr, ring_k_ptr,
    ring_u_ptr, ring_decay_ptr, q_stride, k_stride, v_stride, decay_stride, beta_stride, H: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, KR: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VR: tl.constexpr,
    BV: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid (heads times slices of BV columns, requests). KR, VR: sizes in slots; KP: a power of two."""
    slices: tl.constexpr = (V + BV - 1) // BV
    head = tl.program_id(0) // slices
    group = head // (H // G)
    # A decay's place in its row, and the length of a row.
    own_decay = head * K if CHANNELS else head
    decays: tl.constexpr = H * K if CHANNELS else H
    ring_decays: tl.constexpr = H * KR if CHANNELS else H
    request = requests_ptr + tl.program_id(1) * 8
    first, ring = tl.load(request).to(tl.int64), tl.load(request + 2).to(tl.int64)
    at, base = tl.load(request + 3), tl.load(request + 4).to(tl.int64)
    kept = tl.load(request + 7)
    key = tl.arange(0, KP)
    column = tl.program_id(0) % slices * BV + tl.arange(0, BV)
    is_key, is_value = key < K, column < V
    matrix = head * (KR * VR) + key[:, None] * VR + column[None, :]
    s = tl.load(
        slots_ptr + base * (H * KR * VR) + matrix, mask=is_key[:, None] & is_value[None, :], other=0.0
    )
    ring_k_ptr += ring * (G * KR * _GRID) + group * K
    ring_u_ptr += (ring * H + head) * (_GRID * VR) + column
    ring_decay_ptr += ring * (ring_decays * _GRID) + own_decay
    for i in tl.range(at, num_stages=_STAGES):
        k = tl.load(ring_k_ptr + i * (G * K) + key, mask=is_key, other=0.0)
        u = tl.load(ring_u_ptr + i * VR, mask=is_value, other=0.0)
        s = _faded(s, ring_decay_ptr + i * decays, key, is_key, CHANNELS) + k[:, None] * u[None, :]
    tl.debug_barrier()  # all of u has been read before some of it is written
    for fold in range(tl.load(request + 5), tl.load(request + 6)):
        end, slot = tl.load(folds_ptr + fold * 4), tl.load(folds_ptr + fold * 4 + 1).to(tl.int64)
        # Triton 3.6 takes a bound that an outer loop carries for the bound's first value.
        begin = tl.load(folds_ptr + fold * 4 + 3)
        for i in tl.range(begin, end, num_stages=_STAGES):
            row = first + i
            k = tl.load(k_ptr + row * k_stride + group * K + key, mask=is_key, other=0.0).to(tl.float32)
            q = tl.load(q_ptr + row * q_stride + group * K + key, mask=is_key, other=0.0).to(tl.float32)
            u = tl.load(v_ptr + row * v_stride + head * V + column, mask=is_value, other=0.0).to(tl.float32)
            s = _faded(s, decay_ptr + row * decay_stride + own_decay, key, is_key, CHANNELS)
            if DELTA:
                u = tl.load(beta_ptr + row * beta_stride + head).to(tl.float32) * (
                    u - tl.sum(k[:, None] * s, 0)
                )
            s += k[:, None] * u[None, :]
            tl.store(out_ptr + (row * H + head) * V + column, tl.sum(q[:, None] * s, 0), mask=is_value)
            if i >= kept:
                tl.store(ring_u_ptr + (at + i) % _GRID * VR, u, mask=is_value)
        if slot >= 0:
            inside = (key < KR)[:, None] & (column < VR)[None, :]
            tl.store(slots_ptr + slot * (H * KR * VR) + matrix, s, mask=inside)


def head_sizes(kind: str, sizes: tuple[int, ...]) -> dict[str, int | bool]:
    """The kernel's constants for a layer of `sizes` as in `radixkv_kernels.states`."""
    groups, heads, key, value = (sizes[0], *sizes) if kind == "kda" else sizes
    padded = triton.next_power_of_2(key)
    return {
        "H": heads,
        "G": groups,
        "K": key,
        "KR": rounded(key),
        "KP": padded,
        "V": value,
        "VR": rounded(value),
        "BV": min(max(8, STATE_NUMBERS // padded), triton.next_power_of_2(rounded(value))),
        "DELTA": kind != "ssd",
        "CHANNELS": kind == "kda",
    }


def norm_rows(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normed queries, scaled, and keys of [T, G, K], as float32."""
    rows, groups, size = query.shape
    outs = (torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format) for _ in "qk")
    q_out, k_out = outs
    if rows:
        norm_kernel[(rows, groups)](
            query,
            key,
            q_out,
            k_out,
            query.stride(0),
            key.stride(0),
            size**-0.5,
            G=groups,
            K=size,
            KP=triton.next_power_of_2(size),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return q_out, k_out


def head_rows(
    memory: LayerStates, tables: StepTables, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> None:
    """Compute rows into `out`, float32 [T, heads, value size], keep states, and put u into the rings.

    Args:
        inputs: of the layer; queries and keys of delta rules are normed.
    """
    sizes = head_sizes(memory.shape.kind, memory.shape.sizes)
    decay, beta = inputs[3], inputs[-1]  # linear attention has no beta
    slices = triton.cdiv(sizes["V"], sizes["BV"])
    heads_kernel[(sizes["H"] * slices, tables.num_requests)](
        tables.requests,
        tables.folds,
        *inputs[:3],
        decay,
        beta,
        out,
        memory.slots,
        *memory.rings,
        *(each.stride(0) for each in (*inputs[:3], decay, beta)),
        **sizes,
        num_warps=1,
        enable_fp_fusion=False,
    )
