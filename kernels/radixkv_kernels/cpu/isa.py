# SPDX-License-Identifier: Apache-2.0
"""Instruction set of compiled CPU kernels: the processor's own, or a smaller one by RADIXKV_CPU_ISA.

    avx2      vectors of 8 floats, 16-bit multiply-adds
    avx512    vectors of 16 floats, 16-bit multiply-adds
    vnni      8-bit dot products, with vectors of 16 where there is AVX-512, of 8 elsewhere

It is for tests, for measurements, and for processors that slow down when they use their widest vectors.
numba fixes its target when it is first used: set the variable before the process starts.
"""

from __future__ import annotations

import functools
import os
import platform
from typing import Any

import llvmlite.binding
import numba
from numba.core.registry import cpu_target

_settings: Any = numba.config

#: Names a level.
VARIABLE = "RADIXKV_CPU_ISA"
#: Levels, and the beginnings of the features that a level leaves out (LLVM's names).
_LEFT_OUT = {
    "avx2": ("avx512", "avx10", "evex512", "amx", "avxvnni", "avxifma", "avxneconvert"),
    "avx512": ("avx512vnni", "avx512bf16", "avx512fp16", "avx10", "amx", "avxvnni"),
    "vnni": (),
}


@functools.cache
def _processor() -> dict[str, bool]:
    """The processor's features, or the value of NUMBA_CPU_FEATURES if set."""
    named = _settings.CPU_FEATURES
    if named is None:
        return dict(llvmlite.binding.get_host_cpu_features())
    return {one[1:]: one.startswith("+") for one in map(str.strip, named.split(",")) if one}


@functools.cache
def levels() -> tuple[str, ...]:
    """The levels that this processor has, from the narrowest; empty where it has no AVX2 (on ARM, say)."""
    has = {name for name, present in _processor().items() if present}
    found = []
    if {"avx2", "fma"} <= has:
        found.append("avx2")
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= has:
            found.append("avx512")
        if "avxvnni" in has or ("avx512" in found and "avx512vnni" in has):
            found.append("vnni")
    return tuple(found)


@functools.cache
def level() -> str | None:
    """The level that kernels are compiled for; None: the processor has none of them.

    Raises:
        ValueError: RADIXKV_CPU_ISA names a level that does not exist, or that this processor lacks.
    """
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if asked in ("", "auto"):
        return levels()[-1] if levels() else None
    if asked not in levels():
        known = "is not a level" if asked not in _LEFT_OUT else "is more than this processor has"
        usable = ", ".join(levels()) or "none"
        raise ValueError(f"{VARIABLE}={asked} {known}: give auto or one of those that it has ({usable})")
    return asked


@functools.cache
def features() -> frozenset[str]:
    """Set numba's target, by LLVM's name; called before anything of ours is compiled.

    Raises:
        ValueError: see `level`; or numba has been used before in this process, with other features.
    """
    own, left_out = _processor(), _LEFT_OUT.get(level() or "", ())
    allowed = {name for name, present in own.items() if present and not name.startswith(left_out)}
    if left_out and allowed != {name for name, present in own.items() if present}:
        flags = (("+" if name in allowed else "-") + name for name in own)
        _settings.CPU_FEATURES = ",".join(flags)
    _, _, fixed = cpu_target.target_context.codegen().magic_tuple()
    if any(one[1:].startswith(left_out) for one in fixed.split(",") if one.startswith("+")):
        raise ValueError(
            f"{VARIABLE}={level()} comes too late: numba has been used before in this process, with all of "
            "the processor's instructions. Set it before the process starts."
        )
    return frozenset(allowed)


def widens_float16() -> bool:
    """Return True if one instruction converts a vector between float16 and float32."""
    return platform.machine() in ("aarch64", "arm64") or "f16c" in features()
