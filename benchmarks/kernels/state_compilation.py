# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels of state layers ahead of time, at the sizes of published models.

`STATE_KERNELS` is what docs/lab/kernel_table.md lists and the tests hold to bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.ahead_of_time import SHARED_PER_PROGRAM, compile_kernel
from radixkv_kernels.triton.state import channels, chunks, conv, heads, keep, ring, scan

_TABLES = (
    *("requests_ptr", "folds_ptr", "owners_ptr", "kept_ptr"),
    *("header_ptr", "chunks_ptr", "copies_ptr", "shorts_ptr", "saves_ptr"),
)


def _compile(
    function: Any, constants: dict[str, Any], target: str, dtype: str, inputs: set[str], warps: int
) -> Any:
    """Compile with float32 pointers but for `inputs`, which are of `dtype`."""
    names = [name for name in function.arg_names if name not in constants]
    types = {name: "*fp32" for name in names if name.endswith("_ptr")}
    types |= {name: "*i32" for name in _TABLES if name in names}
    types |= dict.fromkeys(inputs.intersection(names), f"*{dtype}")
    types |= {name: "*bf16" for name in ("w_ptr", "low_ptr") if name in names}
    aligned = list(types)
    types |= {name: "fp32" if name == "scale" else "i32" for name in names if name not in types}
    aligned += [name for name in names if name.endswith("_stride") or name == "stride"]
    return compile_kernel(function, types, constants, aligned, target, warps, fp_fusion=False)


def compile_chunks(part: str, kind: str, sizes: tuple[int, ...], target: str, dtype: str = "bf16") -> Any:
    """One of the compiled kernels of chunks, `gather`, `scores`, `local`, `state` or `output`; sizes as in
    `radixkv_kernels.states`."""
    of = heads.HeadSizes.of(kind, sizes)
    inputs = {"q_ptr", "k_ptr", "v_ptr", "keys_ptr"}
    if part == "gather":
        constants = of.constants("H", "K", "KR", "KP")
        return _compile(channels.gather_kernel, constants, target, dtype, inputs, 4)
    if part == "scores":
        constants = of.constants("H", "K", "KP")
        return _compile(channels.scores_kernel, constants, target, dtype, inputs, heads.SCORES_WARPS)
    if not of.delta:
        inputs.add("u_ptr")
    if part == "local":
        return _compile(chunks.local_kernel, of.local(), target, dtype, inputs, of.chunk_warps)
    device = int(target.removeprefix("sm_")), SHARED_PER_PROGRAM[target]
    if part == "state":
        constants = of.state(*device) | {"KEEP": True}
        return _compile(chunks.state_kernel, constants, target, dtype, inputs, heads.STATE_WARPS)
    return _compile(chunks.output_kernel, of.output(*device), target, dtype, inputs, of.chunk_warps)


def compile_ring(kind: str, sizes: tuple[int, ...], target: str, dtype: str = "bf16") -> Any:
    """The compiled kernel of decodes over a ring."""
    of = heads.HeadSizes.of(kind, sizes)
    return _compile(ring.ring_kernel, of.ring(), target, dtype, {"q_ptr", "k_ptr", "v_ptr"}, of.ring_warps)


def compile_scan(part: str, sizes: tuple[int, ...], target: str, dtype: str = "bf16") -> Any:
    """One of the compiled kernels `totals`, `states` and `rows` of scans, or of linear recurrent units."""
    constants = scan.scan_sizes(sizes)
    if part == "states":
        constants = {"SIZE": constants["C"] * constants["N"], "BLOCK": scan.STATE_BLOCK}
        return _compile(scan.states_kernel, constants, target, "fp32", set(), 1)
    kernel = scan.totals_kernel if part == "totals" else scan.rows_kernel
    inputs = set() if constants["LRU"] else {"x_ptr", "b_ptr", "c_ptr"}
    return _compile(kernel, constants, target, dtype, inputs, 1)


def compile_conv(channels: int, taps: int, target: str, dtype: str = "bf16") -> Any:
    """The compiled kernel of short convolutions."""
    constants: dict[str, Any] = {"C": channels, "TAPS": taps, "BIAS": True, "SILU": True, "BLOCK": conv.BLOCK}
    constants |= {"H": 1, "D": 1, "V": 1, "LOGITS": 0, "BOUNDED": False}
    return _compile(conv.conv_kernel, constants, target, dtype, _CONV_INPUTS, conv.WARPS)


#: What a product gave, or becomes a head's input.
_CONV_INPUTS = {"x_ptr", "weight_ptr", "bias_ptr", "logits_ptr", "betas_ptr", "written_ptr", "out_ptr"}


