# SPDX-License-Identifier: Apache-2.0
"""Blocks of experts rewritten for a GPU, interpreted, against transformers' own: numbers, bits, launches."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_count import counted_kernels
from nightly import by_day
from tiny_configs import tiny_config
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from radixkv.errors import ConfigError
from radixkv.model.batch_invariance import check_supported, fix_rows
from radixkv.model.gpu_layers import experts as gpu_experts
from radixkv.model.gpu_layers.experts import GpuExperts, GpuRouter, replace_experts
from radixkv.model.step_context import call_model

#: Launches of a block with its shared expert.
MAX_LAUNCHES = 12
FAMILIES = (
    "mixtral",
    "qwen3-moe",
    "qwen2-moe-window",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
    "glm4-lite",
    "qwen3_5_moe_text",
    "phimoe",
    "kimi_linear",
    "minimax_m2",
    "ernie4_5_moe",
    "mimo",
    "jamba",
    "hunyuan-moe",
    "llama4",
    "laguna",
    "longcat",
    "mistral4",
    "lfm2_moe",
    "cohere2_moe",
)
_SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
#: Model type -> its configuration, of families that no other test has a model of.
OTHERS: dict[str, dict[str, Any]] = {
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 16},
    "ernie4_5_moe": {
        "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 1
    },
    "cohere2_moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 1, "first_k_dense_replace": 0,
        "expert_selection_fn": "sigmoid",
    },
}  # fmt: skip


#: Token ids and positions.
_NUMBERS = torch.zeros(8, dtype=torch.int64)


def make_model(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = (
        AutoConfig.for_model(family, **_SMALL, **OTHERS[family]) if family in OTHERS else tiny_config(family)
    )
    kind = AutoModelForImageTextToText if family == "mistral4" else AutoModelForCausalLM
    model = kind.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "bias" in name or ".gate." in name or "router" in name:
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
        elif "experts" in name:
            tensor.copy_(torch.randn(tensor.shape) * 0.1)
    return model


def blocks_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "experts")]


def call(block: Any, states: Tensor, is_row: Tensor | None = None) -> Tensor:
    """[T, H] -> [T, H] within a step."""

    def model(**_: Any) -> Any:
        out = block(states[None])
        return SimpleNamespace(logits=(out[0] if isinstance(out, tuple) else out).view(1, *states.shape))

    numbers = _NUMBERS[: len(states)]
    return call_model(model, numbers, numbers, None, SimpleNamespace(is_row=is_row))


@pytest.mark.parametrize("family", by_day(FAMILIES, "gpt-oss", "deepseek-v3", "qwen2-moe-window"))
@torch.inference_mode()
def test_blocks_of_families(family: str) -> None:
    """transformers' numbers, from at most 12 launches."""
    model = make_model(family, torch.float32)
    (plain, *_) = blocks_of(copy.deepcopy(model))
    count = len(blocks_of(model))
    assert replace_experts(model) == count > 0
    assert replace_experts(model) == 0
    block = blocks_of(model)[0]
    x = torch.randn(5, model.config.get_text_config().hidden_size)
    with counted_kernels() as launched:
        got = call(block, x)
    assert sum(launched.values()) <= MAX_LAUNCHES, launched
    wanted = call(plain, x)
    assert (got - wanted).abs().max().item() <= 1e-5 * wanted.abs().max().item()
    check_supported(model.config, model)


@torch.inference_mode()
def test_rows_do_not_depend_on_the_batch_and_padding_has_no_experts() -> None:
    model = make_model("qwen3-moe", torch.bfloat16)
    replace_experts(model)
    fix_rows(model)
    block = blocks_of(model)[0]
    x = torch.randn(6, model.config.hidden_size, dtype=torch.bfloat16)
    whole = call(block, x)
    assert torch.equal(call(block, x[2:3])[0], whole[2])
    is_row = torch.tensor([1, 1, 1, 0, 0, 0])
    padded = call(block, x, is_row)
    assert torch.equal(padded[:3], whole[:3])
    assert not padded[3:].any()


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
@torch.inference_mode()
def test_sorted_rows_of_large_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped product above a number of rows; the kernels below it and in deterministic mode."""
    model = make_model(family, torch.bfloat16)
    replace_experts(model)
    block = blocks_of(model)[0]
    x = torch.randn(7, model.config.hidden_size, dtype=torch.bfloat16)
    wanted = call(block, x)
    monkeypatch.setattr(gpu_experts, "MAX_ROWS", 4)
    with counted_kernels() as launched:
        got = call(block, x)
    assert launched["_grouped_mm"] == 2
    assert (got - wanted).abs().max().item() < 0.02 * wanted.abs().max().item()
    fix_rows(model)
    assert torch.equal(call(block, x), wanted)


@torch.inference_mode()
def test_routers_of_other_families_stay_and_are_refused_in_deterministic_mode() -> None:
    model = make_model("qwen3-moe", torch.float32)
    for block in blocks_of(model):
        block.gate.__class__ = type("OtherRouter", (type(block.gate),), {})
    replace_experts(model)
    assert any(isinstance(module, GpuExperts) for module in model.modules())
    assert not any(isinstance(module, GpuRouter) for module in model.modules())
    with pytest.raises(ConfigError, match="mixture-of-experts"):
        check_supported(model.config, model)
