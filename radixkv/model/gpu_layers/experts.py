# SPDX-License-Identifier: Apache-2.0
"""Routed experts on a GPU, in the place of transformers' modules: at most 12 kernels a block.

    router: product, choice | pairs of each expert | gates, ups and activation | last product | sum

Steps of more than `MAX_ROWS` rows sort them and use torch's grouped product, where weights are plain 16-bit
floats; in deterministic mode all rows take the kernels. A block's shared expert is added in the last kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from radixkv.model.decoder_layers import ACTIVATIONS, StoredExperts
from radixkv.model.step_context import current_rows
from radixkv_kernels import Norm
from radixkv_kernels.triton.experts import MAX_ROWS, Gate, combine, run_experts
from radixkv_kernels.triton.gated import gate_rows
from radixkv_kernels.triton.residual_norm import norm_rows
from radixkv_kernels.triton.router import (
    CHOSEN_SIGMOID,
    LOGITS,
    SIGMOID,
    SOFTMAX,
    SPARSE,
    Routing,
    route_rows,
)
from radixkv_kernels.triton.tiled_weight import PLAIN, TiledWeight

#: Multiple of bytes that torch's grouped product wants rows of its operands to be.
_GROUPED_BYTES = 16
#: Blocks whose result is that of the experts, and of a shared expert times the sigmoid of its gate.
_SHARED_WITH_GATE = frozenset(
    {
        "Qwen2MoeSparseMoeBlock",
        "Qwen3NextSparseMoeBlock",
        "Qwen3_5MoeSparseMoeBlock",
    }
)
#: The same with shared experts as they are.
_SHARED = frozenset(
    {
        "DeepseekV2Moe",
        "DeepseekV3MoE",
        "DeepseekV32MoE",
        "Dots1MoE",
        "Glm4MoeMoE",
        "Glm4MoeLiteMoE",
        "GlmMoeDsaMoE",
        "Glm4vMoeTextMoE",
        "KimiLinearMoE",
        "BailingHybridMoE",
        "SolarOpenMoE",
        "ExaoneMoeSparseMoEBlock",
        "HYV4MoE",
        "HunYuanMoEV1Moe",
        "Cohere2MoeSparseMoeBlock",
        "LagunaSparseMoeBlock",
        "Llama4TextMoe",
        "Mistral4MoE",
        "Ernie4_5_MoeSparseMoeBlock",
    }
)

#: Blocks whose router and experts call each other in a way of their own: both are replaced, or none.
_WITH_OWN_CALLS = frozenset({"Llama4TextMoe", "LongcatFlashMoE"})


@torch.no_grad()
def replace_experts(model: nn.Module) -> int:
    """Replace experts, routers and blocks with shared experts that the kernels know; weights stay in place.

    Returns:
        Number of replaced modules of experts.
    """
    count = 0
    for parent in list(model.modules()):
        is_own = type(parent).__name__ in _WITH_OWN_CALLS
        is_whole = is_own and _are_floats(parent.experts) and _describe_gate(parent.experts) is not None
        for name, child in list(parent.named_children()):
            if (is_whole and name == "experts") or _is_plain_experts(child):
                setattr(parent, name, GpuExperts(child))
                count += 1
            elif (is_whole or not is_own) and (routing := describe_router(child)) is not None:
                setattr(parent, name, GpuRouter(child, routing))
    for parent in list(model.modules()):
        children = dict(parent.named_children())
        if any(isinstance(child, GpuRouter) for child in children.values()):
            for each in children.get("experts", nn.Module()).modules():
                if isinstance(each, GpuExperts):
                    each.fixed_routes = True
        for name, child in children.items():
            if _adds_shared_experts(child):
                setattr(parent, name, SharedExpertsBlock(child))
    return count


class GpuExperts(StoredExperts):
    """A layer's experts, called as transformers' are.

    Args:
        plain: transformers' module.
        gate_up, down: its weights in any form, with their biases; None: as they are in it.
        own: the experts that it answers for; None: all.
        alternate: gates and ups are outputs in turns; None: as they are in `plain`.

    Attributes:
        fixed_rows: a row's bits must not depend on the number of rows (deterministic mode).
    """

    fixed_routes = False

    def __init__(
        self,
        plain: Any,
        gate_up: TiledWeight | None = None,
        down: TiledWeight | None = None,
        own: range | None = None,
        *,
        alternate: bool | None = None,
    ) -> None:
        super().__init__()
        self.own = range(_number_of(plain)) if own is None else own
        self.num_experts = len(self.own)
        if gate_up is None or down is None:
            self.gate_up_proj, self.down_proj = plain.gate_up_proj, plain.down_proj
            biases = [None, None]
            if getattr(plain, "has_bias", False):
                self.gate_up_proj_bias, self.down_proj_bias = plain.gate_up_proj_bias, plain.down_proj_bias
                biases = [plain.gate_up_proj_bias.detach(), plain.down_proj_bias.detach()]
            inputs_first = getattr(plain, "is_transposed", type(plain).__name__ == "Llama4TextExperts")
            gate_up, down = (
                TiledWeight.plain(weight.detach()[: self.num_experts], bias, inputs_first=inputs_first)
                for weight, bias in zip((plain.gate_up_proj, plain.down_proj), biases, strict=True)
            )
        self.gate_up, self.down = gate_up, down
        gate = _describe_gate(plain)
        assert gate is not None
        self.gate = gate if alternate is None else replace(gate, alternate=alternate)
        self.fixed_rows = False

    @property
    def is_plain(self) -> bool:
        """Weights are plain floats."""
        return self.gate_up.kind == self.down.kind == PLAIN

    def store(self, gate_up: TiledWeight, down: TiledWeight) -> None:
        """Take weights in other forms for the plain ones, which are given back."""
        self.gate_up, self.down = gate_up, down
        del self.gate_up_proj, self.down_proj

    def forward(
        self,
        states: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
        *,
        multiplier: float = 1.0,
    ) -> Tensor:
        """[T, H], [T, K] the experts of each row, [T, K] their weights -> [T, H]; see `run_experts`."""
        ids, weights = ids.to(torch.int32), weights.to(torch.float32)
        if self.own.start:  # those of other ranks count for nothing, whatever their numbers are here
            ids = ids - self.own.start
        if len(states) > MAX_ROWS and not self.fixed_rows and self._has_grouped_product(states.dtype):
            return self._grouped(states, ids, weights, shared, shared_gate, multiplier)
        return run_experts(
            *(states.contiguous(), ids, weights, self.gate_up, self.down, self.gate, shared, shared_gate),
            multiplier=multiplier,
        )

    def _has_grouped_product(self, dtype: torch.dtype) -> bool:
        sizes = (self.gate_up.in_features, self.gate_up.out_features, self.down.in_features)
        return (
            dtype == torch.bfloat16
            and self.is_plain
            and all(size * dtype.itemsize % _GROUPED_BYTES == 0 for size in sizes)
        )

    def _grouped(
        self,
        states: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        shared_gate: Tensor | None,
        multiplier: float,
    ) -> Tensor:
        """The same by sorted rows; nothing waits for the device."""
        chosen = ids.shape[1]
        own, order = ids.flatten().sort(stable=True)
        experts = torch.arange(self.num_experts, dtype=torch.int32, device=ids.device)
        ends = torch.searchsorted(own, experts, right=True, out_int32=True)
        places = own.clamp(0, self.num_experts - 1).long()
        route = weights.flatten()[order, None]
        inner = _grouped_product(states[order // chosen], self.gate_up, ends, places)
        if self.gate.scales_inputs:
            inner = (inner * route).to(inner.dtype)
        inner = _grouped_product(self._gated(inner), self.down, ends, places)
        results = inner.new_empty(inner.shape, dtype=torch.float32)
        results[order] = inner.float() if self.gate.scales_inputs else inner * route
        extras: Any = {"identities": self.gate.identities, "multiplier": multiplier}
        return combine(results, ids, self.num_experts, states, shared, shared_gate, weights, **extras)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate = self.gate
        if gate.alternate:
            gate_up = gate_up.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
        if gate.activation == "clamped":
            first, second = gate_up.chunk(2, 1)
            first, second = first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit)
            return (second + 1) * (first * torch.sigmoid(first * gate.alpha))
        return gate_rows(gate_up, gate.activation)


def _grouped_product(rows: Tensor, weight: TiledWeight, ends: Tensor, experts: Tensor) -> Tensor:
    """Sorted rows [N, in] times each expert's weight -> [N, out]."""
    product: Tensor = F.grouped_mm(rows, weight.codes.transpose(-1, -2), offs=ends)
    return product if weight.bias is None else product.add_(weight.bias[experts])


