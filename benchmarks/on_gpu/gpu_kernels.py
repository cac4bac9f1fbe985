# SPDX-License-Identifier: Apache-2.0
"""The attention kernel beside torch's SDPA on contiguous tensors and, where there is one, vLLM's kernel."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_machine import matmul_rate, read_rate
from benchmarks.gpu_numbers import has_type
from benchmarks.gpu_parts import Report
from benchmarks.paged_bench import Bench, Sizes, milliseconds, profiled
from radixkv_kernels.triton.backend import TritonBackend

#: Decodes: most times SDPA's milliseconds on contiguous tensors. Prompts: share of the product's speed. A
#: shared prefix: how many times as fast as without sharing. All measured in the same run.
DECODE_TARGET, PREFILL_TARGET, SHARED_TARGET = 1.05, 0.70, 1.7


def table(sizes: Sizes, report: Report) -> None:
    """All loads; one that fails is a line, and the next one runs."""
    read, matmul = read_rate(sizes), matmul_rate(sizes)
    report(**{"read TB/s": read / 1e12, "matmul TFLOP/s": matmul / 1e12})
    small = sizes.small
    loads: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for requests in (2,) if small else (1, 32, 64):
        for context in (40,) if small else (2048, 8192, 32768):
            name = f"decode {requests} x {context}"
            loads.append((name, functools.partial(decode, sizes, requests, context, read)))
    chunk = (6, 70) if small else (512, 32768)
    prompts = [(48, 48)] if small else [(n, n) for n in (2048, 8192, 16384)]
    loads += [
        (f"prefill {rows} at {context}", functools.partial(prefill, sizes, rows, context, matmul))
        for rows, context in [*prompts, chunk]
    ]
    latents = [(2, 1)] if small else [(32, 1), (1, 2048)]
    loads += [(f"latents {n} x {t}", functools.partial(latent, sizes, n, t, read)) for n, t in latents]
    loads.append(("shared prefix", functools.partial(shared, sizes)))
    loads.append(("fp8", functools.partial(fp8, sizes)))
    loads.append(("image", functools.partial(image, sizes)))
    loads.append(("merge", functools.partial(merge, sizes)))
    for name, measure in loads:
        try:
            report(load=name, **measure())
        except Exception as error:
            report(load=name, ok=False, error=f"{type(error).__name__}: {str(error)[:500]}")
        if sizes.device.type == "cuda":
            torch.cuda.empty_cache()


def beside(bench: Bench, sizes: Sizes, sdpa: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of each; peers that fail say why."""
    contenders = {"radixkv ms": bench.attend()}
    notes = {}
    for name, make in (("SDPA ms", lambda: sdpa), ("vLLM ms", lambda: vllm_attention(bench))):
        try:
            run = make()
            if run is not None:
                run()
                contenders[name] = run
        except Exception as error:
            notes[name] = f"{type(error).__name__}: {str(error)[:200]}"
    times = milliseconds(contenders, sizes)
    if "SDPA ms" in times:
        times["times SDPA's time"] = times["radixkv ms"] / times["SDPA ms"]
    return times | notes


