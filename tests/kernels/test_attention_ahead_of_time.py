"""The shipped tile table, compiled ahead of time: no spills, resources within bounds, tensor cores used."""

from __future__ import annotations

import os

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from radixkv_kernels.triton import ahead_of_time as aot  # noqa: E402

#: The table is chosen with the assembler of triton 3.9. Older ones spill a few words of bookkeeping in
#: places.
SPILL_LIMIT = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 64

TESTED = [c for c in aot.CONFIGURATIONS if c.name.rsplit(", ", 1)[0] in aot.TESTED]


def check(c: aot.Configuration, target: str) -> None:
    report = aot.inspect_kernel(aot.compile_attention(c, target), target)
    assert report.spill_bytes <= SPILL_LIMIT
    assert report.registers <= 255
    assert report.shared_bytes <= aot.SHARED_PER_PROGRAM[target]
    assert report.programs_per_sm >= (2 if c.kind == "short" else 1)
    rows = c.tiles(target)[1].rows
    if c.dtype == "fp32":
        return
    # Hopper's wide instructions start at 64 rows.
    expected = "HGMMA" if target == "sm_90" and rows >= 64 else "HMMA"
    assert report.matrix_instruction == expected


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("c", TESTED, ids=lambda c: c.name)
def test_attention(c: aot.Configuration, target: str) -> None:
    if not aot.supported(c, target):
        pytest.skip(f"{target} has no {c.kv_dtype}")
    check(c, target)


@pytest.mark.slow
@pytest.mark.skipif("RADIXKV_ALL_TILES" not in os.environ, reason="set RADIXKV_ALL_TILES=1: takes minutes")
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("c", [c for c in aot.CONFIGURATIONS if c not in TESTED], ids=lambda c: c.name)
def test_every_other_configuration(c: aot.Configuration, target: str) -> None:
    if not aot.supported(c, target):
        pytest.skip(f"{target} has no {c.kv_dtype}")
    check(c, target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_other_kernels(target: str) -> None:
    # triton 3.6 cannot assemble conversions to e5m2 for sm_80.
    stored_types = ["bf16", "i8"] + (["fp8e5"] if target == "sm_90" or SPILL_LIMIT == 0 else [])
    kernels = [aot.compile_merge(32, 128, target), aot.compile_copy(target)]
    kernels += [aot.compile_write(8, 128, stored, target) for stored in stored_types]
    for kernel in kernels:
        report = aot.inspect_kernel(kernel, target)
        assert report.spill_bytes == 0
        assert report.registers <= 128


@pytest.mark.parametrize("name", ["32:8 d128, short", "32:8 d128, long", "16:8 d256 window, softcap, long"])
def test_gfx942(name: str) -> None:
    c = next(c for c in aot.CONFIGURATIONS if c.name == name)
    report = aot.inspect_kernel(aot.compile_attention(c, "gfx942"), "gfx942")
    assert report.matrix_instruction == "MFMA"
    assert report.spill_bytes <= SPILL_LIMIT
    assert report.shared_bytes <= aot.SHARED_PER_PROGRAM["gfx942"]
