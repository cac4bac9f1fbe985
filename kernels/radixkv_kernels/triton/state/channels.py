# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of a chunk's keys and queries where each channel of a key has a decay (KDA).

    A_ij = sum over d of k_i,d k_j,d e^(G_i,d - G_j,d)            the same with q_i for the outputs

e^-G alone may overflow. So rows come in parts of 16: with R the sums at a part's first row, rows j before the
part enter by e^(R - G_j) and its own rows by e^(G_i - R), both at most 1, as one product of matrices; pairs
within the part one by one.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from radixkv_kernels.states import GRID
from radixkv_kernels.triton.state.chunks import inverse_length, rows_of
from radixkv_kernels.triton.state.split import split_product

_GRID = tl.constexpr(GRID)
#: Rows of a part.
PART = 16
_PART = tl.constexpr(PART)


@triton.jit
def gather_kernel(
    header_ptr, chunks_ptr, k_ptr, decay_ptr, ring_k_ptr, ring_decay_ptr, keys_ptr, lengths_ptr,
    cumulated_ptr, k_stride,
    decay_stride, H: tl.constexpr, K: tl.constexpr, KR: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Keys of each chunk, their lengths and the sums of decays. Grid (chunks, heads)."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if chunk >= tl.load(header_ptr + 5):
        return
    table = chunks_ptr + chunk * 8
    first, begin, end = tl.load(table).to(tl.int64), tl.load(table + 1), tl.load(table + 2)
    ring = tl.load(table + 3).to(tl.int64) * (H * KR * _GRID)
    row, key = tl.arange(0, _GRID), tl.arange(0, KP)
    is_key = (key < K)[None, :]
    in_ring, in_step = (row < begin)[:, None] & is_key, ((row >= begin) & (row < end))[:, None] & is_key
    at = (first + row - begin)[:, None]
    place = ring + row[:, None] * (H * K) + head * K + key[None, :]
    column = head * K + key[None, :]
    k = rows_of(ring_k_ptr + place, k_ptr + at * k_stride + column, in_ring, in_step)
    decay = rows_of(ring_decay_ptr + place, decay_ptr + at * decay_stride + column, in_ring, in_step)
    own = (chunk * H + head) * _GRID + row
    tl.store(keys_ptr + own[:, None] * KP + key[None, :], k)
    tl.store(lengths_ptr + own, inverse_length(k))
    tl.store(cumulated_ptr + own[:, None] * KP + key[None, :], tl.cumsum(decay.to(tl.float32), 0))


@triton.jit
def scores_kernel(
    header_ptr, chunks_ptr, q_ptr, keys_ptr, lengths_ptr, cumulated_ptr, scores_ptr, query_scores_ptr,
    q_stride,
    H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid (parts, chunks, heads). Scores at places j > i mean nothing."""
    chunk, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    if chunk >= tl.load(header_ptr + 5):
        return
    table = chunks_ptr + chunk * 8
    first, begin, end = tl.load(table).to(tl.int64), tl.load(table + 1), tl.load(table + 2)
    start = tl.program_id(0) * _PART
    if start >= end:
        return
    row, other, key = start + tl.arange(0, _PART), tl.arange(0, _GRID), tl.arange(0, KP)
    own = (chunk * H + head) * _GRID
    at = (own + row)[:, None] * KP + key[None, :]
    k = tl.load(keys_ptr + at).to(tl.float32) * tl.load(lengths_ptr + own + row)[:, None]
    cumulated = tl.load(cumulated_ptr + at)
    in_step = ((row >= begin) & (row < end))[:, None] & (key < K)[None, :]
    q = tl.load(
        q_ptr + (first + row - begin)[:, None] * q_stride + head * K + key[None, :], mask=in_step, other=0.0
    ).to(tl.float32)
    reference = tl.load(cumulated_ptr + (own + start) * KP + key)
    fading = tl.exp(cumulated - reference[None, :])
    before = (other < start)[:, None] & (key < KP)[None, :]
    at_others = (own + other)[:, None] * KP + key[None, :]
    others = tl.load(keys_ptr + at_others, mask=before, other=0.0).to(tl.float32)
    sums = tl.load(cumulated_ptr + at_others, mask=before, other=0.0)
    others *= tl.exp(tl.where(before, reference[None, :] - sums, 0.0))
    others *= tl.load(lengths_ptr + own + other, mask=other < start, other=0.0)[:, None]
    scores = split_product(k * fading, tl.trans(others))
    query_scores = split_product(q * fading, tl.trans(others))
    for j in range(start, start + _PART):
        pair = tl.load(keys_ptr + (own + j) * KP + key).to(tl.float32) * tl.load(lengths_ptr + own + j)
        sums_there = tl.load(cumulated_ptr + (own + j) * KP + key)
        weight = pair[None, :] * tl.exp(tl.minimum(cumulated - sums_there[None, :], 0.0))
        is_pair = (other == j)[None, :]
        scores = tl.where(is_pair, tl.sum(k * weight, 1)[:, None], scores)
        query_scores = tl.where(is_pair, tl.sum(q * weight, 1)[:, None], query_scores)
    target = (own + row)[:, None] * _GRID + other[None, :]
    tl.store(scores_ptr + target, scores)
    tl.store(query_scores_ptr + target, query_scores)
