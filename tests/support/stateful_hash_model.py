# SPDX-License-Identifier: Apache-2.0
"""A model with states for engine tests: a paged hash model whose answers come from its slots and rings.

A slot holds the tokens that its state sums up, a ring the tokens since its base. The context from which an
answer is made is read from these, never from the request: a wrong slot, a ring of somebody else or a state of
other tokens gives other tokens. Each context is also compared with the request's at once, and noted in
`violations` where it differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from paged_language_model import PagedHashModel

from radixkv.cache.states.checkpoint import GRID
from radixkv.engine.engine import Engine
from radixkv.model.block_copy import BlockCopy
from radixkv.scheduling.batch import Batch, fold_position

_GARBAGE = np.array([-7], dtype=np.int64)
#: Room for the tokens of a test's longest text.
BYTES_PER_STATE = 1 << 12


class SlotsOfTokens:
    """Slots that hold the tokens which their states sum up; see `radixkv.engine.runner.StateSlots`."""

    bytes_per_slot = BYTES_PER_STATE

    def __init__(self, slots: list[np.ndarray[Any, Any]]) -> None:
        self._slots = slots
        self.num_slots = len(slots)
        self.num_bytes = len(slots) * BYTES_PER_STATE

    def save(self, slots: Sequence[int]) -> BlockCopy:
        rows = np.zeros((len(slots), BYTES_PER_STATE), np.uint8)
        for row, slot in zip(rows, slots, strict=True):
            tokens = self._slots[slot]
            row.view(np.int64)[: 1 + len(tokens)] = [len(tokens), *tokens]
        return BlockCopy(rows)

    def load(self, slots: Sequence[int], data: Sequence[Any]) -> None:
        if [len(row) for row in data] != [BYTES_PER_STATE] * len(slots):
            raise ValueError("states of another model")
        for slot, row in zip(slots, data, strict=True):
            words = np.frombuffer(row, np.int64)
            self._slots[slot] = words[1 : 1 + int(words[0])].copy()


class StatefulHashModel(PagedHashModel):
    """See above.

    Args:
        num_slots: states.
        options: see `PagedHashModel`.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, **options: Any) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.slots: list[np.ndarray[Any, Any]] = [_GARBAGE] * num_slots
        self.states = SlotsOfTokens(self.slots)
        self.rings: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}
        self._contexts: list[np.ndarray[Any, Any]] = []
        self.num_saves = 0

    def check_checkpoints(self, engine: Engine) -> None:
        """Assert that the slot of each checkpoint holds the tokens of its path."""
        cache: Any = engine.cache
        for checkpoint in cache.states:
            assert checkpoint.node is not None
            path = b"".join(node.key for node in cache.tree.index.path(checkpoint.node))
            kept = self.slots[cache.states.state_slot(checkpoint)].astype("<i4").tobytes()
            assert kept == path[: 4 * checkpoint.end], f"{checkpoint!r} is another state"

    def execute(self, batch: Batch) -> torch.Tensor:
        assert batch.states is not None
        if batch.fed_tokens is not None:
            batch.token_ids[:] = batch.fed_tokens.numpy()
        self._contexts = [self._context(batch, r) for r in range(len(batch.entries))]
        try:
            logits = super().execute(batch)
        except BaseException:
            for r in range(len(batch.entries)):
                self.rings[int(batch.states.ring_rows[r])] = 0, _GARBAGE
                if batch.states.target_slots[r] >= 0:
                    self.slots[batch.states.target_slots[r]] = _GARBAGE
            for _, _, slot in batch.states.saves:
                self.slots[slot] = _GARBAGE
            raise
        self._write(batch)
        return logits

    def _context(self, batch: Batch, r: int) -> np.ndarray[Any, Any]:
        """Tokens up to the end of an entry, as base, ring and the step's rows have them."""
        states, entry = batch.states, batch.entries[r]
        assert states is not None
        base = int(states.base_positions[r])
        assert base % GRID == 0
        assert 0 <= entry.start - base <= GRID
        slot = int(states.base_slots[r])
        assert (slot < 0) == (base == 0)
        before = self.slots[slot] if slot >= 0 else np.empty(0, np.int64)
        ring = np.empty(0, np.int64)
        if entry.start > base:
            ring_base, tokens = self.rings[int(states.ring_rows[r])]
            ring = tokens[: entry.start - base] if ring_base == base else _GARBAGE
        rows = batch.token_ids[batch.query_starts[r] : batch.query_starts[r + 1]]
        return np.concatenate([before, ring, rows])

    def _write(self, batch: Batch) -> None:
        states = batch.states
        assert states is not None
        assert len(set(states.ring_rows.tolist())) == len(batch.entries), "two requests share a ring"
        written = [slot for slot in states.target_slots.tolist() if slot >= 0]
        written += [slot for _, _, slot in states.saves]
        assert len(set(written)) == len(written), "a slot is written twice"
        assert not set(written) & set(states.base_slots.tolist()), "a slot is read and written"
        for r, position, slot in states.saves:
            entry = batch.entries[r]
            assert position % GRID == 0
            assert states.base_positions[r] < position <= entry.end
            self.slots[slot] = self._contexts[r][:position]
            self.num_saves += 1
        for r, entry in enumerate(batch.entries):
            base, target = int(states.base_positions[r]), int(states.target_positions[r])
            assert target == fold_position(base, entry.start + entry.count)
            assert (states.target_slots[r] >= 0) == (target > base)
            if target > base:
                assert not entry.draft
                self.slots[states.target_slots[r]] = self._contexts[r][:target]
            self.rings[int(states.ring_rows[r])] = target, self._contexts[r][target:]

    def _read(self, batch: Batch, r: int, length: int) -> np.ndarray[Any, Any]:
        super()._read(batch, r, length)
        return self._contexts[r][:length]

    def _compare(self, batch: Batch, r: int, tokens: np.ndarray[Any, Any]) -> None:
        super()._compare(batch, r, tokens)
        if not np.array_equal(self._contexts[r], tokens):
            text = f"{batch.entries[r]!r} goes on from the state of other tokens"
            self.violations.append(text)
            raise AssertionError(text)
