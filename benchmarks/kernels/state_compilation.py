# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels of state layers ahead of time, at the sizes of published models.

`STATE_KERNELS` is what docs/lab/kernel_table.md lists and the tests hold to bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

from benchmarks.ahead_of_time import compile_kernel
from radixkv_kernels.triton.state import conv, heads, keep, scan

_TABLES = ("requests_ptr", "folds_ptr", "owners_ptr", "kept_ptr")


def _compile(
    function: Any, constants: dict[str, Any], target: str, dtype: str, inputs: set[str], warps: int
) -> Any:
    """Compile with float32 pointers but for `inputs`, which are of `dtype`."""
    names = [name for name in function.arg_names if name not in constants]
    types = {name: "*fp32" for name in names if name.endswith("_ptr")}
    types |= {name: "*i32" for name in _TABLES if name in names}
    types |= dict.fromkeys(inputs, f"*{dtype}")
    aligned = list(types)
    types |= {name: "fp32" if name == "scale" else "i32" for name in names if name not in types}
    aligned += [name for name in names if name.endswith("_stride") or name == "stride"]
    return compile_kernel(function, types, constants, aligned, target, warps, fp_fusion=False)


def compile_heads(kind: str, sizes: tuple[int, ...], target: str, dtype: str = "bf16") -> Any:
    """The compiled kernel of a state for each head; sizes as in `radixkv_kernels.states`."""
    constants = heads.head_sizes(kind, sizes)
    inputs = {"v_ptr"} if kind != "ssd" else {"q_ptr", "k_ptr", "v_ptr"}
    return _compile(heads.heads_kernel, constants, target, dtype, inputs, 1)


def compile_norm(groups: int, key: int, target: str, dtype: str = "bf16") -> Any:
    """The compiled kernel that norms queries and keys."""
    constants = {"G": groups, "K": key, "KP": triton.next_power_of_2(key)}
    return _compile(heads.norm_kernel, constants, target, dtype, {"q_ptr", "k_ptr"}, 1)


def compile_scan(channels: int, size: int, target: str, dtype: str = "bf16") -> Any:
    """The compiled kernel of selective scans."""
    constants = {"C": channels, "G": 1, "N": size, "NP": triton.next_power_of_2(size)}
    constants["BLOCK"] = scan.SCAN_BLOCK
    return _compile(scan.scan_kernel, constants, target, dtype, {"x_ptr", "b_ptr", "c_ptr"}, 1)


def compile_lru(channels: int, target: str) -> Any:
    """The compiled kernel of linear recurrent units."""
    return _compile(scan.lru_kernel, {"C": channels, "BLOCK": scan.LRU_BLOCK}, target, "fp32", set(), 1)


def compile_conv(channels: int, taps: int, target: str, dtype: str = "bf16") -> Any:
    """The compiled kernel of short convolutions."""
    constants = {"C": channels, "TAPS": taps, "BIAS": True, "SILU": True, "BLOCK": conv.BLOCK}
    return _compile(
        conv.conv_kernel, constants, target, dtype, {"x_ptr", "weight_ptr", "bias_ptr"}, conv.WARPS
    )


def compile_keep(widths: tuple[int, int, int], target: str) -> Any:
    """The compiled kernel that fills rings."""
    constants: dict[str, Any] = dict(zip("ABC", widths, strict=True))
    constants |= {f"SIZE_{part}": 64 * width for part, width in zip("ABC", widths, strict=True)}
    constants["BLOCK"] = keep.BLOCK
    return _compile(keep.keep_kernel, constants, target, "fp32", set(), keep.WARPS)


#: Name in the table -> compiles the kernel for a target.
STATE_KERNELS: dict[str, Callable[[str], Any]] = {
    "gated delta net 16:32 d128": lambda target: compile_heads("delta", (16, 32, 128, 128), target),
    "KDA 32 d128": lambda target: compile_heads("kda", (32, 128, 128), target),
    "Mamba2 8:128 d128 x 64": lambda target: compile_heads("ssd", (8, 128, 128, 64), target),
    "Mamba2 1:24 d256 x 64": lambda target: compile_heads("ssd", (1, 24, 256, 64), target),
    "lightning attention 64 d128": lambda target: compile_heads("ssd", (64, 64, 128, 128), target),
    "norm of queries and keys 16 d128": lambda target: compile_norm(16, 128, target),
    "Mamba 8192 channels x 16": lambda target: compile_scan(8192, 16, target),
    "RG-LRU 2560 channels": lambda target: compile_lru(2560, target),
    "convolution 8192 channels, 4 taps": lambda target: compile_conv(8192, 4, target),
    "keep 2048 and 32 numbers": lambda target: compile_keep((2048, 32, 0), target),
}
#: The default tests compile these, one of each kernel; the others are compiled by night.
BY_DAY = (
    "gated delta net 16:32 d128",
    "KDA 32 d128",
    "Mamba 8192 channels x 16",
    "convolution 8192 channels, 4 taps",
    "keep 2048 and 32 numbers",
)
