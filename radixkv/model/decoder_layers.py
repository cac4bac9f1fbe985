# SPDX-License-Identifier: Apache-2.0
"""Parts of transformers' decoder layers: read once, by every rewriting for a device.

The families here differ in details of one structure::

    norm | q, k, v products | norms of heads | rotary embedding | attention | o product | norm | added
    norm | gate and up products | activation * up | down product             | norm | added

Layers of other classes are described by what they compute (`radixkv.model.traced_layers`), for a GPU.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from radixkv.model.attention.attention_hook import HEAD_MULTIPLE
from radixkv.model.attention.latent_attention import Latents
from radixkv.model.attention.query_scale import QueryScale
from radixkv.model.loading.file_pages import address_ranges, release_file_pages
from radixkv.model.parallel.communicator import Communicator
from radixkv.model.parallel.over_ranks import JoinedOverRanks, SummedOverRanks
from radixkv_kernels import Norm, Pairs, RotaryTurn


@dataclass(frozen=True)
class _Family:
    """Names and constants by which a family differs from the others.

    Attributes:
        prefix: beginning of its classes' names.
        offset, wide: attributes of its norms, see `Norm`.
        window_in_config: attention takes its window from the configuration, not from the module.
        half_angles: its rotary embedding gives the angles of one half of a head, for both.
    """

    prefix: str
    offset: bool = False
    wide: bool = False
    window_in_config: bool = False
    half_angles: bool = False


_GEMMA = {"offset": True, "wide": True}
_FAMILIES = {
    "llama": _Family("Llama"),
    "mistral": _Family("Mistral", window_in_config=True),
    "qwen2": _Family("Qwen2"),
    "qwen3": _Family("Qwen3"),
    "phi3": _Family("Phi3", window_in_config=True),
    "smollm3": _Family("SmolLM3"),
    "granite": _Family("Granite"),
    "gemma": _Family("Gemma", **_GEMMA),
    "gemma2": _Family("Gemma2", **_GEMMA),
    "gemma3": _Family("Gemma3", **_GEMMA),
    "mixtral": _Family("Mixtral", window_in_config=True),
    "qwen2_moe": _Family("Qwen2Moe"),
    "qwen3_moe": _Family("Qwen3Moe"),
    "ministral": _Family("Ministral"),
    "seed_oss": _Family("SeedOss"),
    "cwm": _Family("Cwm"),
    "dots1": _Family("Dots1"),
    "arcee": _Family("Arcee"),
    "gpt_oss": _Family("GptOss", wide=True, half_angles=True),
    "qwen2_vl": _Family("Qwen2VL"),
    "qwen2_5_vl": _Family("Qwen2_5_VL"),
    "qwen3_vl": _Family("Qwen3VLText"),
    "qwen3_vl_moe": _Family("Qwen3VLMoeText"),
}
#: transformers' module and class of a layer -> its family.
_LAYER_CLASSES = {
    (f"transformers.models.{name}.modeling_{name}", f"{family.prefix}DecoderLayer"): name
    for name, family in _FAMILIES.items()
}
#: The same of its norms.
_NORM_CLASSES = {
    (f"transformers.models.{name}.modeling_{name}", f"{family.prefix}RMSNorm"): family
    for name, family in _FAMILIES.items()
}
#: Attributes by which RMSNorms name their epsilon.
_EPSILONS = ("variance_epsilon", "eps", "norm_eps")
_TRIED_ROWS = 8
#: Names of a gated MLP's products, the last one at the end.
_GATED_NAMES = (
    ("gate_up_proj", "down_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("w1", "w3", "w2"),
)
#: Classes of activations -> what `radixkv_kernels` calls them.
ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
}


class StoredProduct(nn.Module):
    """A linear layer that keeps its weight in a form of its own, not as a tensor.

    Args:
        in_features, out_features: as of `nn.Linear`.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    @property
    def weight(self) -> torch.Tensor:
        """Nothing, in the dtype that inputs have: some models convert them to that of the weight."""
        return torch.empty(0)


