# SPDX-License-Identifier: Apache-2.0
"""Norms and attention, shared by the rewritten decoder layers of the Llama shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from radixkv.model.adapters.attachment import ProductSlot, SlotOf
from radixkv.model.decoder_layers import DecoderParts
from radixkv.model.parallel.over_ranks import JoinedOverRanks
from radixkv.model.step_context import current_step
from radixkv_kernels.cpu.linear.row_kernels import RowKernels

#: Linear layers of Llama's layer that are computed as one product, in the order of their outputs.
ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


class Scratch:
    """A float32 matrix that all layers write to in turn; grows to the largest batch."""

    def __init__(self) -> None:
        self._data = torch.empty(0)

    @property
    def address(self) -> int:
        """Address of the memory; a larger batch moves it."""
        return self._data.data_ptr()

    def take(self, rows: int, width: int) -> torch.Tensor:
        """[rows, width], with anything in it; valid until the next call."""
        if self._data.numel() < rows * width:
            self._data = torch.empty(rows * width)
        return self._data[: rows * width].view(rows, width)


class LlamaLayer(nn.Module):
    """A layer that stands for a transformers layer, for which `is_plain_llama` holds.

    It takes what transformers passes to its own and returns the same: [1, T, H] -> [1, T, H]. The residual is
    added in place: the input's memory holds the result.

    Args:
        parts: parts of the transformers layer.
        kernels: shared by all layers of a model.

    Attributes:
        merged, output, gate_up, down: its products, which subclasses make.
        gate_columns: gates and ups begin at multiples of this in their product.
    """

    merged: Any
    output: Any
    gate_up: Any
    down: Any
    gate_columns = 1

    def __init__(self, parts: DecoderParts, kernels: RowKernels) -> None:
        super().__init__()
        attention = parts.heads
        self.kernels = kernels
        self.layer_index = attention.layer_index
        self.scale = attention.scale
        self.head_size = attention.head_size
        self.num_heads = attention.num_heads
        self.num_kv_heads = attention.num_kv_heads
        assert parts.gated is not None
        # Plain tuples: looking a submodule up costs as much as the norm of a row.
        norms: Any = (parts.before_attention, parts.before_mlp)  # a Llama layer has both
        self.norms = tuple((norm.weight, norm.eps) for norm in norms)
        self.joined = (attention.joined, parts.gated.joined)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """The layer, in the signature that transformers calls."""
        states = hidden_states[0]
        merged = self.queries_keys_values(states)
        attended = self._attend(merged, position_embeddings, current_step())
        self._add(self.add_attention_output, attended, states, self.joined[0])
        self._add(self.add_mlp_output, self.mlp_rows(states), states, self.joined[1])
        return hidden_states

    @staticmethod
    def _add(
        add: Callable[[torch.Tensor, torch.Tensor], None],
        rows: torch.Tensor,
        states: torch.Tensor,
        joined: JoinedOverRanks | None,
    ) -> None:
        """Add a product to the states: of several ranks, each adds its own columns."""
        if joined is None:
            add(rows, states)
            return
        own = states[:, joined.own_outputs]
        add(joined.join_inputs(rows), own)
        states.copy_(joined.join_outputs(own))

    def adapt(self, slot_of: SlotOf) -> None:
        """See `radixkv.model.adapters.attachment`."""
        self.merged = self.adapted(self.merged, slot_of(ATTENTION_INPUTS))
        self.output = self.adapted(self.output, slot_of(["self_attn.o_proj"]))
        self.gate_up = self.adapted(self.gate_up, slot_of(GATE_UP, self.gate_columns))
        self.down = self.adapted(self.down, slot_of(["mlp.down_proj"]))

    def adapted(self, product: Any, slot: ProductSlot) -> Any:
        """Return the product with the changes of adapters."""
        raise NotImplementedError

    def queries_keys_values(self, states: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, (Hq + 2 Hkv) D]: the first norm, and q, k and v as one product."""
        raise NotImplementedError

    def add_attention_output(self, attended: torch.Tensor, states: torch.Tensor) -> None:
        """Add the output product of [T, Hq D] to the states."""
        raise NotImplementedError

    def mlp_rows(self, states: torch.Tensor) -> torch.Tensor:
        """The second norm and the MLP of the states, up to its last product."""
        raise NotImplementedError

    def add_mlp_output(self, rows: torch.Tensor, states: torch.Tensor) -> None:
        """Add the MLP's last product, of the output of `mlp_rows`, to the states."""
        raise NotImplementedError

    def _attend(
        self, merged: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: Any
    ) -> torch.Tensor:
        """Rope in place, write, attend: [T, Hq D]."""
        attended: torch.Tensor = step.attend(
            self.layer_index, *self._rotated_heads(merged, position_embeddings), scale=self.scale
        )
        return attended.reshape(len(merged), -1)

    def _rotated_heads(
        self, merged: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rope in place: queries, keys and values [T, heads, D]."""
        cosines, sines = position_embeddings
        rotated = self.num_heads + self.num_kv_heads
        self.kernels.rotate(merged, rotated, cosines[0], sines[0])
        heads = merged.view(len(merged), -1, self.head_size)
        return heads[:, : self.num_heads], heads[:, self.num_heads : rotated], heads[:, rotated:]
