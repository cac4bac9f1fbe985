"""Decode steps replayed as CUDA graphs: one launch in place of some hundreds per step.

A step qualifies if every entry writes all of its rows and wants their logits: one row for a decode, 1 + k for
one with a draft of k tokens. Such a step is padded to a number of rows from a short list (`bucket`), and is
the same sequence of kernel launches as any other step of the same *key*::

    key = (padded number of rows, what the backend's launches depend on: its grids)

All else is read from device memory at fixed addresses: token ids, positions, slots, and the attention plan,
which the backend stages before each replay. The first step of a key runs eagerly, which also warms compilers
and libraries up; the second is captured; from then on it is replayed.

    copies -> plan -> fill the static inputs -> backend.stage(plan) -> replay -> logits[:n]

Padded rows have slot -1 (never written) and belong to no query of the plan (never attended): they compute
numbers that nobody reads. A model that can't be captured, because it waits for the device somewhere, turns
graphs off for good and keeps running eagerly.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from radixkv.model.attention_hook import AttentionStep, model_inputs
from radixkv.scheduling.batch import Batch
from radixkv_kernels import AttentionBackend, PagedKV
from radixkv_kernels.triton.tiles import bucket

logger = logging.getLogger(__name__)

#: Steps with drafts are recorded up to so many rows.
DRAFT_ROWS = 512

#: Runs a step once or records it: step -> (function that replays it, the step's result, rewritten in place
#: by every replay).
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


class DecodeGraphs:
    """Captures and replays decode steps; not thread-safe.

    Args:
        model: called as `radixkv.model.attention_hook` says.
        max_rows: most rows of a step that is recorded.
        capture: how a step is recorded; tests replace it.
        max_graphs: graphs kept, least recently used ones make room.
    """

    def __init__(
        self,
        model: Any,
        kv: PagedKV,
        backend: AttentionBackend,
        *,
        max_rows: int,
        capture: Capture | None = None,
        max_graphs: int = 64,
    ) -> None:
        self.model, self.backend, self._kv = model, backend, kv
        self.captured = self.replayed = 0
        self.enabled = True
        self._capture = capture or CudaCapture()
        self._max_graphs = max_graphs
        self._max_size = bucket(max_rows)
        device = kv.spec.device
        self._step: AttentionStep  # the one that runs or is recorded
        self._windows: set[int | None] = set()
        # Padding rows keep the zeros: NaN in them would be as harmless, but trips checks.
        shape = (self._max_size, backend.config.num_query_heads, kv.spec.head_size)
        self._out = torch.zeros(shape, dtype=backend.config.compute_dtype, device=device)
        pinned = device.type == "cuda"
        # Rows: token ids, positions, slots.
        # Every graph writes its logits here, so that none keeps memory of its own for them.
        self._logits: torch.Tensor | None = None
        self._inputs = torch.zeros(3, self._max_size, dtype=torch.int64, device=device)
        self._staging = torch.zeros(3, self._max_size, dtype=torch.int64, pin_memory=pinned)
        self._staged = torch.cuda.Event() if pinned else None
        self._graphs: OrderedDict[Hashable, tuple[Callable[[], None], torch.Tensor]] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"DecodeGraphs({len(self._graphs)} graphs, {self.captured} captured, {self.replayed} replays)"

    def run(self, batch: Batch, plan: Any) -> torch.Tensor | None:
        """Logits [n, V] of a decode step, valid until the next one; None if the step does not qualify.

        The batch's copies have been made, and `plan` is the backend's of this batch.
        """
        count = batch.num_tokens
        if not self.enabled or not qualifies(batch) or count > self._max_size:
            return None
        size = bucket(count)
        self._fill(batch, size)
        slots = self._inputs[2, :size]
        self._step = AttentionStep(self.backend, self._kv, plan, slots, out=self._out, windows=self._windows)
        if not self._windows:
            # Only running the model tells which windows its layers have.
            return self._forward()[:count]
        self.backend.stage(plan, self._windows)
        key = (size, self.backend.launch_key(plan, self._windows))
        graph = self._graphs.get(key)
        if graph is None and not self._first_time(key):
            graph = self._record(key)
        if graph is None:
            return self._forward()[:count]
        self._graphs.move_to_end(key)
        graph[0]()
        self.replayed += 1
        return graph[1][:count]

    def _fill(self, batch: Batch, size: int) -> None:
        """Copy the batch's columns to the static inputs, padded to `size` rows."""
        if self._staged is not None:
            self._staged.synchronize()
        host, count = self._staging.numpy(), batch.num_tokens
        rows = (batch.token_ids, batch.positions, batch.write_slots)
        for row, values, padding in zip(host, rows, (0, 0, -1), strict=True):
            row[:count] = values
            row[count:size] = padding
        self._inputs[:, :size].copy_(self._staging[:, :size], non_blocking=True)
        if self._staged is not None:
            self._staged.record()

    def _forward(self) -> torch.Tensor:
        token_ids, positions = self._inputs[:2, : len(self._step.slots)]
        logits: torch.Tensor = self.model(**model_inputs(token_ids, positions, None, self._step)).logits[0]
        if self._logits is None:
            self._logits = logits.new_zeros(self._max_size, logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    def _first_time(self, key: Hashable) -> bool:
        """Whether a key is new; as many are remembered as graphs are kept, times four."""
        new = key not in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > 4 * self._max_graphs:
            self._seen.popitem(last=False)
        return new

    def _record(self, key: Hashable) -> tuple[Callable[[], None], torch.Tensor] | None:
        try:
            graph = self._capture(self._forward)
        except RuntimeError as error:
            self.enabled = False
            self._graphs.clear()
            logger.warning("decode steps of this model can't be captured as CUDA graphs: %s", error)
            return None
        self._graphs[key] = graph
        self.captured += 1
        if len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)
        return graph


def qualifies(batch: Batch) -> bool:
    """Whether every row is written to its own slot, and its logits are wanted: decodes, drafts included."""
    count = batch.num_tokens
    written = len(batch.write_slots) if batch.write_rows is None else -1
    return 0 < count == len(batch.logit_rows) == written


def most_rows(max_num_seqs: int, max_draft_tokens: int) -> int:
    """Most rows of a step worth recording: a row for every request, and drafts as far as they are likely.

    Logits of all of them have their place at any time: steps of very many rows, which are seldom, have none.
    """
    return max(max_num_seqs, min(DRAFT_ROWS, max_num_seqs * (1 + max_draft_tokens)))


class CudaCapture:
    """Records steps as CUDA graphs that share one memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which gives all cached memory back to the driver each time, and leaves its
        # stream current after a capture that failed.
        with torch.cuda.stream(self._stream):
            # Other threads of a server may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = step()
            except BaseException:
                # A broken capture must be ended, too, and says again that it is broken.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay, result
