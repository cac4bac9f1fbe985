# SPDX-License-Identifier: Apache-2.0
"""The step that a model computes, found by its layers without passing through their arguments.

Some architectures of transformers do not hand unknown keywords on to their attention or their mixers, so a
step passed as one would be lost on the way.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_thread = threading.local()


def current_step() -> Any:
    """Return the step that this thread's model computes.

    Raises:
        RuntimeError: the model was called directly, not by `call_model`.
    """
    step = getattr(_thread, "step", None)
    if step is None:
        raise RuntimeError("a model loaded for paged attention was called outside of call_model")
    return step


def current_positions() -> Tensor:
    """Return the [T] absolute positions of the tokens that this thread's model computes.

    Raises:
        RuntimeError: as `current_step`.
    """
    current_step()
    positions: Tensor = _thread.positions
    return positions


def current_rows() -> Tensor | None:
    """Return [T], 0 for rows of this thread's step that are padding; None: all rows are of requests.

    Raises:
        RuntimeError: as `current_step`.
    """
    is_row: Tensor | None = getattr(current_step(), "is_row", None)
    return is_row


def chooses_rows(model: Any) -> bool:
    """Return True if a model computes the logits of chosen rows; a few compute those of all."""
    kind: Any = type(model)
    return _chooses_rows(kind)


@functools.cache
def _chooses_rows(kind: Any) -> bool:
    parameters = inspect.signature(getattr(kind, "forward", kind.__call__)).parameters
    return "logits_to_keep" in parameters or any(
        each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters.values()
    )


@contextmanager
def computing(step: Any, positions: Tensor) -> Iterator[None]:
    """Return a context in which this thread's layers compute a step of rows at these [T] positions."""
    before = getattr(_thread, "step", None), getattr(_thread, "positions", None)
    _thread.step, _thread.positions = step, positions
    try:
        yield
    finally:
        _thread.step, _thread.positions = before


def call_model(
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    rows: Tensor | None,
    step: Any,
    inputs: Mapping[str, Any] | None = None,
) -> Tensor:
    """Call a loaded model for one step.

    Args:
        input_ids: [T] token ids of the flattened batch.
        positions: [T] absolute position of each token in its own sequence.
        rows: [R] indices of the tokens whose logits are wanted; None: all T.
        step: the object that stores K/V and attends, such as an `AttentionStep`.
        inputs: the model's arguments in place of ids and positions, where these are not all that it sees.

    Returns:
        Logits [R, vocab].
    """
    wanted = {} if rows is None or not chooses_rows(model) else {"logits_to_keep": rows}
    if inputs is None:
        inputs = {"input_ids": input_ids[None], "position_ids": positions[None]}
    with computing(step, positions):
        output = model(**inputs, attention_mask=None, use_cache=False, **wanted)
    logits: Tensor = output.logits[0]
    return logits if rows is None or wanted else logits[rows]
