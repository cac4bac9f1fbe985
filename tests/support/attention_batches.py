# SPDX-License-Identifier: Apache-2.0
"""Random ragged batches over a paged cache whose unwritten memory is NaN, shared by the attention tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from radixkv_kernels import Ahead, AttentionBackend, KVSpec, PagedKV, make_backend, reference_paged_attention
from radixkv_kernels.cpu.torch_backend import TorchBackend

#: Largest error against float64, relative to the largest output: rounding of inputs (none: the reference
#: reads the same rounded values), of the probabilities and of the output in each dtype.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


@dataclass
class Batch:
    """A cache, a batch over it, and a backend to attend with."""

    backend: AttentionBackend
    kv: PagedKV
    query: torch.Tensor
    query_starts: np.ndarray
    context_lengths: np.ndarray
    block_tables: list[np.ndarray]
    scale: float
    ahead: Ahead | None = None

    def attend(self, backend: AttentionBackend | None = None, **features: Any) -> torch.Tensor:
        backend = backend or self.backend
        plan = backend.plan(self.query_starts, self.context_lengths, self.block_tables, self.ahead)
        return backend.attend(self.kv, 0, self.query, plan, scale=self.scale, **features)

    def reference(self, **features: Any) -> torch.Tensor:
        return reference_paged_attention(
            self.query,
            self.kv,
            0,
            self.query_starts,
            self.context_lengths,
            self.block_tables,
            scale=self.scale,
            ahead=self._ahead_of(features.get("window")),
            **features,
        )

    def _ahead_of(self, window: int | None) -> np.ndarray | None:
        is_causal = self.ahead is None or (self.ahead.in_windows_only and window is None)
        return None if is_causal or self.ahead is None else self.ahead.counts

    def see_each_other(self, *spans: tuple[int, int, int], in_windows_only: bool = False) -> Batch:
        """The same batch, where tokens of request r at positions [start, end) see each other, for each
        (r, start, end)."""
        counts = np.zeros(len(self.query), np.int32)
        for r, start, end in spans:
            first, own = int(self.query_starts[r]), int(self.query_starts[r + 1])
            begin = int(self.context_lengths[r]) - (own - first)
            at = np.arange(max(start, begin), end)
            counts[first + at - begin] = end - 1 - at
        return replace(self, ahead=Ahead(counts, in_windows_only))

    def rows(self, requests: list[int], tokens: list[int] | None = None) -> Batch:
        """The same requests in this order, each cut to its last `tokens[i]` queries (all: None)."""
        picked, starts, lengths, rows = [], [0], [], []
        for i, r in enumerate(requests):
            start, end = int(self.query_starts[r]), int(self.query_starts[r + 1])
            start = max(start, end - tokens[i]) if tokens is not None else start
            picked.append(self.query[start:end])
            rows.append(np.arange(start, end))
            starts.append(starts[-1] + end - start)
            lengths.append(int(self.context_lengths[r]))
        return Batch(
            self.backend,
            self.kv,
            torch.cat(picked),
            np.array(starts, np.int32),
            np.array(lengths, np.int32),
            [self.block_tables[r] for r in requests],
            self.scale,
            self._some(np.concatenate(rows)),
        )

    def chunk(self, request: int, first: int, end: int) -> Batch:
        """Queries at absolute positions `first` to `end` of one request, as a step of its own."""
        start, length = int(self.query_starts[request]), int(self.context_lengths[request])
        offset = length - (int(self.query_starts[request + 1]) - start)
        return Batch(
            self.backend,
            self.kv,
            self.query[start + first - offset : start + end - offset],
            np.array([0, end - first], np.int32),
            np.array([end], np.int32),
            [self.block_tables[request]],
            self.scale,
            self._some(np.arange(start + first - offset, start + end - offset)),
        )

    def _some(self, rows: np.ndarray) -> Ahead | None:
        return None if self.ahead is None else self.ahead.of(rows)


def build_backend(
    path: str, kv: PagedKV, num_query_heads: int, dtype: torch.dtype, **options: Any
) -> AttentionBackend:
    """`path` is a backend's name, or one implementation of the cpu backend: numba, torch."""
    options = {"max_num_tokens": 2048, "max_num_seqs": 64, "max_model_len": 4096} | options
    name = "cpu" if path in ("numba", "torch") else path
    backend = make_backend(
        name, num_query_heads=num_query_heads, spec=kv.spec, compute_dtype=dtype, **options
    )
    return TorchBackend(backend.config) if path == "torch" else backend


def fill_nan(kv: PagedKV) -> None:
    """Every byte of the cache becomes NaN (int8 has none: its scales do)."""
    for t in kv.tensors():
        if t.dtype == torch.int8:
            t.fill_(-128)
        elif t.dtype.itemsize == 1:
            t.view(torch.uint8).fill_(0x7F)
        else:
            t.fill_(float("nan"))


def make_batch(
    backend_name: str,
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (9, 3),
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    shared: dict[int, tuple[int, int]] | None = None,
    seed: int = 0,
    value_size: int = 0,
    value_in_key: bool = False,
    **options: Any,
) -> Batch:
    """`lengths` are (query tokens, context length) per request; `shared[r] = (s, n)`: request r has the
    first n blocks of request s.

    The backend writes the cache itself, but for Triton's: interpreted, it takes milliseconds a row.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_query_heads, num_kv_heads = heads
    counts = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(counts) + 3
    shape = (2, num_blocks, block_size, num_kv_heads, head_size, dtype, torch.device("cpu"), quantization)
    spec = KVSpec(*shape, value_size=value_size, value_in_key=value_in_key)
    kv = PagedKV(spec)
    fill_nan(kv)
    backend = build_backend(backend_name, kv, num_query_heads, dtype, **options)
    writer = TorchBackend(backend.config) if backend_name == "triton" else backend
    order = rng.permutation(num_blocks).astype(np.int32)
    tables: list[np.ndarray] = []
    for r, count in enumerate(counts):
        table, order = order[:count].copy(), order[count:]
        if shared and r in shared:
            source, n = shared[r]
            table[:n] = tables[source][:n]
        tables.append(table)
    written: set[int] = set()
    for table, (_, context) in zip(tables, lengths, strict=True):
        positions = np.arange(context)
        slots = table[positions // block_size].astype(np.int64) * block_size + positions % block_size
        slots = np.array([s if s not in written else -1 for s in slots.tolist()], dtype=np.int64)
        written.update(slots.tolist())
        key = torch.randn(context, num_kv_heads, head_size, generator=generator).to(dtype)
        value = torch.randn(context, num_kv_heads, spec.value_size, generator=generator).to(dtype)
        if value_in_key:
            value = key[..., : spec.value_size]
        writer.write(kv, 0, key, value, torch.from_numpy(slots))
    starts = np.concatenate([[0], np.cumsum([n for n, _ in lengths])]).astype(np.int32)
    query = torch.randn(int(starts[-1]), num_query_heads, head_size, generator=generator).to(dtype)
    context_lengths = np.array([c for _, c in lengths], np.int32)
    return Batch(backend, kv, query, starts, context_lengths, tables, head_size**-0.5)


def assert_close(result: torch.Tensor, reference: torch.Tensor, factor: float = 1.0) -> None:
    """Within the tolerance of the result's dtype, scaled by the largest output; NaN fails."""
    error = (result.double() - reference).abs().max().item()
    limit = TOLERANCE[result.dtype] * max(1.0, reference.abs().max().item()) * factor
    assert error <= limit, f"error {error:.2e} above {limit:.2e}"