def compile_entry(kind: str, sizes: tuple[int, ...], target: str, dtype: str = "bf16") -> Any:
    """The compiled kernel of a layer's convolution (4 taps), decays and betas."""
    of = heads.HeadSizes.of(kind, sizes)
    values = of.heads * of.value
    constants: dict[str, Any] = {"C": 2 * of.groups * of.key + values, "TAPS": 4, "BIAS": kind == "ssd"}
    constants |= {"SILU": True, "BLOCK": conv.BLOCK, "H": of.heads, "V": values, "BOUNDED": False}
    constants |= {"D": of.heads * (of.key if of.channels else 1), "LOGITS": conv.LOGITS[kind]}
    return _compile(conv.conv_kernel, constants, target, dtype, _CONV_INPUTS, conv.WARPS)


def compile_leave(kind: str, sizes: tuple[int, ...], target: str, dtype: str = "bf16") -> Any:
    """The compiled kernel of a layer's norm, gate and rings; Mamba 2's norm is over all heads of a group."""
    of = heads.HeadSizes.of(kind, sizes)
    keys, values, is_mamba = of.groups * of.key, of.heads * of.value, kind == "ssd"
    rest = (0, 0) if is_mamba else (values, of.heads)
    widths = 2 * keys + values, keys, of.heads * (of.key if of.channels else 1), *rest
    width = values // of.groups if is_mamba else of.value
    constants = _widths(widths) | keep.norm_constants(width)
    constants |= {"N": values, "V": of.value, "WEIGHTS": values if is_mamba else width, "SKIP": is_mamba}
    constants |= {"SILU": kind != "kda", "GATE_FIRST": is_mamba, "WIDE": kind == "kda"}
    inputs = {"gate_ptr", "norm_ptr", "values_ptr", "out_ptr", "a_ptr", "b_ptr"}
    return _compile(keep.leave_kernel, constants, target, dtype, inputs, keep.norm_warps(width))


def compile_keep(widths: tuple[int, ...], target: str) -> Any:
    """The compiled kernel that fills rings."""
    return _compile(keep.keep_kernel, _widths(widths), target, "fp32", set(), keep.WARPS)


def _widths(widths: tuple[int, ...]) -> dict[str, Any]:
    constants: dict[str, Any] = dict(zip("ABCDE", widths, strict=True))
    constants |= {f"SIZE_{part}": 64 * width for part, width in zip("ABCDE", widths, strict=True)}
    return constants | {"BLOCK": keep.BLOCK}


def _parts(name: str, kind: str, sizes: tuple[int, ...]) -> dict[str, Callable[[str], Any]]:
    """The kernels of a layer with heads."""
    parts = ["gather", "scores"] if kind == "kda" else []
    found: dict[str, Callable[[str], Any]] = {
        f"{name}, {part}": functools.partial(compile_chunks, part, kind, sizes)
        for part in (*parts, "local", "state", "output")
    }
    found[f"{name}, decode"] = functools.partial(compile_ring, kind, sizes)
    found[f"{name}, convolution and gates"] = functools.partial(compile_entry, kind, sizes)
    found[f"{name}, norm and rings"] = functools.partial(compile_leave, kind, sizes)
    return found


#: Name in the table -> compiles the kernel for a target.
STATE_KERNELS: dict[str, Callable[[str], Any]] = {
    **_parts("gated delta net 16:32 d128", "delta", (16, 32, 128, 128)),
    **_parts("KDA 32 d128", "kda", (32, 128, 128)),
    **_parts("Mamba2 8:128 d128 x 64", "ssd", (8, 128, 128, 64)),
    **_parts("Mamba2 1:24 d256 x 64", "ssd", (1, 24, 256, 64)),
    **_parts("lightning attention 64 d128", "ssd", (64, 64, 128, 128)),
    **{
        f"{name}, {part}": functools.partial(compile_scan, part, sizes)
        for name, sizes in (("Mamba 8192 channels x 16", (8192, 1, 16)), ("RG-LRU 2560 channels", (2560,)))
        for part in ("totals", "states", "rows")
    },
    "convolution 8192 channels, 4 taps": lambda target: compile_conv(8192, 4, target),
    "keep 2048, 32, 4096 and 32 numbers": lambda target: compile_keep((2048, 32, 4096, 32, 0), target),
}
#: The default tests compile these, one of each kernel; the others are compiled by night.
BY_DAY = (
    "gated delta net 16:32 d128, state",
    "gated delta net 16:32 d128, decode",
    "gated delta net 16:32 d128, convolution and gates",
    "gated delta net 16:32 d128, norm and rings",
    "KDA 32 d128, scores",
    "Mamba 8192 channels x 16, rows",
    "convolution 8192 channels, 4 taps",
    "keep 2048, 32, 4096 and 32 numbers",
)
