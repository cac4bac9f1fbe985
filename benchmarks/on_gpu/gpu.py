"""Attention kernels and engine on a GPU, beside the best that torch has, in one run.

    python -m benchmarks.gpu [--small] [--only NAME ...] [--json FILE]

1. numerics: mixed batches in bfloat16 and float16 against float64, every feature, and the bit-identity checks
   (shared against plain, cold against hit, batch order) with `deterministic=True`. Any failure ends the run.
2. prefill: causal, 32:8 heads of 128, contexts of 2k, 8k and 16k; TFLOP/s, beside SDPA and FlexAttention on
   contiguous tensors. Target at 8k: 400 TFLOP/s on an H100, and 0.9 of the best contiguous one.
3. decode: 64 requests of 8k; TB/s of keys and values read, beside the same kernel on a cache whose blocks lie
   in order. Target: 3.6 TB/s on an H100/H200, and within 5 % of contiguous.
4. shared: 64 requests, 6k shared and 2k of their own; with sharing beside without. Target: 2.5 times as fast.
5. fp8: the decode of 3. on an FP8 cache beside bfloat16. Target: 1.6 times as fast.
6. engine: decode steps of Llama-3.1-8B, Qwen3-0.6B and SmolLM2-135M shapes, random weights, through the
   engine's model runner and its CUDA graphs; milliseconds over the roofline (`benchmarks.gpu_engine`).
7. speculation: steps of 1, 8 and 64 requests with 1 to 16 rows each; what a draft costs.
8. throughput: the whole engine beside transformers' own continuous batching, 64 requests at a time; output
   tokens/s (`benchmarks.gpu_throughput`). Targets: 3 times with a shared prefix, 1.5 times without.

The last lines say which targets were met.

`--small` runs every part at toy sizes: on a GPU to try the script, on a CPU under Triton's interpreter (set
TRITON_INTERPRET=1) to test it. Its timings mean nothing, and are marked so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from radixkv_kernels import KVSpec, PagedKV, make_backend, reference_paged_attention

PARTS = ("numerics", "prefill", "decode", "shared", "fp8", "engine", "speculation", "throughput")

#: (part, words that the row's name holds, figure, least value); figures of a part without rows: no words.
TARGETS = (
    ("prefill", "context 8192", "radixkv", 400.0),
    ("prefill", "context 8192", "over the best contiguous", 0.9),
    ("decode", "", "radixkv", 3.6),
    ("decode", "", "paged over in order", 0.95),
    ("shared", "", "speed-up", 2.5),
    ("fp8", "", "speed-up", 1.6),
    ("throughput", "shared prefix", "times as fast", 3.0),
    ("throughput", "nothing shared", "times as fast", 1.5),
)
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 3e-6}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the parts run at."""

    small: bool
    device: torch.device

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head size."""
        return (4, 2, 32) if self.small else (32, 8, 128)

    @property
    def prefill_contexts(self) -> tuple[int, ...]:
        return (48,) if self.small else (2048, 8192, 16384)

    @property
    def decode(self) -> tuple[int, int]:
        """Requests, context."""
        return (3, 80) if self.small else (64, 8192)

    @property
    def shared(self) -> tuple[int, int, int]:
        """Requests, shared tokens, own tokens."""
        return (3, 512, 16) if self.small else (64, 6144, 2048)

    @property
    def rounds(self) -> int:
        return 1 if self.small else 20


class Bench:
    """A paged cache with random contents, and batches over it."""

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
        layers: int = 1,
        heads: tuple[int, int, int] | None = None,
        **options: Any,
    ) -> None:
        hq, hkv, size = heads or sizes.heads
        block = 16
        tokens = tokens or [1] * len(contexts)
        counts = [-(-c // block) for c in contexts]
        common = shared // block
        total = common + sum(n - common for n in counts)
        spec = KVSpec(layers, total, block, hkv, size, dtype, sizes.device, quantization)
        self.kv = PagedKV(spec)
        self.backend = make_backend(
            "triton",
            num_query_heads=hq,
            spec=spec,
            compute_dtype=dtype,
            max_num_tokens=max(sum(tokens), 16),
            max_num_seqs=len(contexts),
            max_model_len=max(contexts) + block,
            **options,
        )
        ids = np.arange(total, dtype=np.int32)
        if not in_order:
            ids = np.random.default_rng(0).permutation(ids)
        self.tables, at = [], common
        for n in counts:
            self.tables.append(np.concatenate([ids[:common], ids[at : at + n - common]]))
            at += n - common
        slots = torch.arange(total * block, device=sizes.device)
        torch.manual_seed(0)
        for layer in range(layers):
            # In pieces: a whole layer of random rows would double the memory needed.
            for part in slots.split(1 << 16):
                rows = torch.randn(2, len(part), hkv, size, device=sizes.device, dtype=dtype)
                self.backend.write(self.kv, layer, rows[0], rows[1], part)
        self.query = torch.randn(sum(tokens), hq, size, device=sizes.device, dtype=dtype)
        self.starts = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
        self.contexts = np.array(contexts, np.int32)
        self.scale = size**-0.5

    def attend(self, query: torch.Tensor | None = None, **features: Any) -> Callable[[], torch.Tensor]:
        plan = self.backend.plan(self.starts, self.contexts, self.tables)
        out = torch.empty_like(self.query)
        query = self.query if query is None else query
        return lambda: self.backend.attend(self.kv, 0, query, plan, scale=self.scale, out=out, **features)

    def reference(self, **features: Any) -> torch.Tensor:
        return reference_paged_attention(
            self.query, self.kv, 0, self.starts, self.contexts, self.tables, scale=self.scale, **features
        )

    def kv_bytes(self) -> float:
        """Bytes of keys, values and scales that the batch reads, blocks counted once per request."""
        return float(self.contexts.sum()) * self.kv.spec.bytes_per_slot / self.kv.spec.num_layers


def milliseconds(contenders: dict[str, Callable[[], Any]], sizes: Sizes) -> dict[str, float]:
    """Median of interleaved rounds, by CUDA events where there are; each after a write that empties the
    L2."""
    cuda = sizes.device.type == "cuda"
    flush = torch.empty(256 << 20 if cuda else 1, dtype=torch.uint8, device=sizes.device)
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(sizes.rounds):
        for name, run in contenders.items():
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


def numerics(sizes: Sizes) -> dict[str, Any]:
    """Largest errors relative to the dtype's tolerance; raises AssertionError where one is above 1."""
    device, heads = sizes.device, sizes.heads[0]
    contexts, tokens = (
        ([70, 40, 33], [1, 9, 33]) if sizes.small else ([3000, 1500, 700, 1, 2600], [1, 129, 700, 1, 5])
    )
    features: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window": contexts[0] // 3},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.linspace(-1, 3, heads, device=device)},
    }
    errors = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for quantization in (None, "int8", "fp8_e5m2", "fp8_e4m3"):
            bench = Bench(sizes, contexts, tokens=tokens, dtype=dtype, quantization=quantization)
            for name, chosen in features.items():
                if quantization and name != "plain":
                    continue
                reference = bench.reference(**chosen)
                error = (bench.attend(**chosen)().double().cpu() - reference).abs().max().item()
                limit = TOLERANCE[dtype] * max(1.0, reference.abs().max().item()) * (2 if quantization else 1)
                key = f"{str(dtype).removeprefix('torch.')} {quantization or ''} {name}"
                errors[key] = error / limit
                assert error <= limit, f"{key}: error {error:.2e} above {limit:.2e}"
    errors |= identity(sizes)
    return {"largest error over its limit": max(errors.values()), "checks": len(errors)}


