# SPDX-License-Identifier: Apache-2.0
"""Plain attention in float64: what every backend is tested against, and too simple to be wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixkv_kernels.kv_cache import PagedKV


def reference_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    query_starts: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    ahead: np.ndarray | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch, one request and one dense score matrix at a time.

    Args:
        query: `[T, Hq, D]`; request r owns rows `query_starts[r]` to `query_starts[r + 1]`.
        keys, values: per request `[context_length, Hkv, D]`; its queries are the last positions of it.
        query_starts: int `[R + 1]`.
        scale, window, softcap, sinks: as in `AttentionBackend.attend`.
        ahead: int `[T]`, the number of positions after its own that each row sees; None: none.

    Returns:
        `[T, Hq, D]` float64; rows that belong to no request are zero.
    """
    size = values[0].shape[-1] if values else query.shape[-1]
    out = torch.zeros(*query.shape[:2], size, dtype=torch.float64)
    for r, (k, v) in enumerate(zip(keys, values, strict=True)):
        start, end = int(query_starts[r]), int(query_starts[r + 1])
        if start == end:
            continue
        group = query.shape[1] // k.shape[1]
        q = query[start:end].double().cpu().transpose(0, 1)
        k = k.double().cpu().repeat_interleave(group, dim=1).transpose(0, 1)
        v = v.double().cpu().repeat_interleave(group, dim=1).transpose(0, 1)
        logits = q @ k.transpose(1, 2) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        length = k.shape[1]
        key_position = torch.arange(length)[None, :]
        query_position = torch.arange(length - (end - start), length)[:, None]
        last = query_position
        if ahead is not None:
            last = last + torch.as_tensor(ahead[start:end])[:, None]
        visible = key_position <= last
        if window is not None:
            visible &= query_position - key_position < window
        logits = logits.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.double().cpu()[:, None, None].expand(-1, end - start, 1)
            weights = torch.cat([logits, column], dim=2).softmax(dim=2)[:, :, :length]
        else:
            weights = logits.softmax(dim=2)
        out[start:end] = (weights @ v).transpose(0, 1)
    return out


def reference_paged_attention(
    query: torch.Tensor,
    kv: PagedKV,
    layer: int,
    query_starts: np.ndarray,
    context_lengths: np.ndarray,
    block_tables: Sequence[np.ndarray] | np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    ahead: np.ndarray | None = None,
) -> torch.Tensor:
    """`reference_attention` on the (dequantised) contents of a paged cache, with the arguments of `plan`."""
    pairs = [kv.read(layer, block_tables[r], int(n)) for r, n in enumerate(context_lengths)]
    return reference_attention(
        query,
        [k for k, _ in pairs],
        [v for _, v in pairs],
        query_starts,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        ahead=ahead,
    )
