# SPDX-License-Identifier: Apache-2.0
"""Compiled CPU products in a process of their own: `python instruction_set_probe.py FILE [narrow]`.

What they compute and the code that numba made of them go to FILE.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from radixkv_kernels import KVSpec, PagedKV
from radixkv_kernels.cpu import compiling

TOKENS, INPUTS, OUTPUTS, HEADS, SIZE = 19, 200, 70, 2, 32


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int8_results() -> dict[str, torch.Tensor]:
    from radixkv_kernels.cpu.linear.int8_product import PackedInt8
    from radixkv_kernels.cpu.linear.int8_rows import Int8Rows

    weight = torch.randint(-127, 128, (OUTPUTS, INPUTS), generator=torch.Generator().manual_seed(1))
    product = PackedInt8(weight.to(torch.int8), random(OUTPUTS).abs(), random(OUTPUTS, seed=2))
    kernels, x, norm = Int8Rows(), random(TOKENS, INPUTS, seed=3), random(INPUTS, seed=4)
    made = {
        "int8": kernels.quantize(x, product.row_width),
        "int8, normed": kernels.norm(x, norm, 1e-5, product.row_width),
        "int8, gated": kernels.gated(random(TOKENS, 2 * INPUTS, seed=5), product.row_width),
    }
    return {name: product.multiply(*one, torch.empty(TOKENS, OUTPUTS)) for name, one in made.items()}


def float_results() -> dict[str, torch.Tensor]:
    from radixkv_kernels.cpu.attention.kv_write import FloatWriter
    from radixkv_kernels.cpu.linear.float_product import PackedFloat, PackedGate
    from radixkv_kernels.cpu.linear.row_kernels import RowKernels

    found, x = {}, random(TOKENS, INPUTS, seed=3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight, out = random(OUTPUTS, INPUTS, seed=6).to(dtype), torch.empty(TOKENS, OUTPUTS)
        found[f"{dtype}"] = PackedFloat(weight).multiply(x, out)
        if dtype == torch.bfloat16:
            found["gate"] = PackedGate(weight, weight.flip(0)).multiply(x, torch.empty_like(out))
    kernels, turned = RowKernels(), random(TOKENS, HEADS * SIZE, seed=7)
    angles = random(TOKENS, SIZE, seed=8)
    kernels.rotate(turned, HEADS, angles.cos(), angles.sin())
    kv = PagedKV(KVSpec(1, 4, 16, HEADS, SIZE, torch.bfloat16, torch.device("cpu")))
    kv.clear(4)
    rows = random(TOKENS, HEADS, SIZE, seed=10)
    FloatWriter(kv).write(0, rows, rows, torch.arange(TOKENS), None)
    return {
        **found,
        "norm": kernels.rms_norm(x, random(INPUTS, seed=9), 1e-5),
        "rope": turned,
        "written": kv.key.float(),
    }


def main() -> None:
    compiled: list[Any] = []
    original: Any = compiling.cfunc

    def recording(*args: Any, **options: Any) -> Any:
        def compile_one(function: Any) -> Any:
            compiled.append(original(*args, **options)(function))
            return compiled[-1]

        return compile_one

    compiling.cfunc = recording
    results = int8_results() if sys.argv[2:] else {**int8_results(), **float_results()}
    code = "\n".join(one._library.get_asm_str() for one in compiled)
    torch.save({"results": results, "code": code}, sys.argv[1])


if __name__ == "__main__":
    main()
