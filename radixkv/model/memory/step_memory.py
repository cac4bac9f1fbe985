# SPDX-License-Identifier: Apache-2.0
"""Memory of a step besides weights and K/V: measured on a GPU before the K/V gets the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from radixkv.images.image_files import blank_image
from radixkv.model.attention.attention_shape import AttentionShape
from radixkv.model.attention.expanded_latents import find_latents
from radixkv.model.cuda_graphs import row_sizes
from radixkv.model.device_paths import rewrite_layers
from radixkv.model.step_context import call_model
from radixkv_kernels import make_backend
from radixkv_kernels.contiguous import MAX_BYTES, MIN_ROWS
from radixkv_kernels.gated_heads import GatedHeads
from radixkv_kernels.state_reference import shape_of
from radixkv_kernels.states import GRID
from radixkv_kernels.triton.state.tables import capacities

if TYPE_CHECKING:
    from radixkv.model.loading.loader import LoadedModel
    from radixkv.model.vision.vision_model import VisionModel

#: Bytes of sampling for each logit: float32 copies of a row, as processors, softmax and sorting make them,
#: and the counts of tokens that penalties keep.
_SAMPLING_BYTES_PER_LOGIT = 20
#: GPU memory of a recorded launch with its arguments: a twelfth of 256 KiB for a fused layer. An estimate.
_GRAPH_BYTES_PER_LAUNCH = 2**18 // 12
#: Launches of a layer that are not measured: attention, its merge, and the rotation and writing before it.
_KERNELS_PER_LAYER = 4
#: The same of a state, whose heads have kernels for chunks, for decodes, for their ring and their norm.
_KERNELS_PER_STATE = 5
#: Sides of the images that are tried, in pixels: up to 16 million in all.
_SQUARES = tuple(2**power for power in range(6, 13))


class _WithoutAttention:
    """A step whose attention costs its queries and its output; state layers cost their chunks, too."""

    long_chunks: None = None

    def __init__(self, attention: AttentionShape, num_chunks: int) -> None:
        self._groups = {layer: group for group in attention.groups for layer in group.layers}
        self._num_chunks = num_chunks
        self.states = self

    def mix(self, layer: int, kind: str, inputs: tuple[torch.Tensor, ...], constants: Any) -> torch.Tensor:
        if kind in ("scan", "lru"):
            size = int(np.prod(shape_of(layer, kind, inputs, constants).slot_shape))
            inputs[0].new_empty(2, self._num_chunks, size, dtype=torch.float32)  # counts, as below
        if kind not in ("delta", "kda", "ssd"):
            return inputs[0].new_empty(inputs[0].shape, dtype=torch.float32)
        from radixkv_kernels.triton.state.heads import ChunkScratch, HeadSizes  # needs triton

        out = inputs[0].new_empty(inputs[2].shape, dtype=torch.float32)
        sizes = HeadSizes.of(kind, shape_of(layer, kind, inputs, constants).sizes)
        ChunkScratch.of(sizes, self._num_chunks, inputs)  # counts, though it is dropped at once
        return out

    def mix_gated(
        self,
        layer: int,
        of: GatedHeads,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        logits: torch.Tensor,
        betas: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = mixed.new_empty(len(mixed), mixed.shape[1] + of.value_width)  # convolved, and times steps
        decays = mixed.new_empty(len(mixed), of.num_logits + of.heads, dtype=torch.float32)
        keys, values = of.key_width, of.value_width
        sizes = ((keys, of.groups), (keys, of.groups), (values, of.heads))
        inputs = tuple(rows[:, :width].unflatten(1, (count, -1)) for width, count in sizes)
        out = self.mix(layer, of.kind, (*inputs, decays[:, : of.num_logits]), ())
        return gate.new_empty(out.shape[0], values)

    def mix_factored(self, layer: int, weight: torch.Tensor, *inputs: Any) -> torch.Tensor:
        row = inputs[-1]
        return row.new_empty(2, len(row), weight.shape[1])[0]

    def attend_merged(self, layer: int, merged: torch.Tensor, *others: Any, **scoring: Any) -> torch.Tensor:
        group = self._groups[layer]
        query = merged.new_empty(len(merged), group.num_query_heads, group.key_size)
        return self.attend(layer, query, query, query)

    def attend_latents(
        self, layer: int, query: torch.Tensor, folded: torch.Tensor, *others: Any, **scoring: Any
    ) -> torch.Tensor:
        return folded.new_empty(*folded.shape[:2], self._groups[layer].value_size)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **scoring: Any
    ) -> torch.Tensor:
        return query.new_empty(*query.shape[:2], value.shape[2])


class LaunchCount(TorchDispatchMode):
    """Count what launches something: Triton's kernels, and operators that are neither views nor memory alone.

    Attributes:
        count: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __enter__(self) -> LaunchCount:
        import triton  # optional

        self._hooks: Any = triton.knobs.runtime.launch_enter_hook
        self._hooks.add(self._launched)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.remove(self._launched)

    def _launched(self, _: Any) -> None:
        self.count += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in func.name())
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def measure_step_memory(
    loaded: LoadedModel,
    quantization: str | None,
    *,
    max_num_tokens: int,
    max_num_seqs: int,
    max_padded_rows: int,
    max_model_len: int,
    deterministic: bool = False,
) -> int:
    """Return the bytes of steps on the model's GPU: activations, logits, sampling, kernels, CUDA graphs.

    Args:
        quantization: of weights, see `rewrite_layers`.
        max_num_tokens: tokens of the largest step.
        max_num_seqs: most requests in it.
        max_padded_rows: most rows of a step that is recorded, and whose logits are all computed.
        max_model_len: longest context.
        deterministic: see `ModelRunner`.
    """
    # Packing weights again leaves holes in the memory they had, which count as used.
    rewrite_layers(loaded.model, quantization, "triton")
    # Each request may have a chunk that is not full.
    chunks = max_num_tokens // GRID + min(max_num_seqs, max_num_tokens)
    activations, _ = _forward_memory(loaded, max_num_tokens, chunks, max_padded_rows, max_model_len)
    # Graphs have memory of their own, which all of them share.
    states = loaded.attention.states
    chunks = capacities(max_padded_rows, large=True, deterministic=deterministic)["chunks"]
    with LaunchCount() as launches:
        recorded, num_logits = _forward_memory(
            loaded, max_padded_rows, chunks, max_padded_rows, max_model_len
        )
    num_graphs = (3 if states and not deterministic else 2) * len(row_sizes(max_padded_rows))
    num_launches = launches.count + _KERNELS_PER_LAYER * loaded.attention.num_layers
    num_launches += _KERNELS_PER_STATE * len(states)
    graphs = recorded + num_graphs * num_launches * _GRAPH_BYTES_PER_LAUNCH
    # The graphs' own copy of the logits, and the copies of sampling.
    sampling = num_logits * (_SAMPLING_BYTES_PER_LOGIT + loaded.dtype.itemsize)
    kernels = _kernel_memory(loaded, max_num_tokens, max_num_seqs, max_model_len)
    return activations + graphs + sampling + kernels


