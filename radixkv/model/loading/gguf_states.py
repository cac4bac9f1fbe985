# SPDX-License-Identifier: Apache-2.0
"""Tensors of state layers in GGUF files: values and orders that llama.cpp's conversion changes.

    ssm_a       -exp(A_log)
    Qwen 3.5    heads of values tiled over those of keys: v0 of each key's, then v1 of each (`tiled`)
    Qwen3-Next  queries, keys and values above the gates, each head by head; the model has them by key head

Each is undone by moving rows, which blocks survive. Columns cross blocks: the product that takes the values
gets its inputs in the file's order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_Array = np.ndarray[Any, Any]
_BLOCK = re.compile(r"blk\.\d+\.(.+)")
#: Qwen3-Next's first product, of which files have two parts.
JOINED_INPUT = "ssm_in_joined.weight"
_PER_HEAD = ("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight")


def leaf_of(name: str) -> str:
    """A tensor's name without its layer."""
    found = _BLOCK.fullmatch(name)
    return name if found is None else found[1]


class StateOrders:
    """Orders of rows and columns of a model's state layers.

    Args:
        config: of the model.
        tiled: heads of values are tiled in the file.
    """

    def __init__(self, config: Mapping[str, Any], *, tiled: bool) -> None:
        self._rows: dict[str, _Array] = {}
        #: Leaf of a product's name -> for each column in the file, the model's input.
        self.inputs: dict[str, _Array] = {}
        if "linear_num_key_heads" not in config:
            return
        keys, per_key = config["linear_num_key_heads"], config["linear_num_value_heads"]
        per_key //= keys
        key_size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
        if tiled and per_key > 1:
            heads, values = (_tiles(keys, per_key, size) for size in (1, value_size))
            untiled = np.argsort(values)
            before = 2 * keys * key_size
            self._rows = dict.fromkeys(_PER_HEAD, np.argsort(heads))
            self._rows["attn_gate.weight"] = untiled
            self._rows["attn_qkv.weight"] = np.concatenate([np.arange(before), before + untiled])
            self._rows["ssm_conv1d.weight"] = self._rows["attn_qkv.weight"]
            self.inputs["ssm_out.weight"] = values
        elif not tiled:
            self._rows[JOINED_INPUT] = by_head(keys, [key_size, key_size, *[per_key * value_size] * 2])

    def restore(self, name: str, weights: Any) -> Any:
        """A tensor's values, or rows of anything, as the model has them."""
        leaf = leaf_of(name)
        if leaf == "ssm_a":
            with np.errstate(divide="ignore", invalid="ignore"):  # a damaged file's; the trial run finds it
                weights = np.log(-weights)
        if leaf in self._rows:
            weights = weights[self._rows[leaf]]
        if leaf in self.inputs:
            weights = weights[:, np.argsort(self.inputs[leaf])]
        return weights


def _tiles(keys: int, per_key: int, size: int) -> _Array:
    """For each element in the file, the model's."""
    return np.arange(keys * per_key * size).reshape(keys, per_key, size).swapaxes(0, 1).reshape(-1)


def by_head(keys: int, sizes: list[int]) -> _Array:
    """For each row of the model, that of parts one above the other, of which each (key) head has `sizes`."""
    starts = np.cumsum([0, *(keys * size for size in sizes)])
    parts = [np.arange(keys * size).reshape(keys, size) for size in sizes]
    return np.concatenate([start + part for start, part in zip(starts, parts, strict=False)], 1).reshape(-1)
