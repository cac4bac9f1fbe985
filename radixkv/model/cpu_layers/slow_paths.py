# SPDX-License-Identifier: Apache-2.0
"""Warnings about paths slower than float32 on this processor, given when a server starts."""

from __future__ import annotations

import torch
from torch import nn

from radixkv_kernels.registry import numba_available

_NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def slower_than_float32(model: nn.Module, quantization: str | None) -> str | None:
    """A sentence on products that are left to torch, for which it has no fast way here; None: there are none.

    Args:
        model: after its layers have been replaced.
        quantization: the requested quantization: None or `int8`.
    """
    from radixkv.model.cpu_layers.rewrite import has_int8_products, mostly_linear

    if quantization == "int8" and not has_int8_products():
        return (
            "--quantization int8 will be slower than float32: its products are left to torch, since "
            f"{_missing('neither VNNI nor AVX2')}. Leave the option out for speed"
        )
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    left = next((each for each in weights if each.device.type == "cpu" and each.dtype in _NARROW), None)
    if left is None or torch_is_fast(left.dtype):
        return None
    name = str(left.dtype).removeprefix("torch.")
    reason = _missing("no AVX2") if mostly_linear(model) else "the weights of its experts are fused"
    return (
        f"--dtype {name} will be slower than float32, several times on prompts: its products are left to "
        f"torch, since {reason}, and this processor does not compute in {name}. Use --dtype float32 if "
        "memory allows"
    )


def torch_is_fast(dtype: torch.dtype) -> bool:
    """Return True if torch's library has products of this dtype for this processor."""
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{_NARROW[dtype]}_supported", None)
    return supported is not None and bool(supported())


def _missing(instructions: str) -> str:
    if not numba_available():
        return "numba can't be used (the extra `cpu` installs it)"
    return f"this processor has {instructions}"
