# SPDX-License-Identifier: Apache-2.0
"""A transformers model whose parameters stand for stored weights, to one that multiplies them as they are.

linear layers, experts     panels of blocks (`whole_weights`); those without blocks, in bfloat16
`kv_b_proj` of latents     its numbers, which latent attention takes apart
other linear layers        packed as they are, in 16 bits
all the rest               float32, and so is all that is computed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from radixkv.model.cpu_layers.block_experts import fix_routing
from radixkv.model.cpu_layers.checkpoint_blocks import has_blocks
from radixkv.model.cpu_layers.whole_weights import CheckpointExperts, CheckpointProduct, PlainProduct
from radixkv.model.cpu_layers.widening import widen_the_rest
from radixkv.model.decoder_layers import WholeExperts, WholeProduct, reads_weight
from radixkv.model.loading.gguf_tensors import STAY_PLAIN
from radixkv.model.loading.stored_parameter import StoredParameter, stored_experts
from radixkv.model.stored_weights.stored_weight import StoredWeight
from radixkv_kernels.cpu.linear.block_rows import BlockRows


@torch.no_grad()
def pack_stored_weights(model: nn.Module, *, for_ranks: bool = False) -> Counter[str]:
    """Give every product and all experts of a model with `StoredParameter` parameters their final form.

    Args:
        for_ranks: leave weights as they are until each rank has chosen its share, see `WholeProduct`.

    Returns:
        Titles of those that have no blocks, and how many of each are rounded to bfloat16.
    """
    rows = BlockRows()
    parents = []
    rounded: Counter[str] = Counter()
    for path, module in list(model.named_modules()):
        parts = stored_experts(module)
        if parts is not None:
            rounded.update(_without_blocks([*parts[0], *parts[1]]))
            experts = CheckpointExperts(module, *parts, rows)
            _put(model, path, experts if for_ranks else experts.packed())
            parents.append(path.rpartition(".")[0])
    for path, module in sorted(model.named_modules(), key=_size, reverse=True):
        product = None
        if type(module) is nn.Linear and not path.endswith(STAY_PLAIN):
            parent, _, name = path.rpartition(".")
            if not reads_weight(type(model.get_submodule(parent)), name):
                product = _product(module, rows)
        if product is not None:
            if isinstance(module.weight.data, StoredParameter):
                rounded.update(_without_blocks(module.weight.data.parts))
            _put(model, path, product if for_ranks and product.out_features > 1 else product.packed())
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter.data, StoredParameter):
                setattr(module, name, nn.Parameter(parameter.data.numbers(), requires_grad=False))
    for path in parents:
        fix_routing(model.get_submodule(path))
    widen_the_rest(model)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.float()
    return rounded


def _without_blocks(parts: Iterable[Iterable[StoredWeight]]) -> list[str]:
    """Titles of those weights that have no blocks."""
    return [each.title for own in parts for each in own if not has_blocks(each)]


def _size(named: tuple[str, nn.Module]) -> int:
    """Numbers of a linear layer's weight. The largest ones are packed first: for a while, memory holds a
    weight twice."""
    return named[1].weight.numel() if type(named[1]) is nn.Linear else 0


def _product(module: nn.Linear, rows: BlockRows) -> WholeProduct | None:
    weight = module.weight.data
    if not isinstance(weight, StoredParameter):
        return PlainProduct(weight, None if module.bias is None else module.bias.float())
    if not weight.is_matrix or weight.inputs_first:
        return None
    return CheckpointProduct(weight.parts[0], module.bias, rows)


def _put(model: nn.Module, path: str, module: nn.Module | WholeExperts) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
