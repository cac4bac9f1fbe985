# SPDX-License-Identifier: Apache-2.0
"""What the wheel holds, and whether it can be installed with and without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from source_graph import PACKAGES, ROOT


def test_the_wheel_holds_the_three_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {ROOT / path for path in listed} == set(PACKAGES.values())
    for folder in PACKAGES.values():
        assert (folder / "py.typed").exists(), f"{folder.name} says nothing about its types"
    for source_root in ("kernels", "server"):
        assert not (ROOT / source_root / "__init__.py").exists(), f"`import {source_root}` would find ours"


def test_the_wheel_is_built_without_what_serving_needs() -> None:
    done = subprocess.run(["make", "-n", "wheel"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip wheel" in done.stdout
    assert "torch" not in done.stdout + (ROOT / "pyproject.toml").read_text().partition("[project]")[0]
    assert "constraints" not in done.stdout


def test_a_run_says_how_to_get_what_tests_were_skipped_for(tmp_path: Path) -> None:
    file = tmp_path / "test_skipped.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_page(n): pytest.skip('no chromium here')\n"
        "def test_tier(): pytest.skip('needs redis-server')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "missing_programs", str(file), "-c", os.devnull]
    paths = os.pathsep.join([str(ROOT / "tests" / "support"), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert "2 tests skipped for lack of chromium: .venv/bin/playwright install" in done.stdout, done.stderr
    assert "1 test skipped for lack of redis-server: apt-get install redis-server" in done.stdout


@pytest.mark.nightly
def test_the_pins_agree_with_torchs_build_for_gpus(tmp_path: Path) -> None:
    """By metadata alone: constraints.txt does not rule out what PyPI's torch requires (CUDA, a Triton)."""
    pins = dict(
        line.strip().lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    )
    report = tmp_path / "report.json"
    found = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pip",
                "install",
                "--dry-run",
                "--ignore-installed",
                "--no-deps",
                "--quiet",
            ),
            *("--timeout", "20", "--retries", "0", "--report", str(report), f"torch=={pins['torch']}"),
        ],
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""},
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip(f"PyPI tells nothing of torch {pins['torch']} here: {found.stderr.strip()[-200:]}")
    (torch,) = json.loads(report.read_text(encoding="utf-8"))["install"]
    required = [Requirement(text) for text in torch["metadata"]["requires_dist"]]
    linux = {"platform_system": "Linux", "sys_platform": "linux", "extra": ""}
    needed = [one for one in required if one.marker is None or one.marker.evaluate(linux)]
    assert any(one.name == "triton" for one in needed), "not the build for GPUs"
    for one in needed:
        pinned = pins.get(one.name.lower().replace("_", "-"))
        assert pinned is None or one.specifier.contains(pinned), f"torch needs {one}, {pinned} is pinned"