class WholeProduct(StoredProduct):
    """A product that takes its final form once each rank has chosen its outputs.

    Until then a call makes that form and drops it.
    """

    def of_outputs(self, spans: Sequence[range]) -> WholeProduct:
        """Some of its outputs, one span after the other."""
        raise NotImplementedError

    def of_inputs(self, own: range, *, has_bias: bool) -> WholeProduct:
        """Some of its inputs, with its bias or without one."""
        raise NotImplementedError

    def packed(self) -> nn.Module:
        """Its final form."""
        raise NotImplementedError

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.packed()(inputs)
        return out


class StoredExperts(nn.Module):
    """A layer's experts with weights in a form of their own; a row's bits depend on that row only.

    Attributes:
        fixed_routes: the bits of a row's route, too.
    """

    fixed_routes = True


class WholeExperts(StoredExperts):
    """Experts that take their final form once each rank has chosen which are its own; see `WholeProduct`.

    Attributes:
        num_experts: of the layer.
    """

    num_experts: int

    def of_experts(self, own: range) -> WholeExperts:
        """Some of the experts, which answer for no others."""
        raise NotImplementedError

    def packed(self) -> StoredExperts:
        """Their final form."""
        raise NotImplementedError

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.packed()(*inputs)
        return out


def pack_whole_weights(model: nn.Module) -> None:
    """Give every product and all experts of a model that have not got it yet their final form."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, WholeProduct | WholeExperts):
                setattr(parent, name, child.packed())


def reads_weight(parent: Any, name: str) -> bool:
    """Return True if a class looks at the weight of its layer of this name, as some routers do, which a
    replacement does not have."""
    try:
        return f"self.{name}.weight" in inspect.getsource(parent.forward)
    except (OSError, TypeError):  # it was not read from a file
        return False


@dataclass(frozen=True)
class Turning:
    """The form of a layer's rotary embedding.

    Attributes:
        pairs, wide: as in `RotaryTurn`.
        step: columns from one pair's angle to the next one's.
        is_half: cosines and sines are those of one half of what turns, for both.
        is_none: nothing turns.
    """

    pairs: Pairs = Pairs.HALVES
    wide: bool = False
    step: int = 1
    is_half: bool = False
    is_none: bool = False

    def turn(self, angles: Any, rows: torch.Tensor, size: int) -> RotaryTurn:
        """The `RotaryTurn` of a step.

        Args:
            angles: what transformers hands to a layer: cosines and sines [1, T, R], or one complex tensor.
            rows: [T, ..]; size: of a head.
        """
        if self.is_none:
            return RotaryTurn(rows[:, :1], rows[:, :1], 0)
        if isinstance(angles, torch.Tensor):
            cosines, sines = torch.view_as_real(angles[0]).unbind(-1)
            return RotaryTurn(cosines, sines, 2 * cosines.shape[1], self.pairs, self.wide)
        cosines, sines = (each[0, :, :: self.step] for each in angles)
        turned = cosines.shape[1] * (2 if self.is_half else self.step)
        return RotaryTurn(cosines, sines, min(size, turned), self.pairs, self.wide)


@dataclass(frozen=True)
class AttentionParts:
    """Attention of a layer.

    Attributes:
        merged: the products of queries, keys and values, or one that is all three.
        output: the output product; `joined`: the ranks' shares of its inputs and outputs, if it is shared.
        query_norm, key_norm, value_norm, gated, shared, turns_first, key_factor: as in `Rotation`.
        turning: of queries and keys.
        query_scale: of queries by their position; None: there is none.
        scale, window, softcap, sinks: as in `AttentionBackend.attend`.
        names: of the products in `merged`, and of `output`.
    """

    layer_index: int
    merged: tuple[nn.Linear, ...]
    output: nn.Linear
    joined: JoinedOverRanks | None
    num_heads: int
    num_kv_heads: int
    head_size: int
    query_norm: Norm | None
    key_norm: Norm | None
    turning: Turning
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    names: tuple[tuple[str, ...], str]
    value_norm: Norm | None = None
    gated: bool = False
    shared: bool = False
    turns_first: bool = False
    key_factor: float = 1.0
    query_scale: QueryScale | None = None

    @property
    def inputs(self) -> tuple[nn.Linear, ...]:
        """Products that become one."""
        return self.merged

    @property
    def others(self) -> tuple[nn.Linear, ...]:
        """The other products."""
        return (self.output,)

    def without_products(self) -> AttentionParts:
        """The same for what has its own products, so that the memory of these can be given back."""
        return replace(self, merged=(), output=cast(Any, None), joined=None)


@dataclass(frozen=True)
class LatentParts:
    """Absorbed attention of latents, see `radixkv.model.attention.latent_attention`.

    Attributes:
        query: the product of queries, or their down product, whose result `query_norm` norms for `query_up`.
        down: the product of latents and what turns of keys; `latent_norm`: of the latents.
        latents: its weights fold queries and outputs.
        turning, output, scale, query_scale: as in `AttentionParts`.
        names: of `query`, `down` and `gate`, of `query_up`, and of `output`.
        gate: the product of a gate for each head of the output (Bailing); None: there is none.
        indexer: of a sparse attention, whose choice is not used; None: there is none.
    """

    layer_index: int
    query: nn.Linear
    query_norm: Norm | None
    query_up: nn.Linear | None
    down: nn.Linear
    latent_norm: Norm
    latents: Latents
    output: nn.Linear
    turning: Turning
    scale: float
    names: tuple[tuple[str, ...], str, str]
    gate: nn.Linear | None = None
    query_scale: QueryScale | None = None
    indexer: nn.Module | None = None

    @property
    def inputs(self) -> tuple[nn.Linear, ...]:
        """Products that become one."""
        return (self.query, self.down) if self.gate is None else (self.query, self.down, self.gate)

    @property
    def others(self) -> tuple[nn.Linear, ...]:
        """The other products."""
        return (self.output,) if self.query_up is None else (self.query_up, self.output)

    def without_products(self) -> LatentParts:
        """See `AttentionParts.without_products`."""
        no: Any = None
        return replace(self, query=no, query_up=no, down=no, output=no, gate=None, indexer=None)


@dataclass(frozen=True)
class GatedParts:
    """A gated MLP: `gate_up` are the gate's and the up product, or one that is both; `joined`: of `down`.

    Attributes:
        gate_factor, factor: of gates before their activation, and of the result (Falcon-H1).
        names: of all of these products in the module.
    """

    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear
    joined: JoinedOverRanks | None
    activation: str
    names: tuple[str, ...]
    gate_factor: float = 1.0
    factor: float = 1.0

    def without_products(self) -> GatedParts:
        """See `AttentionParts.without_products`."""
        return replace(self, gate_up=(), down=cast(Any, None), joined=None)


@dataclass(frozen=True)
class PerLayerParts:
    """Gemma 4's last addition: norm(projection(activation(gate(states)) * inputs of this layer))."""

    gate: nn.Module
    activation: nn.Module
    projection: nn.Module
    norm: Norm


