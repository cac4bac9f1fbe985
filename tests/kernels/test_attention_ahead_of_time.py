# SPDX-License-Identifier: Apache-2.0
"""The shipped tile table, compiled ahead of time: no spills, resources within bounds, tensor cores used."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter

import pytest
from nightly import by_day

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from benchmarks import ahead_of_time as aot  # noqa: E402
from benchmarks import state_compilation as states  # noqa: E402
from radixkv_kernels.triton.head_shape import heads_per_program  # noqa: E402
from radixkv_kernels.triton.merge import AT_ONCE  # noqa: E402
from radixkv_kernels.triton.tiles import choose_tile, launch_tile  # noqa: E402

#: The table is chosen with the assembler of triton 3.9. Older ones spill a few words of bookkeeping in
#: places.
SPILL_LIMIT = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 64
#: Long tiles of latents were the fastest on an H200 with their spills.
LATENT_SPILLS = 1024

#: The products of Ampere and Ada keep their operands in registers.
CONSUMER_SPILLS = 1024

TESTED = [c for c in aot.CONFIGURATIONS if c.name.rsplit(", ", 1)[0] in aot.TESTED]
#: The others of TESTED are compiled by night.
BY_DAY = ("32:8 d128, long",)
#: Compiled for sm_80, too; the others take RADIXKV_ALL_TILES, to save time.
SM_80 = ("32:8 d128, long",)
ALL_TILES = pytest.mark.skipif(
    "RADIXKV_ALL_TILES" not in os.environ, reason="set RADIXKV_ALL_TILES=1: takes minutes"
)


def check(c: aot.Configuration, target: str) -> None:
    kernel = aot.compile_attention(c, target)
    report = aot.inspect_kernel(kernel, target)
    assert report.spill_bytes <= (LATENT_SPILLS if c.has_latent_tiles(target) else SPILL_LIMIT)
    assert report.registers <= 255
    assert report.shared_bytes <= aot.SHARED_PER_PROGRAM[target]
    assert report.programs_per_sm >= (2 if c.kind == "short" and c.head_size <= 256 else 1)
    rows = c.tiles(target)[1].rows
    if c.dtype == "fp32":
        return
    if c.kv_dtype is not None and target == "sm_90":
        # Elements are converted in pairs, or as integers: F2F and I2F take one at a time, a quarter as often.
        assert not re.search(r"\b(F2F|I2F)\b", aot.assembly(kernel))
    # Hopper's wide instructions start at 64 rows.
    expected = "HGMMA" if target == "sm_90" and rows >= 64 else "HMMA"
    assert report.matrix_instruction == expected


@pytest.mark.parametrize(
    "c",
    [pytest.param(c, marks=() if c.name in BY_DAY else pytest.mark.nightly) for c in TESTED],
    ids=lambda c: c.name,
)
def test_attention(c: aot.Configuration) -> None:
    check(c, "sm_90")


@pytest.mark.nightly
@pytest.mark.parametrize("c", [c for c in TESTED if c.name in SM_80], ids=lambda c: c.name)
def test_attention_on_sm_80(c: aot.Configuration) -> None:
    check(c, "sm_80")


@pytest.mark.slow
@ALL_TILES
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "c", [c for c in aot.CONFIGURATIONS if c not in TESTED or c.name not in SM_80], ids=lambda c: c.name
)
def test_every_other_configuration(c: aot.Configuration, target: str) -> None:
    if not aot.supported(c, target):
        pytest.skip(f"{target} has no {c.kv_dtype}")
    check(c, target)


def loops(ptx: str) -> list[Counter[str]]:
    """The float32 arithmetic of each basic block that has products of matrices and exponentials."""
    blocks = re.split(r"^\$L__BB\w+:", ptx, flags=re.MULTILINE)
    found = [
        block
        for block in blocks
        if "ex2.approx" in block and re.search(r"\b(wgmma\.mma_async|mma\.sync)\b", block)
    ]
    return [Counter(re.findall(r"\b(ex2|fma|mul|sub|add|max|div|neg)\.[\w.]*f32", block)) for block in found]


# The first is compiled for another test, too.
BIT_IDENTICAL = [
    aot.Configuration("plain", (32, 8), 128, "long", deterministic=True),
    aot.Configuration("int8, softcap", (16, 8), 64, "long", kv_dtype="i8", softcap=True, deterministic=True),
]


@pytest.mark.parametrize("c", BIT_IDENTICAL, ids=lambda c: c.name)
@pytest.mark.nightly
def test_masked_and_unmasked_tiles_compute_alike(c: aot.Configuration) -> None:
    """Which of the two loops a tile of keys takes depends on a row's mates, and must not change its bits."""
    unmasked, masked = loops(aot.compile_attention(c, "sm_90").asm["ptx"])
    assert unmasked == masked


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("32:8 d128, short", marks=ALL_TILES),
        "32:8 d128, long",
        pytest.param("9:3 d64, short", marks=ALL_TILES),
        pytest.param("16:8 d256 window, softcap, long", marks=ALL_TILES),
        pytest.param("32:8 d128 deterministic, long", marks=ALL_TILES),
        pytest.param("32:8 d128 fp8 e4m3 KV, short", marks=pytest.mark.nightly),
        pytest.param("32:8 d128 fp8 e4m3 KV, long", marks=ALL_TILES),
        pytest.param("32:8 d128 fp8 deterministic, long", marks=ALL_TILES),
    ],
)
def test_keys_and_values_are_loaded_steps_ahead(name: str) -> None:
    """Several buffers for keys and for values in shared memory, filled by asynchronous copies."""
    c = next(c for c in aot.CONFIGURATIONS if c.name == name)
    kernel = aot.compile_attention(c, "sm_90")
    code = kernel.asm["ttgir"]
    head, keys = c.head_size, c.tiles("sm_90")[1].keys
    shapes = [f"{head}x{keys}xbf16", f"{keys}x{head}xbf16"]
    if c.kv_dtype is not None:  # values in pairs
        shapes = [f"{head}x{keys}xf8E4M3FN", f"{keys}x{head // 2}xi16"]
    for shape in shapes:
        buffers = [int(n) for n in re.findall(rf"local_alloc\b.*memdesc<(\d+)x{shape},", code)]
        assert len(buffers) >= 2, "a loop without buffers"
        assert min(buffers) >= 2
    assert "async_copy_global_to_local" in code
    # A step waits for its own copies alone: those of the next one go on.
    assert max(int(n) for n in re.findall(r"async_wait .*num = (\d+)", code)) >= 2
    # Pieces of 16 bytes; scales are numbers of 4.
    pieces = re.findall(r"cp\.async\.c[ag]\.shared\.global [^,]*, [^,]*, (\w+)", kernel.asm["ptx"])
    assert {int(size, 0) for size in pieces} == ({4, 16} if c.kv_dtype else {16})


