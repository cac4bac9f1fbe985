# SPDX-License-Identifier: Apache-2.0
"""Arrays on their way to the logits' device and back, without a wait on the way there; its lack of memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from radixkv.errors import OutOfDeviceMemoryError


def to_device(array: np.ndarray[Any, Any] | Sequence[int], device: torch.device) -> torch.Tensor:
    """Return a tensor of the same type; lists become int64. A copy to a GPU waits for nothing there."""
    own = array if isinstance(array, np.ndarray) else np.array(array, dtype=np.int64)
    tensor = torch.from_numpy(own)
    if device.type == "cuda":
        # A copy from other memory would wait for all that was launched before.
        tensor = tensor.pin_memory()
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


class Fetch:
    """The numbers of several tensors on their way to the host, one copy however many there are.

    From a GPU they travel as float64, which holds float32, bools and ids below 2^53 exactly. Work
    launched after the copy is not waited for.
    """

    def __init__(self, columns: Sequence[torch.Tensor]) -> None:
        self._flat = [column.reshape(-1) for column in columns]
        self._copied: torch.cuda.Event | None = None
        if self._flat[0].device.type == "cuda":
            numbers = torch.cat([column.double() for column in self._flat])
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[list[Any]]:
        """Return the numbers of each tensor, flattened."""
        if self._copied is None:
            return [column.tolist() for column in self._flat]
        self._copied.synchronize()
        numbers = iter(self._numbers.tolist())
        return [list(itertools.islice(numbers, len(column))) for column in self._flat]


@contextmanager
def frees_memory() -> Iterator[None]:
    """Return what torch keeps for later to the device if memory runs out in this block.

    Its parts may each have been too small, and be enough together.

    Raises:
        OutOfDeviceMemoryError: it ran out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        lines = str(error).splitlines()
        error.__traceback__ = None  # its frames hold the tensors of the step
        torch.cuda.empty_cache()
        raise OutOfDeviceMemoryError(lines[0] if lines else "out of memory") from None
