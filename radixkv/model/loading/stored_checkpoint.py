# SPDX-License-Identifier: Apache-2.0
"""A model of a quantised checkpoint: stored weights are read here, everything else by transformers.

    files' tensors -> reader of the format -> stored weights, by the names that plain weights would have
    those and the plain tensors -> transformers' own mapping of names, its conversions, tied weights

transformers gets a plain model's configuration and state. A stored weight stands in it as an object that is
dequantised when transformers asks for its numbers: tensor by tensor, each straight in the model's dtype.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixkv.model.loading.checkpoint_formats import EXPERT, StoredForm
from radixkv.model.loading.file_pages import address_ranges, release_file_pages
from radixkv.model.loading.model_source import ModelSource
from radixkv.model.loading.stored_forms.found_weights import FoundWeights, damaged
from radixkv.model.loading.stored_forms.mapped_tensors import MappedTensors
from radixkv.model.loading.stored_forms.readers import READERS
from radixkv.model.loading.stored_parameter import StoredParameter
from radixkv.model.loading.weight_files import weight_files
from radixkv.model.loading.without_memory import build_without_memory
from radixkv.model.stored_weights.stored_weight import StackedWeights, StoredWeight

#: Bytes of stored weights whose pages are given back together: each time, all mapped pages are looked at.
_RELEASED_AT_ONCE = 256 << 20
#: Names that tools write where transformers expects those of the model's authors (Mixtral, MiniMax).
_NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_DESCRIPTIONS = ("quantization_config", "compression_config", "quantization")


class StoredCheckpoint:
    """The tensors of a quantised checkpoint.

    Args:
        source: the model's folder.
        form: what its configuration says of it.
        keep: leave `StoredParameter` parameters in the model, for what multiplies weights as they are stored.

    Raises:
        ModelLoadError: damaged files, or tensors that contradict each other or the configuration.
    """

    def __init__(self, source: ModelSource, form: StoredForm, *, keep: bool = False) -> None:
        self._folder, self._keep = source.folder, keep
        self._tensors = MappedTensors(weight_files(source.folder))
        self.found: FoundWeights = READERS[form.method](self._tensors, form.settings)
        for name in set(self._tensors) - self.found.read:
            if self._tensors[name].is_floating_point() and self._tensors[name].dtype.itemsize == 1:
                raise damaged(name, "no weight of its form consists of it")
        self._seen: list[Tensor] = []
        self._lock = threading.Lock()

    def load(
        self, kind: Any, config: Any, arguments: Mapping[str, Any], trust_remote_code: bool
    ) -> tuple[Any, Any]:
        """The transformers model, and its report of what it found and missed.

        Args:
            kind: transformers' class that finds a model's own.
            config: the model's configuration.
            arguments: of `from_pretrained`; the dtype among them is that of all weights.
        """
        plain = plain_config(config)
        same = {name: arguments[name] for name in ("dtype", "attn_implementation")}
        bare: Any = build_without_memory(
            lambda: kind.from_config(plain, trust_remote_code=trust_remote_code, **same)
        )
        result: tuple[Any, Any] = type(bare).from_pretrained(
            None,
            config=plain,
            state_dict=self._state(arguments["dtype"]),
            generation_config=_generation_config(self._folder),
            **arguments,
        )
        self._release(at_once=0)
        return result

    def _state(self, dtype: torch.dtype) -> dict[str, Any]:
        """A state as a plain checkpoint has it: tensors, and objects that become tensors of `dtype`."""
        left = set(self._tensors) - self.found.read
        state: dict[str, Any] = {name: self._tensors[name] for name in left} | self.found.renamed
        state |= {
            name: StoredParameter.of(weight, dtype) if self._keep else _Expanded(weight, dtype, self._release)
            for name, weight in self.found.weights.items()
        }
        return {_authors_name(name): each for name, each in state.items()}

    @property
    def dtype(self) -> torch.dtype:
        """That of most numbers that are stored plainly."""
        sizes: Counter[torch.dtype] = Counter()
        for name in set(self._tensors) - self.found.read:
            if self._tensors[name].is_floating_point():
                sizes[self._tensors[name].dtype] += self._tensors[name].numel()
        return sizes.most_common(1)[0][0] if sizes else torch.bfloat16

    def summary(self) -> str:
        """Numbers of weights in each form, as `14 of FP8`."""
        counts = Counter(weight.title for weight in self.found.weights.values())
        return ", ".join(f"{count} of {title}" for title, count in sorted(counts.items()))

    def _release(self, *weights: StoredWeight | StackedWeights, at_once: int = _RELEASED_AT_ONCE) -> None:
        """Give back memory of files' pages that have been read, once it is worth it."""
        with self._lock:
            for weight in weights:
                parts = weight.weights if isinstance(weight, StackedWeights) else (weight,)
                self._seen += [tensor for part in parts for tensor in part.tensors]
            if sum(tensor.nbytes for tensor in self._seen) >= at_once:
                release_file_pages(address_ranges(self._seen))
                self._seen.clear()


def _authors_name(name: str) -> str:
    found = EXPERT.fullmatch(name)
    if found is None or not found["experts"].endswith(".block_sparse_moe.experts"):
        return name
    return f"{found['experts']}.{found['number']}.{_NUMBERED.get(found['product'], found['product'])}.weight"


class _Expanded:
    """Stands for a tensor in a state: it is made of a stored weight when it is asked for."""

    def __init__(
        self, weight: StoredWeight | StackedWeights, dtype: torch.dtype, release: Callable[..., None]
    ) -> None:
        self._weight, self._dtype, self._release = weight, dtype, release

    def __getitem__(self, index: Any) -> Tensor:
        numbers = self._weight.dequantized(self._dtype)
        self._release(self._weight)
        found: Tensor = numbers[index]
        return found


def _generation_config(folder: Path) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none: it is made of the model's configuration
        return GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )


def plain_config(config: Any) -> Any:
    """A copy of a configuration that has no word on quantised weights, its parts' configurations included."""
    plain = copy.deepcopy(config)
    queue = [plain]
    for each in queue:
        for name in _DESCRIPTIONS:
            if hasattr(each, name):
                delattr(each, name)
        queue += [part for part in vars(each).values() if hasattr(part, "to_diff_dict")]
    return plain
