# SPDX-License-Identifier: Apache-2.0
"""PagedStates: the storage of layers that keep a state instead of keys and values.

Of each state layer there are *slots*, states after a whole number of grid steps of `GRID` tokens, and
*rings*, what each running request has added since its slot::

    position    base                 start                end
                 | ring: 0 .. GRID tokens  | rows of a step  |
    slot ->  state after base tokens

The state at any position follows from a slot and a ring. A slot is written once; a ring's length is the
caller's, so that taking back guessed tokens costs nothing.

    kind     sizes                               slot                 ring
    conv     channels, taps                      taps - 1 inputs      inputs
    delta    key heads, value heads, key size,   [heads, key, value]  keys as columns, writes, decays (on a
             value size                                               GPU also values and betas)
    ssd      groups, heads, key size,            [heads, key, value]  keys as columns, writes, decays
             value size
    scan     channels, groups, state size        [channels, state]    inputs, and the state at its end
    lru      channels                            [channels]           inputs, and the state at its end
    kda      heads, key size, value size         [heads, key, value]  keys, writes, decays of each channel
                                                                      (on a GPU also values and betas)

States are float32: rounded to 16 bits they would be off by percents after some thousand tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixkv_kernels.kv_cache import Bytes, saved_rows, sent_index

#: Tokens between two positions at which states can be kept.
GRID = 64
#: Slots behind the last one that callers see: a zero state, and two that a step's passing states go to.
HIDDEN_SLOTS = 3
#: Most columns, in floats, by which a head's size is rounded up.
_ROUND = 8


@dataclass(frozen=True)
class StateShape:
    """State that one layer keeps.

    Args:
        layer: its number in the model.
        kind, sizes: see the module's table.

    Raises:
        ValueError: a kind that does not exist, or more taps than a ring has inputs.
    """

    layer: int
    kind: str
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a state is one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.kind == "conv" and not 1 < self.sizes[1] <= GRID:
            raise ValueError(f"a convolution has 2 to {GRID} taps, not {self.sizes[1]}")

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """Shape of the state, float32."""
        sizes = self.sizes
        if self.kind == "conv":
            return sizes[1] - 1, sizes[0]
        if self.kind in ("delta", "ssd"):
            return sizes[1], rounded(sizes[2]), rounded(sizes[3])
        if self.kind == "kda":
            return sizes[0], rounded(sizes[1]), rounded(sizes[2])
        return (sizes[0], sizes[2]) if self.kind == "scan" else (sizes[0],)

    @property
    def ring_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parts of a ring, float32."""
        sizes = self.sizes
        if self.kind == "conv":
            return ((GRID, sizes[0]),)
        if self.kind in ("delta", "ssd"):
            groups, heads, key, value = sizes[0], sizes[1], rounded(sizes[2]), rounded(sizes[3])
            return (groups, key, GRID), (heads, GRID, value), (heads, GRID)
        if self.kind == "kda":
            heads, key, value = sizes[0], rounded(sizes[1]), rounded(sizes[2])
            return (heads, GRID, key), (heads, GRID, value), (heads, GRID, key)
        if self.kind == "scan":
            channels, groups, state = sizes
            return (GRID, channels), (GRID, channels), (GRID, groups, state), (channels, state)
        return (GRID, sizes[0]), (GRID, sizes[0]), (sizes[0],)

    @property
    def value_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parts of a ring for values and betas of delta rules, float32; see `StateSpec`."""
        if self.kind not in ("delta", "kda"):
            return ()
        heads, value = self.sizes[-3], rounded(self.sizes[-1])
        return (heads, GRID, value), (heads, GRID)

    @property
    def bytes_per_slot(self) -> int:
        return 4 * int(np.prod(self.slot_shape))


KINDS = ("conv", "delta", "ssd", "scan", "lru", "kda")


def rounded(size: int) -> int:
    """The size of a head in memory: kernels work on whole vectors."""
    return -(-size // _ROUND) * _ROUND


@dataclass(frozen=True)
class StateSpec:
    """Sizes of the storage of a model's states.

    Args:
        shapes: of all state layers; a layer may have several of different kinds.
        num_slots: states that are kept, all layers together.
        num_rings: most requests that run at once.
        keeps_values: rings of delta rules hold values and betas, too, for a backend that folds a ring as one
            chunk (Triton's) in place of adding up what its tokens wrote.
    """

    shapes: tuple[StateShape, ...]
    num_slots: int
    num_rings: int
    keeps_values: bool = False

    def ring_shapes(self, shape: StateShape) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parts of a ring of one of the shapes, float32."""
        return shape.ring_shapes + (shape.value_shapes if self.keeps_values else ())

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a state, all layers together."""
        return sum(shape.bytes_per_slot for shape in self.shapes)

    @property
    def bytes_per_ring(self) -> int:
        """Bytes per running request, all layers together."""
        return 4 * sum(int(np.prod(part)) for shape in self.shapes for part in self.ring_shapes(shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots and rings."""
        return self.num_slots * self.bytes_per_slot + self.num_rings * self.bytes_per_ring


@dataclass(frozen=True)
class LayerStates:
    """Memory of one shape.

    Attributes:
        slots: float32 [num_slots + HIDDEN_SLOTS, *slot_shape]; the first hidden one is zero.
        rings: for each part of a ring, float32 [num_rings, *its shape].
        lengths: int64 [num_rings], of kinds that keep the state at a ring's end: the tokens since the base
            that it sums up. -1: none.
    """

    shape: StateShape
    slots: torch.Tensor
    rings: tuple[torch.Tensor, ...]
    lengths: torch.Tensor


class PagedStates:
    """States of one model on a device. Memory is not cleared: unwritten slots and rings may hold anything.

    Attributes:
        spec: the sizes it was made with.
    """

    def __init__(self, spec: StateSpec, device: torch.device | None = None) -> None:
        self.spec = spec
        self._layers: dict[tuple[int, str], LayerStates] = {}
        for shape in spec.shapes:
            slots = torch.empty(spec.num_slots + HIDDEN_SLOTS, *shape.slot_shape, device=device)
            rings = tuple(
                torch.empty(spec.num_rings, *part, device=device) for part in spec.ring_shapes(shape)
            )
            lengths = torch.full((spec.num_rings,), -1, dtype=torch.int64)
            self._layers[shape.layer, shape.kind] = LayerStates(shape, slots, rings, lengths)
        self.clear_hidden()

    def clear_hidden(self) -> None:
        """Write the state before the first token."""
        for layer in self._layers.values():
            layer.slots[self.spec.num_slots] = 0

    def __repr__(self) -> str:
        spec = self.spec
        size = spec.num_slots * spec.bytes_per_slot / 2**20
        return f"PagedStates({len(spec.shapes)} states, {spec.num_slots} slots, {size:.1f} MiB)"

    def of(self, layer: int, kind: str) -> LayerStates:
        """The memory of a layer's state of some kind."""
        return self._layers[layer, kind]

    def layers(self) -> list[LayerStates]:
        """All of it, in the order of `spec.shapes`."""
        return list(self._layers.values())

    def read(self, slot: int, row: np.ndarray) -> None:
        """Copy a slot, layer after layer, into uint8 [spec.bytes_per_slot]; on any thread while it is not
        written. A GPU's memory is waited for."""
        end = 0
        for part in self._layers.values():
            source = part.slots[slot].cpu().numpy().reshape(-1).view(np.uint8)
            start, end = end, end + len(source)
            np.copyto(row[start:end], source)

    def gather_slots(self, slots: Sequence[int]) -> torch.Tensor:
        """Return what `read` copies on the device, uint8 [len(slots), bytes_per_slot]; waits for nothing."""
        parts = [
            part.slots.index_select(0, sent_index(slots, part.slots.device)).flatten(1).view(torch.uint8)
            for part in self._layers.values()
        ]
        return torch.cat(parts, 1)

    def scatter_slots(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        """Write what `gather_slots` returned into slots; waits for nothing."""
        end = 0
        for part in self._layers.values():
            start, end = end, end + part.shape.bytes_per_slot
            own = rows[:, start:end].contiguous().view(torch.float32)
            index = sent_index(slots, part.slots.device)
            part.slots.index_copy_(0, index, own.view(len(rows), *part.slots.shape[1:]))

    def load(self, slots: Sequence[int], data: Sequence[Bytes]) -> None:
        """Write what `read` copied into slots, which need not be the ones it came from.

        Raises:
            ValueError: they are not as many or not as long as they should be; nothing was written.
        """
        rows = saved_rows(data, len(slots), self.spec.bytes_per_slot, f"{len(slots)} states are")
        for slot, row in zip(slots, rows, strict=True):
            end = 0
            for part in self._layers.values():
                target = part.slots[slot]
                start, end = end, end + part.shape.bytes_per_slot
                if target.device.type == "cpu":
                    np.copyto(target.numpy().reshape(-1).view(np.uint8), row[start:end])
                else:
                    source = torch.from_numpy(row[start:end].copy())
                    target.copy_(source.view(torch.float32).view(target.shape))
