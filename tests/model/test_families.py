# SPDX-License-Identifier: Apache-2.0
"""Every family against transformers' own eager attention: float32 logits within 1e-4, cold and hot.

The path under test is the product's: `load_model` -> attention hook -> `ModelRunner` with paged K/V. Cold:
the prompt in one batch, or in chunks. Hot: a second request whose block table begins with the first one's
blocks, while a third decodes in the same batch. Prompts are several windows long.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from nightly import by_day
from tiny_configs import FAMILIES, VOCAB_SIZE
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from radixkv.engine.config import EngineConfig
from radixkv.model.loading.loader import LoadedModel, load_model
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.scheduling.batch import Batch

BLOCK_SIZE = 8
TOLERANCE = 1e-4


class Family:
    """One loaded model with its paged runner, and the reference beside it."""

    def __init__(self, folder: Path) -> None:
        self.loaded: LoadedModel = load_model(
            EngineConfig(model=str(folder), device="cpu"), show_progress=False
        )
        self.reference = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        spec = self.loaded.attention.layout(64, BLOCK_SIZE, self.loaded.dtype, self.loaded.device)
        self.runner = ModelRunner(self.loaded, spec, StepLimits(256, 8, 256), backend="cpu")

    @torch.inference_mode()
    def expected(self, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), V] logits of the reference, computed in one go without a cache."""
        logits: torch.Tensor = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits

    def run(self, *rows: tuple[Sequence[int], int, int, np.ndarray]) -> list[torch.Tensor]:
        """Compute tokens [start, end) of each `(tokens, start, end, block table)` in one batch."""
        counts = [end - start for _, start, end, _ in rows]
        positions = np.concatenate([np.arange(start, end) for _, start, end, _ in rows])
        tables = np.concatenate([np.full(n, i) for i, n in enumerate(counts)])
        slots = [
            int(rows[i][3][p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for i, p in zip(tables.tolist(), positions.tolist(), strict=True)
        ]
        batch = Batch(
            entries=[],
            token_ids=np.concatenate([np.asarray(tokens[start:end]) for tokens, start, end, _ in rows]),
            positions=positions,
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lengths=np.asarray([end for _, _, end, _ in rows], dtype=np.int32),
            block_tables=[table for *_, table in rows],
            write_slots=np.asarray(slots, dtype=np.int64),
            write_rows=None,
            logit_rows=np.arange(sum(counts)),
            copy_groups=[],
        )
        return list(torch.split(self.runner.execute(batch), counts))


#: Models of each kind of block and of attention.
BY_DAY = ("llama", "qwen3-moe", "gemma2", "gemma3", "gpt-oss", "phi", "gpt-neox", "mistral-window")


@pytest.fixture(scope="module", params=by_day(FAMILIES, *BY_DAY))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(save_tiny_model(tmp_path_factory.mktemp(request.param), request.param))


def some_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def blocks(*ids: int) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() < TOLERANCE


def test_logits_are_far_from_constant(family: Family) -> None:
    """Guards the other tests: a model whose context hardly matters would agree with anything."""
    tokens = some_tokens(45, 1)
    changed = list(tokens)
    changed[40] = (changed[40] + 7) % VOCAB_SIZE
    difference = (family.expected(tokens)[-1] - family.expected(changed)[-1]).abs().max().item()
    assert difference > 100 * TOLERANCE


def test_cold_in_one_batch(family: Family) -> None:
    tokens = some_tokens(45, 2)
    (logits,) = family.run((tokens, 0, 45, blocks(5, 2, 9, 1, 30, 7)))
    assert_close(logits, family.expected(tokens))


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.nightly), 7, 16])
def test_cold_in_chunks(family: Family, chunk: int) -> None:
    tokens = some_tokens(41, 3)
    table = blocks(8, 3, 6, 20, 11, 4)
    parts = [family.run((tokens, start, min(start + chunk, 41), table))[0] for start in range(0, 41, chunk)]
    assert_close(torch.cat(parts), family.expected(tokens))


def test_hot_beside_others(family: Family) -> None:
    """Two requests on cached blocks of a third, beside its decode and a cold prompt, all in one batch."""
    shared = some_tokens(34, 4)
    owner = blocks(40, 13, 22, 17, 35, 36)
    family.run((shared, 0, 34, owner))
    first = shared[:32] + some_tokens(11, 5)
    second = shared[:24] + some_tokens(1, 6)
    cold = some_tokens(19, 7)
    grown = [*shared, 77]
    logits = family.run(
        (first, 32, 43, np.concatenate([owner[:4], blocks(50, 51)])),
        (grown, 34, 35, owner),
        (second, 24, 25, np.concatenate([owner[:3], blocks(52)])),
        (cold, 0, 19, blocks(53, 54, 55)),
    )
    for actual, tokens, start in zip(logits, (first, grown, second, cold), (32, 34, 24, 0), strict=True):
        assert_close(actual, family.expected(tokens)[start:])


def test_loaded_facts(family: Family) -> None:
    config = family.reference.config
    loaded = family.loaded
    (group,) = loaded.attention.groups
    assert loaded.attention.num_layers == config.num_hidden_layers
    assert group.num_query_heads == config.num_attention_heads
    assert group.num_kv_heads == getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert loaded.max_model_len == 512
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.eos_token_ids == (2,)
    assert not loaded.model.training
