# SPDX-License-Identifier: Apache-2.0
"""HandMade: steps of one sequence over a runner of a model with states, without a scheduler."""

from __future__ import annotations

import numpy as np
import torch

from radixkv.model.runner import ModelRunner
from radixkv.scheduling.batch import Batch, BatchStates, StateSave
from radixkv_kernels.states import GRID

#: Tokens of a block, and blocks of the sequence.
BLOCK, NUM_BLOCKS = 16, 9


class HandMade:
    """One sequence's steps over a runner, with the slots that a scheduler would give it."""

    def __init__(self, runner: ModelRunner, tokens: list[int], base: int = 0, slot: int = -1) -> None:
        self.runner, self.tokens = runner, tokens
        self.base, self.slot, self.start = base, slot, base

    def run(self, ends: list[int], saves: dict[int, int] | None = None) -> torch.Tensor:
        """Logits of all rows, in steps that end at `ends`; `saves` says where states at positions go."""
        return torch.cat([self._step(end, saves or {}) for end in ends]).float()

    def _step(self, end: int, saves: dict[int, int]) -> torch.Tensor:
        start, count = self.start, end - self.start
        states = BatchStates.empty(1)
        states.base_slots[0], states.base_positions[0] = self.slot, self.base
        target = max(self.base, (end - 1) // GRID * GRID)
        states.target_positions[0] = target
        if target > self.base:
            states.target_slots[0] = int(self.slot == 0)
        states.saves = [StateSave(0, at, slot) for at, slot in saves.items() if self.base < at <= end]
        batch = Batch(
            entries=[],
            token_ids=np.array(self.tokens[start:end]),
            positions=np.arange(start, end),
            query_starts=np.array([0, count], np.int32),
            context_lengths=np.array([end], np.int32),
            block_tables=[np.arange(NUM_BLOCKS, dtype=np.int32)],
            write_slots=np.arange(start, end),
            write_rows=None,
            logit_rows=np.arange(count),
            copy_groups=[],
            states=states,
        )
        out = self.runner.execute(batch)
        if target > self.base:
            self.slot, self.base = int(states.target_slots[0]), target
        self.start = end
        return out
