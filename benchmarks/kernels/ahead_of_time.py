# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels ahead of time for a GPU that is not there, and read what the compiler made of
them.

`compile_attention` compiles one configuration of the shipped tile table for one target; `inspect_kernel`
reads registers, spills, shared memory and matrix instructions from the result. `CONFIGURATIONS` is what
docs/lab/kernel_table.md lists and the tests hold to bounds. Works with triton 3.6 to 3.9, with no GPU and no
CUDA toolkit: the assembler and disassembler are those in triton's wheel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv_kernels import Pairs
from radixkv_kernels.kv_cache import KVSpec
from radixkv_kernels.triton.copy import copy_kernel
from radixkv_kernels.triton.experts import (
    TILE_ROWS,
    Gate,
    combine_kernel,
    experts_kernel,
    list_pairs_kernel,
)
from radixkv_kernels.triton.fp8_rows import round_rows_kernel, rounding_block, rounding_warps
from radixkv_kernels.triton.gated import ACTIVATIONS, gated_kernel
from radixkv_kernels.triton.head_shape import head_constants, heads_per_program, widest
from radixkv_kernels.triton.latent_write import QUERY_HEADS as LATENT_QUERY_HEADS
from radixkv_kernels.triton.latent_write import latent_write_kernel
from radixkv_kernels.triton.low_rank import (
    low_rank_add_kernel,
    low_rank_constants,
    low_rank_inner_kernel,
)
from radixkv_kernels.triton.merge import merge_constants, merge_kernel
from radixkv_kernels.triton.residual_norm import residual_norm_kernel, warps_for
from radixkv_kernels.triton.rotate_write import QUERY_HEADS, rotate_write_kernel, rotation_warps
from radixkv_kernels.triton.router import (
    Routing,
    choose_constants,
    choose_kernel,
    product_tile,
    router_product_kernel,
)
from radixkv_kernels.triton.sample import WARPS, sample_kernel, sampling_constants
from radixkv_kernels.triton.stored_product import stored_product_kernel
from radixkv_kernels.triton.tiled_weight import E2M1, TABLE, TiledWeight
from radixkv_kernels.triton.tiles import (
    CDNA,
    MIN_SEGMENT,
    SEGMENT,
    Tile,
    choose_tile,
    has_latent_tiles,
    launch_tile,
)
from radixkv_kernels.triton.unified_attention import attention_kernel
from radixkv_kernels.triton.write import write_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: Those whose kernels may begin before the ones that they depend on end.
_EARLY = ("sm_90",)
#: Those of the table of attention.
TABLE_TARGETS = ("sm_80", "sm_90", "gfx942")
#: Shared memory of one multiprocessor and the most one program may take, in bytes.
SHARED_PER_SM = {
    "sm_80": 164 << 10,
    "sm_86": 100 << 10,
    "sm_89": 100 << 10,
    "sm_90": 228 << 10,
    "gfx942": 64 << 10,
}
SHARED_PER_PROGRAM = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "gfx942": 64 << 10,
}
_REGISTERS_PER_SM = 65536
_THREADS_PER_SM = {"sm_80": 2048, "sm_86": 1536, "sm_89": 1536, "sm_90": 2048}

#: Numbers by which queries grow, see `QueryGrowth`.
_GROWTH = ("growth_scale", "growth_length", "growth_first")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Configuration:
    """One specialisation of the attention kernel, as `TritonBackend` would launch it."""

    name: str
    heads: tuple[int, int]
    head_size: int
    kind: str
    dtype: str = "bf16"
    kv_dtype: str | None = None
    block_size: int = 16
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    ahead: bool = False
    deterministic: bool = False
    value_size: int = 0
    value_in_key: bool = False

    @property
    def spec(self) -> KVSpec:
        """Of one layer, one block."""
        quantization = None if self.kv_dtype is None else "int8"  # any: the kernel's constants are the same
        sizes: dict[str, Any] = {"value_size": self.value_size, "value_in_key": self.value_in_key}
        cpu = torch.device("cpu")
        return KVSpec(1, 1, 16, self.heads[1], self.head_size, torch.bfloat16, cpu, quantization, **sizes)

    def has_latent_tiles(self, target: str) -> bool:
        """Whether a target has tiles of latents for it."""
        capability = _capability(target)
        return has_latent_tiles(self.spec, _BYTES[self.dtype], capability, by_segment=self.deterministic)

    def heads_per_program(self, target: str) -> int:
        """Query heads of a program."""
        group = self.heads[0] // self.heads[1]
        return heads_per_program(widest(self.spec), group, latents=self.has_latent_tiles(target))

    def tiles(self, target: str) -> tuple[Tile, Tile]:
        """The tile that work is cut for, and the one the kernel runs with, on a target."""
        capability, element = _capability(target), _BYTES[self.dtype]
        group, size = self.heads_per_program(target), widest(self.spec)
        latents = self.has_latent_tiles(target)
        planned = choose_tile(size, group, self.kind, element, capability, latents=latents)
        launched = launch_tile(
            *(planned, size, element, capability),
            group_size=group,
            block_size=self.block_size,
            featured=self.window or self.softcap,
            quantized=self.kv_dtype is not None,
            by_segment=self.deterministic,
        )
        return planned, launched


