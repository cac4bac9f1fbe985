# SPDX-License-Identifier: Apache-2.0
"""Long chunks of latent attention, expanded: the same results as absorbed ones and as transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_attention_shapes import expected, generate, make_llm, reference, some_tokens
from tiny_models import save_tiny_model

from radixkv.model import rewritten_model
from radixkv.model.attention import expanded_latents
from radixkv.model.attention.expanded_latents import Expansion, find_latents
from radixkv.model.attention.latent_attention import Latents
from radixkv_kernels import reference_attention

LIMITS = {"num_blocks": 60, "max_num_batched_tokens": 170, "max_model_len": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("latents") / "model", "deepseek-v3")


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Queries and contexts of the chunks that are expanded from now on."""
    seen = []
    attend = Expansion.attend

    def noted(self: Expansion, latents: Latents, query: Any, stored: Any, scale: float) -> Any:
        seen.append((len(query), len(stored)))
        return attend(self, latents, query, stored, scale)

    monkeypatch.setattr(Expansion, "attend", noted)
    return seen


@torch.inference_mode()
@pytest.mark.parametrize("is_contiguous", [False, True])
def test_expanded_heads_attend_as_in_float64(is_contiguous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded_latents, "SCRATCH_ELEMENTS", 2 * 1024 * (24 + 16))
    monkeypatch.setattr(expanded_latents, "MAX_BYTES", 2 * 2 * 18 * 200 * 4)  # two heads at a time
    heads, nope, rope, value, latent = 5, 12, 6, 10, 20
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(heads * (nope + value), latent, generator=draw)
    sizes = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value, "kv_lora_rank": latent}
    latents = Latents(SimpleNamespace(kv_b_proj=SimpleNamespace(weight=weight), **sizes))
    expansion = Expansion(latents, "cpu", 256, is_contiguous=is_contiguous)
    for queries, context in ((70, 70), (1, 90), (65, 200)):
        stored = torch.randn(context, latent + rope, generator=draw)
        query = torch.randn(queries, heads, nope + rope, generator=draw)
        both = (stored[:, :latent] @ weight.T).view(context, heads, nope + value)
        rotated = stored[:, None, latent:].expand(-1, heads, -1)
        key = torch.cat((both[..., :nope], rotated), -1)
        starts = np.array([0, queries])
        truth = reference_attention(query, [key], [both[..., nope:]], starts, scale=0.2)
        found = expansion.attend(latents, query, stored, 0.2)
        torch.testing.assert_close(found.double(), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_contiguous", [False, True])
def test_greedy_tokens_of_long_prompts(
    is_contiguous: bool, folder: Path, chunks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_contiguous:  # as on a GPU

        def make(model: torch.nn.Module, name: str, most: int) -> Expansion:
            latents = find_latents(model)
            assert latents is not None
            return Expansion(latents, name, most, is_contiguous=True)

        monkeypatch.setattr(rewritten_model, "make_expansion", make)
    long, short, tail = some_tokens(150, 1), some_tokens(30, 2), some_tokens(130, 3)
    branch = [*long[:107], *tail]
    prompts: list[Sequence[int]] = [long, short, branch]
    model = reference(folder)
    wanted = [expected(model, prompt) for prompt in prompts]
    llm = make_llm(folder, **LIMITS)
    assert [generate(llm, prompt)[0] for prompt in prompts] == wanted
    # The whole prompt; and the rest of the branch behind its cached prefix.
    assert set(chunks) == {(150, 150), (130, 237)}
    chunks.clear()
    llm.engine.cache.reset()
    assert generate(llm, *prompts) == wanted  # beside rows that stay absorbed, in a pool too small for all
    assert chunks
    turn = [*long, *wanted[0], *tail[:90]]
    assert generate(llm, turn)[0] == expected(model, turn)
    llm.engine.cache.check()


def test_deterministic_mode_expands_nothing(tmp_path: Path, chunks: list[tuple[int, int]]) -> None:
    folder = save_tiny_model(tmp_path / "model", "minicpm3")
    generate(make_llm(folder, **LIMITS, deterministic=True), some_tokens(150, 1))
    assert not chunks


def test_expanded_chunks_read_what_narrow_caches_hold(folder: Path, chunks: list[tuple[int, int]]) -> None:
    llm = make_llm(folder, **LIMITS, kv_cache_dtype="int8")
    prompt = some_tokens(150, 1)
    cold = generate(llm, prompt)
    assert chunks
    assert generate(llm, prompt) == cold
