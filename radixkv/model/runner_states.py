# SPDX-License-Identifier: Apache-2.0
"""RunnerStates: the states of a model runner, and a batch's operations on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixkv.model.block_copy import BlockCopy
from radixkv.model.device_copies import DeviceCopies
from radixkv.model.host_copies import HostCopies
from radixkv.model.state_layers.steps import PagedStep
from radixkv.scheduling.batch import Batch, BatchStates
from radixkv.scheduling.length_classes import plain_positions
from radixkv_kernels import Bytes
from radixkv_kernels.registry import make_state_backend
from radixkv_kernels.state_interface import plan_states
from radixkv_kernels.states import PagedStates, StateSpec


class RunnerStates:
    """Memory and kernels of a model's state layers. Not thread-safe.

    Args:
        spec: sizes of the memory.
        backend: attention backend beside them, `cpu` or `triton`.
        device: device of the memory.
        deterministic: see `make_state_backend`.
        copies: the attribute of this name.

    Attributes:
        copies: saves and loads of a GPU's memory, beside the steps; None: a thread reads the CPU's.
        host_copies: what that thread copies.
    """

    def __init__(
        self,
        spec: StateSpec,
        backend: str,
        device: torch.device,
        *,
        deterministic: bool = False,
        copies: DeviceCopies | None = None,
    ) -> None:
        self.copies, self.host_copies = copies, HostCopies()
        self.spec = spec
        self._memory = PagedStates(spec, device)
        self._backend = make_state_backend(backend, deterministic=deterministic)

    def tensors(self) -> list[torch.Tensor]:
        """List the memory's tensors on its device."""
        return [tensor for layer in self._memory.layers() for tensor in (layer.slots, *layer.rings)]

    def clear_hidden(self) -> None:
        """Write zeros where a request without a state begins, after the memory's contents were lost."""
        self._memory.clear_hidden()

    def step(self, batch: Batch) -> PagedStep:
        """Return the step that the layers call for a batch; O(tokens / grid + requests).

        A batch without requests, as run before the first one, may leave anything in the rings.
        """
        states = batch.states
        starts = plain_positions(batch)[batch.query_starts[:-1]]
        if states is None:
            assert not batch.entries, f"{batch!r} says nothing of the states of a model that has some"
            states = BatchStates.empty(len(starts))
            states.ring_rows[:] = np.arange(len(starts)) % self.spec.num_rings
            starts = np.zeros_like(starts)
        written = [*states.target_slots.tolist(), *(save.slot for save in states.saves)]
        self.host_copies.before_writing(written)
        plan = plan_states(
            self.spec,
            batch.query_starts,
            starts,
            states.base_slots,
            states.base_positions,
            states.ring_rows,
            states.target_slots,
            states.target_positions,
            states.saves,
        )
        return PagedStep(self._backend, self._memory, plan)

    def stage(self, step: PagedStep, rows: int, max_rows: int, *, large: bool = False) -> bool | None:
        """Bring a step to where recorded launches of `rows` rows read it; see `StateBackend.stage`.

        Args:
            large: take the launches for chunks of prompts, whether they are needed or not.

        Returns:
            Whether they are those for chunks of prompts; None: the step fits into none.
        """
        device = self._memory.layers()[0].slots.device
        for larger in (True,) if large else (False, True):
            if self._backend.stage(step.plan, rows, max_rows, large=larger, device=device):
                return larger
        return None

    @property
    def num_slots(self) -> int:
        return self.spec.num_slots

    @property
    def bytes_per_slot(self) -> int:
        return self.spec.bytes_per_slot

    @property
    def num_bytes(self) -> int:
        return self.spec.num_bytes

    def save(self, slots: Sequence[int]) -> BlockCopy:
        """Copy slots out; see `radixkv.engine.runner.StateSlots`."""
        if self.copies is not None:
            return self.copies.save(self._memory.gather_slots(slots))
        return self.host_copies.save(slots, self.spec.bytes_per_slot, self._memory.read)

    def load(self, slots: Sequence[int], data: Sequence[Bytes]) -> None:
        """Fill slots; see `radixkv.engine.runner.StateSlots`."""
        if self.copies is None:
            self.host_copies.before_writing(slots)
            self._memory.load(slots, data)
            return
        self.copies.load(
            lambda rows: self._memory.scatter_slots(slots, rows),
            *(data, len(slots), self.spec.bytes_per_slot, f"{len(slots)} states are"),
        )
