# SPDX-License-Identifier: Apache-2.0
"""A transformers model whose parameters stand for stored weights, to one on a GPU that multiplies them so.

linear layers, experts     tile forms (`weight_tiles`), each made on the device of its bytes from the file
`kv_b_proj` of latents     its numbers, which latent attention takes apart
embeddings                 tile forms, too: rows that occur are dequantised
the rest, and forms        plain numbers in the model's dtype
without tiles
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.model.decoder_layers import (
    StoredExperts,
    WholeExperts,
    WholeProduct,
    reads_weight,
)
from radixkv.model.gpu_layers.experts import GpuExperts, can_compute
from radixkv.model.gpu_layers.products import FP8_CAPABILITY, TiledProduct
from radixkv.model.gpu_layers.weight_tiles import needs_float8, tiled
from radixkv.model.loading.file_pages import address_ranges, release_file_pages
from radixkv.model.loading.gguf_tensors import STAY_PLAIN
from radixkv.model.loading.stored_parameter import StoredParameter, stored_experts
from radixkv.model.stored_weights.scaled_weight import ScaledWeight
from radixkv.model.stored_weights.stored_weight import ScaleGroupCut, StoredWeight
from radixkv_kernels.triton.tiled_weight import PLAIN, TiledWeight, joined, stacked


class Target:
    """Where weights go, and which forms had to be expanded on the way.

    Args:
        device, dtype: of the model.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.expanded: Counter[str] = Counter()
        self._embedded: dict[int, TiledWeight] = {}
        self._has_float8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY

    def tiles(self, weight: StoredWeight, bias: Tensor | None = None) -> TiledWeight:
        """A weight in its tile form on the device, or expanded to plain numbers there.

        An output layer that is tied to the embedding has that one's codes.
        """
        embedded = self._embedded.get(weight.tensors[0].data_ptr())
        if embedded is not None and embedded.out_features == weight.out_features:
            return embedded.with_bias(bias)
        found = tiled(weight, self.device)
        if found is None or (needs_float8(found) and not self._has_float8):
            self.expanded[weight.title] += 1
            found = TiledWeight.plain(weight.to(self.device).dequantized(self.dtype))
        if self.device.type != "cpu":
            release_file_pages(address_ranges(weight.tensors))
        return found.with_bias(bias)

    def computes(self, experts: Any) -> bool:
        """Return True for transformers' experts whose gate the kernels have."""
        return can_compute(experts)

    def embedding(self, plain: nn.Embedding, weight: StoredWeight) -> nn.Module:
        """An embedding with a stored table."""
        scale = float(getattr(plain, "embed_scale", 1.0))
        made = self._embedded[weight.tensors[0].data_ptr()] = self.tiles(weight)
        return TiledEmbedding(made, self.dtype, scale)

    def plain(self, tensor: Tensor) -> Tensor:
        """A plain tensor in the model's dtype on the device."""
        return tensor.detach().to(self.device, self.dtype)


class StoredLinear(WholeProduct):
    """A product of stored weights that wait in the file, which becomes a `TiledProduct`.

    Args:
        weights: one above the other.
        bias: [out] or None.
        target: where it goes.
        order: for each column of the weights, the input; None: the same.
    """

    def __init__(
        self,
        weights: Sequence[StoredWeight],
        bias: Tensor | None,
        target: Target,
        order: Tensor | None = None,
    ) -> None:
        super().__init__(weights[0].in_features, sum(each.out_features for each in weights))
        self._weights, self.bias, self._target, self._order = tuple(weights), bias, target, order

    @property
    def weight(self) -> Tensor:
        return torch.empty(0, dtype=self._target.dtype)

    def of_outputs(self, spans: Sequence[range]) -> StoredLinear:
        found = []
        for span in spans:
            start = 0
            for weight in self._weights:
                own = range(max(span.start - start, 0), max(0, min(span.stop - start, weight.out_features)))
                if len(own):
                    found.append(_outputs(weight, own))
                start += weight.out_features
        bias = None if self.bias is None else torch.cat([self.bias[span.start : span.stop] for span in spans])
        return StoredLinear(found, bias, self._target, self._order)

    def of_inputs(self, own: range, *, has_bias: bool) -> StoredLinear:
        if self._order is not None:
            raise ScaleGroupCut(
                "weights with inputs in an order of their own are not split by inputs over GPUs: leave "
                "--tensor-parallel out"
            )
        weights = [each.of_inputs(own) for each in self._weights]
        return StoredLinear(weights, self.bias if has_bias else None, self._target)

    def packed(self) -> nn.Module:
        sizes = [each.out_features for each in self._weights]
        biases: Sequence[Tensor | None] = [None] * len(sizes)
        if self.bias is not None:
            biases = self._target.plain(self.bias).split(sizes)
        weights = [self._target.tiles(*each) for each in zip(self._weights, biases, strict=True)]
        if self._order is not None:
            weights = [each.reordered(self._order.to(self._target.device)) for each in weights]
        if all(each.kind == PLAIN for each in weights) and self._order is None:
            return _plain_linear(weights)
        return TiledProduct(weights, self._target.dtype)


