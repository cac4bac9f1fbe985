"""The bridge from transformers' attention layers to radixkv's paged attention.

transformers lets a model call any registered function in place of its own attention. Each layer of a model
loaded with `attn_implementation=ATTENTION_NAME` calls `paged_attention_hook` with its query, key and value
(keys after the rotary embedding, key/value heads not repeated). The hook hands them to the step object that
the caller passed to the model as the keyword `radixkv_step`:

    model(input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False,
          logits_to_keep=rows, radixkv_step=step)

The step object writes K and V into their slots and attends; nothing is kept in module globals. No mask
function is registered under the name, which makes transformers skip the creation of masks altogether.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Free of `sdpa`, `flash`, `flex_attention`, `/` and `paged|`, to which transformers gives a meaning.
ATTENTION_NAME = "radixkv_paged_attention"


class AttentionStep(Protocol):
    """What a forward pass needs to know about one step; supplied by the caller of the model."""

    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store `key` and `value`, then attend causally over each row's own context.

        Args:
            layer_index: 0 to num_layers - 1.
            query: [T, Hq, D], the T tokens of the step's flattened batch.
            key, value: [T, Hkv, D].
            scale: factor on the attention scores.
            window: a token sees itself and the `window - 1` tokens before it; None: all before it.
            softcap: scores become softcap * tanh(score / softcap); None: untouched.
            sinks: [Hq] one extra logit per head in the softmax's denominator, without a value; None: none.

        Returns:
            [T, Hq, D].
        """
        ...


def paged_attention_hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    radixkv_step: AttentionStep | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, in the signature that transformers calls.

    Args:
        module: the attention module; its `layer_idx` names the layer.
        query: [1, Hq, T, D].
        key, value: [1, Hkv, T, D].
        attention_mask: ignored; the causal structure comes from the step's context lengths.
        scaling: factor on the scores; None: 1 / sqrt(D).
        radixkv_step: see `AttentionStep`.
        softcap, s_aux: as in `AttentionStep.attend` (softcap, sinks).
        kwargs: `sliding_window` where the architecture passes it; the module's attribute otherwise.

    Returns:
        ([1, T, Hq, D], None): the output and, in place of attention weights, None.

    Raises:
        RuntimeError: the model was called without `radixkv_step`.
    """
    if radixkv_step is None:
        raise RuntimeError("a model loaded for paged attention was called without the keyword radixkv_step")
    window = (
        kwargs["sliding_window"] if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
    )
    output = radixkv_step.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
        sinks=s_aux,
    )
    return output.unsqueeze(0), None


def register_attention_hook() -> str:
    """Make the hook known to transformers (idempotent) and return its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention_hook)
    return ATTENTION_NAME


def model_inputs(
    input_ids: Tensor, positions: Tensor, rows: Tensor | None, step: AttentionStep
) -> dict[str, Any]:
    """The keywords with which a loaded model is called for one step.

    Args:
        input_ids: [T] token ids of the flattened batch.
        positions: [T] absolute position of each token in its own sequence.
        rows: [R] indices of the tokens whose logits are wanted; None: all T.
        step: the object that stores K/V and attends.

    Returns:
        Keywords for `model(**kwargs)`; its `.logits` are [1, R, vocab].
    """
    inputs: dict[str, Any] = {
        "input_ids": input_ids[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "use_cache": False,
        "radixkv_step": step,
    }
    if rows is not None:
        inputs["logits_to_keep"] = rows
    return inputs


class PlainCausalStep:
    """An `AttentionStep` without a cache: plain causal attention over the T tokens of one sequence.

    Used by the checks at load and as a reference in tests. It records what each layer asked for.

    Args:
        positions: [T] position of each row; the rows may come in any order.

    Attributes:
        calls: one `(layer_index, query heads, kv heads, head size of query, key and value)` per call.
        windows: layer index -> window.
    """

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions
        self.calls: list[tuple[int, int, int, int, int, int]] = []
        self.windows: dict[int, int | None] = {}

    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute in float32 and return [T, Hq, D of value]; O(T^2)."""
        import torch

        num_tokens, num_query_heads, head_size = query.shape
        num_kv_heads = key.shape[1]
        self.calls.append(
            (layer_index, num_query_heads, num_kv_heads, head_size, key.shape[-1], value.shape[-1])
        )
        self.windows[layer_index] = window
        group = num_query_heads // num_kv_heads
        keys = key.float().repeat_interleave(group, dim=1)
        values = value.float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~_causal_window(self._positions, window), float("-inf"))
        if sinks is not None:
            extra = sinks.float().view(-1, 1, 1).expand(-1, num_tokens, 1)
            weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def _causal_window(positions: Tensor, window: int | None) -> Tensor:
    """[T, T] booleans: may the query of a row see the key of a column?"""
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