def identity(sizes: Sizes) -> dict[str, float]:
    """Bit-identity in deterministic mode: each check that holds is 0.0; the first that fails raises."""
    own, shared = (16, 512) if sizes.small else (700, 2048)
    contexts = [shared + own + 3 * i for i in range(4)]
    bench = Bench(sizes, contexts, shared=shared, deterministic=True)
    together = bench.attend()().clone()
    plain = dataclasses.replace(bench.backend.config, share_prefixes=False)
    bench.backend = type(bench.backend)(plain)
    assert torch.equal(bench.attend()(), together), "shared and plain differ"
    for r, context in enumerate(contexts):
        plan = bench.backend.plan(np.array([0, 1]), np.array([context]), [bench.tables[r]])
        alone = bench.backend.attend(bench.kv, 0, bench.query[r : r + 1], plan, scale=bench.scale)
        assert torch.equal(alone[0], together[r]), "a row depends on its batch"
    n = 40 if sizes.small else 1500
    bench = Bench(sizes, [n], tokens=[n], deterministic=True)
    cold = bench.attend()().clone()
    for cut in (1, n // 3, n - 1):
        plan = bench.backend.plan(np.array([0, n - cut]), np.array([n]), bench.tables)
        hit = bench.backend.attend(bench.kv, 0, bench.query[cut:], plan, scale=bench.scale)
        assert torch.equal(hit, cold[cut:]), f"cold and hit at {cut} differ"
    return {"shared equals plain": 0.0, "alone equals together": 0.0, "hit equals cold": 0.0}


def prefill(sizes: Sizes) -> dict[str, Any]:
    hq, hkv, size = sizes.heads
    results: dict[str, Any] = {}
    for n in sizes.prefill_contexts:
        bench = Bench(sizes, [n], tokens=[n])
        q, k, v = (
            torch.randn(1, h, n, size, device=sizes.device, dtype=torch.bfloat16) for h in (hq, hkv, hkv)
        )
        sdpa = functools.partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        contenders: dict[str, Callable[[], Any]] = {"radixkv": bench.attend(), "SDPA": sdpa}
        if not sizes.small:
            contenders["FlexAttention"] = flex_attention(q, k, v)
        times = milliseconds(contenders, sizes)
        # Two products of n x n / 2 visible pairs.
        flop = 4 * n * n / 2 * size * hq
        results[f"context {n}"] = {name: flop / (ms * 1e9) for name, ms in times.items()}
        best = min(ms for name, ms in times.items() if name != "radixkv")
        results[f"context {n}"]["over the best contiguous"] = best / times["radixkv"]
    return {"unit": "TFLOP/s", **results}


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device=q.device.type
    )
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def decode(sizes: Sizes) -> dict[str, Any]:
    requests, context = sizes.decode
    paged = Bench(sizes, [context] * requests)
    in_order = Bench(sizes, [context] * requests, in_order=True)
    times = milliseconds({"radixkv": paged.attend(), "blocks in order": in_order.attend()}, sizes)
    rates = {name: paged.kv_bytes() / ms / 1e9 for name, ms in times.items()}
    return {"unit": "TB/s", **rates, "paged over in order": times["blocks in order"] / times["radixkv"]}


