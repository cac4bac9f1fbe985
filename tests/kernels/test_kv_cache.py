# SPDX-License-Identifier: Apache-2.0
"""Clearing the first blocks of a cache: all layers and scales of them, and nothing after them."""

from __future__ import annotations

import pytest
import torch

from radixkv_kernels import KVSpec, PagedKV


@pytest.mark.parametrize("quantization", [None, "int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("cleared", [0, 3, 5])
def test_clear(quantization: str | None, cleared: int) -> None:
    kv = PagedKV(KVSpec(2, 5, 8, 3, 16, torch.float32, torch.device("cpu"), quantization))
    for tensor in kv.tensors():
        tensor.view(torch.uint8).fill_(7)
    kv.clear(cleared)
    for tensor in kv.tensors():
        octets = tensor.view(torch.uint8)
        assert bool((octets[:, :, :cleared] == 0).all())
        assert bool((octets[:, :, cleared:] == 7).all())
