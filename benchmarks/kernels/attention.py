# SPDX-License-Identifier: Apache-2.0
"""Attention on this machine's CPU: the paged backend beside torch's SDPA, at SmolLM2-135M's shapes.

    python -m benchmarks.attention [--threads N] [--layers N] [--json FILE]

Prints a table of five workloads, float32, 9 query heads, 3 KV heads, head size 64, blocks of 16:

- a prefill chunk of 512 tokens on 1,500 cached ones, beside SDPA on contiguous keys and values with a mask
  made beforehand (what a dense engine would do at best);
- a decode batch of 8 requests of 2,000 tokens, beside gathering each request's blocks and SDPA per request;
- 32 decodes that share 1,500 tokens and have 500 of their own: shared prefixes attended once, the same
  backend with sharing off, and gather + SDPA;
- the plan of 64 and of 256 decodes, on contexts of 8,000 tokens of which 6,000 are shared, or none;
- the largest error of each workload against float64.

Every workload runs on several layers' worth of cache in turn, as a step of a model does: one layer alone
would stay in the processor's cache. Contenders run in turn, round after round, and each figure is the
median round. With `--threads 1` the clock is the thread's own CPU time, which other programs disturb little;
with more it is wall time, which on a busy machine varies by factors: quote the ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.figures import write_figures
from radixkv_kernels import KVSpec, PagedKV, make_backend, reference_paged_attention
from radixkv_kernels.cpu.attention.backend import CpuBackend

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 9, 3, 64, 16
SCALE = HEAD_SIZE**-0.5


@dataclasses.dataclass
class Workload:
    """A batch of equal requests over a paged cache of random keys and values."""

    backend: CpuBackend
    kv: PagedKV
    query: torch.Tensor
    starts: np.ndarray
    lengths: np.ndarray
    tables: list[np.ndarray]

    def attend(self, backend: CpuBackend | None = None) -> Callable[[int], torch.Tensor]:
        backend = backend or self.backend
        plan = backend.plan(self.starts, self.lengths, self.tables)
        return lambda layer: backend.attend(self.kv, layer, self.query, plan, scale=SCALE)

    def gather_and_sdpa(self) -> Callable[[int], torch.Tensor]:
        """Per request: gather its blocks, then SDPA."""
        blocks = [torch.from_numpy(t.astype(np.int64)) for t in self.tables]
        out = torch.empty_like(self.query)

        def run(layer: int) -> torch.Tensor:
            for r, (index, length) in enumerate(zip(blocks, self.lengths.tolist(), strict=True)):
                k = self.kv.key[layer].index_select(1, index).flatten(1, 2)[None, :, :length]
                v = self.kv.value[layer].index_select(1, index).flatten(1, 2)[None, :, :length]
                q = self.query[r].view(1, HEADS, 1, HEAD_SIZE)
                out[r] = scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True)[0, :, 0]
            return out

        return run

    def contiguous_sdpa(self) -> Callable[[int], torch.Tensor]:
        """SDPA on one request's keys and values, already contiguous, with a ready mask."""
        length, n = int(self.lengths[0]), self.query.shape[0]
        table = self.tables[0]
        pairs = [
            [x.transpose(0, 1)[None].contiguous() for x in self.kv.read(i, table, length, torch.float32)]
            for i in range(self.kv.spec.num_layers)
        ]
        mask = torch.full((n, length), float("-inf")).triu(length - n + 1)
        query = self.query.transpose(0, 1)[None]

        def run(layer: int) -> torch.Tensor:
            k, v = pairs[layer]
            out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)
            return out[0].transpose(0, 1)

        return run

    def error(self, result: torch.Tensor) -> float:
        reference = reference_paged_attention(
            self.query, self.kv, 0, self.starts, self.lengths, self.tables, scale=SCALE
        )
        return (result.double() - reference).abs().max().item()


def make_workload(requests: int, tokens: int, context: int, shared: int, layers: int) -> Workload:
    """`requests` of `context` tokens, the last `tokens` of them new, whose first `shared` are in shared
    blocks."""
    common, blocks = shared // BLOCK, -(-context // BLOCK)
    own = blocks - common
    spec = KVSpec(
        layers, common + requests * own, BLOCK, KV_HEADS, HEAD_SIZE, torch.float32, torch.device("cpu")
    )
    kv = PagedKV(spec)
    torch.manual_seed(0)
    for tensor in kv.tensors():
        tensor.normal_()
    order = np.random.default_rng(0).permutation(spec.num_blocks).astype(np.int32)
    tables = [
        np.concatenate([order[:common], order[common + r * own : common + (r + 1) * own]])
        for r in range(requests)
    ]
    backend = make_backend(
        "cpu",
        num_query_heads=HEADS,
        spec=spec,
        compute_dtype=torch.float32,
        max_num_tokens=requests * tokens,
        max_num_seqs=requests,
        max_model_len=context,
    )
    assert isinstance(backend, CpuBackend)
    query = torch.randn(requests * tokens, HEADS, HEAD_SIZE)
    starts = np.arange(requests + 1, dtype=np.int32) * tokens
    return Workload(backend, kv, query, starts, np.full(requests, context, np.int32), tables)


