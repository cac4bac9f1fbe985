# SPDX-License-Identifier: Apache-2.0
"""Models built without memory for their weights, and without torch's functions that import sympy."""

from __future__ import annotations

import pytest
import torch
import torch._prims_common
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from radixkv.model.loading.without_memory import build_without_memory


@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config])
def test_parameters_have_no_memory_and_buffers_have_values(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kind(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_config(config)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("imports sympy")

    monkeypatch.setattr(torch._prims_common, "elementwise_dtypes", fail)
    model = build_without_memory(lambda: AutoModelForCausalLM.from_config(config))
    assert {name: tensor.shape for name, tensor in model.named_parameters()} == {
        name: tensor.shape for name, tensor in plain.named_parameters()
    }
    assert all(tensor.is_meta for tensor in model.parameters())
    for (name, buffer), (_, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
