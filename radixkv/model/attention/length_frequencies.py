# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings whose frequencies depend on the length of a sequence, chosen row by row.

transformers chooses the frequencies of `dynamic` and `longrope` by the longest sequence of a batch. Here each
row has the frequencies of its own sequence's length, whatever runs beside it. Lengths are in classes
(`radixkv.scheduling.length_classes`), and the frequencies of a class are

    longrope    within the original length the short factors, beyond it the long ones: transformers' own
    dynamic     the ones of the original length, of its double, of four times it, and so on: the next one up

A row's class comes in the high bits of its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.scheduling.length_classes import POSITION_BITS, LengthClasses

#: Kinds whose frequencies depend on the length.
LENGTH_DEPENDENT = ("dynamic", "longrope")
_POSITION = (1 << POSITION_BITS) - 1


def classify_lengths(model: nn.Module, max_length: int) -> LengthClasses:
    """Make every rotary embedding of a model choose its frequencies by the class in each row's position.

    Args:
        max_length: the most tokens of a sequence.

    Returns:
        The classes of lengths up to there; one, where no frequencies change before it.
    """
    modules = [module for module in model.modules() if isinstance(_kinds(module), dict)]
    ends: set[int] = set()
    for module in modules:
        for kind, layer_type in _dependent(module):
            ends.update(_ends(kind, _original(module, kind, layer_type), max_length))
    classes = LengthClasses(tuple(sorted(ends)))
    for module in modules:
        if ends:
            _choose_by_row(module, (0, *classes.ends))
        _forget_lengths(module)
    return classes


def _kinds(module: Any) -> dict[str | None, str] | None:
    """Return the kinds of a rotary embedding's frequencies, by kind of layer; None: for other modules."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {None: kinds}
    return kinds if isinstance(kinds, dict) else None


def _dependent(module: Any) -> Iterator[tuple[str, str | None]]:
    """The kinds that depend on the length, each with its kind of layer."""
    for layer_type, kind in (_kinds(module) or {}).items():
        if kind in LENGTH_DEPENDENT:
            yield kind, layer_type


def _original(module: Any, kind: str, layer_type: str | None) -> int:
    """The length up to which the frequencies are constant."""
    config = module.config
    settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    return int(
        config.max_position_embeddings if kind == "dynamic" else settings["original_max_position_embeddings"]
    )


def _ends(kind: str, original: int, max_length: int) -> Iterator[int]:
    """The lengths below `max_length` after which the frequencies change."""
    end = original
    while end < max_length:
        yield end
        if kind == "longrope":
            return
        end *= 2


def _choose_by_row(module: Any, bounds: tuple[int, ...]) -> None:
    """Replace a rotary embedding's forward by one that reads classes in positions.

    Args:
        bounds: of each class, the longest length of the one before.
    """
    frequencies = [dict(_frequencies(module, bound + 1)) for bound in bounds]
    original: Callable[..., Any] = module.forward

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        classes, positions = position_ids >> POSITION_BITS, position_ids & _POSITION
        chosen: list[Tensor] = []
        for index, bound in enumerate(bounds):
            for name, values in frequencies[index].items():
                setattr(module, name, values)
            mine = classes == index
            # Some look at the longest of the positions: it is in the class, and no other row's.
            own = torch.cat([positions * mine, torch.full_like(positions[:, :1], bound)], dim=1)
            found = original(x, own, *args, **kwargs)
            parts = [part[:, :-1] for part in (found if isinstance(found, tuple) else (found,))]
            # Of each row [1, T, D], the values of its class.
            chosen = [
                torch.where(mine[..., None], *pair) for pair in zip(parts, chosen or parts, strict=True)
            ]
        return tuple(chosen) if isinstance(found, tuple) else chosen[0]

    module.forward = forward


def _frequencies(module: Any, length: int) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a rotary embedding's frequencies for sequences of a length, by name."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # slow: loaded models have paid for it

    for kind, layer_type in _dependent(module):
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        before = getattr(module, name)
        original = seq_len = _original(module, kind, layer_type)
        while seq_len < length:
            seq_len *= 2
        if length <= original:
            yield name, before
        else:
            values, _ = ROPE_INIT_FUNCTIONS[kind](
                module.config, before.device, seq_len=seq_len, layer_type=layer_type
            )
            yield name, values


def _forget_lengths(module: Any) -> None:
    """Keep transformers from changing the frequencies by the longest sequence of a batch."""
    kinds = module.rope_type
    if isinstance(kinds, str):
        module.rope_type = "default" if kinds in LENGTH_DEPENDENT else kinds
    else:
        module.rope_type = {
            name: "default" if kind in LENGTH_DEPENDENT else kind for name, kind in kinds.items()
        }