def shared(sizes: Sizes) -> dict[str, Any]:
    requests, common, own = sizes.shared
    contexts = [common + own] * requests
    together = Bench(sizes, contexts, shared=common)
    plain = Bench(sizes, contexts, shared=common, share_prefixes=False)
    times = milliseconds({"shared": together.attend(), "plain": plain.attend()}, sizes)
    return {"unit": "ms", **times, "speed-up": times["plain"] / times["shared"]}


def fp8(sizes: Sizes) -> dict[str, Any]:
    requests, context = sizes.decode
    wide = Bench(sizes, [context] * requests)
    # Before Hopper and Ada, only e5m2 exists.
    new = sizes.device.type != "cuda" or torch.cuda.get_device_capability() >= (8, 9)
    narrow = Bench(sizes, [context] * requests, quantization="fp8_e4m3" if new else "fp8_e5m2")
    times = milliseconds({"bfloat16": wide.attend(), "fp8": narrow.attend()}, sizes)
    return {"unit": "ms", **times, "speed-up": times["bfloat16"] / times["fp8"]}


def engine(sizes: Sizes) -> dict[str, Any]:
    from benchmarks.gpu_engine import decode_steps

    return decode_steps(sizes.device, sizes.small, sizes.rounds)


def speculation(sizes: Sizes) -> dict[str, Any]:
    from benchmarks.gpu_engine import speculative_steps

    return speculative_steps(sizes.device, sizes.small, sizes.rounds)


def throughput(sizes: Sizes) -> dict[str, Any]:
    from benchmarks.gpu_throughput import compare

    return compare(sizes.device, sizes.small, rounds=1 if sizes.small else 3)


def targets(results: dict[str, Any]) -> list[str]:
    """One line per target whose part has run: the figure, the target, met or missed."""
    lines = []
    for part, words, figure, least in TARGETS:
        if part not in results:
            continue
        row = results[part]
        if words:
            row = next(value for name, value in row.items() if words in name)
        verdict = "met" if row[figure] >= least else "missed"
        lines.append(f"{part:11s} {words:15s} {figure:25s} {row[figure]:8.3g}  target {least:<5g} {verdict}")
    return lines


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name} {'(' + result['unit'] + ')' if 'unit' in result else ''}")
    for key, value in result.items():
        if isinstance(value, dict):
            row = "  ".join(f"{k} {v:.3g}" for k, v in value.items())
            print(f"  {key:28s} {row}")
        elif key != "unit":
            print(f"  {key:28s} {value:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--small", action="store_true", help="toy sizes, to try the script; timings mean nothing"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=" ".join(PARTS)
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and not (args.small and os.environ.get("TRITON_INTERPRET") == "1"):
        sys.exit(
            "no CUDA device; to try the script on a CPU: TRITON_INTERPRET=1 python -m benchmarks.gpu --small"
        )
    if not cuda:
        # The interpreter's bfloat16 and its products need repairs first, as in the tests.
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kernels" / "interpreted"))
        importlib.import_module("interpreter_repairs").install()
    torch.set_grad_enabled(False)
    sizes = Sizes(args.small, torch.device("cuda" if cuda else "cpu"))
    where = torch.cuda.get_device_name() if cuda else "CPU, interpreted"
    print(f"{where}, torch {torch.__version__}{', toy sizes: timings mean nothing' if args.small else ''}")
    results: dict[str, Any] = {}
    for part in args.only:
        results[part] = globals()[part](sizes)
        show(part, results[part])
    if not args.small:
        print("\ntargets (for an H100 or H200)", *targets(results), sep="\n  ")
    if args.json:
        args.json.write_text(json.dumps({"device": where, "small": args.small, "results": results}, indent=2))


if __name__ == "__main__":
    main()
