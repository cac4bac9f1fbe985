# SPDX-License-Identifier: Apache-2.0
"""Steps that state layers call: over the states' memory, or, in a dry run, by the plain recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from radixkv.model.step_context import current_step
from radixkv_kernels.gated_heads import GatedHeads
from radixkv_kernels.state_interface import StateBackend, StatePlan
from radixkv_kernels.state_reference import reference_mix, shape_of
from radixkv_kernels.states import PagedStates, StateShape


class StateMixing(Protocol):
    """States of one step, as the layers see them."""

    def mix(self, layer: int, kind: str, inputs: tuple[Tensor, ...], constants: tuple[Any, ...]) -> Tensor:
        """Compute one layer; see `radixkv_kernels.state_reference` for kinds, inputs and constants."""


def mix(layer: int, kind: str, *inputs: Tensor, constants: tuple[Any, ...] = ()) -> Tensor:
    """Compute one layer's rows with the states of the step that runs; returns the dtype of the first input.

    Raises:
        RuntimeError: the model was not called by `call_model`.
    """
    states: StateMixing = current_step().states
    return states.mix(layer, kind, inputs, constants).to(inputs[0].dtype)


@dataclass(frozen=True)
class PagedStep:
    """The memory of a runner's states, and the plan of its step."""

    backend: StateBackend
    memory: PagedStates
    plan: StatePlan

    def mix(self, layer: int, kind: str, inputs: tuple[Tensor, ...], constants: tuple[Any, ...]) -> Tensor:
        """See `StateMixing`."""
        return self.backend.mix(self.memory, layer, kind, self.plan, inputs, constants)

    def mix_gated(self, layer: int, of: GatedHeads, *inputs: Tensor | None) -> Tensor:
        """Compute a layer of heads between its products; inputs as of `StateBackend.mix_gated`."""
        return self.backend.mix_gated(self.memory, layer, self.plan, of, *inputs)  # type: ignore[arg-type]

    def mix_factored(self, layer: int, weight: Tensor, bias: Tensor | None, row: Tensor) -> Tensor:
        """Compute a gated short convolution; see `StateBackend.mix_factored`."""
        return self.backend.mix_factored(self.memory, layer, self.plan, weight, bias, row)


class PlainStates:
    """The T tokens of one sequence from its beginning, by the float64 reference.

    Args:
        order: [T], the rows in the order of their positions.

    Attributes:
        shapes: the states that the layers keep, in the order of their calls.
    """

    def __init__(self, order: Tensor) -> None:
        self._order = order
        self.shapes: list[StateShape] = []

    def mix(self, layer: int, kind: str, inputs: tuple[Tensor, ...], constants: tuple[Any, ...]) -> Tensor:
        """See `StateMixing`."""
        self.shapes.append(shape_of(layer, kind, inputs, constants))
        out, _ = reference_mix(kind, tuple(each[self._order] for each in inputs), constants)
        return out[self._order.argsort()].to(inputs[0].dtype)