@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=ALL_TILES), "sm_90"])
def test_the_other_kernels(target: str) -> None:
    # triton 3.6 cannot assemble conversions to e5m2 for sm_80.
    stored_types = ["bf16", "i8"] + (["fp8e5"] if target == "sm_90" or SPILL_LIMIT == 0 else [])
    kernels = [aot.compile_merge(32, 128, target), aot.compile_copy(target)]
    kernels += [aot.compile_write(8, 128, stored, target) for stored in stored_types]
    for kernel in kernels:
        report = aot.inspect_kernel(kernel, target)
        assert report.spill_bytes == 0
        assert report.registers <= 128


@pytest.mark.parametrize(("target", "is_early"), [("sm_80", False), ("sm_90", True)])
def test_a_merge_begins_before_attention_ends(target: str, is_early: bool) -> None:
    """On Hopper it reads its plan before it waits, and partials afterwards."""
    c = next(c for c in aot.CONFIGURATIONS if c.name == "32:8 d128, long")
    merge = aot.compile_merge(32, 128, target).asm["ptx"]
    assert merge.count("griddepcontrol.wait") == is_early
    if not is_early:
        return
    before, after = merge.split("griddepcontrol.wait")
    assert before.count("ld.global") >= 6
    assert "ld.global.v" not in before
    assert "st.global" not in before
    assert "ld.global.v" in after
    assert aot.compile_attention(c, target).asm["ptx"].count("griddepcontrol.launch_dependents") == 1


