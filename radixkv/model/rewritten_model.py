# SPDX-License-Identifier: Apache-2.0
"""RewrittenModel: a loaded model in the form in which steps compute it.

Everything that depends on the weights is made here: a runner is given other weights by being given another
of these. On a GPU, where recorded steps know the addresses of weights, they are written in place instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from radixkv.errors import WeightUpdateError
from radixkv.model.adapters.adapter_memory import AdapterMemory
from radixkv.model.adapters.base_modules import BaseModules
from radixkv.model.attention.expanded_latents import make_expansion
from radixkv.model.batch_invariance import check_supported, choose_row_multiple, fix_rows, use_fixed_tiles
from radixkv.model.device_paths import rewrite_layers
from radixkv.model.loading.file_pages import address_ranges, release_file_pages
from radixkv.model.whole_vectors import AlignedActivations

if TYPE_CHECKING:
    from radixkv.model.loading.loader import LoadedModel
    from radixkv.model.step_limits import StepLimits


class RewrittenModel:
    """A model whose layers have been replaced for a device.

    Args:
        loaded: the model; its layers are replaced.
        limits: limits of the runner's steps.
        backend, deterministic, quantization, max_lora_rank: see `ModelRunner`.

    Attributes:
        model: the transformers model.
        adapters: reads and finds adapters; None: rows have none.
        row_multiple: rows of a step are padded to a multiple of it.
        activations: see `radixkv.model.whole_vectors`; None: they are as they are.
        expansion: see `radixkv.model.attention.expanded_latents`; None: latents are not expanded.
        vision: the model's tower; None: it sees no images.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        limits: StepLimits,
        *,
        backend: str,
        deterministic: bool,
        quantization: str | None,
        max_lora_rank: int,
    ) -> None:
        self.model = model = loaded.model
        weights = address_ranges(model.parameters())
        release_file_pages(weights)  # the checks at load have read all
        base = BaseModules.of_loaded(loaded) if max_lora_rank else None
        rewrite_layers(model, quantization, backend)
        self.adapters: AdapterMemory | None = None
        if base is not None and backend == "triton":
            from radixkv.model.adapters.gpu_adapters import GpuAdapterMemory, GpuLimits  # needs triton

            largest = GpuLimits(limits.max_num_tokens, limits.max_num_seqs, max_lora_rank)
            self.adapters = GpuAdapterMemory.on_gpu(model, base, loaded.device, loaded.dtype, largest)
        elif base is not None:
            self.adapters = AdapterMemory.attached(model, base)
        self.row_multiple = 1
        self.activations: AlignedActivations | None = None
        if deterministic:
            check_supported(loaded.hf_config, model)
            fix_rows(model)
            if loaded.device.type == "cpu":
                self.activations = AlignedActivations(model)
            self.row_multiple = choose_row_multiple(model, limits.max_num_tokens)
            if self.row_multiple == 0:
                use_fixed_tiles(model)
                self.row_multiple = 1
        release_file_pages(weights)
        # Which chunks are long depends on how a prompt is cut.
        self.expansion = None
        if not deterministic:
            self.expansion = make_expansion(model, backend, limits.max_num_tokens)
        self.vision = loaded.vision


def write_in_place(served: nn.Module, other: nn.Module) -> None:
    """Write the tensors of a model over those of another one of the same structure, at their addresses.

    Raises:
        WeightUpdateError: the models differ in structure; nothing was written.
    """
    pairs = list(_paired(served, other, "model", set()))
    for where, ours, theirs in pairs:
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise _differs(where)
    with torch.no_grad():
        for _, ours, theirs in pairs:
            ours.copy_(theirs)


def _paired(
    ours: Any, theirs: Any, where: str, seen: set[int]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the tensors that two equal structures reach, each of ours once."""
    if id(ours) in seen:
        return
    if type(ours) is not type(theirs):
        raise _differs(where)
    if isinstance(ours, torch.Tensor):
        seen.add(id(ours))
        yield where, ours, theirs
        return
    parts: list[tuple[Any, Any, Any]]
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            raise _differs(where)
        parts = [(key, ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            raise _differs(where)
        parts = [(index, *pair) for index, pair in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, np.ndarray):
        if ours is not theirs:
            raise _differs(where)  # none of a GPU's layers has one
        return
    elif isinstance(ours, nn.Module):
        parts = [("", ours.__dict__, theirs.__dict__)]
    elif not type(ours).__module__.startswith("radixkv"):
        return  # configurations, for one, hold no tensors
    elif is_dataclass(ours):
        parts = [(each.name, getattr(ours, each.name), getattr(theirs, each.name)) for each in fields(ours)]
    else:
        parts = [("", getattr(ours, "__dict__", {}), getattr(theirs, "__dict__", {}))]
    seen.add(id(ours))
    for name, own, other in parts:
        yield from _paired(own, other, f"{where}.{name}" if name != "" else where, seen)


def reached_tensors(model: nn.Module) -> list[torch.Tensor]:
    """List the tensors of a model and of its replaced layers, those that `write_in_place` writes."""
    return [tensor for _, tensor, _ in _paired(model, model, "model", set())]


def _differs(where: str) -> WeightUpdateError:
    return WeightUpdateError(
        f"The weights were not changed: the new model differs from the served one in structure, at {where}."
    )
