"""Batch -> logits of the sampled rows: the model, its paged K/V, and the step that connects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from radixkv.model.batch_invariance import check_supported, choose_row_multiple, use_fixed_tiles
from radixkv.model.cpu.packed_linear import pack_linear_layers
from radixkv.model.cpu.quantized_linear import quantize_linear_layers
from radixkv.model.cpu.thread_control import ThreadControl
from radixkv.model.cuda_graphs import DecodeGraphs
from radixkv.model.loading.file_pages import address_ranges, release_file_pages
from radixkv.scheduling.batch import Batch
from radixkv_kernels import KVSpec, PagedKV, make_backend

if TYPE_CHECKING:
    from radixkv.model.loading.loader import LoadedModel


@dataclass(slots=True)
class AttentionStep:
    """What the attention hook calls in each layer of one step; passed through the model as a keyword.

    Rows from `num_tokens` on are padding: they are neither written nor attended.
    """

    backend: Any
    kv: PagedKV
    plan: Any
    write_slots: torch.Tensor
    write_rows: torch.Tensor | None
    num_tokens: int

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this layer's K/V into the cache, then attend over it.

        Args:
            query: [T, Hq, D]; key, value: [T, Hkv, D].

        Returns:
            [T, Hq, D]
        """
        count = self.num_tokens
        padding = query.shape[0] - count
        if padding:
            query, key, value = query[:count], key[:count], value[:count]
        self.backend.write(self.kv, layer, key, value, self.write_slots, self.write_rows)
        out: torch.Tensor = self.backend.attend(
            self.kv, layer, query, self.plan, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


class ModelRunner:
    """Weights and paged K/V tensors; not thread-safe.

    Args:
        loaded: a model whose attention goes through the hook.
        spec: size and layout of the K/V storage.
        backend: `cpu` or `triton`.
        max_num_tokens: largest T of a batch.
        max_num_seqs: most entries of a batch.
        max_model_len: longest context.
        deterministic: logits do not depend on what else is in the batch or the cache; see
            `radixkv.model.batch_invariance`.
        share_prefixes: attend prefixes that several entries share once per group.
        quantization: None, or `int8` weights.
        thread_control: asked before each step how many threads to compute with.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spec: KVSpec,
        *,
        backend: str,
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        deterministic: bool = False,
        share_prefixes: bool = True,
        quantization: str | None = None,
        thread_control: ThreadControl | None = None,
    ) -> None:
        self.thread_control = thread_control
        self.model = loaded.model
        self.device = loaded.device
        self.spec = spec
        weights = address_ranges(loaded.model.parameters())
        release_file_pages(weights)  # the checks at load have read all
        if quantization is not None:
            quantize_linear_layers(loaded.model)
        elif self.device.type == "cpu":
            pack_linear_layers(loaded.model)
        self.row_multiple = 1
        if deterministic:
            check_supported(loaded.hf_config)
            self.row_multiple = choose_row_multiple(loaded.model)
            if self.row_multiple == 0:
                use_fixed_tiles(loaded.model)
                self.row_multiple = 1
        release_file_pages(weights)
        self.kv = PagedKV(spec)
        self.backend_name = backend
        self.backend = make_backend(
            backend,
            num_query_heads=loaded.num_query_heads,
            spec=spec,
            compute_dtype=loaded.dtype,
            deterministic=deterministic,
            share_prefixes=share_prefixes,
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self.graphs: DecodeGraphs | None = None
        # Padding to a list of batch sizes would change the products that deterministic mode fixes.
        if self.device.type == "cuda" and not deterministic:
            self.graphs = DecodeGraphs(self.model, self.kv, self.backend, max_num_seqs=max_num_seqs)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> torch.Tensor:
        """Run one step.

        Returns:
            Logits [S, V] of `batch.logit_rows`, in the model's dtype.
        """
        if self.thread_control is not None:
            self.thread_control.before_step()
        for group in batch.copy_groups:
            self.backend.copy_blocks(self.kv, group)
        plan = self.backend.plan(batch.query_starts, batch.context_lengths, batch.block_tables)
        if self.graphs is not None:
            replayed = self.graphs.run(batch, plan)
            if replayed is not None:
                return replayed
        step = AttentionStep(
            self.backend,
            self.kv,
            plan,
            self._to_device(batch.write_slots),
            None if batch.write_rows is None else self._to_device(batch.write_rows),
            batch.num_tokens,
        )
        output = self.model(
            input_ids=self._to_device(self._pad(batch.token_ids))[None],
            position_ids=self._to_device(self._pad(batch.positions))[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=self._to_device(self._pad(batch.logit_rows)),
            radixkv_step=step,
        )
        logits: torch.Tensor = output.logits[0, : len(batch.logit_rows)]
        return logits

    def _pad(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The array with zeros behind, up to a multiple of `row_multiple` rows."""
        padding = -len(array) % self.row_multiple
        return np.pad(array, (0, padding)) if padding else array

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)