@pytest.mark.parametrize("head_size", by_day((64, 80, 128, 256, 512), 128))
def test_merge_loads_partials_ahead(head_size: int) -> None:
    """In the loop all loads of a round come before its first fold, as the assembler orders them."""
    kernel = aot.compile_merge(32, head_size, "sm_90")
    report = aot.inspect_kernel(kernel, "sm_90")
    assert report.spill_bytes == 0
    assert report.registers <= 96
    loops = re.split(r"\bBRA\b", aot.assembly(kernel))
    [ops] = [found for loop in loops if len(found := re.findall(r"\b(LDG|FMNMX)\b", loop)) > 32]
    # A place, a maximum, a sum and a row of each partial.
    assert ops.count("LDG") >= 4 * AT_ONCE
    assert ops == ["LDG"] * ops.count("LDG") + ["FMNMX"] * AT_ONCE


@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=ALL_TILES), "sm_90"])
@pytest.mark.nightly
def test_low_rank_kernels(target: str) -> None:
    """No spills, and products of narrow types by tensor cores."""
    for kernel in aot.compile_low_rank(4096, (4096, 1024, 1024), 64, target):
        report = aot.inspect_kernel(kernel, target)
        assert report.spill_bytes == 0
        assert report.registers <= 128
        assert report.matrix_instruction == "HMMA"


@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=ALL_TILES), "sm_90"])
@pytest.mark.nightly
def test_kernels_between_products(target: str) -> None:
    """No spills, loads of 16 bytes, and no product contracted into a sum: results do not hang on a compiler's
    choice."""
    kernels = {
        "norm": aot.compile_residual_norm(4096, target),
        "Gemma's norms": aot.compile_residual_norm(2304, target, AFTER=aot.GEMMA_NORM, NEXT=aot.GEMMA_NORM),
        "two branches, layer norm": aot.compile_residual_norm(4096, target, OTHER=1, NEXT=aot.COHERE_NORM),
        "gate": aot.compile_gated(14336, "silu", target),
        "rotate": aot.compile_rotate_write((32, 8), 128, 128, "bf16", target),
    }
    if "RADIXKV_NIGHTLY" in os.environ:
        kernels["norms over all heads"] = aot.compile_rotate_write(
            (32, 8), 128, 128, "bf16", target, norms=True, WHOLE=1
        )
        kernels["heads normed after they turn"] = aot.compile_rotate_write(
            (32, 8), 128, 128, "bf16", target, norms=True, TURNS_FIRST=1, KEY_SCALED=1
        )
        kernels["queries that grow"] = aot.compile_rotate_write(
            (40, 8), 128, 128, "bf16", target, PAIRS=1, STEP=2, GROWTH=1
        )
        kernels["gated"] = aot.compile_rotate_write((16, 2), 256, 64, "bf16", target, norms=True, QD=512)
        kernels["rotate normed heads"] = aot.compile_rotate_write((32, 8), 128, 128, "i8", target, norms=True)
        # Latents of DeepSeek V3 and their queries, 4 bytes of two neighbours at a time.
        for stored in ("bf16", "i8"):
            latents = aot.inspect_kernel(
                compiled := aot.compile_latent_write(128, (128, 64, 512), stored, target), target
            )
            assert (latents.spill_bytes, latents.registers <= 64) == (0, True)
            assert "fma.rn.f32" not in compiled.asm["ptx"]
        grown = aot.compile_latent_write(128, (128, 64, 512), "bf16", target, GROWTH=2)
        assert aot.inspect_kernel(grown, target).spill_bytes == 0
        kernels["rotate a part"] = aot.compile_rotate_write((32, 32), 96, 48, "bf16", target)
    if target == "sm_90" and "RADIXKV_NIGHTLY" in os.environ:
        kernels["rotate many to fp8"] = aot.compile_rotate_write((64, 32), 128, 128, "fp8e4nv", target)
        kernels["wide gate"] = aot.compile_gated(9216, "gelu_tanh", target, "fp32")
    for name, kernel in kernels.items():
        report = aot.inspect_kernel(kernel, target)
        assert report.spill_bytes == 0, name
        assert report.registers <= 128, name
        assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", kernel.asm["ptx"]), name
        assert "fma.rn.f32" not in kernel.asm["ptx"], name