@dataclass(frozen=True)
class BesideParts:
    """Routed experts that Gemma 4 has beside an MLP: norm(MLP) + norm(experts(norm(states)))."""

    router: nn.Module
    experts: nn.Module
    before: Norm
    after: Norm
    after_mlp: Norm

    def without_modules(self) -> BesideParts:
        """See `AttentionParts.without_products`."""
        return replace(self, router=cast(Any, None), experts=cast(Any, None))


@dataclass(frozen=True)
class DecoderParts:
    """A decoder layer.

    Attributes:
        family: the model type.
        before_attention, before_mlp: norms of the residual; None: there is none.
        after_attention, after_mlp: norms of the branch before it is added.
        multiplier: factor of the branch before it is added.
        communicator: sums the results of attention's output product and a gated MLP's last one over ranks;
            None: there is one rank, or they are joined.
        mlp: the module; `gated` describes its parts, if it is a gated MLP.
        beside: experts whose result is added to the MLP's, before `after_mlp`.
        is_parallel: the MLP is given what attention is given, and both results are added.
        per_layer: added last; factor: one number by which the sum is multiplied then.
        names: of the modules of attention and of the MLP.
        besides: what transformers' layer returns after the states, which nobody uses; None: no tuple.
    """

    family: str
    attention: AttentionParts | LatentParts
    mlp: nn.Module
    gated: GatedParts | None
    before_attention: Norm | None
    before_mlp: Norm | None
    after_attention: Norm | None
    after_mlp: Norm | None
    multiplier: float
    communicator: Communicator | None
    is_parallel: bool = False
    beside: BesideParts | None = None
    per_layer: PerLayerParts | None = None
    factor: torch.Tensor | None = None
    names: tuple[str, str] = ("self_attn", "mlp")
    besides: tuple[Any, ...] | None = None

    @property
    def heads(self) -> AttentionParts:
        """`attention` of all layers that `describe_layer` describes."""
        assert isinstance(self.attention, AttentionParts)
        return self.attention


