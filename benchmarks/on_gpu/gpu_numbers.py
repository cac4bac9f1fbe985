# SPDX-License-Identifier: Apache-2.0
"""Attention against float64, and in deterministic mode bit by bit against itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts import Report
from benchmarks.paged_bench import Bench, Sizes, make_backend

#: Largest error allowed, relative to the largest output; quantised caches twice as much.
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 3e-6}

#: Query heads, KV heads, head size: groups of 1 to 71 heads, sizes that are no powers of two.
SHAPES = (
    (9, 3, 64),
    (2, 2, 80),
    (8, 2, 96),
    (14, 2, 64),
    (16, 2, 192),
    (16, 8, 256),
    (71, 1, 64),
    (64, 8, 64),
)
TOY_SHAPES = ((3, 1, 24),)
#: Query heads, elements of a key, of which the first are its value: DeepSeek V3, GLM-4.7-Flash, MiniCPM3.
LATENTS = ((128, 576, 512), (20, 576, 512), (40, 288, 256))
TOY_LATENTS = ((4, 40, 32),)


def compare(sizes: Sizes, report: Report, name: str, run: Callable[[], tuple[Any, Any, float]]) -> None:
    """Report one check: the largest error of (result, reference, limit), or what was raised."""
    try:
        result, reference, limit = run()
    except Exception as error:
        # The next check may still tell something; one that breaks the device breaks all that follow.
        report(check=name, ok=False, error=f"{type(error).__name__}: {str(error)[:500]}")
        return
    scale = max(1.0, reference.abs().max().item())
    off = (result.double().cpu() - reference.double().cpu()).abs().max().item() / scale
    # `not above` would let NaN pass.
    report(check=name, ok=off <= limit, error_over_limit=off / limit if limit else off)


def numbers(sizes: Sizes, report: Report, dtype_name: str) -> None:
    """Every feature, head shape and K/V type in one compute type; each check is a line."""
    dtype = getattr(torch, dtype_name)
    heads = sizes.heads[0]
    contexts, tokens = (
        ([70, 33], [1, 9]) if sizes.small else ([3000, 1500, 700, 1, 2600], [1, 129, 700, 1, 5])
    )
    features: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window": contexts[0] // 3},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.linspace(-1, 3, heads, device=sizes.device)},
    }
    bench = Bench(sizes, contexts, tokens=tokens, dtype=dtype)
    for name, chosen in features.items():
        compare(
            *(sizes, report, name),
            lambda c=chosen: (bench.attend(**c)(), bench.reference(**c), limit(bench)),  # type: ignore[misc]
        )
    image = (20, 24) if sizes.small else (150, 256)
    pictured = Bench(sizes, contexts[:1], tokens=contexts[:1], dtype=dtype)
    ahead = pictured.image(*image)
    compare(
        *(sizes, report, "image"),
        lambda: (pictured.attend(ahead)(), pictured.reference(ahead), limit(pictured)),
    )
    # A chunk on a long context, split among programs; groups that share prefixes at two depths.
    long, common = (100, 64) if sizes.small else (9000, 4096)
    chunk, requests = (6, 3) if sizes.small else (300, 12)
    for name, make in {
        "split chunk": lambda: Bench(sizes, [long], tokens=[chunk], dtype=dtype),
        "split decode": lambda: Bench(sizes, [long], dtype=dtype),
        "shared groups": lambda: Bench(
            sizes, [common + 5 + 7 * r for r in range(requests)], tokens=[1 + r % 3 for r in range(requests)],
            shared=common, dtype=dtype,
        ),
    }.items():  # fmt: skip
        compare(sizes, report, name, lambda m=make: attended(m()))  # type: ignore[misc]
    for quantization in ("int8", "fp8_e5m2", "fp8_e4m3"):
        if has_type(sizes, quantization):
            compare(
                *(sizes, report, quantization),
                lambda q=quantization: attended(  # type: ignore[misc]
                    Bench(sizes, contexts, tokens=tokens, dtype=dtype, quantization=q)
                ),
            )
    for shape in TOY_SHAPES if sizes.small else SHAPES:
        small = ([40], [9]) if sizes.small else ([900, 700, 130], [1, 200, 3])
        compare(
            *(sizes, report, "heads {}:{} of {}".format(*shape)),
            lambda s=shape, c=small: attended(  # type: ignore[misc]
                Bench(sizes, c[0], tokens=c[1], dtype=dtype, heads=s)
            ),
        )

    for heads, size, value in TOY_LATENTS if sizes.small else LATENTS:
        small = ([40], [9]) if sizes.small else ([900, 700, 130], [1, 20, 3])
        compare(
            *(sizes, report, f"latents {heads}:1 of {size}, values of {value}"),
            lambda h=heads, k=size, v=value, c=small: attended(  # type: ignore[misc]
                Bench(sizes, c[0], tokens=c[1], dtype=dtype, heads=(h, 1, k), latent=v)
            ),
        )


def has_type(sizes: Sizes, quantization: str) -> bool:
    """Whether the device has a K/V type: before Ada and Hopper, only e5m2 of the two fp8."""
    new = sizes.device.type != "cuda" or torch.cuda.get_device_capability() >= (8, 9)
    return new or quantization != "fp8_e4m3"


def limit(bench: Bench) -> float:
    return TOLERANCE[bench.query.dtype] * (1 if bench.kv.spec.quantization is None else 2)


def attended(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, float]:
    """What a batch's attention gives, what it should, and how far they may be apart."""
    return bench.attend()(), bench.reference(), limit(bench)


