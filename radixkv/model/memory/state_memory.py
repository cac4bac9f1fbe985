# SPDX-License-Identifier: Apache-2.0
"""Memory of a model's states: a share of the K/V cache's, or a given size; refusals give the numbers."""

from __future__ import annotations

from dataclasses import replace

import torch

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.attention.attention_shape import AttentionShape
from radixkv_kernels.registry import numba_available
from radixkv_kernels.states import GRID, StateSpec

#: Largest share of states in the memory for K/V and states together, without --state-memory.
_LARGEST_SHARE = 0.5
#: Slots that one request needs: its last state, and the next one.
_SLOTS_PER_REQUEST = 2
_MIB = 2**20


def check_states_supported(config: EngineConfig, attention: AttentionShape, device: torch.device) -> None:
    """Refuse a model with state layers where it can't be computed.

    Raises:
        ConfigError: on a CPU without numba, or with blocks larger than the grid.
    """
    if not attention.states:
        return
    if config.block_size > GRID:
        raise ConfigError(
            f"--block-size {config.block_size} is too large for a model with states, which are kept every "
            f"{GRID} tokens; use at most {GRID}"
        )
    if device.type == "cpu" and not numba_available():
        raise ConfigError(
            "this model has layers that keep a state, whose kernels need numba; install radixkv[cpu]"
        )


def size_states(
    config: EngineConfig, attention: AttentionShape, memory: int, block_bytes: int, device: torch.device
) -> StateSpec | None:
    """Decide the number of states; None: the model keeps none.

    Without --state-memory, as many as there are grid points in the K/V that fits beside them, and at most
    half of the memory. Two of them let one request run, whose ring of latest inputs counts with them.

    Args:
        memory: bytes for K/V and states together.
        block_bytes: K/V of one block.
        device: device of the model; a GPU's kernels keep more in rings.

    Raises:
        ConfigError: --state-memory does not hold the states of one request.
    """
    if not attention.states:
        return None
    one = StateSpec(attention.states, 1, 1, keeps_values=device.type == "cuda")
    most_rings = config.max_num_seqs

    def fitting(size: float, beside: int = 0) -> int:
        """Number of states that fit, with rings for their running requests and `beside` bytes each."""
        each = one.bytes_per_slot + beside
        num_slots = int(size // (each + one.bytes_per_ring / _SLOTS_PER_REQUEST))
        if num_slots < _SLOTS_PER_REQUEST * most_rings:
            return num_slots
        return int((size - most_rings * one.bytes_per_ring) // each)

    if config.state_memory is not None:
        num_slots = fitting(config.state_memory)
    else:
        num_slots = fitting(memory * _LARGEST_SHARE)
        if config.num_blocks is None:
            num_slots = min(num_slots, fitting(memory, GRID // config.block_size * block_bytes))
        else:
            grid_points = -(-config.num_blocks * config.block_size // GRID)
            num_slots = min(num_slots, grid_points + _SLOTS_PER_REQUEST * most_rings)
    if num_slots < _SLOTS_PER_REQUEST:
        count, state, ring = _SLOTS_PER_REQUEST, one.bytes_per_slot / _MIB, one.bytes_per_ring / _MIB
        raise ConfigError(
            f"the states do not fit: one request needs {count} of {state:.1f} MiB and {ring:.1f} MiB for its "
            f"latest inputs, {count * state + ring:.1f} MiB, but there is room for {num_slots}; raise "
            "--state-memory (or --kv-cache-memory)"
        )
    return replace(one, num_slots=num_slots, num_rings=min(most_rings, num_slots // _SLOTS_PER_REQUEST))
