# SPDX-License-Identifier: Apache-2.0
"""Experts whose weights stay the blocks of a GGUF file, and routers whose rows do not depend on the batch.

Rows are sorted by expert, each expert multiplies its own, and the results of a token's experts are added up
in the order in which its router named them: a token's bits depend on that token only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from radixkv.model.cpu_layers.packed_linear import PackedLinear
from radixkv.model.decoder_layers import StoredExperts
from radixkv_kernels.cpu.linear.block_experts import ExpertProduct
from radixkv_kernels.cpu.linear.block_rows import BlockRows

_Array = np.ndarray[Any, Any]
#: Rows of experts that are computed at a time, at most: their gates take memory.
_MAX_ROWS = 8192


class SortedExperts(StoredExperts):
    """Experts of a layer, in the place of transformers' module of all experts.

    Args:
        plain: that module, whose activation is kept, not its weights.
        own: range of the experts whose weights it has; results of other experts count as zero.
    """

    def __init__(self, plain: Any, own: range) -> None:
        super().__init__()
        self.own = own
        self.num_experts = int(plain.num_experts)
        #: Without gates, the activation of ups.
        self.apply_gate = plain._apply_gate if plain.has_gate else plain.act_fn
        #: Gates and ups alternate in the input of `apply_gate`.
        self.alternate = plain.has_gate and not plain.is_concatenated

    def forward(self, states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [T, W], int64 [T, K] the experts of each row, float32 [T, K] their weights -> [T, W]."""
        size = max(1, _MAX_ROWS // indices.shape[1])
        parts = zip(states.split(size), indices.split(size), weights.split(size), strict=True)
        return torch.cat([self._combined(*part) for part in parts])

    def _combined(self, states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        count, chosen = indices.shape
        flat = indices.reshape(-1).numpy()
        order = torch.from_numpy(np.argsort(flat, kind="stable"))
        counts = np.bincount(flat, minlength=self.num_experts)
        before, after = (int(counts[:end].sum()) for end in (self.own.start, self.own.stop))
        order, counts = order[before:after], counts[self.own.start : self.own.stop]
        outputs = torch.zeros(len(flat), states.shape[1])
        experts = np.flatnonzero(counts)
        if len(experts):
            outputs[order] = self.outputs(states[order // chosen], experts, counts[experts])
        outputs = outputs.view(count, chosen, -1).mul_(weights.unsqueeze(-1))
        total = outputs[:, 0].clone()
        for each in range(1, chosen):
            total += outputs[:, each]
        return total

    def outputs(self, rows: torch.Tensor, experts: _Array, counts: _Array) -> torch.Tensor:
        """Multiply rows [N, W], sorted: `counts[i]` of them belong to `experts[i]`, counted among its own."""
        raise NotImplementedError

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The gate's function of rows [N, 2 I], the gates first, as transformers has it."""
        if self.alternate:
            gate_up = gate_up.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        found: torch.Tensor = self.apply_gate(gate_up)
        return found.contiguous()


class BlockExperts(SortedExperts):
    """Experts with weights in blocks.

    Args:
        gate_up: products of gates and ups, the gates first.
        down: the last products.
        rows: shared by all layers of a model.
    """

    def __init__(
        self, plain: Any, own: range, gate_up: ExpertProduct, down: ExpertProduct, rows: BlockRows
    ) -> None:
        super().__init__(plain, own)
        self.gate_up, self.down, self.rows = gate_up, down, rows
        activation = type(getattr(plain, "act_fn", None)).__name__
        self.fused = plain.has_gate and not self.alternate and activation in ("SiLU", "SiLUActivation")

    def outputs(self, rows: torch.Tensor, experts: _Array, counts: _Array) -> torch.Tensor:
        own = torch.empty(len(rows), self.gate_up.out_features)
        self.gate_up.multiply(self.rows.quantize(rows, self.gate_up.row_dtype), experts, counts, own)
        dtype = self.down.row_dtype
        inner = self.rows.gated(own, dtype) if self.fused else self.rows.quantize(self.gated(own), dtype)
        return self.down.multiply(inner, experts, counts, torch.empty(len(rows), self.down.out_features))


class PackedExperts(SortedExperts):
    """Experts with weights of 16 or 32 bits, for formats without a kernel.

    Args:
        gate_up, down: a product for each of its own experts; gates come first.
    """

    def __init__(self, plain: Any, own: range, gate_up: list[PackedLinear], down: list[PackedLinear]) -> None:
        super().__init__(plain, own)
        self.gate_up, self.down = gate_up, down

    def outputs(self, rows: torch.Tensor, experts: _Array, counts: _Array) -> torch.Tensor:
        parts = zip(experts.tolist(), rows.split(counts.tolist()), strict=True)
        return torch.cat([self.down[each](self.gated(self.gate_up[each](part))) for each, part in parts])


class RepeatedGate(nn.Module):
    """The gate of a shared expert, one number a row, repeated for each number that it scales.

    torch's sigmoid has other bits in a whole vector than in the remainder, so that the bits of a single
    column would depend on the number of rows.

    Args:
        product: with one output, from as many inputs as the shared expert has outputs.
    """

    def __init__(self, product: PackedLinear) -> None:
        super().__init__()
        self.product = product

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.product(states).repeat_interleave(self.product.in_features, -1)


def fix_router(router: Any) -> None:
    """Make the rows of a router's product independent of each other.

    transformers' routers multiply by `weight` and go on. The product is computed before, by a packed layer,
    and the router gets it together with an identity for its weight, by which nothing is rounded.

    Args:
        router: a module with a `weight` [experts, W] that its forward gives to `linear`, and its width.
    """
    experts, width = router.weight.shape
    plain = nn.Linear(width, experts, bias=False, device="meta")
    plain.weight = nn.Parameter(router.weight.detach(), requires_grad=False)
    product = PackedLinear(plain)
    router.weight = nn.Parameter(torch.eye(experts), requires_grad=False)
    router.hidden_dim = experts

    def multiply(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (product(inputs[0].reshape(-1, width)), *inputs[1:])

    router.register_forward_pre_hook(multiply)


def fix_routing(parent: nn.Module) -> None:
    """Make the rows of the router beside experts independent of each other, and those of a shared gate.

    Args:
        parent: the module that the experts belong to.
    """
    for name, each in list(parent.named_children()):
        if name in ("gate", "router") and type(each) is not nn.Linear and hasattr(each, "weight"):
            fix_router(each)
        elif name == "shared_expert_gate" and isinstance(each, PackedLinear):
            setattr(parent, name, RepeatedGate(each))
