# SPDX-License-Identifier: Apache-2.0
"""The linear layers of a base model that adapters may change, by their paths in transformers' model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from radixkv.model.decoder_layers import StoredProduct
from radixkv.model.vision.families import is_in_tower

if TYPE_CHECKING:
    from radixkv.model.loading.loader import LoadedModel

#: A path has one of these among its parts: attention and MLP of a decoder layer, whose rows are the step's.
_PARENTS = frozenset({"self_attn", "attn", "attention", "mlp", "shared_mlp", "feed_forward", "shared_expert"})
#: Rows of these are chosen by a router, or their result chooses.
_NOT_UNDER = frozenset({"experts", "gate", "router", "shared_expert_gate"})


@dataclass(frozen=True, slots=True)
class BaseModules:
    """A base model as adapters see it.

    Attributes:
        names: names by which the model is known; adapters tell the one they were trained on.
        folder: where it was loaded from; None: not from a folder.
        shapes: path of each linear layer that may be changed -> (inputs, outputs).
        takes_activated: whether adapters may begin within a prompt.
    """

    names: tuple[str, ...]
    folder: Path | None
    shapes: dict[str, tuple[int, int]]
    takes_activated: bool = True

    @classmethod
    def of(cls, model: nn.Module, names: tuple[str, ...], folder: Path | None = None) -> BaseModules:
        """Describe a transformers model whose layers have not been rewritten."""
        shapes = {
            path: (module.in_features, module.out_features)
            for path, module in model.named_modules()
            if _is_linear(module) and _may_change(path)
        }
        return cls(names, folder, shapes)

    @classmethod
    def of_loaded(cls, loaded: LoadedModel) -> BaseModules:
        """Describe a loaded model whose layers have not been rewritten."""
        name = str(getattr(loaded.model.config, "_name_or_path", "") or loaded.name)
        base = cls.of(loaded.model, (loaded.name, name), Path(name))
        # A state is the base's or the adapter's: kept ones would have to end where an adapter begins.
        return replace(base, takes_activated=not loaded.attention.states)


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear or isinstance(module, StoredProduct)


def _may_change(path: str) -> bool:
    parts = path.split(".")
    is_in_layer = any(part.isdigit() for part in parts) and not is_in_tower(path)
    return is_in_layer and bool(_PARENTS.intersection(parts)) and not _NOT_UNDER.intersection(parts)