def describe_layer(layer: Any) -> DecoderParts | None:
    """Describe a layer of a transformers model; None: it has parts that `DecoderLayer` can't describe."""
    name = _LAYER_CLASSES.get(_class_of(layer))
    attention = None if name is None else _describe_attention(layer.self_attn, _FAMILIES[name])
    if name is None or attention is None:
        return None
    # Of four norms, the second is applied to attention's output.
    four = hasattr(layer, "pre_feedforward_layernorm")
    second = describe_norm(layer.post_attention_layernorm)
    return DecoderParts(
        family=name,
        attention=attention,
        mlp=layer.mlp,
        gated=describe_gated(layer.mlp),
        before_attention=describe_norm(layer.input_layernorm),
        before_mlp=describe_norm(layer.pre_feedforward_layernorm) if four else second,
        after_attention=second if four else None,
        after_mlp=describe_norm(layer.post_feedforward_layernorm) if four else None,
        multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
        communicator=summed_by(layer.self_attn.o_proj),
    )


@torch.no_grad()
def find_norm(module: nn.Module, dtype: torch.dtype, *, any_layer_norm: bool = False) -> Norm | None:
    """Describe a norm of any family; None: the module is none, or computes something else.

    A class that is not known by name is tried: on random rows it must compute the bits of a `Norm`, or, if it
    subtracts a mean, nearly so.

    Args:
        dtype: of the rows that it will get.
        any_layer_norm: torch's own layer norm, too, which is one kernel already.
    """
    if _class_of(module) in _NORM_CLASSES:
        return describe_norm(module)
    name, is_torch = type(module).__name__, type(module) is nn.LayerNorm
    eps = next((getattr(module, each) for each in _EPSILONS if hasattr(module, each)), None)
    if name == "OlmoLayerNorm":
        eps = 1e-5
    if not any(each in name for each in ("RMSNorm", "LayerNorm", "L2Norm")) or not isinstance(eps, float):
        return None
    if is_torch and not any_layer_norm:
        return None
    if not is_torch and len(inspect.signature(module.forward).parameters) != 1:  # a gate, too
        return None
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    shape = getattr(module, "normalized_shape", (64,)) if weight is None else tuple(weight.shape)
    if weight is not None:
        if (
            not isinstance(weight, torch.Tensor)
            or weight.dim() > 2
            or weight.is_meta
            or weight.dtype != dtype
        ):
            return None
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    rows = torch.randn(_TRIED_ROWS, *shape, generator=torch.Generator().manual_seed(0))
    rows = (3 * rows + 1).to(torch.device("cpu") if weight is None else weight.device, dtype)
    wanted = module(rows)
    for offset, wide in itertools.product((False, True), repeat=2):
        norm = Norm(weight, eps, offset, wide)
        if wanted.dtype == dtype and bias is None and torch.equal(norm.apply(rows), wanted):
            return norm
    for offset in (False, True):
        norm = Norm(weight, eps, offset, wide=True, centered=True, bias=bias)
        step = torch.finfo(dtype).eps
        if wanted.dtype == dtype and torch.allclose(norm.apply(rows), wanted, rtol=2 * step, atol=4 * step):
            return norm
    return None


def describe_norm(module: Any) -> Norm:
    """Describe the RMSNorms of these families. Raises KeyError for anything else."""
    family = _NORM_CLASSES[_class_of(module)]
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(module.weight.detach(), float(eps), family.offset, family.wide)


