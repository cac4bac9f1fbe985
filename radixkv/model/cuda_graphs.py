# SPDX-License-Identifier: Apache-2.0
"""Steps replayed as CUDA graphs: one launch in place of some hundreds per step.

Decodes, decodes with drafts and steps with chunks of prompts alike: up to `PADDED_ROWS` rows, a step is
padded to a number of rows from a short list (`row_sizes`), and is the same sequence of kernel launches as any
other step of the same *key*::

    key = (padded number of rows, tiles of adapters, whether states come in chunks,
           the grids of the backend's launches)

The backend makes the grids of a padded step as large as any step of that size needs, so that there are two
keys for each number of rows: with its kernel for long chunks and shared prefixes, and without. Where rows may
have adapters, each of them is recorded with a few adapters, too. Models with states have a third one:
their layers take more programs where chunks of prompts are in the step.

All else is read from device memory at fixed addresses: token ids, positions, slots, and the attention plan,
which the backend stages before each replay. `capture` records the steps that serving will have, at the start;
of a key that it did not foresee the first step runs eagerly, the second is captured.

    copies -> plan -> fill the static inputs -> backend.stage(plan) -> replay -> logits of the rows wanted

Padded rows have slot -1 (never written), belong to no query of the plan (never attended) and have no
experts: they compute numbers that are never read. A model that can't be captured, because it waits for the
device somewhere, turns graphs off for good and keeps running eagerly.

The sums of several ranks are recorded with all else. Every rank records and replays the same steps, since all
are given the same ones. A rank that can't record computes the same sums in the same order eagerly.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import torch

from radixkv.model.attention.attention_hook import AttentionStep
from radixkv.model.runner_states import RunnerStates
from radixkv.model.runner_windows import RunnerWindows
from radixkv.model.step_context import call_model
from radixkv.model.warm_up import idle_batch
from radixkv.sampling.device_arrays import to_device
from radixkv.scheduling.batch import Batch
from radixkv_kernels import AttentionBackend, GroupedKV, PagedKV

logger = logging.getLogger(__name__)

#: Steps are padded and recorded up to this many rows: more take a GPU longer than their launches.
PADDED_ROWS = 512

#: Runs a step once or records it: step -> (function that replays it, the step's result, rewritten in place
#: by every replay).
Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


class StepGraphs:
    """Captures and replays steps; not thread-safe.

    Args:
        model: called as `radixkv.model.attention.attention_hook` says.
        max_rows: most rows of a step that is recorded, from `max_padded_rows`.
        row_multiple: what numbers of rows are multiples of, so that no row's bits depend on them.
        record: how a step is recorded; tests replace it.
        max_graphs: graphs kept, least recently used ones make room; twice as many with adapters.
        adapters: a `GpuAdapterMemory`; None: rows have none.
        states: states of the model; None: it has none.
        windows: blocks of layers with a window; None: they are not apart.
        has_grid: the model's rotary positions have three components, which images tell apart.
    """

    def __init__(
        self,
        model: Any,
        kv: PagedKV | GroupedKV,
        backend: AttentionBackend,
        *,
        max_rows: int,
        row_multiple: int = 1,
        record: Recorder | None = None,
        max_graphs: int = 64,
        adapters: Any = None,
        states: RunnerStates | None = None,
        windows: RunnerWindows | None = None,
        has_grid: bool = False,
    ) -> None:
        self.model, self.backend, self._kv = model, backend, kv
        self._has_grid = has_grid
        self.captured = self.replayed = 0
        self.enabled = True
        self._recorder = record or CudaRecorder()
        self._adapters, self._states, self._freed = adapters, states, windows
        self._max_graphs = max_graphs if adapters is None else 2 * max_graphs
        self._sizes = row_sizes(max_rows, row_multiple)
        max_rows = self._sizes[-1]
        device = kv.spec.device
        self._step: AttentionStep  # the one that runs or is recorded
        self._windows: set[int | None] = set()
        self._has_run = False
        # Padding rows keep the zeros: NaN in them would be as harmless, but trips checks. Layers of several
        # shapes get memory of the graphs' own.
        self._out: torch.Tensor | None = None
        if isinstance(kv, PagedKV):
            shape = (max_rows, backend.config.num_query_heads, kv.spec.value_size)
            self._out = torch.zeros(shape, dtype=backend.config.compute_dtype, device=device)
        pinned = device.type == "cuda"
        # Every graph writes its logits here, so that none keeps memory of its own for them.
        self._logits: torch.Tensor | None = None
        # Rows: token ids, positions, slots, whether it is a row of the batch, slots in the pool of windows;
        # rotary positions of a grid.
        num_columns = 8 if has_grid else 5
        self._inputs = torch.zeros(num_columns, max_rows, dtype=torch.int64, device=device)
        self._staging = torch.zeros(num_columns, max_rows, dtype=torch.int64, pin_memory=pinned)
        self._staged = torch.cuda.Event() if pinned else None
        self._graphs: OrderedDict[Hashable, tuple[Callable[[], None], torch.Tensor]] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"StepGraphs({len(self._graphs)} graphs, {self.captured} captured, {self.replayed} replays)"

    def capture(self) -> Iterator[float]:
        """Record the steps that serving will have, the largest first: the others find room in its memory.

        Yields:
            After each step, what share of them is done.
        """
        spec, sizes = self._kv.spec, self._sizes[::-1]
        for done, size in enumerate(sizes, 1):
            # A decode each, up to the most there may be; the last one has the other rows.
            lengths = [1] * min(size, self.backend.config.max_num_seqs)
            lengths[-1] += size - len(lengths)
            batch = idle_batch(lengths, lengths, spec.num_blocks, spec.block_size)
            kinds = [(True, False), (False, False)]
            if self._states is not None:
                kinds.insert(0, (True, True))
            for (every_kernel, chunks), adapted in itertools.product(
                kinds, (False,) if self._adapters is None else (True, False)
            ):
                adapters = self._adapters.stage_none(size) if adapted else None
                # A first run compiles the kernels, and finds the windows of the layers.
                options: dict[str, Any] = {"every_kernel": every_kernel, "chunks": chunks}
                if self._prepare(batch, size, adapters, **options) is None:
                    continue
                self._forward()
                key = self._prepare(batch, size, adapters, **options)
                if self.enabled and key not in self._graphs:
                    self._record(key)
            yield done / len(sizes)

    def run(
        self, batch: Batch, plan: Any, adapters: Any = None, rope: np.ndarray[Any, Any] | None = None
    ) -> torch.Tensor | None:
        """Logits [S, V] of a step's `logit_rows`, valid until the next one; None if it does not qualify.

        The batch's copies have been made, and `plan` is the backend's of this batch.

        Args:
            adapters: `StepAdapters` of its rows; None: they have none.
            rope: rotary positions [3, T] where images come before; None: they are the positions.
        """
        count = batch.num_tokens
        if not self.enabled or not qualifies(batch) or count > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= count)
        staged = None if adapters is None else self._adapters.stage(adapters, size)
        key = self._prepare(batch, size, staged, plan, rope=rope)
        if key is None:
            return None
        graph = self._graphs.get(key)
        # Only running the model tells which windows its layers have.
        if graph is None and self._has_run and not self._first_time(key):
            graph = self._record(key)
        if graph is None:
            return self._wanted(self._forward(), batch)
        self._graphs.move_to_end(key)
        graph[0]()
        self.replayed += 1
        return self._wanted(graph[1], batch)

    def _prepare(
        self,
        batch: Batch,
        size: int,
        adapters: Any,
        plan: Any = None,
        *,
        every_kernel: bool = False,
        chunks: bool = False,
        rope: np.ndarray[Any, Any] | None = None,
    ) -> Hashable | None:
        """Bring a step to where recorded launches read it; returns its key, or None if it fits into none."""
        states = None
        if self._states is not None:
            states = self._states.step(batch)
            found = self._states.stage(states, size, self._sizes[-1], large=chunks)
            if found is None:
                return None
            chunks, every_kernel = found, every_kernel or found
        if plan is None:
            plan = self._plan(batch)
        self._fill(batch, size, rope)
        slots = self._inputs[2, :size]
        self._step = AttentionStep(self.backend, self._kv, plan, slots, out=self._out, windows=self._windows)
        if self._freed is not None:
            self._step = self._freed.step(self._step, batch, self._inputs[4, :size])
        self._step.adapters, self._step.states = adapters, states
        self._step.is_row = self._inputs[3, :size]
        self.backend.pad(plan, self._windows, size, every_kernel=every_kernel)
        self.backend.stage(plan, self._windows)
        num_tiles = 0 if adapters is None else len(adapters.tiles)
        return size, num_tiles, chunks, self.backend.launch_key(plan, self._windows)

    def _plan(self, batch: Batch) -> Any:
        if self._freed is not None:
            return self._freed.plan(self.backend, batch)
        return self.backend.plan(batch.query_starts, batch.context_lengths, batch.block_tables)

    @staticmethod
    def _wanted(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Select the logits of the rows that the batch samples."""
        count, rows = batch.num_tokens, batch.logit_rows
        if len(rows) == count and (rows[1:] > rows[:-1]).all():
            return logits[:count]
        return logits.index_select(0, to_device(rows, logits.device))

    def _fill(self, batch: Batch, size: int, rope: np.ndarray[Any, Any] | None) -> None:
        """Copy the batch's columns to the static inputs, padded to `size` rows."""
        if self._staged is not None:
            self._staged.synchronize()
        host, count = self._staging.numpy(), batch.num_tokens
        host[:2, :count] = batch.token_ids, batch.positions
        host[:2, count:size] = 0
        host[2, :size] = -1
        written: Any = slice(count) if batch.write_rows is None else batch.write_rows
        host[2][written] = batch.write_slots
        host[3, :size] = np.arange(size) < count
        if batch.windows is not None:
            host[4, :count], host[4, count:size] = batch.windows.write_slots, -1
        if self._has_grid:
            host[5:, :count] = batch.positions if rope is None else rope
            host[5:, count:size] = 0
        self._inputs[:, :size].copy_(self._staging[:, :size], non_blocking=True)
        if self._staged is not None:
            self._staged.record()
        if batch.fed_tokens is not None:
            self._inputs[0, :count] = batch.fed_tokens

    def _forward(self) -> torch.Tensor:
        self._has_run = True
        columns = self._inputs[:, : len(self._step.slots)]
        token_ids, positions, inputs = columns[0], columns[1], None
        if self._has_grid:
            inputs = {"input_ids": token_ids[None], "position_ids": columns[5:, None]}
        logits = call_model(self.model, token_ids, positions, None, self._step, inputs)
        if self._logits is None:
            self._logits = logits.new_zeros(self._sizes[-1], logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    def _first_time(self, key: Hashable) -> bool:
        """Return True for a key not seen before; four keys are remembered per kept graph."""
        new = key not in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > 4 * self._max_graphs:
            self._seen.popitem(last=False)
        return new

    def _record(self, key: Hashable) -> tuple[Callable[[], None], torch.Tensor] | None:
        try:
            graph = self._recorder(self._forward)
        except RuntimeError as error:
            self.enabled = False
            self._graphs.clear()
            logger.warning("steps of this model can't be captured as CUDA graphs: %s", error)
            return None
        self._graphs[key] = graph
        self.captured += 1
        if len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)
        return graph


def qualifies(batch: Batch) -> bool:
    """Return True if no row is written to several slots, as rows copied within the step are."""
    rows = batch.write_rows
    return batch.num_tokens > 0 and (rows is None or len(np.unique(rows)) == len(rows))


def max_padded_rows(max_num_tokens: int, max_num_seqs: int) -> int:
    """Most rows of a step that is padded and recorded: a token for every request at least.

    Logits of all of them have their place at any time: steps of very many rows have none.
    """
    return min(max_num_tokens, max(max_num_seqs, PADDED_ROWS))


def row_sizes(max_rows: int, multiple: int = 1) -> list[int]:
    """The numbers of rows that steps are padded to: few, and above 64 at most a quarter is padding.

    Args:
        multiple: that all of them are multiples of, at most `max_rows`.
    """
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    sizes += [*range(80, 129, 16), *range(160, 257, 32), *range(320, max_rows, 64)]
    most = max_rows // multiple * multiple
    return sorted({min(-(-size // multiple) * multiple, most) for size in (*sizes, most)})


class CudaRecorder:
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
