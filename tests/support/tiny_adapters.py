# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of tiny models, written by PEFT itself with random matrices, and PEFT's greedy answers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def peft_model(base: Any, seed: int, **options: Any) -> Any:
    """A base model, or that of a folder, with one random adapter whose matrices are both far from zero."""
    from peft import LoraConfig, get_peft_model  # takes seconds, and few tests need it

    chosen = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(plain_model(base) if isinstance(base, Path) else base, LoraConfig(**chosen))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def plain_model(base: Path) -> Any:
    """The base model of transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def save_adapter(model: Any, folder: Path) -> Path:
    """Write a model's adapter as PEFT does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: at these sizes, waiting for others takes longer than computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens, each computed from all before it, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def last_logits(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """Logits [V] of the token after the prompt."""
    logits: torch.Tensor = model(torch.tensor([list(prompt)]), use_cache=False).logits[0, -1]
    return logits
