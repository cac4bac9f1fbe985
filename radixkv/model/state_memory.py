# SPDX-License-Identifier: Apache-2.0
"""Memory of a model's states: a share of the K/V cache's, or a given size; refusals give the numbers."""

from __future__ import annotations

import torch

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.attention_shape import AttentionShape
from radixkv_kernels.registry import numba_available
from radixkv_kernels.states import GRID, StateSpec

#: Of the memory for K/V and states together, states get this share at most when nothing is said.
_LARGEST_SHARE = 0.5
#: Slots that one request needs: its last state, and the next one.
_SLOTS_PER_REQUEST = 2
_MIB = 2**20


def check_states_supported(config: EngineConfig, attention: AttentionShape, device: torch.device) -> None:
    """Refuse a model with state layers where it can't be computed.

    Raises:
        ConfigError: on a GPU, in several ranks, with adapters, without numba, or with blocks larger than the
            grid.
    """
    if not attention.states:
        return
    if device.type != "cpu":
        raise ConfigError(
            "this model has layers that keep a state, which radixkv computes on a CPU only; use --device cpu"
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            "this model has layers that keep a state, which can't be shared among ranks; leave "
            "--tensor-parallel out"
        )
    if config.takes_adapters:
        raise ConfigError(
            "this model has layers that keep a state, which can't be computed with adapters; leave --lora "
            "and --lora-dir out, or merge the adapter into its base and serve that"
        )
    if config.block_size > GRID:
        raise ConfigError(
            f"--block-size {config.block_size} is too large for a model with states, which are kept every "
            f"{GRID} tokens; use at most {GRID}"
        )
    if not numba_available():
        raise ConfigError(
            "this model has layers that keep a state, whose kernels need numba; install radixkv[cpu]"
        )


def size_states(
    config: EngineConfig, attention: AttentionShape, memory: int, block_bytes: int
) -> StateSpec | None:
    """Decide the number of states; None: the model keeps none.

    Where nothing is said, as many as there are grid points in the K/V that fits beside them, and at most half
    of the memory. A running request's ring comes on top; its memory is touched when it first runs.

    Args:
        memory: bytes for K/V and states together.
        block_bytes: K/V of one block.

    Raises:
        ConfigError: --state-memory does not hold the states of one request.
    """
    if not attention.states:
        return None
    one = StateSpec(attention.states, 1, 1)
    slot_bytes = one.bytes_per_slot
    if config.state_memory is not None:
        num_slots = config.state_memory // slot_bytes
    else:
        grid_bytes = GRID // config.block_size * block_bytes
        num_slots = min(memory // (grid_bytes + slot_bytes), int(memory * _LARGEST_SHARE) // slot_bytes)
        if config.num_blocks is not None:
            most = (
                -(-config.num_blocks * config.block_size // GRID) + _SLOTS_PER_REQUEST * config.max_num_seqs
            )
            num_slots = min(most, int(memory * _LARGEST_SHARE) // slot_bytes)
    if num_slots < _SLOTS_PER_REQUEST:
        needed = _SLOTS_PER_REQUEST * slot_bytes
        raise ConfigError(
            f"the states do not fit: one request needs {_SLOTS_PER_REQUEST} of {slot_bytes / _MIB:.1f} MiB, "
            f"{needed / _MIB:.1f} MiB, but there is room for {num_slots}; raise --state-memory (or "
            "--kv-cache-memory)"
        )
    return StateSpec(attention.states, num_slots, config.max_num_seqs)