def identity(sizes: Sizes, report: Report) -> None:
    """Deterministic mode: rows have the same bits whatever the batch, sharing, and the cached part."""
    for quantization in (None, "int8", "fp8_e4m3" if has_type(sizes, "fp8_e4m3") else "fp8_e5m2"):
        kind = quantization or "bfloat16"

        def same(name: str, a: torch.Tensor, b: torch.Tensor, kind: str = kind) -> None:
            report(check=f"{kind}: {name}", ok=torch.equal(a, b), different=int((a != b).sum()))

        own, shared = (6, 64) if sizes.small else (700, 2048)
        contexts = [shared + own + 3 * i for i in range(2 if sizes.small else 4)]
        bench = Bench(sizes, contexts, shared=shared, quantization=quantization, deterministic=True)
        together = bench.attend()().clone()
        plain = make_backend(sizes, bench.backend.config, share=False)
        plan = plain.plan(bench.starts, bench.contexts, bench.tables)
        same("shared and plain", plain.attend(bench.kv, 0, bench.query, plan, scale=bench.scale), together)
        for r, context in enumerate(contexts):
            plan = bench.backend.plan(np.array([0, 1]), np.array([context]), [bench.tables[r]])
            alone = bench.backend.attend(bench.kv, 0, bench.query[r : r + 1], plan, scale=bench.scale)
            same(f"alone and together, row {r}", alone[0], together[r])
        split = make_backend(sizes, bench.backend.config, share=False)
        split.settings = dataclasses.replace(split.settings, parallel=1)
        plan = split.plan(bench.starts, bench.contexts, bench.tables)
        same("split and whole", split.attend(bench.kv, 0, bench.query, plan, scale=bench.scale), together)
        n = 70 if sizes.small else 1500
        bench = Bench(sizes, [n], tokens=[n], quantization=quantization, deterministic=True)
        cold = bench.attend()().clone()
        for cut in (n // 3,) if sizes.small else (1, n // 3, n - 1):
            plan = bench.backend.plan(np.array([0, n - cut]), np.array([n]), bench.tables)
            hit = bench.backend.attend(bench.kv, 0, bench.query[cut:], plan, scale=bench.scale)
            same(f"cold and hit at {cut}", hit, cold[cut:])