@torch.inference_mode()
def measure_encoding_memory(vision: VisionModel, max_model_len: int) -> int:
    """Return the bytes that the tower takes for the largest image on the model's GPU, besides its result.

    It counts beside a step's: an image that is encoded in pieces keeps what the tower has so far while steps
    run. The largest is the square with the most tokens that a prompt has room for.
    """
    device, largest, most = vision.model.device, _SQUARES[0], 0
    for side in _SQUARES:
        num_tokens = vision.processor.num_tokens(side, side)
        if most < num_tokens <= max_model_len:
            largest, most = side, num_tokens
    inputs = vision.prepare(blank_image(largest, largest))
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    encoding = vision.encode(inputs)
    return int(torch.cuda.max_memory_allocated(device) - before - encoding.num_bytes)


def _forward_memory(
    loaded: LoadedModel, num_tokens: int, num_chunks: int, num_logit_rows: int, max_model_len: int
) -> tuple[int, int]:
    """Return the bytes that a step of this many rows takes at most, and its number of logits."""
    device = loaded.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device) % max_model_len
    rows = torch.arange(min(num_logit_rows, num_tokens), device=device)
    step: Any = _WithoutAttention(loaded.attention, num_chunks)
    num_logits = call_model(loaded.model, tokens, positions, rows, step).numel()
    return int(torch.cuda.max_memory_allocated(device) - before), int(num_logits)


def _kernel_memory(loaded: LoadedModel, max_num_tokens: int, max_num_seqs: int, max_model_len: int) -> int:
    """Return the memory of the attention backend for plans and partials, besides K/V."""
    layout = loaded.attention.layout(1, 16, loaded.dtype, loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    backend = make_backend(
        "triton",
        spec=layout,
        compute_dtype=loaded.dtype,
        max_num_tokens=max_num_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    ends = np.array([0, 1], dtype=np.int32)
    plan = backend.plan(ends, ends[1:], [np.zeros(1, dtype=np.int32)])
    # One set of buffers for each window; models have one, or two.
    backend.stage(plan, [None, max_model_len])
    scratch = backend.scratch_bytes
    if find_latents(loaded.model) is not None and max_num_tokens >= MIN_ROWS:
        scratch = max(scratch, 2 * MAX_BYTES)  # expanded heads, and what makes them
    return int(torch.cuda.memory_allocated(loaded.device) - before) + scratch
