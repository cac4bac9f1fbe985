# SPDX-License-Identifier: Apache-2.0
"""Kernels at each instruction set that this processor has: no wider one is used, the results agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import instruction_set_probe
import pytest
import torch

pytest.importorskip("numba")

from radixkv_kernels.cpu.isa import VARIABLE, level, levels

pytestmark = pytest.mark.skipif(not levels(), reason="no AVX2 here")
# Instructions that a level must not have: registers and masks of AVX-512; VNNI and later extensions.
_LATER = r"\bvpdp\w+|\bvdpbf16ps|\bvcvtne\w+|\btdp\w+"
_WIDER = {
    "avx2": rf"zmm\d|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b|{_LATER}",
    "avx512": _LATER,
    "vnni": r"\btdp\w+",
}
_NEEDED = {
    "avx2": [
        r"vpmaddwd.*ymm",
        r"vfmadd\w+ps.*ymm",
        r"vpmovsxbw.*ymm",
        r"vpslld\s+\$16, .*ymm",
        r"vcvtph2ps.*ymm",
    ],
    "avx512": [r"vpmaddwd.*zmm"],
    "vnni": [r"vpdpbusd"],
}
_EQUAL = ("int8", "torch.float32", "torch.bfloat16", "torch.float16", "written")


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """For each level but this process's own: a process that compiles and runs products, all at once.

    Only AVX2 has float vectors of another width.
    """
    started: dict[str, Any] = {}
    for name in levels():
        if name != level():
            folder = tmp_path_factory.mktemp(name)
            command = [sys.executable, instruction_set_probe.__file__, str(folder / "found")]
            variables = {VARIABLE: name, "NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
            paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
            process = subprocess.Popen(
                [*command, *(["int8"] if name != "avx2" else [])], env={**os.environ, **variables, **paths}
            )
            started[name] = (process, folder / "found")
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in levels() if name != level()])
def test_a_level_keeps_to_its_instructions_and_computes_the_same(probes: dict[str, Any], name: str) -> None:
    process, file = probes[name]
    assert process.wait() == 0
    found = torch.load(file)
    lines = [line for line in found["code"].splitlines() if re.match(r"\t[a-z]", line)]
    assert len(lines) > 1_000
    wider = [line for line in lines if re.search(_WIDER[name], line)]
    assert not wider, wider[:5]
    for pattern in _NEEDED[name]:
        assert any(re.search(pattern, line) for line in lines), pattern
    expected = instruction_set_probe.int8_results()
    if name == "avx2":
        expected |= instruction_set_probe.float_results()
    assert found["results"].keys() == expected.keys()
    for key, value in expected.items():
        got = found["results"][key]
        if key in _EQUAL:
            assert torch.equal(got, value), key
        else:  # norms and gates add up, or round, in an order of their own
            error = float((got - value).square().mean().sqrt())
            assert error < (1e-2 if "int8" in key else 1e-6) * float(value.square().mean().sqrt()), key


def attempt(value: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, VARIABLE: value, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.nightly
def test_an_unknown_level_is_refused_with_those_there_are() -> None:
    done = attempt("avx1024", "from radixkv.model.device_paths import check_instruction_set as f; f()")
    assert "ConfigError" in done.stderr
    assert f"{VARIABLE}=avx1024" in done.stderr
    assert ", ".join(levels()) in done.stderr


@pytest.mark.skipif(len(levels()) < 2, reason="one level only")
def test_a_level_that_comes_too_late_is_refused() -> None:
    code = "import numba; numba.njit(lambda x: x)(1); import radixkv_kernels.cpu.vectors"
    done = attempt(levels()[0], code)
    assert "too late" in done.stderr


def test_the_best_level_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "auto")
    assert level.__wrapped__() == levels()[-1]
