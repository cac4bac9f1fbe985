# SPDX-License-Identifier: Apache-2.0
"""Launches made again with other inputs: the same as if they were made anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("numba")
from radixkv_kernels.cpu.linear import launch
from radixkv_kernels.cpu.linear.row_kernels import RowKernels


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("with_openmp", [True, False])
def test_launches_made_again_take_other_inputs(
    threads: int, with_openmp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small launch and one for all threads; of the second, the output is an input, too."""
    if not with_openmp:
        monkeypatch.setattr(launch, "gomp_address", lambda: 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    kernels, recorded = RowKernels(), launch.RecordedLaunches()
    small, large = torch.randn(3, 64), torch.randn(64, 1024)
    weights, out = (torch.rand(64), torch.rand(1024)), (torch.empty(3, 64), torch.empty(64, 1024))

    def make(*inputs: Any) -> str:
        kernels.rms_norm(inputs[0], weights[0], 1e-5, out[0])
        kernels.rms_norm(inputs[1], weights[1], 1e-6, inputs[1])
        return "made"

    expected = [kernels.rms_norm(small, weights[0], 1e-5), kernels.rms_norm(large, weights[1], 1e-6)]
    first = torch.ones_like(small), torch.ones_like(large)
    assert recorded.record(lambda: make(*first), [each.data_ptr() for each in first]) == "made"
    kernels.rms_norm(torch.ones(2, 32), torch.ones(32), 1.0)  # other arguments meanwhile
    for _ in range(2):
        again = small.clone(), large.clone()
        recorded.run([each.data_ptr() for each in again])
        assert torch.equal(out[0], expected[0])
        assert torch.equal(again[1], expected[1])
        assert torch.equal(first[0], torch.ones_like(small))


def test_failed_function_ends_the_recording() -> None:
    recorded = launch.RecordedLaunches()
    with pytest.raises(ZeroDivisionError):
        recorded.record(lambda: 1 // 0, [])
    RowKernels().rms_norm(torch.ones(2, 32), torch.ones(32), 1.0)
    recorded.record(lambda: None, [])
    recorded.run([])
