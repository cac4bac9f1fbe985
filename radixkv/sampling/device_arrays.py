"""Arrays on their way to the logits' device and back, without waiting on the way there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def to_device(array: np.ndarray[Any, Any] | Sequence[int], device: torch.device) -> torch.Tensor:
    """A tensor of the same type; lists become int64. Copying to a GPU waits for nothing that runs there."""
    own = array if isinstance(array, np.ndarray) else np.array(array, dtype=np.int64)
    tensor = torch.from_numpy(own)
    if device.type == "cuda":
        # A copy from other memory would wait for all that was launched before.
        tensor = tensor.pin_memory()
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def fetch(columns: Sequence[torch.Tensor]) -> list[list[Any]]:
    """The numbers of several tensors, flattened: one wait for a GPU, however many there are.

    From there they travel as float64, which holds float32, bools and ids below 2^53 as they are.
    """
    flat = [column.reshape(-1) for column in columns]
    if flat[0].device.type == "cpu":
        return [column.tolist() for column in flat]
    numbers = iter(torch.cat([column.double() for column in flat]).tolist())
    return [list(itertools.islice(numbers, len(column))) for column in flat]
