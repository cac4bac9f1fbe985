# SPDX-License-Identifier: Apache-2.0
"""Plain recurrences of state layers in float64: what every backend is tested against, one token at a time.

    kind   inputs of T tokens                                    constants                          output
    conv   x [T, C]                                              weight [K, C], bias [C] or None,   [T, C]
                                                                 "silu" or None
    delta  q, k [T, G, K], v [T, H, V], log decay, beta [T, H]                                      [T, H, V]
    ssd    q, k [T, G, K], u [T, H, V], log decay [T, H]                                            [T, H, V]
    scan   x, dt [T, C], b, c [T, G, N]                          A [C, N]                           [T, C]
    lru    a, x [T, C]                                                                              [T, C]
    kda    q, k [T, H, K], v [T, H, V], log decay [T, H, K],                                        [T, H, V]
           beta [T, H]

`delta` and `kda` norm queries and keys themselves, and scale queries by 1 / sqrt(K).
"""

from __future__ import annotations

from typing import Any

import torch

from radixkv_kernels.states import StateShape

_NORM_EPSILON = 1e-6


def shape_of(
    layer: int, kind: str, inputs: tuple[torch.Tensor, ...], constants: tuple[Any, ...]
) -> StateShape:
    """The state that a layer with these inputs keeps."""
    first = inputs[0]
    if kind == "conv":
        sizes: tuple[int, ...] = (first.shape[1], constants[0].shape[0])
    elif kind in ("delta", "ssd"):
        sizes = (first.shape[1], inputs[2].shape[1], first.shape[2], inputs[2].shape[2])
    elif kind == "scan":
        sizes = (first.shape[1], inputs[2].shape[1], inputs[2].shape[2])
    elif kind == "kda":
        sizes = (first.shape[1], first.shape[2], inputs[2].shape[2])
    else:
        sizes = (first.shape[1],)
    return StateShape(layer, kind, tuple(map(int, sizes)))


def reference_mix(
    kind: str,
    inputs: tuple[torch.Tensor, ...],
    constants: tuple[Any, ...] = (),
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of one sequence's T tokens, and the state after them, in float64; O(T).

    Args:
        state: before the first token, as it lies in a slot without rounding of sizes; None: zero.
    """
    wide: tuple[Any, ...] = tuple(each.to(torch.float64) for each in inputs)
    numbers: tuple[Any, ...] = tuple(
        each.to(torch.float64) if torch.is_tensor(each) else each for each in constants
    )
    if state is not None:
        state = state.to(torch.float64)
    if kind == "conv":
        weight, bias, activation = numbers
        return _conv(state, wide[0], weight, bias, activation)
    if kind in ("delta", "kda"):
        return _delta(state, *wide)
    if kind == "ssd":
        return _ssd(state, *wide)
    if kind == "scan":
        x, dt, b, c = wide
        return _scan(state, x, dt, b, c, numbers[0])
    assert kind == "lru", kind
    return _lru(state, *wide)


def _conv(
    state: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    taps, count = len(weight), len(x)
    before = x.new_zeros(taps - 1, x.shape[1]) if state is None else state
    row = torch.cat([before, x])
    out = sum(row[k : k + count] * weight[k] for k in range(taps))
    assert torch.is_tensor(out)
    if bias is not None:
        out = out + bias
    return (torch.nn.functional.silu(out) if activation == "silu" else out), row[count:]


def _delta(
    state: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = v.shape[1]
    q, k = (
        (x * (x.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt()).repeat_interleave(
            heads // x.shape[1], 1
        )
        for x in (q, k)
    )
    q = q * q.shape[-1] ** -0.5
    decay = g.exp() if g.ndim == 3 else g.exp()[:, :, None]  # of each channel, or of the head
    s = v.new_zeros(heads, k.shape[-1], v.shape[-1]) if state is None else state
    out = torch.empty_like(v)
    for t in range(len(v)):
        s = s * decay[t][:, :, None]
        u = (v[t] - torch.einsum("hk,hkv->hv", k[t], s)) * beta[t][:, None]
        s = s + k[t][:, :, None] * u[:, None, :]
        out[t] = torch.einsum("hk,hkv->hv", q[t], s)
    return out, s


def _ssd(
    state: Any, q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = u.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    s = u.new_zeros(heads, k.shape[-1], u.shape[-1]) if state is None else state
    out = torch.empty_like(u)
    for t in range(len(u)):
        s = s * g[t].exp()[:, None, None] + k[t][:, :, None] * u[t][:, None, :]
        out[t] = torch.einsum("hk,hkv->hv", q[t], s)
    return out, s


def _scan(
    state: Any, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, rate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    per = x.shape[1] // b.shape[1]
    b, c = (each.repeat_interleave(per, 1) for each in (b, c))
    s = torch.zeros_like(rate) if state is None else state
    out = torch.empty_like(x)
    for t in range(len(x)):
        s = s * (dt[t][:, None] * rate).exp() + (dt[t] * x[t])[:, None] * b[t]
        out[t] = (s * c[t]).sum(-1)
    return out, s


def _lru(state: Any, a: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.zeros_like(x[0]) if state is None else state
    out = torch.empty_like(x)
    for t in range(len(x)):
        s = a[t] * s + x[t]
        out[t] = s
    return out, s