def _class_of(module: Any) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def _describe_attention(attention: Any, family: _Family) -> AttentionParts | None:
    head_size = int(attention.head_dim)
    if head_size % HEAD_MULTIPLE:  # the hook pads such heads
        return None
    names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    merged: tuple[Any, ...] = tuple(getattr(attention, name) for name in names)
    output = own_term(attention.o_proj)
    if not all(is_product(part) for part in (*merged, output)):
        return None
    num_heads = int(attention.config.num_attention_heads)
    width = sum(part.out_features for part in merged)
    window = getattr(attention.config if family.window_in_config else attention, "sliding_window", None)
    # Of the families here, Gemma 2 alone hands its softcap to attention.
    softcap = attention.attn_logit_softcapping if family.prefix == "Gemma2" else None
    sinks = getattr(attention, "sinks", None)
    has_norms = hasattr(attention, "q_norm")
    return AttentionParts(
        layer_index=int(attention.layer_idx),
        merged=merged,
        output=output,
        joined=joined(attention.o_proj),
        num_heads=num_heads,
        num_kv_heads=(width // head_size - num_heads) // 2,
        head_size=head_size,
        query_norm=describe_norm(attention.q_norm) if has_norms else None,
        key_norm=describe_norm(attention.k_norm) if has_norms else None,
        turning=Turning(is_half=family.half_angles, is_none=not getattr(attention, "use_rope", True)),
        scale=float(attention.scaling),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
        sinks=None if sinks is None else sinks.detach().to(torch.float32),
        names=(names, "o_proj"),
    )


def describe_gated(mlp: Any) -> GatedParts | None:
    """Describe a gated MLP of any family by its products and activation; None: it has others."""
    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    activation = activation or getattr(mlp, "activation", None)
    kind = ACTIVATIONS.get(type(activation).__name__)
    names = next((each for each in _GATED_NAMES if all(hasattr(mlp, name) for name in each)), None)
    if names == _GATED_NAMES[-1]:  # LFM2's calls silu as a function
        kind = "silu"
    if kind is None or names is None:
        return None
    products: tuple[Any, ...] = tuple(own_term(getattr(mlp, name)) for name in names)
    if not all(is_product(product) for product in products):
        return None
    factors = (float(getattr(mlp, name, 1.0)) for name in ("gate_multiplier", "down_multiplier"))
    return GatedParts(products[:-1], products[-1], joined(getattr(mlp, names[-1])), kind, names, *factors)


def is_product(module: Any) -> bool:
    return type(module) is nn.Linear or isinstance(module, StoredProduct)


def own_term(module: Any) -> Any:
    return module.term if isinstance(module, JoinedOverRanks | SummedOverRanks) else module


def joined(module: Any) -> JoinedOverRanks | None:
    return module if isinstance(module, JoinedOverRanks) else None


def summed_by(module: Any) -> Communicator | None:
    return module.communicator if isinstance(module, SummedOverRanks) else None


def is_plain_llama(parts: DecoderParts, dtype: torch.dtype) -> bool:
    """Return True for Llama's layer with SiLU, with product weights of this dtype on a CPU."""
    first = parts.heads.merged[0]
    if isinstance(first, StoredProduct) or not is_llama_shape(parts):
        return False
    return first.weight.dtype == dtype and first.weight.device.type == "cpu"


def is_llama_shape(parts: DecoderParts) -> bool:
    """Return True for Llama's layer with SiLU, whatever its products."""
    return (
        parts.family == "llama"
        and parts.heads.head_size % 2 == 0
        and parts.gated is not None
        and parts.gated.activation == "silu"
    )


#: Bytes of replaced weights whose memory is given back together: each time, all mapped pages are looked at.
_RELEASED_AT_ONCE = 256 << 20


def replace_layers(
    model: nn.Module,
    make: Callable[[DecoderParts], nn.Module | None],
    make_other: Callable[[nn.Module], nn.Module | None] = lambda layer: None,
) -> int:
    """Put what `make` makes of a layer that can be described in its place; returns how many it made.

    `make_other` gets layers of classes that are not known.

    Memory of weights that nothing else uses is given back.
    """
    count = 0
    old: list[nn.Parameter] = []
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for index, layer in enumerate(layers):
            parts = describe_layer(layer)
            made = make_other(layer) if parts is None else make(parts)
            if made is not None:
                layers[index] = made
                count += 1
                old += [weight for weight in layer.parameters() if weight.device.type == "cpu"]
                if sum(weight.nbytes for weight in old) > _RELEASED_AT_ONCE:
                    release_file_pages(address_ranges(old))
                    old.clear()
    release_file_pages(address_ranges(old))
    return count
