# SPDX-License-Identifier: Apache-2.0
"""Communicator: the sums and messages between the ranks of one group, by gloo on CPUs and NCCL on GPUs.

A process may be in several groups, one after the other or at once: torch's global process group is not used.
Ranks meet in a folder that only this user can read, and gloo listens on this machine's loopback address, on a
port that the system chooses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

_MEETING_S = 30.0
# A rank that waits for a lost one hears of it at once, and the watcher of the group ends one that hangs: see
# `worker_group`. gloo itself need not give up before.
_NEVER = timedelta(hours=12)


class Communicator:
    """A rank's end of its group. Not thread-safe, but for `waiting_since` and `abort`.

    Creating one blocks until all ranks have come to the meeting.

    Args:
        meeting: a file that does not exist yet, the same for all ranks, in a folder that exists.
        device: device of the tensors that are summed.
        in_order: sum in the order of ranks, so that a row's sum does not depend on the rows beside it.

    Raises:
        RuntimeError: a rank did not come.
    """

    def __init__(
        self, meeting: Path, rank: int, size: int, device: torch.device, *, in_order: bool = False
    ) -> None:
        self.rank, self.size = rank, size
        self.device = device
        # Two numbers have one sum, whatever their order.
        self._in_order = in_order and size > 2
        self._waiting_since: float | None = None
        self._pending: list[tuple[float, Any]] = []
        store = dist.FileStore(str(meeting), size)
        store.set_timeout(timedelta(seconds=_MEETING_S))
        self._group = _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, rank, size)
        self.gather(0)  # all of them are there

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace the tensor by the sum of all ranks' tensors, which have its shape; returns it."""
        if self._in_order:
            each = [torch.empty_like(tensor) for _ in range(self.size)]
            self._wait(self._group.allgather([each], [tensor]))
            tensor.copy_(each[0])
            for other in each[1:]:
                tensor.add_(other)
        else:
            self._wait(self._group.allreduce([tensor]))
        return tensor

    def join(self, own: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """All ranks' tensors side by side: [..., own width] -> [..., sum of `widths`].

        Args:
            widths: of each rank's tensor.
        """
        padded = F.pad(own, (0, max(widths) - own.shape[-1])).contiguous()  # as the messages have one size
        each = padded.new_empty(self.size, *padded.shape)
        self._wait(self._group.allgather([list(each)], [padded]))
        return torch.cat([part[..., :width] for part, width in zip(each, widths, strict=True)], dim=-1)

    def take_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace the tensor by that of rank 0; returns it."""
        self._wait(self._group.broadcast(tensor, 0))
        return tensor

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return max(self.gather(number))

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return min(self.gather(number))

    def total(self, number: int) -> int:
        """The sum of all ranks' numbers."""
        return sum(self.gather(number))

    def gather(self, number: int) -> list[int]:
        """All ranks' numbers, in their order."""
        each = [torch.empty(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        own = torch.tensor([number], dtype=torch.int64, device=self.device)
        self._wait(self._group.allgather([each], [own]))
        return [int(one) for one in each]

    def note_launched(self) -> None:
        """On a GPU: make `waiting_since` wait for all work launched so far."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._pending.append((time.monotonic(), event))

    @property
    def waiting_since(self) -> float | None:
        """Return the time, by `time.monotonic`, since when this rank waits for others; None: it does not.

        On a GPU: since when a step has been running that is not done. Any thread may ask.
        """
        while self._pending and self._pending[0][1].query():
            self._pending.pop(0)
        return self._pending[0][0] if self._pending else self._waiting_since

    def abort(self) -> None:
        """Let all waiting calls return, with undefined results; any thread may call this."""
        if self.device.type == "cuda":
            self._group.abort()

    def _wait(self, work: Any) -> None:
        self._waiting_since = time.monotonic()
        try:
            work.wait()
        finally:
            self._waiting_since = None


def _gloo(store: dist.Store, rank: int, size: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _NEVER
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the ranks are on one machine
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _NEVER
    return nccl(store, rank, size, options)