class GpuRouter(nn.Module):
    """A router, called as transformers' are: [.., H] -> logits [T, E], weights and experts [T, K]."""

    def __init__(self, plain: Any, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        product = _product_of(plain)
        self.weight = product.weight
        self.bias = getattr(product, "bias", None)
        holder = getattr(plain, "moe_statics", plain)
        self.choice_bias: Tensor | None = getattr(holder, "e_score_correction_bias", None)
        self.norm: Norm | None = None
        self.expert_factor: Tensor | None = None
        if type(plain).__name__ == "Gemma4TextRouter":
            weight = plain.scale.detach().float() * plain.scalar_root_size
            self.norm = Norm(weight, float(plain.eps), wide=True)
            self.expert_factor = plain.per_expert_scale.detach()

    def forward(self, states: Tensor, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`choice_bias`: [E], where the block has it."""
        rows = states.reshape(-1, states.shape[-1]).contiguous()
        added = self.choice_bias if choice_bias is None else choice_bias
        if self.norm is not None:
            rows = norm_rows(rows, self.norm)
        return route_rows(
            rows, self.weight, self.routing, self.bias, added, current_rows(), self.expert_factor
        )


class SharedExpertsBlock(nn.Module):
    """A block of routed experts beside experts that all rows have: [1, T, H] -> [1, T, H].

    Modules keep their names, by which adapters find them.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.gate, self.experts = getattr(plain, _gate_name(plain)), plain.experts
        self._shared = _shared_name(plain)
        setattr(self, self._shared, getattr(plain, self._shared))
        self.has_gate = type(plain).__name__ in _SHARED_WITH_GATE
        if self.has_gate:
            self.shared_expert_gate = plain.shared_expert_gate
        is_mean = getattr(plain, "shared_expert_combination_strategy", "sum") == "average"
        self.multiplier = 0.5 if is_mean else 1.0
        factor = getattr(plain, "routed_scaling_factor", None)
        if type(plain).__name__ == "LagunaSparseMoeBlock" and factor is not None:
            self.gate.routing = replace(self.gate.routing, factor=float(factor))

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = self.gate(rows)
        shared = getattr(self, self._shared)(rows)
        gate = self.shared_expert_gate(rows).view(-1) if self.has_gate else None
        out: Tensor = self.experts(rows, ids, weights, shared, gate, multiplier=self.multiplier)
        return out.view(hidden_states.shape)


def _gate_name(block: Any) -> str:
    """The attribute of a block's router."""
    return "gate" if hasattr(block, "gate") else "router"


def _shared_name(block: Any) -> str:
    """The attribute of the experts that all rows of a block have."""
    names = ("shared_experts", "shared_expert", "shared_mlp")
    return next((each for each in names if hasattr(block, each)), "")


def _product_of(router: Any) -> Any:
    """What holds the weight of a router's product."""
    return next(
        (getattr(router, each) for each in ("wg", "proj", "classifier") if hasattr(router, each)), router
    )


def describe_router(module: Any) -> Routing | None:
    """Describe the choice of a router of transformers; None: its class is not known."""
    name = type(module).__name__
    if not type(module).__module__.startswith("transformers.models."):
        return None
    choices: Any = getattr(module, "top_k", None)
    if name in _SOFTMAX_ROUTERS:
        return Routing(
            choices,
            SOFTMAX,
            rounds_weights=name not in ("MixtralTopKRouter", "MiniMaxTopKRouter"),
            normalised=bool(getattr(module, "norm_topk_prob", True)),
        )
    if name == "GptOssTopKRouter" or (name.startswith("GraniteMoe") and name.endswith("TopKRouter")):
        return Routing(choices, LOGITS, rounds_weights=True)
    if name in _GROUP_ROUTERS:
        return Routing(
            choices,
            SIGMOID,
            rounds_logits=False,
            normalised=bool(module.norm_topk_prob),
            epsilon=1e-20,
            factor=float(module.routed_scaling_factor),
            groups=int(module.num_group),
            kept_groups=int(module.topk_group),
            best_of_group=2,
        )
    if name == "DeepseekV2TopkRouter":
        has_groups = module.topk_method == "group_limited_greedy"
        return Routing(
            choices,
            SOFTMAX,
            rounds_logits=False,
            normalised=False,
            factor=float(module.routed_scaling_factor),
            groups=int(module.num_group) if has_groups else 1,
            kept_groups=int(module.topk_group) if has_groups else 1,
        )
    if name in ("Mistral4TopkRouter", "LongcatFlashTopkRouter"):
        is_grouped = name.startswith("Mistral4")
        return Routing(
            choices,
            SOFTMAX,
            rounds_logits=is_grouped,
            rounds_scores=is_grouped,
            rounds_weights=is_grouped,
            normalised=is_grouped and bool(module.norm_topk_prob),
            epsilon=1e-20,
            factor=float(module.routed_scaling_factor),
            groups=int(module.num_group) if is_grouped else 1,
            kept_groups=int(module.topk_group) if is_grouped else 1,
            best_of_group=2,
        )
    if name == "HunYuanMoEV1Gate":
        is_wide = module.wg.weight.dtype == torch.float32
        return Routing(choices, SOFTMAX, rounds_logits=not is_wide, rounds_weights=not is_wide)
    if name == "Llama4Router":
        return Routing(choices, CHOSEN_SIGMOID, rounds_weights=True, normalised=False)
    if name == "Cohere2MoeTopKRouter":
        if module.expert_selection_fn == "softmax":
            return Routing(choices, LOGITS, rounds_weights=True)
        normalised = bool(module.norm_topk_prob)
        return Routing(
            choices, CHOSEN_SIGMOID, rounds_scores=True, rounds_weights=True, normalised=normalised
        )
    if name == "Lfm2MoeTopKRouter":
        return Routing(
            choices,
            SIGMOID,
            rounds_scores=True,
            rounds_weights=True,
            normalised=bool(module.norm_topk_prob),
            epsilon=1e-6,
            factor=float(module.routed_scaling_factor),
        )
    if name == "LagunaTopKRouter":
        softcap = float(module.router_logit_softcapping)
        return Routing(choices, SIGMOID, rounds_weights=True, softcap=softcap)
    if name == "Gemma4TextRouter":
        return Routing(int(module.config.top_k_experts), SOFTMAX)
    if name in ("MiniMaxM2TopKRouter", "MiniMaxM3VLTopKRouter", "Step3p7TopKRouter"):
        return Routing(choices, SIGMOID)
    if name == "HYV3TopKRouter":
        factor = float(module.router_scaling_factor)
        return Routing(choices, SIGMOID, rounds_logits=False, epsilon=1e-20, factor=factor)
    if name in ("Ernie4_5_MoeTopKRouter", "Ernie4_5_VLMoeMoeTopKRouter"):
        least = float(module.norm_min)
        return Routing(choices, SOFTMAX, rounds_logits=False, rounds_weights=True, least=least)
    if name == "JambaTopKRouter":
        return Routing(choices, SOFTMAX, rounds_weights=True, normalised=False)
    if name == "PhimoeTopKRouter":
        margin = 2 * float(module.router_jitter_noise)
        return Routing(choices, SPARSE, rounds_weights=True, normalised=False, margin=margin)
    return None


_SOFTMAX_ROUTERS = frozenset(
    f"{family}TopKRouter"
    for family in (
        *("Mixtral", "MiniMax", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3_5Moe", "Qwen3VLMoeText"),
        *("Olmoe", "FlexOlmo", "Mellum", "Qwen3OmniMoeThinkerText", "Qwen4ExpText"),
    )
)
_GROUP_ROUTERS = frozenset(
    f"{family}TopkRouter"
    for family in (
        "DeepseekV3",
        "DeepseekV32",
        "Dots1",
        "Glm4Moe",
        "Glm4MoeLite",
        "GlmMoeDsa",
        "Glm4vMoeText",
        "AXK1",
        "BailingHybrid",
        "ExaoneMoe",
        "HYV4",
        "KimiLinear",
        "MiMoV2Flash",
        "NemotronH",
        "SolarOpen",
    )
)


def _number_of(plain: Any) -> int:
    """Experts with weights."""
    return int(getattr(plain, "num_routed_experts", None) or plain.num_experts)


def _describe_gate(plain: Any) -> Gate | None:
    """Describe the gate of transformers' experts; None: the kernels have none such."""
    name, function = type(plain).__name__, getattr(plain, "act_fn", None)
    if name == "GptOssExperts":
        return Gate("clamped", True, float(plain.limit), float(plain.alpha))
    activation = "silu" if function is F.silu else ACTIVATIONS.get(type(function).__name__)
    if activation is not None and name == "Llama4TextExperts":
        return Gate(activation, scales_inputs=True)
    if activation is not None and name == "LongcatFlashExperts":
        return Gate(activation, identities=int(plain.zero_expert_num))
    if activation is None or type(plain)._apply_gate.__name__ != "_default_apply_gate":
        return None
    return Gate(activation)


def can_compute(module: Any) -> bool:
    """Return True for experts of transformers with a gate that the kernels have, whatever their weights."""
    return (
        type(module).__module__.startswith("transformers.models.")
        and bool(getattr(module, "has_gate", False))
        and not getattr(module, "has_post_expert_norm", False)
        and _describe_gate(module) is not None
    )


def _is_plain_experts(module: Any) -> bool:
    """Return True for experts that `can_compute`, with plain weights."""
    return _are_floats(module) and can_compute(module)


def _are_floats(module: Any) -> bool:
    """Return True for experts with weights of plain floats."""
    weights: list[Any] = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in weights) and all(
        weight.dtype in (torch.bfloat16, torch.float16, torch.float32) for weight in weights
    )


def _adds_shared_experts(module: Any) -> bool:
    name = type(module).__name__
    return (
        name in _SHARED | _SHARED_WITH_GATE
        and isinstance(getattr(module, "experts", None), GpuExperts)
        and isinstance(getattr(module, _gate_name(module), None), GpuRouter)
        and getattr(module, _shared_name(module), None) is not None
    )
