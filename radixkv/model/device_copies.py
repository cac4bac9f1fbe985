# SPDX-License-Identifier: Apache-2.0
"""Copies between a GPU's memory and the host's beside the steps: the engine's thread never waits for one.

    steps' stream   | step | gather |      step      | scatter | step |
    side stream                     | to the host |   | from the host |
    a thread                          waits, hands on

Blocks are gathered in the order of the steps, so that later ones may write to them at once, and copied to
pinned memory on a side stream. What is loaded comes the other way: only the device waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from radixkv.model.block_copy import BlockCopy
from radixkv.text.thread_priority import yield_to_steps
from radixkv_kernels import Bytes
from radixkv_kernels.kv_cache import saved_rows


class Done(Protocol):
    """End of a copy."""

    def query(self) -> bool:
        """Return True if it is over."""

    def synchronize(self) -> None:
        """Wait for it on the host."""


class CopyStreams(Protocol):
    """Stream and events of copies; tests replace it."""

    def pinned(self, *shape: int) -> torch.Tensor:
        """Return new host memory for copies, uint8."""

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Return True if copies may read this host memory where it is."""

    def beside(self, work: Callable[[], torch.Tensor], *, after_steps: bool) -> tuple[torch.Tensor, Done]:
        """Launch work on the side stream; return its tensor, and its end.

        Args:
            after_steps: after all that was launched on the steps' stream.
        """

    def join(self, tensor: torch.Tensor, done: Done) -> None:
        """Let the steps' stream go on only after a copy, whose tensor it reads."""


class CudaStreams:
    """A stream of CUDA beside the steps' one."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)

    def pinned(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return memory.is_pinned()

    def beside(self, work: Callable[[], torch.Tensor], *, after_steps: bool) -> tuple[torch.Tensor, Done]:
        if after_steps:
            self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            tensor = work()
            done = torch.cuda.Event()
            done.record()
        return tensor, done

    def join(self, tensor: torch.Tensor, done: Any) -> None:
        current = torch.cuda.current_stream()
        current.wait_event(done)
        tensor.record_stream(current)


class DeviceCopies:
    """Saves and loads of one device's memory; used by the engine's thread.

    Args:
        streams: where they run; None: CUDA's.
    """

    def __init__(self, device: torch.device, streams: CopyStreams | None = None) -> None:
        self._device = device
        self._streams: CopyStreams = streams or CudaStreams(device)
        self._waiter: ThreadPoolExecutor | None = None  # made when it is needed
        # Host memory that copies still read.
        self._reading: list[tuple[Done, object]] = []

    def save(self, gathered: torch.Tensor) -> BlockCopy:
        """Copy rows uint8 [N, bytes] of the device's memory to the host; see `Runner.save`."""
        rows = self._streams.pinned(*gathered.shape)
        kept = [gathered]  # until it has been read
        _, done = self._streams.beside(lambda: rows.copy_(gathered, non_blocking=True), after_steps=True)

        def wait(_: int) -> None:
            done.synchronize()
            kept.clear()

        copy = BlockCopy(rows.numpy(), wait, reads_pool=False)
        if self._waiter is None:
            self._waiter = ThreadPoolExecutor(1, "radixkv-saver", initializer=yield_to_steps)
        self._waiter.submit(copy.run)
        return copy

    def load(
        self, scatter: Callable[[torch.Tensor], None], data: Sequence[Bytes], count: int, size: int, what: str
    ) -> None:
        """Copy rows to the device and let `scatter` write them, before the steps from now on; see
        `Runner.load`.

        Pinned memory, as a host tier has, is read where it is; other memory through pinned memory.

        Raises:
            ValueError: see `saved_rows`; nothing was written.
        """
        rows = saved_rows(data, count, size, what)
        if not rows:
            return
        self._reading = [(done, memory) for done, memory in self._reading if not done.query()]
        sources = [torch.from_numpy(row) for row in rows]
        if not all(self._streams.is_pinned(source) for source in sources):
            staged = self._streams.pinned(count, size)
            np.stack(rows, out=staged.numpy())
            sources = [staged]

        def copy() -> torch.Tensor:
            loaded = torch.empty(count, size, dtype=torch.uint8, device=self._device)
            for target, source in zip(loaded.view(len(sources), -1), sources, strict=True):
                target.copy_(source.view(-1), non_blocking=True)
            return loaded

        loaded, done = self._streams.beside(copy, after_steps=False)
        self._reading.append((done, (rows, sources)))
        self._streams.join(loaded, done)
        scatter(loaded)
