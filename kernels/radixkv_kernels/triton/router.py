# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that choose each row's experts: the router's product, and one program a row for the rest.

    scores   softmax or sigmoid of the logits, or the logits themselves
    groups   the best groups of experts, by the sum of their two best (DeepSeek V3) or their best one (V2)
    choice   the K highest scores, of equal ones the first; with a bias that counts for the choice only
    weights  their scores: divided by their sum, or softmax among them (gpt-oss), or among those of the
             remaining logits that are nearly as high (Phi-MoE), or their sigmoids (Llama 4); times a factor

A row's bits depend on itself only. Rows of a graph beyond the step's get the expert -1.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

SOFTMAX, SIGMOID, LOGITS, SPARSE, CHOSEN_SIGMOID = range(5)
_TILE = 16


@dataclass(frozen=True)
class Routing:
    """Rules by which a router chooses.

    Attributes:
        choices: experts of a row.
        scores: SOFTMAX, SIGMOID, LOGITS, SPARSE or CHOSEN_SIGMOID; of LOGITS, weights are the softmax of
            those chosen; of SPARSE, each is the softmax of logits that are not chosen yet and at most
            `margin` of the higher magnitude below it; of CHOSEN_SIGMOID, the sigmoid of each chosen logit.
        rounds_logits: logits are rounded to the rows' dtype; `rounds_scores`: so are scores of all experts.
        softcap: of logits; 0: there is none.
        rounds_weights: weights are.
        normalised: weights are divided by their sum and `epsilon`, or by `least`, if that is more.
        factor: of weights, at last.
        groups, kept_groups: of consecutive experts; `best_of_group`: scores that are summed up for a group.
    """

    choices: int
    scores: int
    rounds_logits: bool = True
    rounds_weights: bool = False
    normalised: bool = True
    epsilon: float = 0.0
    factor: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1
    least: float = 0.0
    margin: float = 0.0
    rounds_scores: bool = False
    softcap: float = 0.0


