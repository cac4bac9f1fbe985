# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of short causal convolutions: a program for each row, and for each state that is kept.

    out[t] = activation(bias + weight[0] x[t - K + 1] + ... + weight[K - 1] x[t])

The state before a row is its last K - 1 inputs: of this step, of the ring, or of the base. In layers of heads
(`GatedHeads`) other programs of the same launch turn the row's logits to decays and betas.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from radixkv_kernels.gated_heads import GatedHeads
from radixkv_kernels.states import GRID, LayerStates
from radixkv_kernels.triton.state.tables import StepTables

BLOCK, WARPS = 256, 2
_GRID = tl.constexpr(GRID)
#: What a row has besides: nothing; logits of decays; of steps that values are multiplied by, and their
#: decays; factors of the convolution's input and output.
_NONE, _DECAY, _STEP, _FACTORS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
#: The same of a kind's.
LOGITS = {"delta": 1, "kda": 1, "ssd": 2}


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x); no exponential overflows."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, x, x * e) / (1.0 + e)


@triton.jit
def softplus(x):
    """log(1 + e^x), to the last digits of small results, too: the quotient restores what 1 + e has lost."""
    e = tl.exp(-tl.abs(x))
    sum = 1.0 + e
    log = tl.where(sum == 1.0, e, tl.log(sum) * (e / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _input(x_ptr, row, stride, column, inside, C: tl.constexpr, FACTORS: tl.constexpr):
    """The convolution's input of a row: its C numbers, or the third C of them times the first."""
    at = x_ptr + row * stride + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if FACTORS:
        x *= tl.load(at + 2 * C, mask=inside, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _tap(x_ptr, slot_ptr, ring_ptr, stride, first, at, own, column, inside, C: tl.constexpr,
         TAPS: tl.constexpr, FACTORS: tl.constexpr):  # fmt: skip
    """The input of row `own` of a request, which may lie up to TAPS - 1 tokens before its first row."""
    place = at + own
    if own >= 0:
        x = _input(x_ptr, first + own, stride, column, inside, C, FACTORS)
    elif place >= 0:
        x = tl.load(ring_ptr + place * C + column, mask=inside, other=0.0)
    else:
        x = tl.load(slot_ptr + (TAPS - 1 + place) * C + column, mask=inside, other=0.0)
    return x


@triton.jit
def _decays(
    logits_ptr, betas_ptr, rate_ptr, logit_bias_ptr, decay_ptr, beta_ptr, row, logits_stride, betas_stride,
    beta_scale, low, high, bound, block, is_row, H: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
    BOUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decays of a block of the row's D logits, then of its H betas; zero where the row is padding."""
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    column = block * BLOCK + tl.arange(0, BLOCK)
    if block < blocks:
        inside = column < D
        held = column < tl.where(is_row, D, 0)
        x = tl.load(logits_ptr + row * logits_stride + column, mask=held, other=0.0).to(tl.float32)
        x += tl.load(logit_bias_ptr + column, mask=inside, other=0.0)
        rate = tl.load(rate_ptr + column // (D // H), mask=inside, other=0.0)
        if BOUNDED:
            decay = bound * sigmoid(-rate * x)
        elif STEP:
            decay = rate * tl.minimum(tl.maximum(softplus(x), low), high)
        else:
            decay = rate * softplus(x)
        tl.store(decay_ptr + row * D + column, tl.where(held, decay, 0.0), mask=inside)
    else:
        column -= blocks * BLOCK
        inside = column < H
        held = column < tl.where(is_row, H, 0)
        x = tl.load(betas_ptr + row * betas_stride + column, mask=held, other=0.0).to(tl.float32)
        tl.store(beta_ptr + row * H + column, tl.where(held, sigmoid(x) * beta_scale, 0.0), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def conv_kernel(
    header_ptr, requests_ptr, saves_ptr, owners_ptr, x_ptr, weight_ptr, bias_ptr, out_ptr, slots_ptr,
    rings_ptr, logits_ptr, betas_ptr, rate_ptr, logit_bias_ptr, decay_ptr, beta_ptr, written_ptr, stride,
    logits_stride, betas_stride, beta_scale, low, high, bound, num_rows, C: tl.constexpr, TAPS: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, LOGITS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid (rows + kept states, blocks of BLOCK channels, logits and betas), or more.

    Rows past the plan's become zero. LOGITS: see `_NONE`. Decays and steps are those of H heads; with steps,
    the first V channels times the step of their head go to `written_ptr`, too; with factors, the inputs do.
    """
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    index, block = tl.program_id(0), tl.program_id(1)
    is_row = index < tl.load(header_ptr + 2)
    if LOGITS != _NONE and LOGITS != _FACTORS:  # noqa: SIM102 - the compiler decides this one
        if block >= blocks:
            if index < num_rows:
                _decays(
                    logits_ptr, betas_ptr, rate_ptr, logit_bias_ptr, decay_ptr, beta_ptr, index.to(tl.int64),
                    logits_stride, betas_stride, beta_scale, low, high, bound, block - blocks, is_row, H, D,
                    LOGITS == _STEP, BOUNDED, BLOCK,
                )  # fmt: skip
            return
    save = saves_ptr + (index - num_rows) * 4
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    if index < num_rows:
        if not is_row:
            zero = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
            tl.store(out_ptr + index.to(tl.int64) * C + column, zero, mask=inside)
            if LOGITS == _STEP:
                tl.store(written_ptr + index.to(tl.int64) * V + column, zero, mask=column < V)
            return
        owner = tl.load(owners_ptr + index)
    else:
        if index - num_rows >= tl.load(header_ptr + 1):
            return
        owner = tl.load(save + 2)
    request = requests_ptr + owner * 8
    first = tl.load(request).to(tl.int64)
    ring_ptr = rings_ptr + tl.load(request + 2).to(tl.int64) * (_GRID * C)
    at = tl.load(request + 3)
    slot_ptr = slots_ptr + tl.load(request + 4).to(tl.int64) * ((TAPS - 1) * C)
    if index < num_rows:
        own = index - first.to(tl.int32)
        total = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            total = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(TAPS):
            x = _tap(
                x_ptr, slot_ptr, ring_ptr, stride, first, at, own + k - TAPS + 1, column, inside, C, TAPS,
                LOGITS == _FACTORS,
            )  # fmt: skip
            total += x * tl.load(weight_ptr + k * C + column, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            total = silu(total)
        out = total.to(out_ptr.dtype.element_ty)
        if LOGITS == _FACTORS:
            row = index.to(tl.int64)
            x = _input(x_ptr, row, stride, column, inside, C, True).to(out.dtype)
            tl.store(written_ptr + row * C + column, x, mask=inside)
            factor = tl.load(x_ptr + row * stride + C + column, mask=inside, other=0.0).to(tl.float32)
            out = (out.to(tl.float32) * factor).to(out.dtype)
        tl.store(out_ptr + index.to(tl.int64) * C + column, out, mask=inside)
        if LOGITS == _STEP:
            is_value = column < V
            head = column // (V // H)
            logit = tl.load(logits_ptr + index.to(tl.int64) * logits_stride + head, mask=is_value, other=0.0)
            logit = logit.to(tl.float32) + tl.load(logit_bias_ptr + head, mask=is_value, other=0.0)
            step = tl.minimum(tl.maximum(softplus(logit), low), high)
            step = step.to(out.dtype).to(tl.float32)
            written = (out.to(tl.float32) * step).to(out.dtype)
            tl.store(written_ptr + index.to(tl.int64) * V + column, written, mask=is_value)
    else:
        own, slot = tl.load(save), tl.load(save + 1).to(tl.int64)
        target_ptr = slots_ptr + slot * ((TAPS - 1) * C) + column
        for k in tl.static_range(TAPS - 1):
            x = _tap(
                x_ptr, slot_ptr, ring_ptr, stride, first, at, own + k - TAPS + 1, column, inside, C, TAPS,
                LOGITS == _FACTORS,
            )  # fmt: skip
            tl.store(target_ptr + k * C, x, mask=inside)


def conv_rows(
    memory: LayerStates,
    tables: StepTables,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    """Compute rows x [T, C] into `out`, [T, C], and keep states; the rings are left as they are."""
    nothing = [x] * 7, (0, 0, 1.0, 0.0, 0.0, 0.0)
    constants = {"H": 1, "D": 1, "V": 1, "LOGITS": 0, "BOUNDED": False}
    _launch(memory, tables, x, (weight, bias, activation == "silu"), out, *nothing, constants, 0)


def factored_rows(
    memory: LayerStates,
    tables: StepTables,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve row[:, :C] * row[:, 2 C:] and multiply by row[:, C : 2 C]; the rings are left as they are.

    Returns:
        The result, where padding is zero, and the convolution's inputs, [T, C] each, in the dtype of `row`.
    """
    channels = memory.shape.sizes[0]
    out, inputs = torch.empty(2, len(row), channels, dtype=row.dtype, device=row.device)
    pointers = [row] * 6 + [inputs]
    numbers = 0, 0, 1.0, 0.0, 0.0, 0.0
    constants = {"H": 1, "D": 1, "V": 1, "LOGITS": 3, "BOUNDED": False}
    _launch(memory, tables, row, (weight, bias, False), out, pointers, numbers, constants, 0)
    return out, inputs


def rows_of_heads(
    memory: LayerStates,
    tables: StepTables,
    of: GatedHeads,
    mixed: torch.Tensor,
    logits: torch.Tensor,
    betas: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Convolve channels [T, C], and turn logits [T, _] into decays and betas; the rings are left as they are.

    Returns:
        The heads' inputs as `radixkv_kernels.state_reference` lists them, in the dtype of `mixed` but for
        float32 decays and betas; and the values [T, heads * V], before they were multiplied by steps.
    """
    rows, device = len(mixed), mixed.device
    heads, width, keys, num_logits = of.heads, of.value_width, of.key_width, of.num_logits
    is_step = of.kind == "ssd"
    out = torch.empty_like(mixed, memory_format=torch.contiguous_format)
    decay = torch.empty(rows, num_logits, dtype=torch.float32, device=device)
    beta = decay if betas is None else torch.empty(rows, heads, dtype=torch.float32, device=device)
    written = torch.empty(rows, width, dtype=out.dtype, device=device) if is_step else out
    pointers = [logits, logits if betas is None else betas, of.rate, of.logit_bias, decay, beta, written]
    low, high = of.limits
    numbers = (
        logits.stride(0),
        0 if betas is None else betas.stride(0),
        of.beta_scale,
        low,
        min(high, torch.finfo(torch.float32).max),
        of.bound,
    )
    constants = {"H": heads, "D": num_logits, "V": width, "LOGITS": LOGITS[of.kind]}
    constants["BOUNDED"] = of.bound != 0.0
    more = triton.cdiv(num_logits, BLOCK) + (0 if betas is None else triton.cdiv(heads, BLOCK))
    filter = of.filter, of.bias, True
    _launch(memory, tables, mixed, filter, out, pointers, numbers, constants, more)

    def shaped(part: torch.Tensor, count: int, size: int) -> torch.Tensor:
        return part.unflatten(1, (count, size))

    if is_step:
        values, k, q = out.split([width, keys, keys], dim=1)
        v = written
    else:
        q, k, values = out.split([keys, keys, width], dim=1)
        v = values
    inputs = [shaped(each, of.groups, of.key_size) for each in (q, k)] + [shaped(v, heads, of.value_size)]
    inputs.append(shaped(decay, heads, of.key_size) if of.kind == "kda" else decay)
    return tuple(inputs if betas is None else (*inputs, beta)), values


def _launch(
    memory: LayerStates,
    tables: StepTables,
    x: torch.Tensor,
    filter: tuple[torch.Tensor, torch.Tensor | None, bool],
    out: torch.Tensor,
    pointers: list[torch.Tensor],
    numbers: tuple[int | float, ...],
    constants: dict[str, Any],
    more_blocks: int,
) -> None:
    channels, taps = memory.shape.sizes
    weight, bias, is_silu = filter
    rows = len(out)
    conv_kernel[(rows + tables.grids["saves"], triton.cdiv(channels, BLOCK) + more_blocks)](
        tables.header,
        tables.walks,
        tables.saves,
        tables.owners,
        x,
        weight,
        weight if bias is None else bias,
        out,
        memory.slots,
        memory.rings[0],
        *pointers,
        x.stride(0),
        *numbers,
        rows,
        C=channels,
        TAPS=taps,
        BIAS=bias is not None,
        SILU=is_silu,
        BLOCK=BLOCK,
        **constants,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
