"""The GPU benchmark runs at toy sizes: every part but the numerics, which the other tests cover."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmarks import gpu


@pytest.mark.parametrize(
    "part", ["prefill", "decode", "shared", "fp8", "engine", "speculation", "throughput"]
)
def test_part(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        result = getattr(gpu, part)(gpu.Sizes(small=True, device=torch.device("cpu")))
    gpu.show(part, result)
    assert part in capsys.readouterr().out
    figures = [x for v in result.values() for x in (v.values() if isinstance(v, dict) else [v])]
    assert all(x >= 0 for x in figures if not isinstance(x, str))
    if part == "throughput":
        # Greedy in float32: two engines that do the same work give the same tokens.
        assert [row["equal tokens"] for row in result.values()] == [1.0, 1.0]


def test_targets_are_judged() -> None:
    results = {"decode": {"unit": "TB/s", "radixkv": 3.7, "paged over in order": 0.9}}
    first, second = gpu.targets(results)
    assert first.endswith(" met")
    assert second.endswith(" missed")