def _capability(target: str) -> int:
    return int(target.removeprefix("sm_")) if target.startswith("sm_") else CDNA


def supported(c: Configuration, target: str) -> bool:
    """Whether the target has the configuration's types."""
    return c.kv_dtype != "fp8e4nv" or target == "sm_90"


def _both(name: str, heads: tuple[int, int], head_size: int, **features: Any) -> list[Configuration]:
    return [
        Configuration(f"{name}, {kind}", heads, head_size, kind, **features) for kind in ("short", "long")
    ]


#: What the documentation's table lists. The default tests compile those of `TESTED`.
CONFIGURATIONS = [
    *_both("32:8 d128", (32, 8), 128),
    *_both("9:3 d64", (9, 3), 64),
    *_both("16:8 d256", (16, 8), 256),
    *_both("32:32 d80", (32, 32), 80),
    *_both("32:32 d96", (32, 32), 96),
    *_both("16:2 d192", (16, 2), 192),
    *_both("32:8 d128 fp16", (32, 8), 128, dtype="fp16"),
    *_both("32:8 d128 fp32", (32, 8), 128, dtype="fp32"),
    *_both("32:8 d128 fp8 e4m3 KV", (32, 8), 128, kv_dtype="fp8e4nv"),
    *_both("32:8 d128 fp8 e5m2 KV", (32, 8), 128, kv_dtype="fp8e5"),
    *_both("32:8 d128 int8 KV", (32, 8), 128, kv_dtype="i8"),
    Configuration(
        "32:8 d128 fp8 e4m3 KV window, softcap, sinks, short",
        *((32, 8), 128, "short"),
        kv_dtype="fp8e4nv",
        window=True,
        softcap=True,
        sinks=True,
    ),
    *_both("32:8 d128 window", (32, 8), 128, window=True),
    *_both("64:8 d64 window, sinks", (64, 8), 64, window=True, sinks=True),
    *_both("16:8 d256 window, softcap", (16, 8), 256, window=True, softcap=True),
    # Images whose tokens see each other: Gemma 3.
    *_both("16:8 d256 window, ahead", (16, 8), 256, window=True, ahead=True),
    *_both("16:8 d256 ahead", (16, 8), 256, ahead=True),
    *_both("32:8 d128 block 256", (32, 8), 128, block_size=256),
    # Deterministic mode has long tiles alone.
    Configuration("32:8 d128 deterministic, long", (32, 8), 128, "long", deterministic=True),
    Configuration("9:3 d64 deterministic, long", (9, 3), 64, "long", deterministic=True),
    Configuration("16:8 d256 deterministic, long", (16, 8), 256, "long", deterministic=True),
    Configuration(
        "32:8 d128 fp8 deterministic, long", (32, 8), 128, "long", kv_dtype="fp8e4nv", deterministic=True
    ),
    # Latents: DeepSeek V3, GLM-4.7-Flash, MiniCPM3. Keys and values of two sizes: MiMo-V2-Flash. Gemma 4.
    *_both("128:1 d576 latents", (128, 1), 576, value_size=512, value_in_key=True),
    *_both("20:1 d576 latents", (20, 1), 576, value_size=512, value_in_key=True),
    *_both("20:1 d576 fp8 e4m3 latents", (20, 1), 576, kv_dtype="fp8e4nv", value_size=512, value_in_key=True),
    *_both("40:1 d288 latents", (40, 1), 288, value_size=256, value_in_key=True),
    *_both("64:4 d192/128", (64, 4), 192, value_size=128),
    *_both("64:8 d192/128 window, sinks", (64, 8), 192, value_size=128, window=True, sinks=True),
    *_both("32:4 d512", (32, 4), 512),
    *_both("32:4 d512 fp8 e4m3 KV", (32, 4), 512, kv_dtype="fp8e4nv"),
    *_both("32:4 d512 fp32", (32, 4), 512, dtype="fp32"),
    Configuration(
        "128:1 d576 latents deterministic, long",
        *((128, 1), 576, "long"),
        value_size=512,
        value_in_key=True,
        deterministic=True,
    ),
]
TESTED = (
    "32:8 d128",
    "9:3 d64",
    "16:8 d256 window, softcap",
    "16:8 d256 window, ahead",
    "64:8 d64 window, sinks",
    "32:8 d128 fp8 e4m3 KV",
    "32:8 d128 deterministic",
    "128:1 d576 latents deterministic",
)


