# SPDX-License-Identifier: Apache-2.0
"""ModelRunner: from a batch to logits of its sampled rows, by the model and its paged K/V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from radixkv.cache.pending_copies import Copy
from radixkv.model.adapters.step_adapters import arrange
from radixkv.model.attention.attention_hook import AttentionStep
from radixkv.model.attention.expanded_latents import Expansion
from radixkv.model.block_copy import BlockCopy
from radixkv.model.cuda_graphs import StepGraphs, max_padded_rows
from radixkv.model.device_copies import DeviceCopies
from radixkv.model.host_copies import HostCopies
from radixkv.model.loading.load_progress import progress_bar
from radixkv.model.memory.released_memory import ReleasedTensors, release_memory
from radixkv.model.rewritten_model import RewrittenModel, reached_tensors, write_in_place
from radixkv.model.runner_states import RunnerStates
from radixkv.model.runner_windows import RunnerWindows
from radixkv.model.step_context import call_model
from radixkv.model.step_limits import StepLimits as StepLimits
from radixkv.model.vision.step_images import RunnerImages, StepImages
from radixkv.model.warm_up import first_steps
from radixkv.model.whole_vectors import AlignedActivations
from radixkv.sampling.device_arrays import frees_memory, to_device
from radixkv.scheduling.batch import Batch
from radixkv_kernels import Ahead, AttentionPlan, Bytes, GroupedKV, KVLayout, KVSpec, make_backend, make_kv
from radixkv_kernels.states import StateSpec

if TYPE_CHECKING:
    from radixkv.model.loading.loader import LoadedModel

# The first touch of a page costs microseconds, many times a write to it: on a CPU, this much of the
# K/V memory is touched before the first request.
_TOUCHED_KV_BYTES = 256 * 2**20


class ModelRunner:
    """Weights and paged K/V tensors; not thread-safe.

    Args:
        loaded: a model whose attention goes through the hook.
        spec: size and layout of the K/V storage.
        limits: limits of its steps.
        backend: `cpu` or `triton`.
        deterministic: logits do not depend on what else is in the batch or the cache; see
            `radixkv.model.batch_invariance`.
        share_prefixes: attend prefixes that several entries share once per group.
        quantization: None, or `int8` weights.
        before_step: called before each step; it may change the number of threads.
        is_alone: whether no other ranks compute the model, too.
        max_lora_rank: most ranks of LoRA adapters that rows may have; 0: they have none.
        states: size of the memory of states; None: the model keeps none.

    Attributes:
        adapters: reads and finds adapters; None: rows have none.
        images: encodes images; None: the model sees none.
        states, windows: see `radixkv.engine.runner.Runner`.
        copies: saves and loads beside the steps; None: a thread reads the CPU's memory.
        host_copies: what that thread copies.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spec: KVSpec | KVLayout,
        limits: StepLimits,
        *,
        backend: str,
        deterministic: bool = False,
        share_prefixes: bool = True,
        quantization: str | None = None,
        before_step: Callable[[], None] | None = None,
        is_alone: bool = True,
        max_lora_rank: int = 0,
        states: StateSpec | None = None,
    ) -> None:
        self._before_step = before_step
        self.dtype = loaded.dtype
        self.device = loaded.device
        self.spec = spec
        self._rewrite = partial(
            RewrittenModel,
            limits=limits,
            backend=backend,
            deterministic=deterministic,
            quantization=quantization,
            max_lora_rank=max_lora_rank,
        )
        self.model: Any
        self._activations: AlignedActivations | None
        self._expansion: Expansion | None
        self._set(rewritten := self._rewrite(loaded))
        self.adapters = rewritten.adapters
        self.row_multiple = rewritten.row_multiple
        self._released_kv: ReleasedTensors | None = None
        self._released_weights: ReleasedTensors | None = None
        self.kv: Any = make_kv(spec)
        self.copies = DeviceCopies(self.device) if self.device.type == "cuda" else None
        self.backend_name = backend
        self.backend = make_backend(
            backend,
            num_query_heads=loaded.attention.groups[0].num_query_heads,
            spec=spec,
            compute_dtype=loaded.dtype,
            deterministic=deterministic,
            share_prefixes=share_prefixes,
            max_num_tokens=limits.max_num_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
        )
        self.states: RunnerStates | None = None
        if states is not None:
            self.states = RunnerStates(
                states, backend, self.device, deterministic=deterministic, copies=self.copies
            )
        self.windows: RunnerWindows | None = None
        if isinstance(spec, KVLayout) and spec.window is not None:
            assert isinstance(self.kv, GroupedKV)
            self.windows = RunnerWindows(spec, limits.max_num_tokens, self.kv, self.copies)
        self.images = None if loaded.vision is None else RunnerImages(loaded.vision)
        self.host_copies = HostCopies()
        self.graphs: StepGraphs | None = None
        # With ranks in deterministic mode, they agree on a multiple later.
        if self.device.type == "cuda" and (is_alone or not deterministic):
            max_rows = max_padded_rows(limits.max_num_tokens, limits.max_num_seqs)
            if max_rows >= self.row_multiple:
                self.graphs = self._make_graphs()

    # ------------------------------------------------------------------ weights

    def rewrite(self, loaded: LoadedModel) -> RewrittenModel:
        """Bring other weights of the model into the form that steps compute. Any thread."""
        return self._rewrite(loaded)

    def exchange(self, rewritten: RewrittenModel) -> None:
        """Compute with other weights from the next step on. Called between steps.

        Raises:
            WeightUpdateError: the models differ in structure; nothing was changed.
        """
        is_in_place = self.backend_name == "triton"  # recorded steps know the weights' addresses
        if is_in_place:
            write_in_place(self.model, rewritten.model)
        else:
            self._set(rewritten)
        if self.images is not None:
            vision = self.images.vision if is_in_place else rewritten.vision
            assert vision is not None, "models of one configuration see alike"
            self.images.exchange(vision)

    def release(self, *, weights: bool) -> None:
        """See `radixkv.engine.runner.Runner`. A CPU's weights stay unless they are given up."""
        for part in (self, self.states, self.windows):
            if part is not None:
                part.host_copies.finish()  # what they copy is in this memory
        memory = [*self.kv.tensors(), *(() if self.states is None else self.states.tensors())]
        if self.device.type == "cpu":  # the addresses stay: kernels know them
            release_memory(memory)
            if weights:
                self.model = self._activations = self._expansion = None
            return
        self._released_kv = ReleasedTensors(memory, keep=False)
        self._released_weights = ReleasedTensors(reached_tensors(self.model), keep=not weights)

    def restore(self, *, weights: bool, kv: bool) -> None:
        """See `radixkv.engine.runner.Runner`. A GPU's steps are recorded again."""
        if weights and self._released_weights is not None:
            self._released_weights.restore()
            self._released_weights = None
        if kv and self._released_kv is not None:
            self._released_kv.restore()
            self._released_kv = None
            if self.states is not None:
                self.states.clear_hidden()
        if self.graphs is not None and self._released_kv is None and self._released_weights is None:
            self.graphs = self._make_graphs()
            self.record()

    def record(self) -> None:
        """Record a GPU's steps, if they are to be recorded."""
        if self.graphs is not None:
            with progress_bar("Recording steps", 1.0, unit="steps") as update, torch.inference_mode():
                for done in self.graphs.capture():
                    update(done)

    def _make_graphs(self) -> StepGraphs:
        limits = self.backend.config
        return StepGraphs(
            self.model,
            self.kv,
            self.backend,
            max_rows=max_padded_rows(limits.max_num_tokens, limits.max_num_seqs),
            row_multiple=self.row_multiple,
            adapters=self.adapters,
            states=self.states,
            windows=self.windows,
            has_grid=self.images is not None and self.images.vision.family.has_grid,
        )

    def _set(self, rewritten: RewrittenModel) -> None:
        self.model = rewritten.model
        self._activations, self._expansion = rewritten.activations, rewritten.expansion

    @property
    def num_blocks(self) -> int:
        return self.spec.num_blocks

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    @property
    def bytes_per_block(self) -> int:
        """K/V of one block, all layers."""
        return self.spec.bytes_per_block

    @property
    def kv_format(self) -> str:
        """Type, shape and order of a saved block; groups of layers one after the other.

        Groups whose windows are kept apart are named, too, since a block depends on them.
        """
        spec = self.spec
        dtype = str(spec.storage_dtype).removeprefix("torch.")
        scaled = "" if spec.quantization is None else " scaled"
        if isinstance(spec, KVSpec):
            return f"{dtype}{scaled} {_block_shape(spec)}"
        shapes = (
            _block_shape(each) + ("" if group.window is None else f" before {group.window}")
            for group, each in zip(spec.groups, spec.specs, strict=True)
        )
        return f"{dtype}{scaled} {' + '.join(shapes)}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def failure(self) -> None:
        """None: no part of it can be lost while the process lives."""

    def on_failure(self, call: Callable[[], None]) -> None:
        """Never called."""

    def close(self) -> None:
        """Do nothing: its memory and its thread end with it."""

    def warm_up(self, *, thorough: bool = True) -> None:
        """See `radixkv.engine.runner.Runner`; with `thorough`, a GPU's steps are recorded as graphs, too.

        On a CPU, the memory of the blocks that are used first is touched.
        """
        limits, num_blocks, block_size = self.backend.config, self.num_blocks, self.block_size
        is_cpu = self.device.type == "cpu"
        if is_cpu:
            self.kv.clear(min(_TOUCHED_KV_BYTES // self.bytes_per_block, num_blocks))
        max_num_tokens = min(limits.max_num_tokens, limits.max_model_len)
        if is_cpu or not thorough:  # one chunk: there is little to compile
            max_num_tokens = min(2 * block_size, max_num_tokens)
        steps = first_steps(max_num_tokens, limits.max_num_seqs, limits.max_model_len, num_blocks, block_size)
        for batch in steps:
            self.execute(batch)
            if is_cpu or not thorough:
                break
        if thorough:
            self.record()

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy K/V of all layers: for each (source, target, n), the first n slots of a block."""
        self.backend.copy_blocks(self.kv, copies)

    def save(self, blocks: Sequence[int]) -> BlockCopy:
        """See `radixkv.engine.runner.Runner`. A CPU's memory is read by a thread of its own."""
        if self.copies is None:
            return self.host_copies.save(blocks, self.bytes_per_block, self.kv.block_reader())
        return self.copies.save(self.kv.gather_blocks(blocks))

    def load(self, blocks: Sequence[int], data: Sequence[Bytes]) -> None:
        """See `radixkv.engine.runner.Runner`."""
        if self.copies is None:
            self.kv.load_blocks(blocks, data)
            return
        self.copies.load(
            lambda rows: self.kv.scatter_blocks(blocks, rows),
            *(data, len(blocks), self.bytes_per_block, f"the K/V of {len(blocks)} blocks is"),
        )

    @frees_memory()
    @torch.inference_mode()
    def execute(self, batch: Batch, shown: StepImages | None = None) -> torch.Tensor:
        """Run one step.

        Args:
            shown: its images, where rank 0 knows them; None: they are those of its requests.

        Returns:
            Logits [S, V] of `batch.logit_rows`, in the model's dtype or float32.
        """
        if self._before_step is not None:
            self._before_step()
        batch, adapters = (batch, None) if self.adapters is None else arrange(batch)
        for group in batch.copy_groups:
            self.copy_blocks(group)
        if shown is None and self.images is not None:
            shown = self.images.of(batch)
        plan = self._plan(batch, None if shown is None else shown.ahead)
        if self.graphs is not None and (shown is None or shown.is_text):
            replayed = self.graphs.run(batch, plan, adapters, None if shown is None else shown.rope)
            if replayed is not None:
                return replayed
        rows = None if batch.write_rows is None else to_device(batch.write_rows, self.device)
        step = AttentionStep(self.backend, self.kv, plan, to_device(batch.write_slots, self.device), rows)
        if self.windows is not None:
            step = self.windows.step(step, batch)
        if adapters is not None:
            assert self.adapters is not None
            step.adapters = self.adapters.stage(adapters)
        if self.states is not None:
            step.states = self.states.step(batch)
        if self._expansion is not None:
            step.long_chunks = self._expansion.divide(batch, self.backend)
        token_ids, positions, logit_rows = (
            to_device(self._pad(column), self.device)
            for column in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        if batch.fed_tokens is not None:
            token_ids[: batch.num_tokens] = batch.fed_tokens
        with nullcontext() if self._activations is None else self._activations.step(len(token_ids)):
            if shown is None:
                logits = call_model(self.model, token_ids, positions, logit_rows, step)
            else:
                assert self.images is not None
                vision = self.images.vision
                inputs = shown.inputs(vision, token_ids, positions)
                logits = call_model(vision, token_ids, positions, logit_rows, step, inputs)
        return logits[: len(batch.logit_rows)]

    def _plan(self, batch: Batch, ahead: Ahead | None) -> AttentionPlan:
        if self.windows is not None:
            return self.windows.plan(self.backend, batch, ahead)
        return self.backend.plan(batch.query_starts, batch.context_lengths, batch.block_tables, ahead)

    def _pad(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The array with zeros after, up to a multiple of `row_multiple` rows."""
        padding = -len(array) % self.row_multiple
        return np.pad(array, (0, padding)) if padding else array


def _block_shape(spec: KVSpec) -> str:
    shape = f"{spec.num_layers}x{spec.num_kv_heads}x{spec.block_size}x{spec.head_size}"
    if spec.value_in_key:
        return f"{shape} with values"
    return shape if spec.value_size == spec.head_size else f"{shape},{spec.value_size}"
