# SPDX-License-Identifier: Apache-2.0
"""Fused layers: the logits of transformers' own layers, to rounding; other families are left alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("numba")

from radixkv.model.cpu_layers.fused_layers import FusedLayer
from radixkv.model.cpu_layers.llama_layer import LlamaLayer
from radixkv.model.cpu_layers.rewrite import pack_layers
from radixkv.model.step_context import call_model


class DenseStep:
    """Attention over the tokens of the call itself, plain; stands for the paged one."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        **_: Any,
    ) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1),
            is_causal=True, scale=scale, enable_gqa=True,
        )  # fmt: skip
        return out.transpose(0, 1)


def tiny(model_type: str, **options: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        **options,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("num_tokens", [1, 7, 600])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_key_value_heads": 1, "head_dim": 24}, {"attention_bias": True, "mlp_bias": True}],
    ids=["plain", "one-kv-head", "biases"],
)
def test_logits_equal_those_of_transformers(num_tokens: int, options: dict[str, Any]) -> None:
    plain = tiny("llama", **options)
    fused = copy.deepcopy(plain)
    assert pack_layers(fused)
    assert sum(isinstance(module, FusedLayer) for module in fused.modules()) == 2
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 97, num_tokens))[None]
    positions = torch.arange(num_tokens)[None]
    with torch.inference_mode():
        expected = plain(input_ids=ids, position_ids=positions, use_cache=False).logits
        got = call_model(fused, ids[0], positions[0], None, DenseStep())[None]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("num_tokens", [2, 5, 300])
def test_a_row_does_not_depend_on_the_others_in_norm_and_rope(num_tokens: int) -> None:
    from radixkv_kernels.cpu.linear.row_kernels import RowKernels

    kernels = RowKernels()
    rows, weight = torch.randn(num_tokens, 192), torch.randn(192)
    angles = torch.randn(num_tokens, 32)
    whole, turned = kernels.rms_norm(rows, weight, 1e-5), rows.clone()
    kernels.rotate(turned, 4, angles.cos(), angles.sin())
    assert torch.equal(turned[:, 128:], rows[:, 128:])
    for r in {0, num_tokens // 2, num_tokens - 1}:
        assert torch.equal(kernels.rms_norm(rows[r : r + 1].clone(), weight, 1e-5)[0], whole[r])
        alone = rows[r : r + 1].clone()
        kernels.rotate(alone, 4, angles[r : r + 1].cos(), angles[r : r + 1].sin())
        assert torch.equal(alone[0], turned[r])


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("qwen3", {"head_dim": 8}), ("gemma2", {"head_dim": 8}), ("llama", {"hidden_act": "gelu"})],
)
def test_other_layers_stay_as_they_are(model_type: str, options: dict[str, Any]) -> None:
    model = tiny(model_type, **options)
    pack_layers(model)
    assert not any(isinstance(module, LlamaLayer) for module in model.modules())
