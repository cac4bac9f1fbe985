# SPDX-License-Identifier: Apache-2.0
"""Tiny models over the interpreted Triton kernels, for the traffic of small pools (`pool_traffic`).

Steps are replayed as recorded ones are on a GPU, by a capture that runs them again. Greedy answers are those
of transformers: each of their tokens has the largest logit, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from paged_language_model import END, VOCAB
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from radixkv.cache.states.checkpoint import GRID
from radixkv.cache.states.window_pool import WindowSpec
from radixkv.engine.config import EngineConfig
from radixkv.model.block_copy import BlockCopy
from radixkv.model.cuda_graphs import StepGraphs
from radixkv.model.host_copies import HostCopies
from radixkv.model.loading.loader import load_model
from radixkv.model.runner import ModelRunner, StepLimits
from radixkv.scheduling.batch import Batch
from radixkv_kernels.states import StateSpec

#: What runs by night -> a name of `tiny_configs`, and what is changed.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {"num_hidden_layers": 2}),
    "windows": ("gemma3", {"sliding_window": 20}),
    "states": ("qwen3_5_text", {}),
    "convolutions": ("lfm2", {}),
    "both": ("lfm3", {}),
    "latents": ("minicpm3", {"num_hidden_layers": 2}),
    "latents and experts": ("deepseek-v3", {"num_hidden_layers": 2}),
    "experts": ("qwen3-moe", {"num_hidden_layers": 2}),
}
#: Two logits so near that rounding may exchange them; other tokens' differ by some tenths.
TIE = 5e-3


class CopiesAtOnce(HostCopies):
    """Copies that are over when they are asked for, so that a seed is the same run each time."""

    def save(
        self, places: Sequence[int], size: int, read: Callable[[int, np.ndarray[Any, Any]], None]
    ) -> BlockCopy:
        copy = super().save(places, size, read)
        self.finish()
        return copy


class InterpretedRunner(ModelRunner):
    """A runner whose steps fail where the test says so, and whose copies are made at once.

    Attributes:
        copies, violations: of scripted models; here there are none.
    """

    copies: ClassVar[list[BlockCopy]] = []
    violations: ClassVar[list[str]] = []
    copies_at_once = True
    fail_if: Callable[[Batch], bool] | None = None

    @property
    def num_replayed(self) -> int:
        """Steps that were replayed."""
        return 0 if self.graphs is None else self.graphs.replayed

    def execute(self, batch: Batch) -> torch.Tensor:
        logits = super().execute(batch)
        if self.fail_if is not None and self.fail_if(batch):
            raise RuntimeError("a kernel failed")
        return logits


class InterpretedModel:
    """One model and its answers.

    Args:
        kind: in `KINDS`.

    Attributes:
        longest: most tokens of prompt and answer.
        num_checked: tokens compared so far.
        num_near: tokens that were not the first ones, by as much as rounding makes.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        name, changes = KINDS[kind]
        ids = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
        self.folder = save_tiny_model(folder, name, vocab_size=VOCAB, **ids, **changes)
        self._reference = AutoModelForCausalLM.from_pretrained(
            self.folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.longest = 2 * GRID + 20 if kind in ("states", "convolutions", "both", "windows") else 48
        self._frees_windows = kind in ("windows", "both")
        self.kind, self.num_checked, self.num_near = kind, 0, 0

    def runner(
        self,
        random: np.random.Generator,
        num_blocks: int,
        block_size: int,
        limits: StepLimits,
        fail_if: Callable[[Batch], bool],
    ) -> InterpretedRunner:
        """A runner with hardly enough memory for states and windows."""
        loaded = load_model(EngineConfig(model=str(self.folder), device="cpu"), show_progress=False)
        attention, states = loaded.attention, None
        most = int(random.integers(1, min(limits.max_num_seqs, 4) + 1))
        if self._frees_windows:
            attention = attention.freeing_windows()
        layout = attention.layout(num_blocks, block_size, loaded.dtype, loaded.device, None)
        if layout.window is not None:
            spec = WindowSpec(layout.window, 0, limits.max_num_tokens)
            needed = most * spec.blocks_per_request(block_size) - (-limits.max_num_tokens // block_size)
            layout = layout.with_blocks(num_blocks, needed + int(random.choice([0, 3, 40])))
        if attention.states:
            num_slots = 2 * most + int(random.choice([0, 1, 6]))
            states = StateSpec(attention.states, num_slots, num_slots // 2, keeps_values=True)
        runner = InterpretedRunner(
            loaded,
            layout,
            limits,
            backend="triton",
            states=states,
            deterministic=bool(states is None and random.random() < 0.2),
        )
        for tensor in runner.kv.tensors():  # padded rows may attend to K/V that nobody wrote
            tensor.view(torch.uint8).zero_()
        if random.random() < 0.7:
            runner.graphs = StepGraphs(
                runner.model,
                runner.kv,
                runner.backend,
                max_rows=limits.max_num_tokens,
                row_multiple=runner.row_multiple,
                record=run_again,
                states=runner.states,
                windows=runner.windows,
            )
        runner.fail_if = fail_if
        for part in (runner, runner.states, runner.windows):
            if part is not None:
                part.host_copies = CopiesAtOnce()
        return runner

    def check(self, prompt: list[int], answer: list[int], *, ended: bool) -> None:
        """Assert that an answer is transformers', with an end after it where `ended`."""
        if ended and (not answer or answer[-1] != END):
            answer = [*answer, END]
        if not answer:
            return
        text = torch.tensor([prompt + answer[:-1]])
        positions = torch.arange(text.shape[1])[None]
        with torch.inference_mode():
            logits = self._reference(input_ids=text, position_ids=positions, use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 :]
        behind = logits.amax(-1) - logits[torch.arange(len(answer)), torch.tensor(answer)]
        self.num_checked += len(answer)
        self.num_near += int((behind > 0).sum())
        worst = int(behind.argmax())
        assert behind[worst] < TIE, (
            f"token {worst} of an answer to {len(prompt)} tokens is {answer[worst]}, "
            f"{float(behind[worst]):.3g} behind {int(logits[worst].argmax())}"
        )


def run_again(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands for CUDA's capture: the result keeps its place, and a replay takes no arguments."""
    result = step().clone()
    return lambda: result.copy_(step()), result  # type: ignore[return-value]
