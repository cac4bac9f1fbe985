# SPDX-License-Identifier: Apache-2.0
"""Experts of a GGUF file that stay blocks, held to transformers' model with dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_files import EXPERT_ARCHITECTURES, expert_state, read_model, write_family_gguf, write_llama_gguf
from nightly import by_day
from transformers import AutoModelForCausalLM

from radixkv import LLM, SamplingParams
from radixkv.model.attention.attention_hook import PlainCausalStep
from radixkv.model.step_context import call_model

pytest.importorskip("numba")
from radixkv.model.cpu_layers.block_experts import BlockExperts, PackedExperts
from radixkv_kernels.cpu.linear.block_method import methods

if not methods():
    pytest.skip("neither VNNI nor AVX2", allow_module_level=True)

KINDS = {"rest": "Q4_K", "ffn_down_exps": "Q6_K", "ffn_gate_inp": "F32"}
TOKENS = torch.tensor([5, 90, 17, 230, 4, 4, 61, 300, 12, 8, 77, 150])


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    with torch.inference_mode():
        return call_model(model, tokens, positions, None, PlainCausalStep(positions))


@torch.inference_mode()
def check(architecture: str, kinds: dict[str, str], kind: type[torch.nn.Module], tmp_path: Path) -> None:
    path = write_family_gguf(
        tmp_path / f"{architecture}.gguf", architecture, kinds, EXPERT_ARCHITECTURES[architecture]
    )
    model = read_model(path)
    assert sum(type(module) is kind for module in model.modules()) == 2
    found = logits(model, TOKENS)
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager", dtype=torch.float32)
    plain.load_state_dict(expert_state(path, plain, architecture), strict=False)
    plain.tie_weights()
    expected = plain.eval()(TOKENS[None], use_cache=False).logits[0]
    # The median, since rounding may send single tokens another way through experts.
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.02
    plain_read = logits(read_model(path, torch.float32), TOKENS)
    assert (plain_read - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (found.argmax(-1) == expected.argmax(-1)).sum() >= 11
    # A token's experts may have many rows or that one.
    mlp = model.model.layers[1].mlp
    states = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    whole = of_rows(mlp, states)
    for first, count in ((0, 1), (39, 1), (3, 7), (8, 32)):
        assert torch.equal(of_rows(mlp, states[first : first + count]), whole[first : first + count])


def of_rows(mlp: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    found = mlp(states[None])
    own: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return own[0]


@pytest.mark.parametrize("architecture", by_day(EXPERT_ARCHITECTURES, "gpt-oss"))
def test_experts_compute_what_the_dequantised_model_does(architecture: str, tmp_path: Path) -> None:
    kinds = KINDS
    if architecture == "gpt-oss":
        kinds = {"rest": "Q4_K", **{f"ffn_{each}_exps": "MXFP4" for each in ("gate", "up", "down")}}
    check(architecture, kinds, BlockExperts, tmp_path)


def test_experts_in_formats_without_a_kernel_become_bfloat16(
    tmp_path: Path,
) -> None:
    kinds = {"rest": "Q4_K", "ffn_up_exps": "TQ2_0", "ffn_down_exps": "F16"}
    check("gpt-oss", kinds, PackedExperts, tmp_path)


@pytest.mark.nightly
def test_answers_are_the_same_hot_and_cold_alone_and_in_a_batch(tmp_path: Path) -> None:
    path = write_llama_gguf(tmp_path / "mixtral.gguf", KINDS, experts=4)
    llm = LLM(str(path), device="cpu", num_blocks=64, deterministic=True, speculation="off")
    tokens = TOKENS.tolist()
    prompts = [tokens, tokens[:7], [*tokens, 3, 9], tokens[::-1], [7]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    together = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    assert [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts] == together
    reference = LLM(str(path), device="cpu", num_blocks=64, gguf="float32", speculation="off")
    expected = [each.outputs[0].token_ids for each in reference.generate(prompts, params)]
    assert sum(ours[0] == theirs[0] for ours, theirs in zip(together, expected, strict=True)) >= 4
