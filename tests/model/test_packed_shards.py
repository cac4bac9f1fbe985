# SPDX-License-Identifier: Apache-2.0
"""Weights in blocks on several ranks: the bits of one rank, experts' sums aside."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_llama_gguf
from gguf_hybrid_files import HYBRIDS, make_hybrid, write_hybrid
from paged_language_model import run_all
from quantised_checkpoints import gptq, quantise
from rank_threads import engine_on_ranks
from tiny_models import save_tiny_model

from radixkv.errors import ConfigError
from radixkv.model.parallel.shard_model import SPLIT_MODEL_TYPES
from radixkv.sampling.sampling_params import SamplingParams

pytest.importorskip("numba")
from radixkv_kernels.cpu.linear.block_method import methods

if not methods():
    pytest.skip("neither VNNI nor AVX2", allow_module_level=True)

MIXED = {"rest": "Q4_K", "attn_v": "Q6_K", "token_embd": "Q6_K"}
#: 16 bits have no kernel for blocks, and routers stay 32.
WITH_EXPERTS = MIXED | {"attn_k": "F16", "ffn_gate_inp": "F32"}
PROMPT = [(17 * i) % 290 + 3 for i in range(135)]
PROMPTS = (PROMPT, PROMPT[:50], PROMPT)
GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=0)


def answers(path: Path, num_ranks: int, **options: Any) -> tuple[list[tuple[int, ...]], np.ndarray[Any, Any]]:
    """Tokens and log probabilities of answers cold, and of one that is hot."""
    engine = engine_on_ranks(
        path, num_ranks, num_blocks=32, max_num_seqs=2, max_num_batched_tokens=96, **options
    )
    tokens, logprobs = [], []
    try:
        for prompt in PROMPTS:
            engine.add_request(prompt, GREEDY)
            (output,) = run_all(engine).values()
            assert output.error is None, output
            tokens.append(tuple(output.outputs[0].token_ids))
            logprobs += [token.chosen.logprob for token in output.outputs[0].logprobs]
        assert output.num_cached_tokens >= 128
    finally:
        if num_ranks > 1:
            engine.close()
    return tokens, np.array(logprobs)


@pytest.mark.parametrize(
    ("kinds", "experts", "options"),
    [
        (MIXED, 0, {}),
        (WITH_EXPERTS, 5, {"deterministic": True}),
        pytest.param(MIXED, 0, {"kv_cache_dtype": "int8"}, marks=pytest.mark.nightly),
    ],
    ids=["llama", "mixtral", "int8"],
)
def test_ranks_share_the_blocks_of_a_file(
    kinds: dict[str, str], experts: int, options: dict[str, Any], tmp_path: Path
) -> None:
    path = write_llama_gguf(tmp_path / "model.gguf", kinds, layers=1, experts=experts)
    tokens, logprobs = answers(path, 1, gguf="packed", **options)
    found, close = answers(path, 2, gguf="packed", **options)
    # Two experts for each token: a sum of two has one order.
    assert found == tokens
    assert np.array_equal(close, logprobs)
    assert found[0] == found[2]
    if "deterministic" in options:
        assert np.array_equal(close[:5], close[10:])


def test_ranks_share_weights_with_activation_order(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "tiny-llama", "llama", vocab_size=321, num_hidden_layers=1)
    plain = Path(shutil.copytree(path, tmp_path / "plain"))
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    assert quantise(path, partial(gptq, shuffled=True), settings, plain=plain)
    tokens, logprobs = answers(path, 1)
    found, close = answers(path, 2)
    assert found == tokens
    assert np.array_equal(close, logprobs)


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    path = write_llama_gguf(tmp_path / "model.gguf", {"rest": "Q8_0"}, layers=1, experts=1)
    with pytest.raises(ConfigError, match=r"--tensor-parallel 2 is more than the 1 experts .* at most 1"):
        engine_on_ranks(path, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [each for each, (kind, _) in HYBRIDS.items() if kind in SPLIT_MODEL_TYPES])
def test_ranks_share_the_blocks_of_a_hybrid_s_file(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_hybrid(path, case, make_hybrid(case, vocab_size=321), ("Q8_0", "Q4_0"), with_tokenizer=True)
    tokens, logprobs = answers(path, 1, gguf="packed")
    found, close = answers(path, 2, gguf="packed")
    assert found == tokens
    assert np.allclose(close, logprobs, atol=0.01)
