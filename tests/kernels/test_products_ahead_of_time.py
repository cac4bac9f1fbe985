# SPDX-License-Identifier: Apache-2.0
"""Kernels of experts, stored weights and choices, compiled ahead for sm_90: no spills, tensor cores."""

from __future__ import annotations

import os
from typing import Any

import pytest
from nightly import by_day

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from benchmarks import ahead_of_time as aot  # noqa: E402
from radixkv_kernels.triton.experts import Gate  # noqa: E402
from radixkv_kernels.triton.router import CHOSEN_SIGMOID, LOGITS, SIGMOID, SOFTMAX, Routing  # noqa: E402

#: Assemblers before that of triton 3.9 spill a few words of bookkeeping in places.
SPILL_LIMIT = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 64
SILU, CLAMPED = Gate("silu"), Gate("clamped", alternate=True, limit=7.0, alpha=1.702)
#: Form -> hidden size, inner size, choices, gate.
SHAPES = {
    "bf16": (2048, 768, 8, SILU),
    "fp8": (2048, 768, 8, SILU),
    "int8": (2048, 768, 8, SILU),
    "int4": (2048, 768, 8, SILU),
    "mxfp4": (2880, 2880, 4, CLAMPED),
    **dict.fromkeys(("int4-order", "int4-32", "nf4", "nvfp4", "q4_k", "q6_k"), (2048, 768, 8, SILU)),
}
STORED = [form for form in SHAPES if form != "bf16"]


def check(kernel: Any, *, products: bool, programs: int = 2) -> None:
    report = aot.inspect_kernel(kernel, "sm_90")
    assert report.spill_bytes <= SPILL_LIMIT
    assert report.programs_per_sm >= programs
    if products:
        assert report.matrix_instruction == "HGMMA"


@pytest.mark.parametrize("down", by_day((False, True), False))
@pytest.mark.parametrize("form", by_day(SHAPES, "bf16", "mxfp4"))
def test_experts(form: str, down: bool) -> None:
    hidden, inner, choices, gate = SHAPES[form]
    kernel = aot.compile_experts(form, hidden, inner, choices, gate, "sm_90", down=down, bias=form == "mxfp4")
    check(kernel, products=True)


@pytest.mark.parametrize(
    ("form", "rows"),
    by_day([(form, rows) for form in STORED for rows in (1, 64, 512)], ("fp8", 1), ("q4_k", 64)),
)
def test_products_of_stored_weights(form: str, rows: int) -> None:
    kernel = aot.compile_stored_product(form, 4096, 14336, rows, "sm_90")
    check(kernel, products=True, programs=2 if rows <= 64 else 1)


@pytest.mark.parametrize("group", by_day((128, 14336), 128))
def test_kernels_that_round_to_8_bits(group: int) -> None:
    """Norms, gates and others, with a scale for each row or for 128 numbers."""
    check(aot.compile_residual_norm(4096, "sm_90", group=min(group, 4096)), products=False)
    check(aot.compile_gated(14336, "silu", "sm_90", group=group), products=False, programs=1)
    check(aot.compile_round_rows(14336, group, "sm_90"), products=False, programs=1)


@pytest.mark.nightly
def test_experts_in_float32() -> None:
    check(aot.compile_experts("fp32", 64, 48, 2, SILU, "sm_90", down=False), products=False)


@pytest.mark.parametrize(
    ("experts", "routing"),
    [
        (128, Routing(8, SOFTMAX, rounds_weights=True)),
        pytest.param(32, Routing(4, LOGITS, rounds_weights=True), marks=pytest.mark.nightly),
        (
            256,
            Routing(8, SIGMOID, rounds_logits=False, groups=8, kept_groups=4, best_of_group=2, factor=2.5),
        ),
        pytest.param(256, Routing(8, SIGMOID, rounds_weights=True, softcap=30.0), marks=pytest.mark.nightly),
        pytest.param(
            128, Routing(1, CHOSEN_SIGMOID, rounds_scores=True, normalised=False), marks=pytest.mark.nightly
        ),
    ],
    ids=["softmax", "logits", "groups", "softcap", "chosen sigmoid"],
)
def test_routers(experts: int, routing: Routing) -> None:
    others = {"expert_factor": routing.softcap > 0, "identities": 256 if routing.softcap else 0}
    for kernel in aot.compile_router(
        2048, experts, routing, "sm_90", choice_bias=routing.groups > 1, **others
    ):
        check(kernel, products=False)


@pytest.mark.parametrize("dtype", by_day(["bf16", "fp32"], "bf16"))
def test_choices_of_tokens(dtype: str) -> None:
    check(aot.compile_sample(128256, "sm_90", dtype), products=False, programs=1)