@pytest.mark.parametrize(
    "name",
    by_day(states.STATE_KERNELS, *states.BY_DAY[:1]),
)
def test_kernels_of_states(name: str) -> None:
    """No spills, and no product contracted into a sum: a ring's rows enter a state with the same bits."""
    kernel = states.STATE_KERNELS[name]("sm_90")
    report = aot.inspect_kernel(kernel, "sm_90")
    assert report.spill_bytes <= SPILL_LIMIT
    assert "fma.rn.f32" not in kernel.asm["ptx"]
    part = name.rsplit(", ", 1)[-1]
    if part in ("state", "output"):
        assert report.matrix_instruction == "HGMMA"
    if part == "state":
        # A chunk's inputs are copied while the one before is computed.
        assert kernel.asm["ptx"].count("cp.async.cg") >= 8
        assert "async_copy_global_to_local" in kernel.asm["ttgir"]
    elif part == "norm and rings":
        assert report.registers <= 64
    elif part not in ("local", "output", "decode", "gather", "scores"):
        assert report.programs_per_sm >= 12


@pytest.mark.parametrize("target", by_day(("sm_86", "sm_89"), "sm_86"))
@pytest.mark.parametrize("name", by_day(states.STATE_KERNELS, "KDA 32 d128, state"))
def test_kernels_of_states_on_consumer_gpus(name: str, target: str) -> None:
    """Ampere's and Ada's programs have 99 KiB of shared memory."""
    report = aot.inspect_kernel(states.STATE_KERNELS[name](target), target)
    assert report.shared_bytes <= aot.SHARED_PER_PROGRAM[target]
    assert report.spill_bytes <= CONSUMER_SPILLS


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("32:8 d128, long", marks=pytest.mark.nightly),
        pytest.param("32:8 d128, short", marks=ALL_TILES),
        pytest.param("16:8 d256 window, softcap, long", marks=ALL_TILES),
    ],
)
def test_gfx942(name: str) -> None:
    c = next(c for c in aot.CONFIGURATIONS if c.name == name)
    report = aot.inspect_kernel(aot.compile_attention(c, "gfx942"), "gfx942")
    assert report.matrix_instruction == "MFMA"
    assert report.spill_bytes <= SPILL_LIMIT
    assert report.shared_bytes <= aot.SHARED_PER_PROGRAM["gfx942"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256, 576])
@pytest.mark.parametrize("group_size", [1, 7, 64, 71, 128])
def test_a_tile_holds_a_whole_group(capability: int, head_size: int, group_size: int) -> None:
    for kind in ("short", "long"):
        group = heads_per_program(head_size, group_size)
        assert group_size % group == 0
        planned = choose_tile(head_size, group, kind, 2, capability)
        options = itertools.product((16, 64), (False, True), (False, True), (False, True))
        for block_size, featured, quantized, by_segment in options:
            launched = launch_tile(
                *(planned, head_size, 2, capability),
                group_size=group,
                block_size=block_size,
                featured=featured,
                quantized=quantized,
                by_segment=by_segment,
            )
            assert group <= launched.rows <= planned.rows
