# SPDX-License-Identifier: Apache-2.0
"""Every part of the GPU benchmark at toy sizes, and the list that runs them as processes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import Lines, child, plan, run_name, run_stages, summarize
from benchmarks.gpu_layers import PUBLISHED
from benchmarks.gpu_parts import (
    PUBLISHED_NAMES,
    RUN_SECONDS,
    RUNS,
    STAGES,
    TOY,
    Part,
    run_part,
    seconds_of,
)

PARTS = [part for stage in STAGES for part in stage]


def lines_of(part: Part) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    run_part(part, True, lambda **fields: found.append(json.loads(json.dumps(fields))))
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(p.name, marks=pytest.mark.nightly)
        if p.name
        in (
            *("edges", "steps", "overlap", "bit identity", "state speed", "models adapters"),
            *("stored numbers", "stored products", "experts", "fused layers", "sampler numbers", "kernels"),
        )
        or p.name.startswith(("layers", "host"))
        or p.name in ("numbers float16", "numbers float32", "states")
        else p.name
        for p in PARTS
        if not p.name.startswith(
            ("throughput", "models shapes", "models states", "models plain", "models bfloat16")
        )
    ],
)
def test_part(name: str) -> None:
    """It reports figures, and each of its checks holds."""
    part = next(p for p in PARTS if p.name == name)
    lines = lines_of(part)
    assert lines
    assert all(line.get("ok", True) for line in lines)
    figures = [x for line in lines for x in line.values() if isinstance(x, float)]
    assert figures or name in ("bit identity", "sanitizer", "models adapters")
    # The slope between two toys is noise.
    assert all(x >= 0 for x in figures) or name.startswith("layers")


@pytest.mark.nightly
def test_experts_and_states_are_checked_in_bfloat16() -> None:
    lines = lines_of(next(p for p in PARTS if p.name == "models bfloat16 1/4"))
    assert [line["ok"] for line in lines] == [True]


@pytest.mark.nightly
def test_both_engines_give_the_same_answers(tmp_path: Path) -> None:
    """Greedy in float32: two engines that do the same work give the same tokens."""
    lines = Lines(tmp_path / "lines")
    for part in PARTS:
        if part.name.startswith("throughput"):
            for fields in lines_of(part):
                lines.add(part.name, **fields)
    summarize(lines)
    rows = [row for row in lines.rows if row["part"] == "throughput"]
    assert [row["equal answers"] for row in rows if "equal answers" in row] == [1.0, 1.0]
    assert all(row["times as fast"] > 0 for row in rows)
    assert len([row for row in rows if "beside" in row]) == 4
    assert len([row for row in lines.rows if row["part"] == "targets"]) == 2


def test_each_run_fits_into_ten_minutes_with_a_machines_start() -> None:
    for run in RUNS:
        assert seconds_of(run, expected=True) < seconds_of(run) <= RUN_SECONDS <= 550
    assert all(0 < part.expected <= part.seconds for part in PARTS)
    assert PUBLISHED.keys() == set(PUBLISHED_NAMES)
    assert TOY not in PARTS
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_a_plan_says_what_would_run() -> None:
    assert [run_name(text) for text in ("1", "speed", "3")] == list(RUNS)
    with pytest.raises(argparse.ArgumentTypeError, match="'4' is no run: take numbers, speed, peers"):
        run_name("4")
    lines = plan(["numbers"], ["machine", "host"])
    assert lines[0].startswith("numbers: ")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["1. machine", "7. host"]
    assert lines[1].endswith("6 s expected, 20 s at most, 140 GB")


SCRIPT = """
import json, subprocess, sys, time
name = sys.argv[-1]
print("a library's greeting")
print(json.dumps({"load": name, "figure": 1.5}), flush=True)
if name == "fails":
    raise ValueError("this went wrong")
if name == "hangs":
    # A child of its own, that keeps the pipe open.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
if name == "lacks":
    print("the package x is not installed", file=sys.stderr)
    sys.exit(75)
"""


def test_parts_that_fail_or_hang_do_not_stop_the_others(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines"
    lines = Lines(path)
    command = [sys.executable, "-c", SCRIPT]
    stages = [
        [Part(name, "", 120) for name in ("fails", "lacks")],
        [Part("hangs", "", 2)],
        [Part("works", "", 120)],
    ]
    started = time.monotonic()
    run_stages(stages, lines, command)
    assert time.monotonic() - started < 300
    summarize(lines)
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written == lines.rows
    assert sorted(row["load"] for row in written if "figure" in row) == ["fails", "hangs", "lacks", "works"]
    ends = {row["part"]: row for row in written if "seconds" in row}
    assert {name: row["status"] for name, row in ends.items()} == {
        "fails": "failed",
        "lacks": "skipped",
        "hangs": "out of time",
        "works": "ok",
    }
    assert ends["fails"]["error"] == "ValueError: this went wrong"
    assert "Traceback" in ends["fails"]["trace"]
    assert ends["lacks"]["error"] == "the package x is not installed"
    assert written[-1]["hangs"] == "out of time"


def test_nothing_starts_after_the_time_for_all_parts(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines")
    run_stages([[Part("late", "", 60)]], lines, ["/no/such/program"], seconds=0.0)
    assert [row["status"] for row in lines.rows] == ["not run"]


def test_a_part_reports_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert child("machine", small=True) == 0
    assert "matmul TFLOP/s" in json.loads(capsys.readouterr().out.splitlines()[-1])
    # Real sizes need a GPU.
    assert child("machine", small=False) == 75
    assert "no CUDA device" in capsys.readouterr().err