def contiguous(bench: Bench, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As much work as the batch's, all of its requests of one length: query, key, value [R, H, T, D]."""
    requests, length = len(bench.contexts), int(bench.contexts[0])
    spec = bench.kv.spec
    shapes = [(bench.query.shape[1], rows), (spec.num_kv_heads, length), (spec.num_kv_heads, length)]
    query, key, value = (
        torch.randn(requests, h, n, spec.head_size, device=spec.device, dtype=bench.query.dtype)
        for h, n in shapes
    )
    return query, key, value


def decode(sizes: Sizes, requests: int, context: int, read: float) -> dict[str, Any]:
    bench = Bench(sizes, [context] * requests)
    query, key, value = contiguous(bench, 1)
    sdpa = functools.partial(scaled_dot_product_attention, query, key, value, enable_gqa=True)
    times = beside(bench, sizes, sdpa)
    rate = bench.kv_bytes() / times["radixkv ms"] * 1e3
    fields = {**times, "TB/s": rate / 1e12, "of the read's": rate / read}
    # A lone short request is too little work for the whole of a card.
    if "times SDPA's time" in times and (requests >= 32 or sizes.small):
        fields |= {"target": DECODE_TARGET, "met": times["times SDPA's time"] <= DECODE_TARGET}
    return fields


def prefill(sizes: Sizes, rows: int, context: int, matmul: float) -> dict[str, Any]:
    bench = Bench(sizes, [context], tokens=[rows])
    query, key, value = contiguous(bench, rows)
    if rows == context:
        sdpa = functools.partial(
            scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True
        )
    else:
        group = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
        sdpa = functools.partial(
            scaled_dot_product_attention, query, key, value, attn_mask=causal_lower_right(rows, context)
        )
    times = beside(bench, sizes, sdpa)
    # The kernel by itself: in whole chunks torch's attention takes its place.
    bench.backend = TritonBackend(bench.backend.config, bench.tiling, long_rows=1 << 30)
    times |= milliseconds({"kernel ms": bench.attend()}, sizes)
    # Two products of all visible pairs.
    pairs = rows * (context - rows) + rows * (rows + 1) / 2
    rate = 4 * pairs * query.shape[3] * query.shape[1] / times["radixkv ms"] * 1e3
    fields = {**times, "TFLOP/s": rate / 1e12, "of the product's": rate / matmul}
    if rows >= 8192 or sizes.small:
        fields |= {"target": PREFILL_TARGET, "met": rate / matmul >= PREFILL_TARGET}
    return fields


def latent(sizes: Sizes, requests: int, rows: int, read: float) -> dict[str, Any]:
    """Decodes or a chunk over 8,192 latents of DeepSeek V3: 128 query heads on one of 576, values of 512."""
    context, shape, value = (40, (4, 1, 40), 32) if sizes.small else (8192, (128, 1, 576), 512)
    tokens = [rows] * requests
    bench = Bench(sizes, [context] * requests, tokens=tokens, heads=shape, latent=value)
    times = milliseconds({"radixkv ms": bench.attend()}, sizes)
    rate = bench.kv_bytes() / times["radixkv ms"] * 1e3
    pairs = requests * rows * (context - (rows - 1) / 2)
    products = 2 * pairs * shape[0] * (shape[2] + value) / times["radixkv ms"] * 1e3
    return {**times, "TB/s": rate / 1e12, "of the read's": rate / read, "TFLOP/s": products / 1e12}


def shared(sizes: Sizes) -> dict[str, Any]:
    """64 requests with 6,144 tokens in common and 2,048 of their own."""
    requests, common, own = (3, 64, 8) if sizes.small else (64, 6144, 2048)
    contexts = [common + own] * requests
    together = Bench(sizes, contexts, shared=common)
    plain = Bench(sizes, contexts, shared=common, share_prefixes=False)
    times = milliseconds({"shared ms": together.attend(), "plain ms": plain.attend()}, sizes)
    speed_up = times["plain ms"] / times["shared ms"]
    return {**times, "speed-up": speed_up, "target": SHARED_TARGET, "met": speed_up >= SHARED_TARGET}


def fp8(sizes: Sizes) -> dict[str, Any]:
    """Decodes on an fp8 cache beside bfloat16."""
    contexts = [40] * 2 if sizes.small else [8192] * 64
    wide = Bench(sizes, contexts)
    narrow = Bench(sizes, contexts, quantization="fp8_e4m3" if has_type(sizes, "fp8_e4m3") else "fp8_e5m2")
    times = milliseconds({"bfloat16 ms": wide.attend(), "fp8 ms": narrow.attend()}, sizes)
    return {**times, "speed-up": times["bfloat16 ms"] / times["fp8 ms"]}


def image(sizes: Sizes) -> dict[str, Any]:
    """A chunk of 2,048 in which 1,024 rows are an image's and see each other, beside the same one causal."""
    rows, start, size = (48, 8, 24) if sizes.small else (2048, 512, 1024)
    bench = Bench(sizes, [rows], tokens=[rows])
    # The kernel's own in both cases: torch's attention takes no such mask.
    bench.backend = TritonBackend(bench.backend.config, bench.tiling, long_rows=1 << 30)
    runs = {"image ms": bench.attend(bench.image(start, size)), "causal ms": bench.attend()}
    times = milliseconds(runs, sizes)
    pairs = rows * (rows + 1) / 2 + size * (size - 1) / 2
    rate = 4 * pairs * bench.query.shape[1] * bench.query.shape[2] / times["image ms"] * 1e3
    return {**times, "times causal": times["image ms"] / times["causal ms"], "TFLOP/s": rate / 1e12}


def merge(sizes: Sizes) -> dict[str, Any]:
    """How much of one long decode the merge kernel takes, by the profiler (nothing on a CPU)."""
    bench = Bench(sizes, [80 if sizes.small else 32768])
    run = bench.attend()
    run()
    if sizes.device.type == "cpu":
        return {"merges": bench.backend.plan(bench.starts, bench.contexts, bench.tables).grids(None)[2]}
    return {f"{one.name[:40]} us": one.microseconds for one in profiled(run, sizes)}


def vllm_attention(bench: Bench) -> Callable[[], Any] | None:
    """vLLM's paged Triton kernel over the same batch; None where it is not installed.

    Raises:
        RuntimeError: its result is another one.
    """
    for module in ("vllm.v1.attention.ops", "vllm.attention.ops"):
        try:
            function = importlib.import_module(f"{module}.triton_unified_attention").unified_attention
            break
        except ImportError:
            continue
    else:
        return None
    device, (_, heads, size) = bench.query.device, bench.query.shape
    out = torch.empty_like(bench.query)
    # [blocks, block size, heads, head size]
    key, value = (t[0].permute(1, 2, 0, 3).contiguous() for t in (bench.kv.key, bench.kv.value))
    width = max(map(len, bench.tables))
    tables = torch.zeros(len(bench.tables), width, dtype=torch.int32)
    for row, blocks in zip(tables, bench.tables, strict=True):
        row[: len(blocks)] = torch.from_numpy(blocks)
    longest = int((bench.starts[1:] - bench.starts[:-1]).max())
    arguments: dict[str, Any] = {
        "q": bench.query,
        "k": key,
        "v": value,
        "out": out,
        "cu_seqlens_q": torch.from_numpy(bench.starts).to(device),
        "max_seqlen_q": longest,
        "seqused_k": torch.from_numpy(bench.contexts).to(device),
        "max_seqlen_k": int(bench.contexts.max()),
        "softmax_scale": bench.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": tables.to(device),
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
    }
    taken = inspect.signature(function).parameters
    if "softmax_segm_output" in taken:
        # Later versions split long contexts into 16 runs where programs are few, in memory they are given.
        few, runs, padded = 128 // bench.kv.spec.num_kv_heads, 16, 1 << (size - 1).bit_length()
        floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
        arguments |= {"seq_threshold_3D": few, "num_par_softmax_segments": runs}
        arguments |= {"softmax_segm_output": floats(few, heads, runs, padded)}
        arguments |= {"softmax_segm_max": floats(few, heads, runs)}
        arguments |= {"softmax_segm_expsum": floats(few, heads, runs)}
    run = functools.partial(function, **{name: v for name, v in arguments.items() if name in taken})
    run()
    error = (out.float() - bench.attend()().float()).abs().max().item()
    if not error < 3e-2:
        raise RuntimeError(f"vLLM's kernel gives another result, by {error:.1e}")
    return run
