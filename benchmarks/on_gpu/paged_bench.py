# SPDX-License-Identifier: Apache-2.0
"""A paged cache with random contents and batches over it, and a clock for what runs on a GPU or a CPU."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from radixkv.model.cuda_graphs import CudaRecorder
from radixkv_kernels import KVSpec, PagedKV, reference_paged_attention
from radixkv_kernels.cpu.torch_backend import TorchBackend
from radixkv_kernels.interface import Ahead, BackendConfig
from radixkv_kernels.triton.backend import TritonBackend
from radixkv_kernels.triton.tiles import Tile, Tiling

BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Toy sizes or real ones, and where."""

    small: bool
    device: torch.device

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head size."""
        return (2, 1, 16) if self.small else (32, 8, 128)

    @property
    def rounds(self) -> int:
        return 1 if self.small else 20


class ToyTiling(Tiling):
    """Short segments and low tiles: several of each in contexts that an interpreter can afford."""

    segment = 64

    def choose(self, kind: str) -> Tile:
        rows = max(16 if kind == "short" else 32, self.group)
        return dataclasses.replace(super().choose(kind), rows=1 << (rows - 1).bit_length(), keys=32)


class Bench:
    """A paged cache with random contents, and batches over it.

    Args:
        contexts: tokens of each request, of which the first `shared` are common to all.
        tokens: query rows of each request; None: one each.
        in_order: blocks lie one after the other.
        heads: query heads, KV heads, elements of a key head; None: those of the sizes.
        latent: values are the first `latent` elements of their keys; 0: they are apart, and as large.
        options: further fields of `BackendConfig`.
    """

    def __init__(
        self,
        sizes: Sizes,
        contexts: list[int],
        *,
        tokens: list[int] | None = None,
        shared: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        quantization: str | None = None,
        in_order: bool = False,
        heads: tuple[int, int, int] | None = None,
        latent: int = 0,
        **options: Any,
    ) -> None:
        hq, hkv, size = heads or sizes.heads
        tokens = tokens or [1] * len(contexts)
        counts = [-(-c // BLOCK) for c in contexts]
        common = shared // BLOCK
        total = common + sum(n - common for n in counts)
        spec = KVSpec(
            *(1, total, BLOCK, hkv, size, dtype, sizes.device, quantization),
            value_size=latent,
            value_in_key=latent > 0,
        )
        self.kv = PagedKV(spec)
        config = BackendConfig(
            num_query_heads=hq,
            spec=spec,
            compute_dtype=dtype,
            max_num_tokens=max(sum(tokens), 16),
            max_num_seqs=len(contexts),
            max_model_len=max(contexts) + BLOCK,
            **options,
        )
        self.tiling = ToyTiling(config) if sizes.small else None
        self.backend = make_backend(sizes, config)
        ids = np.arange(total, dtype=np.int32)
        if not in_order:
            ids = np.random.default_rng(0).permutation(ids)
        self.tables, at = [], common
        for n in counts:
            self.tables.append(np.concatenate([ids[:common], ids[at : at + n - common]]))
            at += n - common
        slots = torch.arange(total * BLOCK, device=sizes.device)
        torch.manual_seed(0)
        # Interpreted, the kernel that writes takes milliseconds a row.
        writer = self.backend if sizes.device.type == "cuda" else TorchBackend(config)
        # In pieces: random rows for a whole layer would double the memory needed.
        for part in slots.split(1 << 16):
            rows = torch.randn(2, len(part), hkv, size, device=sizes.device, dtype=dtype)
            writer.write(self.kv, 0, rows[0], rows[1, ..., : spec.value_size], part)
        self.query = torch.randn(sum(tokens), hq, size, device=sizes.device, dtype=dtype)
        self.starts = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
        self.contexts = np.array(contexts, np.int32)
        self.scale = size**-0.5

    def attend(self, ahead: Ahead | None = None, **features: Any) -> Callable[[], torch.Tensor]:
        """A function that attends the batch, planned once; `ahead`: see `Ahead`."""
        plan = self.backend.plan(self.starts, self.contexts, self.tables, ahead)
        out = self.query.new_empty(*self.query.shape[:2], self.kv.spec.value_size)
        return lambda: self.backend.attend(
            self.kv, 0, self.query, plan, scale=self.scale, out=out, **features
        )

    def reference(self, ahead: Ahead | None = None, **features: Any) -> torch.Tensor:
        """The same in float64, on the CPU."""
        if ahead is not None:
            features["ahead"] = ahead.counts
        return reference_paged_attention(
            self.query, self.kv, 0, self.starts, self.contexts, self.tables, scale=self.scale, **features
        )

    def image(self, start: int, size: int) -> Ahead:
        """Let the rows of the first request from `start` on see each other, `size` of them, as an image's."""
        counts = np.zeros(len(self.query), np.int32)
        counts[start : start + size] = np.arange(size - 1, -1, -1)
        return Ahead(counts)

    def kv_bytes(self) -> float:
        """Bytes of keys, values and scales that the batch reads, blocks counted once per request."""
        return float(self.contexts.sum()) * self.kv.spec.bytes_per_slot


def make_backend(sizes: Sizes, config: BackendConfig, *, share: bool = True) -> TritonBackend:
    """The GPU's backend, with toy tiles at toy sizes."""
    config = dataclasses.replace(config, share_prefixes=config.share_prefixes and share)
    return TritonBackend(config, ToyTiling(config) if sizes.small else None)


def milliseconds(contenders: dict[str, Callable[[], Any]], sizes: Sizes) -> dict[str, float]:
    """Median of interleaved rounds. On a GPU by events around a recorded launch, where it can be recorded,
    each after a write that empties the L2 cache."""
    cuda = sizes.device.type == "cuda"
    flush = torch.empty(256 << 20 if cuda else 1, dtype=torch.uint8, device=sizes.device)
    timed = {name: recorded(run) if cuda else run for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(sizes.rounds):
        for name, run in timed.items():
            flush.zero_()
            if cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end))
            else:
                start = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def recorded(run: Callable[[], Any]) -> Callable[[], Any]:
    """What `run` launches, without what the host does for it; `run` itself where that can't be recorded."""
    for _ in range(3):
        run()
    try:
        replay, result = CudaRecorder()(run)
    except RuntimeError:
        return run

    def again() -> Any:
        replay()
        return result

    return again


@dataclasses.dataclass(frozen=True)
class Profiled:
    """A kernel's microseconds and calls in one run."""

    name: str
    microseconds: float
    calls: float


def profiled(run: Callable[[], Any], sizes: Sizes, runs: int = 3) -> list[Profiled]:
    """What a run takes on the GPU, kernel by kernel, most time first; on a CPU, operator by operator."""
    cuda = sizes.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(runs):
            run()
        if cuda:
            torch.cuda.synchronize()
    microseconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiler.events():
        if cuda and event.device_type == DeviceType.CUDA:
            microseconds[event.name] += event.time_range.elapsed_us()
        elif not cuda:
            microseconds[event.name] += event.self_cpu_time_total
        else:
            continue
        calls[event.name] += 1
    return [Profiled(name, spent / runs, calls[name] / runs) for name, spent in microseconds.most_common()]