@dataclass(frozen=True)
class Report:
    """Compiler's result for a kernel.

    Attributes:
        registers: per thread. spill_bytes: stored to local memory, per thread. shared_bytes: per program.
        matrix_instruction: `HGMMA`, `HMMA`, `MFMA` or empty.
        programs_per_sm: that fit at once, by registers, shared memory and threads (NVIDIA only).
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix_instruction: str
    programs_per_sm: int


def attention_arguments(c: Configuration, target: str) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Signature, constants and 16-aligned arguments of the attention kernel for a configuration."""
    stored = c.kv_dtype or c.dtype
    planned, tile = c.tiles(target)
    group = c.heads_per_program(target)
    types = dict.fromkeys(
        (
            "key_scale_ptr",
            "value_scale_ptr",
            "partial_out_ptr",
            "partial_stat_ptr",
            "sinks_ptr",
        ),
        "*fp32",
    )
    types |= {"query_ptr": f"*{c.dtype}", "out_ptr": f"*{c.dtype}", "blob_ptr": "*i32"}
    pairs = "i16" if c.kv_dtype else stored
    types |= {"key_ptr": f"*{stored}", "value_ptr": f"*{pairs}", "scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("window", "query_token_stride", "query_head_stride", "num_slots"), "i32")
    constants = {
        "HQ": c.heads[0],
        "HKV": c.heads[1],
        "PARTS": c.heads[0] // c.heads[1] // group,
        **head_constants(c.spec),
        "BM": tile.rows,
        "SPLIT": -(-(planned.rows // group) // (tile.rows // group)),
        "BN": tile.keys,
        "BLOCK": c.block_size,
        "SEGMENT": SEGMENT if c.deterministic else MIN_SEGMENT,
        "LONG": c.kind == "long",
        "WINDOW": c.window,
        "SOFTCAP": c.softcap,
        "SINKS": c.sinks,
        "QUANTIZED": c.kv_dtype is not None,
        "BY_SEGMENT": c.deterministic,
        "AHEAD": c.ahead,
        "EARLY": target in _EARLY,
    }
    aligned = [name for name, kind in types.items() if kind[0] == "*"]
    aligned += ["query_token_stride", "query_head_stride", "num_slots"]
    return types, constants, aligned


def compile_kernel(
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: list[str],
    target: str,
    num_warps: int = 4,
    num_stages: int = 2,
    *,
    fp_fusion: bool = True,
) -> Any:
    """Compile a jit function for a target, specialised as the launcher would specialise it.

    Args:
        fp_fusion: whether products and sums may be contracted. The default differs between versions.
    """
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={n: "constexpr" if n in constants else types[n] for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    options["enable_fp_fusion"] = fp_fusion
    return triton.compile(source, target=TARGETS[target], options=options)


def compile_attention(c: Configuration, target: str) -> Any:
    """The compiled attention kernel of one configuration."""
    types, constants, aligned = attention_arguments(c, target)
    tile = c.tiles(target)[1]
    return compile_kernel(attention_kernel, types, constants, aligned, target, tile.warps, tile.stages)


def compile_merge(heads: int, head_size: int, target: str) -> Any:
    """The compiled merge kernel, bf16."""
    pointers = {"out_ptr": "*bf16", "blob_ptr": "*i32"}
    pointers |= dict.fromkeys(("partial_out_ptr", "partial_stat_ptr", "sinks_ptr"), "*fp32")
    constants = merge_constants(heads, triton.next_power_of_2(head_size))
    warps = constants.pop("num_warps")
    constants |= {"V": head_size, "SINKS": True, "EARLY": target in _EARLY}
    return compile_kernel(merge_kernel, pointers, constants, list(pointers), target, warps)


def compile_write(kv_heads: int, head_size: int, stored: str, target: str) -> Any:
    """The compiled write kernel for bf16 rows into a cache of `stored` elements."""
    names = write_kernel.arg_names
    types = {n: "*fp32" if "scale" in n else "*bf16" for n in names if n.endswith("_ptr")}
    types |= {
        "key_data_ptr": f"*{stored}",
        "value_data_ptr": f"*{stored}",
        "slots_ptr": "*i64",
        "rows_ptr": "*i64",
    }
    pointers = list(types)
    types |= {n: "i32" for n in names if n.endswith("_stride") or n == "num_slots"} | {"limit": "fp32"}
    constants = {
        "HKV": kv_heads,
        "HP": triton.next_power_of_2(kv_heads),
        "D": head_size,
        "DP": triton.next_power_of_2(head_size),
        "V": head_size,
        "VP": triton.next_power_of_2(head_size),
        "KIND": {"bf16": 0, "i8": 1}.get(stored, 2),
        "HAS_ROWS": True,
    }
    return compile_kernel(write_kernel, types, constants, pointers, target)


def compile_copy(target: str) -> Any:
    """The compiled block copy kernel, bf16."""
    types = {"data_ptr": "*bf16", "copies_ptr": "*i32", "plane_size": "i32"}
    constants = {"SLOT": 128, "BLOCK": 16, "CHUNK": 1024}
    return compile_kernel(copy_kernel, types, constants, ["data_ptr", "copies_ptr"], target)


#: Kinds of norms, see `norm_kind`: Llama's, Gemma's, Cohere's.
PLAIN_NORM, GEMMA_NORM, COHERE_NORM = 1 | 16, 1 | 2 | 4 | 16, 1 | 4 | 8 | 16


def compile_residual_norm(
    width: int, target: str, dtype: str = "bf16", *, group: int = 0, **flags: int
) -> Any:
    """The compiled kernel that adds to the residual and norms.

    Args:
        group: numbers that share a scale in results of 8 bits; 0: they have `dtype`.
        flags: override those of a Llama layer.
    """
    names = residual_norm_kernel.arg_names
    pointers = {name: f"*{dtype}" for name in names if name.endswith("_ptr")}
    pointers |= rounded_types(group, dtype)
    types = pointers | dict.fromkeys(("states_stride", "added_stride", "other_stride", "scale_stride"), "i32")
    types |= dict.fromkeys(("multiplier", "other_multiplier", "after_eps", "next_eps"), "fp32")
    block = triton.next_power_of_2(width)
    constants: dict[str, Any] = {"N": width, "BLOCK": block, "ADD": True, "OTHER": False, "GROUP": group}
    constants |= {"SCALED": False, "FACTOR": False, "AFTER": 0, "NEXT": PLAIN_NORM} | flags
    aligned = [*pointers, "states_stride", "added_stride"]
    warps = warps_for(block)
    return compile_kernel(residual_norm_kernel, types, constants, aligned, target, warps, fp_fusion=False)


def compile_gated(width: int, activation: str, target: str, dtype: str = "bf16", *, group: int = 0) -> Any:
    """The compiled kernel of a gated MLP; `group`: see `compile_residual_norm`."""
    types = {"gate_up_ptr": f"*{dtype}", "stride": "i32", "scale_stride": "i32", "factor": "fp32"}
    types |= rounded_types(group, dtype)
    block = rounding_block(width, group) if group else min(1024, triton.next_power_of_2(width))
    constants = {"N": width, "BLOCK": block, "KIND": ACTIVATIONS[activation], "GROUP": group}
    constants["SCALED"] = False
    aligned = [each for each in types if each not in ("scale_stride", "factor")]
    warps = rounding_warps(block)
    return compile_kernel(gated_kernel, types, constants, aligned, target, warps, fp_fusion=False)


def compile_round_rows(width: int, group: int, target: str, dtype: str = "bf16") -> Any:
    """The compiled kernel that rounds rows to 8 bits."""
    types = {"x_ptr": f"*{dtype}", "codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "stride": "i32"}
    block = rounding_block(width, group)
    constants = {"N": width, "BLOCK": block, "GROUP": group}
    return compile_kernel(
        round_rows_kernel,
        types | {"scale_stride": "i32"},
        constants,
        list(types),
        target,
        rounding_warps(block),
        fp_fusion=False,
    )


def rounded_types(group: int, dtype: str) -> dict[str, str]:
    """Signature of a result, rounded to 8 bits or not."""
    out, scales = ("fp8e4nv", "fp32") if group else (dtype, dtype)
    return {"out_ptr": f"*{out}", "scales_ptr": f"*{scales}"}


def compile_rotate_write(
    heads: tuple[int, int],
    head_size: int,
    turned: int,
    stored: str,
    target: str,
    dtype: str = "bf16",
    *,
    norms: bool = False,
    **flags: int,
) -> Any:
    """The compiled kernel that norms and rotates heads and writes to a cache of `stored` elements."""
    names = rotate_write_kernel.arg_names
    types = {n: "*fp32" if "scale" in n else f"*{dtype}" for n in names if n.endswith("_ptr")}
    types |= {"key_data_ptr": f"*{stored}", "value_data_ptr": f"*{stored}"}
    types |= {"slots_ptr": "*i64", "rows_ptr": "*i64", "positions_ptr": "*i64"}
    aligned = [*types, "merged_stride", "rotation_stride", "num_slots"]
    types |= dict.fromkeys(
        ("num_tokens", "num_entries", "merged_stride", "rotation_stride", "num_slots"), "i32"
    )
    types |= dict.fromkeys(("query_weight_stride", "key_weight_stride"), "i32")
    types |= dict.fromkeys(("query_eps", "key_eps", "value_eps", "limit", *_GROWTH, "key_multiplier"), "fp32")
    constants = {
        "HQ": heads[0],
        "QD": head_size,
        "STEP": 1,
        "PAIRS": 0,
        "ROUNDED": True,
        "VALUE_NORM": 0,
        "WHOLE": False,
        "SHARED": False,
        "BQ": min(QUERY_HEADS, triton.next_power_of_2(heads[0])),
        "HKV": heads[1],
        "HP": triton.next_power_of_2(heads[1]),
        "D": head_size,
        "DP": triton.next_power_of_2(head_size),
        "R": turned,
        "RP": triton.next_power_of_2(turned // 2),
        "SP": triton.next_power_of_2(max(1, head_size - turned)),
        "QUERY_NORM": PLAIN_NORM if norms else 0,
        "KEY_NORM": PLAIN_NORM if norms else 0,
        "KIND": {dtype: 0, "i8": 1}.get(stored, 2),
        "HAS_ROWS": False,
        "TURNS_FIRST": False,
        "KEY_SCALED": False,
        "GROWTH": 0,
    } | flags
    warps = rotation_warps(heads[1], max(turned, head_size - turned))
    return compile_kernel(rotate_write_kernel, types, constants, aligned, target, warps, fp_fusion=False)


def compile_latent_write(
    heads: int, sizes: tuple[int, int, int], stored: str, target: str, dtype: str = "bf16", **flags: int
) -> Any:
    """The compiled kernel that turns queries of latents and writes these to a cache of `stored` elements.

    Args:
        sizes: elements of a query that do not turn, of the others, and of a latent.
    """
    plain, rest, latent = sizes
    names = latent_write_kernel.arg_names
    types = {n: "*fp32" if "scale" in n else f"*{dtype}" for n in names if n.endswith("_ptr")}
    types |= {"key_data_ptr": f"*{stored}", "slots_ptr": "*i64", "rows_ptr": "*i64", "positions_ptr": "*i64"}
    aligned = [*types, "query_stride", "latents_stride", "rotation_stride"]
    strides = ("query_stride", "latents_stride", "rotation_stride")
    types |= dict.fromkeys(("num_tokens", "num_entries", *strides), "i32")
    types |= dict.fromkeys(("eps", "limit", *_GROWTH), "fp32")
    constants = {
        "H": heads,
        "BQ": min(LATENT_QUERY_HEADS, triton.next_power_of_2(heads)),
        "QD": plain + rest,
        "L": latent,
        "LP": triton.next_power_of_2(latent),
        "R": rest,
        "RP": triton.next_power_of_2(rest // 2),
        "D": latent + rest,
        "TURNS": True,
        "STEP": 1,
        "PAIRS": Pairs.GATHERED.value,
        "ROUNDED": True,
        "NORM": PLAIN_NORM,
        "KIND": {dtype: 0, "i8": 1}.get(stored, 2),
        "HAS_ROWS": False,
        "GROWTH": 0,
    } | flags
    return compile_kernel(latent_write_kernel, types, constants, aligned, target, 4, fp_fusion=False)


def compile_sample(vocabulary: int, target: str, dtype: str = "bf16") -> Any:
    """The compiled kernel that chooses tokens."""
    types = dict.fromkeys(("words_ptr", "list_ptr", "status_ptr"), "*i32")
    types |= {"x_ptr": f"*{dtype}", "y_ptr": "*fp32", "settings_ptr": "*fp64", "token_ptr": "*i64"}
    types |= dict.fromkeys(("x_stride", "y_stride", "words_stride", "V"), "i32")
    constants = sampling_constants(vocabulary)
    aligned = [name for name in types if name not in ("words_stride", "V")]
    return compile_kernel(sample_kernel, types, constants, aligned, target, WARPS)


def compile_low_rank(
    inputs: int, widths: Sequence[int], max_rank: int, target: str, dtype: str = "bf16"
) -> list[Any]:
    """The two compiled kernels of adapters, for a product of linear layers of these widths."""
    inner, add = low_rank_constants(inputs, widths, max_rank, is_wide=dtype == "fp32")
    types = {"rows_ptr": f"*{dtype}", "inner_ptr": "*fp32", "out_ptr": f"*{dtype}", "tiles_ptr": "*i32"}
    types |= {"places_ptr": "*i64", "columns_ptr": "*i32"}
    aligned = [*types, "rows_stride", "out_stride"]
    types |= dict.fromkeys(("rows_stride", "out_stride", "slot_stride", "first_part"), "i32")
    kernels = []
    for function, constants in ((low_rank_inner_kernel, inner), (low_rank_add_kernel, add)):
        own = [name for name in aligned if name in function.arg_names]
        kernels.append(compile_kernel(function, types, constants, own, target))
    return kernels


#: Names of dtypes in signatures.
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
}


def meta_weight(form: str, outputs: int, inputs: int, bias: bool = False) -> TiledWeight:
    """Weights of two experts without memory.

    Args:
        form: bf16, fp32, fp8, int8, int4 (groups of 128, zeros), int4-order (and an order of inputs), int4-32
            (groups of 32), nf4, mxfp4, nvfp4, q4_k or q6_k.
    """

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(2, *shape, dtype=dtype, device="meta")

    added = empty(outputs, dtype=torch.bfloat16) if bias else None
    if form in ("bf16", "fp32"):
        dtype = torch.bfloat16 if form == "bf16" else torch.float32
        return TiledWeight.plain(empty(outputs, inputs, dtype=dtype), added)
    if form == "fp8":
        codes = empty(outputs, inputs, dtype=torch.float8_e4m3fn)
        return TiledWeight.scaled(
            codes, empty(-(-outputs // 128), -(-inputs // 128)), (128, 128), None, added
        )
    if form == "int8":
        codes = empty(outputs, inputs, dtype=torch.int8)
        return TiledWeight.scaled(codes, empty(outputs, 1), (1, inputs), None, added)
    codes, half, byte = empty(outputs, inputs // 2, dtype=torch.uint8), torch.float16, torch.uint8
    if form == "mxfp4":
        return TiledWeight.mxfp4(codes, empty(outputs, inputs // 32, dtype=byte), added)
    if form == "nvfp4":
        scales = empty(outputs, inputs // 16, dtype=torch.float8_e4m3fn)
        return TiledWeight.of_pairs(E2M1, codes, scales, 16, bias=added, supers=empty(outputs, 1))
    if form == "nf4":
        table = tuple(each / 8 - 1 for each in range(16))
        return TiledWeight.of_pairs(TABLE, codes, empty(outputs, inputs // 64), 64, table, added)
    more: dict[str, Any] = {"packed": True}
    group = {"int4-32": 32, "q4_k": 32, "q6_k": 16}.get(form, 128)
    zeros: torch.Tensor | None = empty(outputs, inputs // group, dtype=byte)
    scales = empty(outputs, inputs // group, dtype=half)
    if form == "int4-32":
        zeros, more["zero"] = None, 8
    elif form == "int4-order":
        more["order"] = empty(inputs, dtype=torch.int32)
    elif form == "q4_k":
        more |= {"has_leasts": True, "super_width": 256}
        more["supers"], scales = empty(outputs, inputs // 256, 2, dtype=half), scales.to(byte)
    elif form == "q6_k":
        more |= {"zero": 32, "super_width": 256, "plane_bits": 2}
        more["plane"] = empty(outputs, inputs // 4, dtype=byte)
        more["supers"] = empty(outputs, inputs // 256, 1, dtype=half)
        zeros, scales = None, scales.to(torch.int8)
    return TiledWeight.scaled(codes, scales, (1, group), zeros, added, **more)


def weight_types(weight: TiledWeight) -> dict[str, str]:
    """Signature of the arguments that `TiledWeight.arguments` gives."""
    names = ("w_ptr", "plane_ptr", "s_ptr", "z_ptr", "super_ptr", "order_ptr", "bias_ptr")
    return {n: f"*{_TYPES[t.dtype]}" for n, t in zip(names, weight.arguments(), strict=True)}


def compile_experts(
    form: str,
    hidden: int,
    inner: int,
    choices: int,
    gate: Gate,
    target: str,
    *,
    down: bool,
    bias: bool = False,
) -> Any:
    """The compiled kernel of experts' first product and gate, or of their last product."""
    weight = meta_weight(form, hidden if down else 2 * inner, inner if down else hidden, bias)
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    types = {"x_ptr": f"*{_TYPES[dtype]}", "lists_ptr": "*i32", "counts_ptr": "*i32"} | weight_types(weight)
    types |= {"route_ptr": "*fp32", "out_ptr": "*fp32" if down else f"*{_TYPES[dtype]}"}
    aligned = list(types)
    types |= {"capacity": "i32", "limit": "fp32", "alpha": "fp32"}
    tile: dict[str, Any] = weight.tile(dtype, TILE_ROWS, two=not down)
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    constants = {"CHOICES": choices, "N": hidden if down else inner, "FORM": weight.form}
    constants |= {"KIND": -1 if down else gate.kind, "ALTERNATE": gate.alternate} | tile
    constants["ROUTED"] = gate.scales_inputs != down
    return compile_kernel(experts_kernel, types, constants, aligned, target, warps, stages)


def compile_stored_product(form: str, inputs: int, outputs: int, rows: int, target: str) -> Any:
    """The compiled kernel of a linear layer's stored weight, for a number of rows."""
    weight = meta_weight(form, outputs, inputs, bias=True)
    types = {"x_ptr": "*bf16"} | weight_types(weight) | {"out_ptr": "*bf16"}
    tile: dict[str, Any] = weight.tile(torch.bfloat16, rows)
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    constants = {"N": outputs, "FORM": weight.form} | tile
    aligned = [*types, "out_stride"]
    counts = {"rows": "i32", "out_stride": "i32"}
    return compile_kernel(stored_product_kernel, types | counts, constants, aligned, target, warps, stages)


def compile_router(
    hidden: int,
    experts: int,
    routing: Routing,
    target: str,
    *,
    choice_bias: bool = False,
    expert_factor: bool = False,
    identities: int = 0,
) -> list[Any]:
    """The compiled kernels around experts: router's product, choice, lists of pairs, sum of choices."""
    tile: dict[str, Any] = dict(product_tile(torch.bfloat16))
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    types = {"x_ptr": "*bf16", "w_ptr": "*bf16", "bias_ptr": "*bf16", "out_ptr": "*fp32"}
    counts = {"rows": "i32", "experts": "i32"}
    constants = {"K": hidden, **tile, "BIAS": False, "ROUNDS": routing.rounds_logits}
    product = compile_kernel(
        router_product_kernel, types | counts, constants, list(types), target, warps, stages
    )
    types = {"logits_ptr": "*fp32", "choice_bias_ptr": "*fp32", "is_row_ptr": "*i64", "ids_ptr": "*i32"}
    types |= {"weights_ptr": "*bf16" if routing.rounds_weights else "*fp32"}
    types["expert_factor_ptr"] = "*bf16"
    numbers = dict.fromkeys(("epsilon", "factor", "least", "margin", "softcap"), "fp32")
    constants = choose_constants(routing, experts)
    constants |= {"CHOICE_BIAS": choice_bias, "HAS_ROWS": True, "EXPERT_FACTOR": expert_factor}
    choice = compile_kernel(
        choose_kernel, types | numbers, constants, list(types), target, num_warps=1, fp_fusion=False
    )
    types = {"ids_ptr": "*i32", "lists_ptr": "*i32", "counts_ptr": "*i32"}
    numbers = {"pairs": "i32", "capacity": "i32"}
    lists = compile_kernel(list_pairs_kernel, types | numbers, {"BLOCK": 1024}, list(types), target)
    types = {
        "y_ptr": "*fp32",
        "ids_ptr": "*i32",
        "shared_ptr": "*bf16",
        "gate_ptr": "*bf16",
        "x_ptr": "*bf16",
        "route_ptr": "*fp32",
        "out_ptr": "*bf16",
    }
    constants = {"CHOICES": routing.choices, "N": hidden, "BN": 1024, "SHARED": True, "GATED": True}
    constants["IDENTITIES"] = identities
    numbers = {"experts": "i32", "x_stride": "i32", "multiplier": "fp32"}
    total = compile_kernel(combine_kernel, types | numbers, constants, list(types), target, fp_fusion=False)
    return [product, choice, lists, total]


def _tool(name: str) -> str | None:
    """A binary in triton's wheel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(path) if path.exists() else None


def assembly(kernel: Any) -> str:
    """The machine's instructions of a compiled NVIDIA kernel; empty where triton brings no disassembler."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        return _run([_tool("cuobjdump"), "-sass", f.name]) or _run([_tool("nvdisasm"), f.name])


def inspect_kernel(kernel: Any, target: str) -> Report:
    """Read a compiled kernel's resources. Raises RuntimeError if the tools' output is not understood."""
    shared, warps = int(kernel.metadata.shared), int(kernel.metadata.num_warps)
    if target == "gfx942":
        return _inspect_amd(kernel.asm["amdgcn"], shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        usage = _run([_tool("cuobjdump"), "-res-usage", f.name])
    code = assembly(kernel)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if not found or not code:
        raise RuntimeError(f"could not read the kernel's resources: {usage[-500:]}")
    registers = int(found[1])
    # Local loads and stores in the code are spills: the kernels have no local arrays. Width is in the suffix.
    widths = [int(w or 32) // 8 for w in re.findall(r"\bSTL(?:\.(64|128))?\b", code)]
    instruction = "HGMMA" if "HGMMA" in code else "HMMA" if "HMMA" in code else ""
    threads = warps * 32
    # Registers are dealt in units of 8 a thread; each program pays 1 KiB of shared memory to the system.
    programs = min(
        _REGISTERS_PER_SM // (-(-registers // 8) * 8 * threads),
        SHARED_PER_SM[target] // (shared + 1024),
        _THREADS_PER_SM[target] // threads,
    )
    return Report(registers, sum(widths), shared, instruction, programs)


def _inspect_amd(assembly: str, shared: int) -> Report:
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    if not registers or not spills:
        raise RuntimeError("could not read the kernel's resources from its assembly")
    instruction = "MFMA" if "v_mfma" in assembly else ""
    return Report(int(registers[1]), 4 * int(spills[1]), shared, instruction, 0)


def _run(command: list[str | None]) -> str:
    if command[0] is None:
        return ""
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    return result.stdout