class StoredGpuExperts(WholeExperts):
    """A layer's experts that wait in the file, which become `GpuExperts`.

    Args:
        plain: transformers' module, whose weights are not used.
        first, down: weights of each expert, one above the other, of the first and the last product.
        target: where they go.
        own: the experts that it answers for; None: all.
        biases: of the two products, [experts, out] or None.
        alternate: see `GpuExperts`.
    """

    def __init__(
        self,
        plain: Any,
        first: Sequence[Sequence[StoredWeight]],
        down: Sequence[Sequence[StoredWeight]],
        target: Target,
        own: range | None = None,
        *,
        biases: tuple[Tensor | None, Tensor | None],
        alternate: bool | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = int(plain.num_experts)
        # A module in a tuple is none of this one's: its parameters have no values.
        self._source = (plain, first, down, target)
        self._biases, self._alternate = biases, alternate
        self._own = range(self.num_experts) if own is None else own

    def of_experts(self, own: range) -> StoredGpuExperts:
        return StoredGpuExperts(*self._source, own, biases=self._biases, alternate=self._alternate)

    def packed(self) -> StoredExperts:
        plain, first, down, target = self._source
        part = slice(self._own.start, self._own.stop)
        gate_up, last = (
            _stack(every[part], None if bias is None else target.plain(bias[part]), target)
            for every, bias in zip((first, down), self._biases, strict=True)
        )
        return GpuExperts(plain, gate_up, last, self._own, alternate=self._alternate)


def _stack(experts: Sequence[Sequence[StoredWeight]], bias: Tensor | None, target: Target) -> TiledWeight:
    found = []
    for parts in experts:
        one = joined([target.tiles(each) for each in parts])
        if one is None:
            break
        found.append(one)
    whole = stacked(found) if len(found) == len(experts) else None
    if whole is None:
        target.expanded[experts[0][0].title] += len(experts)
        numbers = [
            torch.cat([each.to(target.device).dequantized(target.dtype) for each in parts])
            for parts in experts
        ]
        whole = TiledWeight.plain(torch.stack(numbers))
    return whole.with_bias(bias)


class TiledEmbedding(nn.Module):
    """An embedding that dequantises the rows it is asked for: ids [...] -> [..., width].

    Args:
        stored: the table, [vocabulary, width].
        dtype: of rows.
        scale: by which every row is multiplied, in that dtype.
    """

    def __init__(self, stored: TiledWeight, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.stored, self.dtype, self.scale = stored, dtype, scale

    @property
    def weight(self) -> Tensor:
        """Nothing, in the dtype and on the device of rows."""
        return torch.empty(0, dtype=self.dtype, device=self.stored.codes.device)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.stored.taken(ids.reshape(-1)).numbers().to(self.dtype)
        if self.scale != 1.0:
            rows = rows * torch.tensor(self.scale, dtype=self.dtype)
        return rows.view(*ids.shape, -1)


@torch.no_grad()
def tile_stored_weights(
    model: nn.Module, device: torch.device, dtype: torch.dtype, *, for_ranks: bool = False
) -> Counter[str]:
    """Move a model with `StoredParameter` parameters to a GPU, its weights as they are stored.

    Args:
        for_ranks: leave weights in the file until each rank has chosen its share, see `WholeProduct`.

    Returns:
        Names of the forms that were expanded, and how many weights of each.
    """
    target = Target(device, dtype)
    for path, module in list(model.named_modules()):
        parts = stored_experts(module)
        if parts is not None and can_compute(module):
            biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
            experts = StoredGpuExperts(module, *parts, target, biases=biases)
            _put(model, path, experts if for_ranks else experts.packed())
    for path, module in list(model.named_modules()):
        weight = getattr(module, "weight", None)
        stored = getattr(weight, "data", None)
        made: nn.Module | None = None
        if isinstance(stored, StoredParameter) and stored.is_matrix and not stored.inputs_first:
            parent, _, name = path.rpartition(".")
            stays = path.endswith(STAY_PLAIN) or reads_weight(type(model.get_submodule(parent)), name)
            if type(module) is nn.Linear and not stays:
                product = StoredLinear(stored.parts[0], module.bias, target)
                made = product if for_ranks else product.packed()
            elif isinstance(module, nn.Embedding) and len(stored.parts[0]) == 1:
                made = target.embedding(module, stored.parts[0][0])
        if made is not None:
            _put(model, path, made)
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter.data, StoredParameter):
                numbers = parameter.data.numbers().to(device)
                setattr(module, name, nn.Parameter(numbers, requires_grad=False))
    model.to(device)
    return target.expanded


def _plain_linear(weights: Sequence[TiledWeight]) -> nn.Linear:
    """A linear layer of weights that were expanded."""
    first = weights[0]
    count = sum(each.out_features for each in weights)
    plain = nn.Linear(first.in_features, count, bias=first.bias is not None, device="meta")
    plain.weight = nn.Parameter(torch.cat([each.codes for each in weights]), requires_grad=False)
    if first.bias is not None:
        biases = [each.bias for each in weights if each.bias is not None]
        plain.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return plain.eval()


def _outputs(weight: StoredWeight, own: range) -> StoredWeight:
    """Some outputs; a block of them that is cut becomes scales of single outputs."""
    try:
        return weight.of_outputs([own])
    except ScaleGroupCut:
        if not isinstance(weight, ScaledWeight):
            raise
        return weight.per_channel().of_outputs([own])


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
