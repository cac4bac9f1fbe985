# SPDX-License-Identifier: Apache-2.0
"""The embedded model on two and three processes: 3 KV heads as 2 + 1, and one each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fuzzing import examples

from radixkv import LLM, SamplingParams
from radixkv.model.cpu_layers.rewrite import has_vector_kernels
from radixkv.model.warm_up import idle_batch

pytestmark = pytest.mark.nightly

TOPICS = ["cats", "rivers", "music", "history", "physics", "chess", "bread", "trains", "planets", "oceans"]
QUESTIONS = (
    "What are {}?",
    "Write a poem about {}.",
    "{} and mathematics:",
    "Name 3 kinds of {}",
    "def {}(x):",
)
PROMPTS = [question.format(topic) for topic in TOPICS for question in QUESTIONS][: examples(10)]
LONG_PROMPT = "Ranks compute together, and nobody can tell. " * 30
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def computed(num_ranks: int) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens after each prompt, and the logits [tokens, V] of all prompts' tokens, a long one's last."""
    options = {"num_blocks": 512, "max_model_len": 1024, "dtype": "float32", "warm_up": "off"}
    with LLM(tensor_parallel=num_ranks, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        encoded = [llm.tokenizer.encode(prompt) for prompt in [*PROMPTS, LONG_PROMPT]]
        rows = []
        for tokens in encoded:
            batch = idle_batch([len(tokens)], [len(tokens)], 512, 16)
            batch.token_ids = np.array(tokens, np.int64)
            batch.write_slots = np.arange(len(tokens), dtype=np.int64)
            rows.append(llm.engine.runner.execute(batch).clone())
        return [list(output.outputs[0].token_ids) for output in outputs], torch.cat(rows)


def test_tokens_and_logits_are_those_of_one_rank() -> None:
    tokens, logits = computed(1)
    for num_ranks in (2, 3):
        found, close = computed(num_ranks)
        assert found == tokens
        assert float((close - logits).abs().max()) < 1e-4
        if has_vector_kernels():  # no sum depends on how the others are shared out
            assert torch.equal(close, logits)