@triton.jit
def router_product_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, rows, experts, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BIAS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / BM), ceil(E / BN)): float32 logits [T, E], products in the weight's dtype."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    on = row < rows
    inside = n < experts
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    acc = tl.zeros((BN, BM), tl.float32)
    for k in range(0, K, BK):
        column = k + tl.arange(0, BK)
        within = (column < K)[None, :]
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * K + column[None, :], mask=on[:, None] & within, other=0.0
        )
        w = tl.load(w_ptr + n[:, None] * K + column[None, :], mask=inside[:, None] & within, other=0.0)
        acc = tl.dot(w, tl.trans(x.to(dtype)), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if ROUNDS:
        acc = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
    at = out_ptr + row.to(tl.int64)[None, :] * experts + n[:, None]
    tl.store(at, acc, mask=inside[:, None] & on[None, :])


@triton.jit
def highest(values):
    """The largest of [G, S]."""
    return tl.max(tl.max(values, 1), 0)


@triton.jit
def first_at(values, wanted, index):
    """The smallest index [G, S] of a value; of none, a large number."""
    return tl.min(tl.min(tl.where(values == wanted, index, 1 << 30), 1), 0)


@triton.jit
def rounded(x, pointer):
    """float32 numbers, rounded to the type that a pointer points to."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def choose_kernel(
    logits_ptr, choice_bias_ptr, expert_factor_ptr, is_row_ptr, ids_ptr, weights_ptr, epsilon, factor, least,
    margin, softcap,
    E: tl.constexpr, CHOICES: tl.constexpr, KP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    S: tl.constexpr, SP: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, SCORES: tl.constexpr,
    CHOICE_BIAS: tl.constexpr, NORMALISED: tl.constexpr, HAS_ROWS: tl.constexpr,
    ROUNDS_SCORES: tl.constexpr, SOFTCAP: tl.constexpr, EXPERT_FACTOR: tl.constexpr,
):  # fmt: skip
    """Grid (rows): int32 ids and weights [T, CHOICES] of float32 logits [T, E], E = G groups of S."""
    row = tl.program_id(0)
    j = tl.arange(0, KP)
    at = row * CHOICES + j
    if HAS_ROWS:  # noqa: SIM102, a constant
        if tl.load(is_row_ptr + row) == 0:
            tl.store(ids_ptr + at, j * 0 - 1, mask=j < CHOICES)
            tl.store(weights_ptr + at, (j * 0.0).to(weights_ptr.dtype.element_ty), mask=j < CHOICES)
            return
    g = tl.arange(0, GP)
    s = tl.arange(0, SP)
    index = g[:, None] * S + s[None, :]
    exists = (g < G)[:, None] & (s < S)[None, :]
    score = tl.load(logits_ptr + row.to(tl.int64) * E + index, mask=exists, other=float("-inf"))
    if SOFTCAP:  # tanh by an exponential that can't overflow
        power = tl.exp(-2.0 * tl.abs(score / softcap))
        tanh = (1.0 - power) / (1.0 + power) * tl.where(score < 0, -1.0, 1.0)
        score = tl.where(exists, softcap * tanh, score)
    if SCORES == 0:
        score = tl.exp(score - highest(score))
        score = score / tl.sum(tl.sum(score, 1), 0)
    elif SCORES == 1:
        score = 1.0 / (1.0 + tl.exp(-score))
    if ROUNDS_SCORES:
        score = rounded(score, weights_ptr)
    choice = score
    if CHOICE_BIAS:
        choice += tl.load(choice_bias_ptr + index, mask=exists, other=0.0).to(tl.float32)
    choice = tl.where(exists, choice, float("-inf"))
    if KEPT < G:
        best = tl.max(choice, 1)
        if BEST == 2:
            first = tl.min(tl.where(choice == best[:, None], s[None, :], 1 << 30), 1)
            best += tl.max(tl.where(s[None, :] == first[:, None], float("-inf"), choice), 1)
        best = tl.where(g < G, best, float("-inf"))
        kept = g < 0
        for _ in tl.static_range(KEPT):
            top = tl.max(tl.where(kept, float("-inf"), best), 0)
            group = tl.min(tl.where((best == top) & (kept == 0), g, 1 << 30), 0)
            kept = kept | (g == group)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    ids = j * 0
    chosen = tl.zeros((KP,), tl.float32)
    taken = index < 0
    for each in tl.static_range(CHOICES):
        left = tl.where(taken, float("-inf"), choice)
        # Of rows that are not numbers, any expert will do: it must only exist.
        best_index = tl.minimum(
            first_at(left, highest(left), tl.where(taken | (exists == 0), 1 << 30, index)), E - 1
        )
        if SCORES == 3:
            top = highest(left)
            own_score = tl.where(exists & (taken == 0), score, top)
            distance = rounded(top - own_score, weights_ptr) / tl.maximum(tl.abs(own_score), top)
            near = exists & (taken == 0) & (rounded(distance, weights_ptr) <= margin)
            own = 1.0 / tl.sum(tl.sum(tl.where(near, tl.exp(own_score - top), 0.0), 1), 0)
        else:
            own = tl.sum(tl.sum(tl.where(index == best_index, tl.where(exists, score, 0.0), 0.0), 1), 0)
        taken = taken | (index == best_index)
        ids = tl.where(j == each, best_index, ids)
        chosen = tl.where(j == each, own, chosen)
    if SCORES == 2:
        chosen = tl.where(j < CHOICES, chosen, float("-inf"))
        chosen = tl.exp(chosen - tl.max(chosen, 0))
        chosen = chosen / tl.sum(chosen, 0)
    elif SCORES == 4:
        chosen = tl.where(j < CHOICES, 1.0 / (1.0 + tl.exp(-chosen)), 0.0)
        if ROUNDS_SCORES:
            chosen = rounded(chosen, weights_ptr)
        if NORMALISED:
            chosen = chosen / tl.sum(chosen, 0)
    elif NORMALISED:
        chosen = chosen / tl.maximum(tl.sum(chosen, 0) + epsilon, least)
    chosen = chosen * factor
    if EXPERT_FACTOR:
        chosen *= tl.load(expert_factor_ptr + ids).to(tl.float32)
    tl.store(ids_ptr + at, ids, mask=j < CHOICES)
    tl.store(weights_ptr + at, chosen.to(weights_ptr.dtype.element_ty), mask=j < CHOICES)


def route_rows(
    states: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    choice_bias: torch.Tensor | None = None,
    is_row: torch.Tensor | None = None,
    expert_factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the experts of rows.

    Args:
        states: [T, H], contiguous; weight: [E, H]; bias: [E] of its product.
        choice_bias: [E], added to scores for the choice only.
        is_row: [T], 0 for rows that are padding; None: there is none.
        expert_factor: [E], by which the weights of an expert are multiplied at last.

    Returns:
        Logits float32 [T, E], weights [T, K] (float32, or the rows' dtype), int32 experts [T, K], the highest
        first.
    """
    (rows, inputs), experts = states.shape, len(weight)
    logits = states.new_empty(rows, experts, dtype=torch.float32)
    ids = states.new_empty(rows, routing.choices, dtype=torch.int32)
    weights = states.new_empty(
        rows, routing.choices, dtype=states.dtype if routing.rounds_weights else torch.float32
    )
    if not rows:
        return logits, weights, ids
    router_product_kernel[(-(-rows // _TILE), -(-experts // _TILE))](
        states,
        weight,
        weight if bias is None else bias,
        logits,
        rows,
        experts,
        K=inputs,
        **product_tile(weight.dtype),
        BIAS=bias is not None,
        ROUNDS=routing.rounds_logits,
    )
    choose_kernel[(rows,)](
        logits,
        logits if choice_bias is None else choice_bias,
        logits if expert_factor is None else expert_factor,
        ids if is_row is None else is_row,
        ids,
        weights,
        routing.epsilon,
        routing.factor,
        routing.least,
        _rounded_margin(routing.margin, weights.dtype),
        routing.softcap,
        **choose_constants(routing, experts),
        CHOICE_BIAS=choice_bias is not None,
        HAS_ROWS=is_row is not None,
        EXPERT_FACTOR=expert_factor is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return logits, weights, ids


def _rounded_margin(margin: float, dtype: torch.dtype) -> float:
    """As torch rounds what it compares numbers of a type with."""
    return float(torch.tensor(margin, dtype=dtype).item()) if margin else 0.0


def choose_constants(routing: Routing, experts: int) -> dict[str, Any]:
    """Return the constants for which the kernel of the choice is specialised."""
    size = experts // routing.groups
    return {
        "E": experts,
        "CHOICES": routing.choices,
        "KP": triton.next_power_of_2(routing.choices),
        "G": routing.groups,
        "GP": triton.next_power_of_2(routing.groups),
        "S": size,
        "SP": triton.next_power_of_2(size),
        "KEPT": routing.kept_groups,
        "BEST": routing.best_of_group,
        "SCORES": routing.scores,
        "NORMALISED": routing.normalised,
        "ROUNDS_SCORES": routing.rounds_scores,
        "SOFTCAP": routing.softcap > 0.0,
    }


def product_tile(dtype: torch.dtype) -> dict[str, int]:
    """Rows, experts and inputs of a program's tile, warps and stages."""
    is_wide = dtype == torch.float32
    size = 32 if is_wide else 128
    return {"BM": _TILE, "BN": _TILE, "BK": size, "num_warps": 1, "num_stages": 2 if is_wide else 4}
