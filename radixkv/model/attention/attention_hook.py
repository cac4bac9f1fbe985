# SPDX-License-Identifier: Apache-2.0
"""The bridge from transformers' attention layers to radixkv's paged attention.

transformers lets a model call any registered function in place of its own attention. Each layer of a model
loaded with `attn_implementation=ATTENTION_NAME` calls `paged_attention_hook` with its query, key and value
(keys after the rotary embedding, key/value heads not repeated). The hook hands them to the step object with
which `call_model` called the model (see `radixkv.model.step_context`).

The step object writes K and V into their slots and attends. No mask function is registered under the name,
which makes transformers skip the creation of masks altogether.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from radixkv.model.attention.attention_shape import AttentionCall
from radixkv.model.attention.expanded_latents import LongChunks
from radixkv.model.attention.latent_attention import Latents
from radixkv.model.attention.query_scale import scaled_queries
from radixkv.model.state_layers.steps import PlainStates, StateMixing
from radixkv.model.step_context import current_step
from radixkv_kernels import (
    AttentionBackend,
    AttentionPlan,
    LatentRotation,
    Rotation,
    reference_attention,
)

#: Free of `sdpa`, `flash`, `flex_attention`, `/` and `paged|`, to which transformers gives a meaning.
ATTENTION_NAME = "radixkv_paged_attention"
#: Elements of a stored head are a multiple of this; zeros fill it up.
HEAD_MULTIPLE = 8


@dataclass(slots=True)
class AttentionStep:
    """Slots that the layers of a step write and read. Rows beyond the plan are padding.

    Attributes:
        kv: the backend's memory: `make_kv` and `make_backend` agree on its layout.
        plan: the backend's plan of this step.
        slots, rows: as in `AttentionBackend.write`; padding has no slots, or -1.
        out: [most rows, Hq, V] that every layer's result overwrites; None: new memory for each.
        windows: all windows that layers have asked for so far.
        adapters: a `StepAdapters` of the step's rows; None: no row has an adapter.
        is_row: [T], 0 for rows that only pad the step; None: there are none.
        states: states of state layers; None: the model has none.
        long_chunks: chunks whose latents are expanded; None: all attend to latents as they are.
    """

    backend: AttentionBackend
    kv: Any
    plan: AttentionPlan
    slots: Tensor
    rows: Tensor | None = None
    out: Tensor | None = None
    windows: set[int | None] = field(default_factory=set)
    adapters: Any = None
    is_row: Tensor | None = None
    states: StateMixing | None = None
    long_chunks: LongChunks | None = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write `key` [T, Hkv, D] and `value` [T, Hkv, V], then attend: `query` [T, Hq, D] -> [T, Hq, V].

        `scale` to `sinks` are the arguments of `AttentionBackend.attend`.
        """
        self.write(layer, key, value)
        return self._attend(layer, query, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write `key` [T, Hkv, D] and `value` [T, Hkv, V] to their slots."""
        slots, rows = self._target(layer)
        if rows is None and len(slots) < len(key):
            key, value = key[: len(slots)], value[: len(slots)]
        self.backend.write(self.kv, layer, key, value, slots, rows)

    def attend_merged(
        self,
        layer: int,
        merged: Tensor,
        rotation: Rotation,
        heads: tuple[int, int, int],
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`attend` for queries, keys and values as one product gives them, neither normed nor rotated yet.

        Args:
            merged: [T, width], see `Rotation`; heads: Hq, Hkv and D, which the memory has, too.

        Returns:
            [T, Hq, D].
        """
        query = self.backend.rotate_and_write(self.kv, layer, merged, rotation, *self._target(layer))
        return self._attend(layer, query, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def attend_latents(
        self,
        layer: int,
        query: Tensor,
        folded: Tensor,
        latents: Tensor,
        rotation: LatentRotation,
        *,
        scale: float,
    ) -> Tensor:
        """`attend` for latents and queries of them, neither normed nor rotated yet.

        Args:
            query: [T, Hq, nope + rope]; latents: [T, latent + rope], see `LatentRotation`.
            folded: [T, Hq, K], its first elements folded queries; all may be overwritten.

        Returns:
            [T, Hq, V].
        """
        slots, rows = self._target(layer)
        self.backend.write_latents(self.kv, layer, query, folded, latents, rotation, slots, rows)
        return self._attend(layer, folded, scale=scale, window=None)

    def _target(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Slots and rows of the keys and values of a layer."""
        return self.slots, self.rows

    def _attend(self, layer: int, query: Tensor, *, window: int | None, **scoring: Any) -> Tensor:
        self.windows.add(window)
        out = None if self.out is None else self.out[: len(query)]
        return self.backend.attend(self.kv, layer, query, self.plan, window=window, out=out, **scoring)


def paged_attention_hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer, with the signature that transformers calls.

    Args:
        module: the attention module; its `layer_idx` names the layer. One with `Latents` hands over latents.
        query: [1, Hq, T, D].
        key, value: [1, Hkv, T, D] and [1, Hkv, T, V].
        attention_mask: ignored; the causal structure comes from the step's context lengths.
        scaling: factor on the scores; None: 1 / sqrt(D).
        softcap, s_aux: as in `AttentionStep.attend` (softcap, sinks).
        kwargs: `sliding_window` where the architecture passes it; the module's attribute otherwise.

    Returns:
        ([1, T, Hq, V], None): the output and, in place of attention weights, None.

    Raises:
        RuntimeError: the model was not called by `call_model`.
    """
    window = (
        kwargs["sliding_window"] if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
    )
    rows, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    rows, value_size = scaled_queries(module, rows), values.shape[2]
    step, layer = current_step(), int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    latents = getattr(module, "kv_b_proj", None)
    if isinstance(latents, Latents):
        if step.long_chunks is not None:
            output = step.long_chunks.attend(step, layer, latents, rows, keys, values, scale=scale)
            return output.unsqueeze(0), None
        rows = latents.fold_query(rows)
    elif keys.shape[2] % HEAD_MULTIPLE or value_size % HEAD_MULTIPLE:
        rows, keys, values = (_padded(each) for each in (rows, keys, values))
    output = step.attend(
        layer,
        rows,
        keys,
        values,
        scale=scale,
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
        sinks=s_aux,
    )
    if isinstance(latents, Latents):
        output = latents.fold_output(output)
    elif output.shape[2] != value_size:
        output = output[..., :value_size].contiguous()  # some modules view it
    return output.unsqueeze(0), None


def _padded(heads: Tensor) -> Tensor:
    """Heads [T, H, D] with zeros after, up to a multiple that is stored."""
    return pad(heads, (0, -heads.shape[2] % HEAD_MULTIPLE))


def register_attention_hook() -> str:
    """Make the hook known to transformers (idempotent) and return its name."""
    from transformers import AttentionInterface  # slow to import: models pay for it when they load

    AttentionInterface.register(ATTENTION_NAME, paged_attention_hook)
    return ATTENTION_NAME


class PlainCausalStep:
    """A step without a cache: `reference_attention` over the T tokens of one sequence.

    Used by the checks at load and as a reference in tests. It records what each layer asked for.

    Args:
        positions: [T] position of each row, 0 to T - 1; the rows may come in any order.

    Attributes:
        calls: one per call.
        windows: layer -> window.
        states: what state layers call.
    """

    long_chunks: None = None

    def __init__(self, positions: Tensor) -> None:
        self._order = positions.argsort()
        self.calls: list[AttentionCall] = []
        self.windows: dict[int, int | None] = {}
        self.states = PlainStates(self._order)
        self._keys: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, **scoring: Any
    ) -> Tensor:
        """[T, Hq, D of value], computed in float64; O(T^2)."""
        sizes = (query.shape[-1], key.shape[-1], value.shape[-1])
        heads = (query.shape[1], key.shape[1])
        # All keys are kept, so that equal memory means the same keys.
        source = next((n for n, seen in self._keys.items() if _is_same(seen, key)), layer)
        self._keys[layer] = key
        in_key = _is_same(key[..., : sizes[2]], value)
        self.calls.append(AttentionCall(layer, heads, sizes, in_key, source))
        self.windows[layer] = window
        order = self._order
        starts = np.array([0, len(order)])
        out = reference_attention(
            query[order], [key[order]], [value[order]], starts, window=window, **scoring
        )
        return out[order.argsort().cpu()].to(query)

    def attend_merged(
        self, layer: int, merged: Tensor, rotation: Rotation, heads: tuple[int, int, int], **scoring: Any
    ) -> Tensor:
        """See `AttentionStep.attend_merged`."""
        return self.attend(layer, *rotation.apply(merged, *heads), **scoring)

    def attend_latents(
        self,
        layer: int,
        query: Tensor,
        folded: Tensor,
        latents: Tensor,
        rotation: LatentRotation,
        *,
        scale: float,
    ) -> Tensor:
        """See `AttentionStep.attend_latents`."""
        rest = pad(rotation.turned(query), (0, folded.shape[2] - rotation.latent - rotation.rest))
        plain = folded[..., : rotation.latent]
        whole = torch.cat([plain if rotation.growth is None else rotation.growth.apply(plain), rest], -1)
        key = rotation.key(latents, folded.shape[2])
        value = key[..., : -(-rotation.latent // HEAD_MULTIPLE) * HEAD_MULTIPLE]
        return self.attend(layer, whole, key, value, window=None, scale=scale)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are the same memory, seen alike."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