def interleaved_medians(
    contenders: dict[str, Callable[[int], Any]], layers: int, rounds: int
) -> dict[str, float]:
    """Milliseconds per layer: every round runs each contender over all layers; the median round counts."""
    for run in contenders.values():
        run(0)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(rounds):
        for name, run in contenders.items():
            start = clock()
            for layer in range(layers):
                run(layer)
            times[name].append((clock() - start) / layers * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def planning(requests: int, shared: int) -> float:
    """Median microseconds (thread CPU time) to plan a step of decodes of the embedded model on contexts of
    8,000."""
    work = make_workload(requests, 1, 8000, shared, 1) if requests * (8000 - shared) < 200_000 else None
    if work is None:
        # Tables alone: the cache would take gigabytes, and a plan never reads it.
        order = np.random.default_rng(0).permutation(requests * 500).astype(np.int32).reshape(requests, 500)
        order[:, : shared // BLOCK] = order[0, : shared // BLOCK]
        work = make_workload(1, 1, 16, 0, 1)
        tables = list(order)
    else:
        tables = work.tables
    config = dataclasses.replace(work.backend.config, max_num_seqs=requests, max_model_len=8000)
    backend = CpuBackend(config)
    starts, lengths = np.arange(requests + 1, dtype=np.int32), np.full(requests, 8000, np.int32)
    times = []
    for _ in range(200):
        start = time.thread_time_ns()
        backend.plan(starts, lengths, tables)
        times.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(times)


def measure(layers: int, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    work = make_workload(1, 512, 2012, 0, layers)
    results["prefill 512 on 1,500"] = interleaved_medians(
        {"radixkv": work.attend(), "SDPA, contiguous": work.contiguous_sdpa()}, layers, rounds
    ) | {"error": work.error(work.attend()(0))}
    work = make_workload(8, 1, 2000, 0, layers)
    results["decode 8 x 2,000"] = interleaved_medians(
        {"radixkv": work.attend(), "gather + SDPA": work.gather_and_sdpa()}, layers, rounds
    ) | {"error": work.error(work.attend()(0))}
    work = make_workload(32, 1, 2000, 1500, layers)
    plain = CpuBackend(dataclasses.replace(work.backend.config, share_prefixes=False))
    results["decode 32 x (1,500 shared + 500)"] = interleaved_medians(
        {
            "radixkv": work.attend(),
            "radixkv, not shared": work.attend(plain),
            "gather + SDPA": work.gather_and_sdpa(),
        },
        layers,
        rounds,
    ) | {"error": work.error(work.attend()(0))}
    results["plan, us"] = {
        f"{n} decodes{', 6,000 shared' if shared else ''}": planning(n, shared)
        for n in (64, 256)
        for shared in (0, 6000)
    }
    return results


def show(results: dict[str, Any]) -> None:
    print(f"{'workload':34s} {'contender':22s} {'ms a layer':>10s} {'radixkv is':>12s}")
    for workload, row in results.items():
        if workload == "plan, us":
            continue
        for name, value in row.items():
            if name == "error":
                print(f"{workload:34s} {'error, against float64':22s} {value:10.1e}")
                continue
            ratio = "" if name == "radixkv" else f"{value / row['radixkv']:8.2f}x as fast"
            print(f"{workload:34s} {name:22s} {value:10.2f} {ratio:>12s}")
    for name, value in results["plan, us"].items():
        print(f"{'plan, ' + name:57s} {value:7.0f} us")


def processor() -> str:
    """The processor's name and widest vectors, where Linux tells."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    name = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line), "")
    return f"{name}, {'AVX-512' if ' avx512f' in text else 'AVX2' if ' avx2' in text else 'no AVX2'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--layers", type=int, default=8, help="layers of cache to cycle through")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of which the median counts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    results = measure(args.layers, args.rounds)
    clock = "thread CPU time" if args.threads == 1 else "wall time"
    print(f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}, float32, {clock}\n")
    show(results)
    setup = {"threads": args.threads, "clock": clock, "layers": args.layers, "torch": torch.__version__}
    write_figures(args.json, "attention", {"setup": setup, "results": results})


if __name__ == "__main__":
    main()
