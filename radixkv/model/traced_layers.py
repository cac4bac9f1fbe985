# SPDX-License-Identifier: Apache-2.0
"""Decoder layers described by what they compute: each is watched while a model computes a few tokens.

A layer's modules are told apart by the tensors that pass between them, so that no class need be known::

    input -> norm? -> attention -> norm? -> added -> norm? -> MLP -> norm? -> added
    input -> norm  -> attention ------------+------> MLP --------------------> both added

Queries and keys that reach attention tell which norms and which form of the rotary embedding the layer has. A
description is good if a layer made from it gives the same result; who makes one compares them (`confirms`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.model.attention.attention_hook import HEAD_MULTIPLE, PlainCausalStep
from radixkv.model.attention.latent_attention import Latents
from radixkv.model.attention.query_scale import QueryScale, query_scales
from radixkv.model.decoder_layers import (
    ACTIVATIONS,
    AttentionParts,
    BesideParts,
    DecoderParts,
    LatentParts,
    PerLayerParts,
    Turning,
    describe_gated,
    find_norm,
    is_product,
    joined,
    own_term,
    summed_by,
)
from radixkv.model.loading.model_checks import position_limit
from radixkv.model.step_context import call_model, computing
from radixkv_kernels import LatentRotation, Norm, Pairs, QueryGrowth, Rotation

_TOKENS = 7
#: A distance that no other form of a rotation makes smaller.
_EQUAL = 1e-6
#: Largest distance from the layer's own result, over the size of what it adds, that rounding explains.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
_PRODUCTS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("q_proj", "k_proj"))
_OUTPUTS = ("o_proj", "out_proj", "dense")
_QUERY_NORMS, _KEY_NORMS = (
    ("q_norm", "q_layernorm", "query_layernorm", "qk_norm"),
    ("k_norm", "k_layernorm", "key_layernorm", "qk_norm"),
)


@dataclass
class _ModuleCall:
    """A call of a module: its first tensor, and its result or the first of its results."""

    name: str
    module: nn.Module
    given: Tensor
    result: Tensor


@dataclass
class LayerTrace:
    """Record of one layer's computation: its inputs, its modules' results, its attention; [1, T, ..] each.

    Attributes:
        arguments, keywords: of the call.
        given: the states before it changed them; positions: [T].
        calls: of modules within, by their paths, in the order in which they returned.
        attended: keywords of its call of attention: query, key and value among them; None: it made none.
        besides: what it returned after its result; None: it returned no tuple.
    """

    layer: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    given: Tensor
    positions: Tensor
    calls: list[_ModuleCall] = field(default_factory=list)
    attended: dict[str, Any] | None = None
    result: Tensor | None = None
    besides: tuple[Any, ...] | None = None
    shares_keys: bool = False


class _RecordingStep(PlainCausalStep):
    """A step that gives each call of attention to the trace of the layer that computes."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__(positions)
        self.positions = positions
        self.trace: LayerTrace | None = None
        self._traces: dict[int, LayerTrace] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **scoring: Any) -> Tensor:
        out = super().attend(layer, query, key, value, **scoring)
        if self.trace is not None:
            asked = {"index": layer, "query": query, "key": key, "value": value, "out": out, **scoring}
            self.trace.attended = asked if self.trace.attended is None else {}
            self._traces[layer] = self.trace
            source = self.calls[-1].source
            if source != layer and source in self._traces:
                self.trace.shares_keys = self._traces[source].shares_keys = True
        return out


@torch.no_grad()
def trace_layers(model: Any) -> dict[nn.Module, LayerTrace]:
    """Let a loaded model compute a few tokens; return its layers that attended."""
    device = model.get_input_embeddings().weight.device
    config = model.config.get_text_config(decoder=True)
    # Over all positions: some attention scales its queries from a certain one on.
    positions = torch.linspace(0, position_limit(config, None) - 1, _TOKENS).long().to(device)
    tokens = (torch.arange(_TOKENS, device=device) + 1) * 31 % int(config.vocab_size)
    step = _RecordingStep(positions)
    traces: dict[nn.Module, LayerTrace] = {}
    with _watched(model, step, traces):
        call_model(model, tokens, positions, None, step)
    return {layer: trace for layer, trace in traces.items() if trace.attended}


@contextmanager
def _watched(model: Any, step: _RecordingStep, traces: dict[nn.Module, LayerTrace]) -> Iterator[None]:
    hooks: list[Any] = []

    def begin(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = _first_tensor(arguments, keywords)
        if given is not None and step.trace is None:
            step.trace = LayerTrace(layer, arguments, keywords, given.clone(), step.positions)

    def end(layer: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        if step.trace is not None and step.trace.layer is layer:
            states = _first(result)
            if states is not None and layer not in traces:
                step.trace.result = states.clone()
                step.trace.besides = result[1:] if isinstance(result, tuple) else None
                traces[layer] = step.trace
            step.trace = None

    def called(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any, result: Any) -> None:
            given, out = _first_tensor(arguments, keywords), _first(result)
            if step.trace is not None and given is not None and out is not None:
                step.trace.calls.append(_ModuleCall(name, module, given, out))

        return hook

    for layers in (each for each in model.modules() if isinstance(each, nn.ModuleList)):
        for layer in layers:
            if not any(True for _ in layer.children()):
                continue
            hooks.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(layer.register_forward_hook(end))
            for name, module in layer.named_modules():
                if name and name.count(".") < 2:
                    hooks.append(module.register_forward_hook(called(name), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first(result: Any) -> Tensor | None:
    if isinstance(result, tuple) and result:
        result = result[0]
    return result if isinstance(result, Tensor) else None


def _first_tensor(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor | None:
    for each in (*arguments, keywords.get("hidden_states"), *keywords.values()):
        if isinstance(each, Tensor):
            return each
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    """Return True for the same memory, whatever its shape."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


def describe_traced(trace: LayerTrace, family: str) -> DecoderParts | None:
    """Describe a layer by its trace; None: it has parts that `DecoderParts` doesn't."""
    layer: Any = trace.layer
    direct = [call for call in trace.calls if "." not in call.name]
    dtype = trace.given.dtype
    norms: list[tuple[_ModuleCall, Norm]] = []
    blocks: list[_ModuleCall] = []
    for call in direct:
        norm = find_norm(call.module, dtype, any_layer_norm=True)
        if norm is not None:
            norms.append((call, norm))
        elif any(True for _ in call.module.parameters()):
            blocks.append(call)
    if trace.shares_keys or len(blocks) < 2 or trace.attended is None:
        return None
    beside = _describe_beside(layer, norms)
    if beside is not None:
        if [call.module for call in blocks[2:4]] != [beside.router, beside.experts]:
            return None
        del blocks[2:4]
    if len(blocks) not in (2, 4):
        return None
    attention, mlp = blocks[:2]
    used: list[_ModuleCall] = []

    def giving(tensor: Tensor) -> tuple[Norm | None, Tensor]:
        """The norm whose result a tensor is, and what it was given."""
        for call, norm in norms:
            if _same(call.result, tensor):
                used.append(call)
                return norm, call.given
        return None, tensor

    def taking(tensor: Tensor) -> Norm | None:
        for call, norm in norms:
            if _same(call.given, tensor):
                used.append(call)
                return norm
        return None

    before_attention, _ = giving(attention.given)
    before_mlp, _ = giving(mlp.given)
    is_parallel = _same(mlp.given, attention.given)
    after_attention, after_mlp = taking(attention.result), taking(mlp.result)
    if beside is not None:
        used += [call for call, _ in norms if call.module in _norms_beside(layer)]
        after_mlp = next(norm for call, norm in norms if call.module is layer.post_feedforward_layernorm)
        used += [call for call, _ in norms if call.module is layer.post_feedforward_layernorm]
    per_layer = None
    if len(blocks) == 4:
        per_layer = _describe_per_layer(layer, blocks[2:])
        if per_layer is None:
            return None
        used += [call for call, _ in norms if call.module is layer.post_per_layer_input_norm]
    parts: AttentionParts | LatentParts | None
    if isinstance(getattr(attention.module, "kv_b_proj", None), Latents):
        parts = _describe_latents(trace, attention)
    else:
        parts = _describe_attention(trace, attention)
    if not _are_unused(trace.besides, attention.module):
        return None
    if parts is None or len({call.name for call in used}) < len({call.name for call, _ in norms}):
        return None
    if is_parallel and (after_attention is not None or after_mlp is not None):
        return None
    factor = getattr(layer, "layer_scalar", None)
    output = getattr(attention.module, parts.names[-1])
    return DecoderParts(
        family=family,
        attention=parts,
        mlp=mlp.module,
        gated=describe_gated(mlp.module),
        before_attention=before_attention,
        before_mlp=None if is_parallel else before_mlp,
        after_attention=after_attention,
        after_mlp=after_mlp,
        multiplier=_multiplier(layer),
        communicator=summed_by(output),
        is_parallel=is_parallel,
        beside=beside,
        per_layer=per_layer,
        factor=factor.detach() if isinstance(factor, Tensor) else None,
        names=(attention.name, mlp.name),
        besides=trace.besides,
    )


def _are_unused(besides: tuple[Any, ...] | None, attention: Any) -> bool:
    """Return True if nobody looks at what a layer returns after its result: nothing, or a choice of keys."""
    is_choice = hasattr(attention, "indexer") or hasattr(attention, "skip_topk")
    return all(each is None or is_choice for each in besides or ())


def _multiplier(layer: Any) -> float:
    """Factor of both branches."""
    return float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0)))


def _norms_beside(layer: Any) -> list[nn.Module]:
    """Gemma 4's norms of the MLP's result, of the experts' result and of their input."""
    return [
        *(layer.post_feedforward_layernorm_1, layer.post_feedforward_layernorm_2),
        layer.pre_feedforward_layernorm_2,
    ]


def _describe_beside(layer: Any, norms: list[tuple[_ModuleCall, Norm]]) -> BesideParts | None:
    if not getattr(layer, "enable_moe_block", False):
        return None
    found = [norm for each in _norms_beside(layer) for call, norm in norms if call.module is each]
    if len(found) != 3:
        return None
    after_mlp, after, before = found
    return BesideParts(layer.router, layer.experts, before, after, after_mlp)


def _describe_per_layer(layer: Any, blocks: list[_ModuleCall]) -> PerLayerParts | None:
    gate: Any = getattr(layer, "per_layer_input_gate", None)
    projection: Any = getattr(layer, "per_layer_projection", None)
    kind = ACTIVATIONS.get(type(getattr(layer, "act_fn", None)).__name__)
    if [call.module for call in blocks] != [gate, projection] or kind is None:
        return None
    norm = find_norm(layer.post_per_layer_input_norm, gate.weight.dtype)
    return None if norm is None else PerLayerParts(gate, layer.act_fn, projection, norm)


def describe_heads(trace: LayerTrace, name: str) -> AttentionParts | None:
    """Describe attention of plain heads by a trace and the name of its module; None: it is another."""
    call = next((each for each in trace.calls if each.name == name), None)
    return None if call is None or not trace.attended else _describe_attention(trace, call)


def _describe_attention(trace: LayerTrace, call: _ModuleCall) -> AttentionParts | None:
    attention: Any = call.module
    asked = trace.attended
    assert asked is not None
    query, key, value = (asked[name] for name in ("query", "key", "value"))
    size, num_heads, num_kv_heads = query.shape[2], query.shape[1], key.shape[1]
    if size % HEAD_MULTIPLE or not size == key.shape[2] == value.shape[2]:
        return None
    calls = {
        each.name.rpartition(".")[2]: each for each in trace.calls if each.name.startswith(f"{call.name}.")
    }
    names = next((each for each in _PRODUCTS if all(name in calls for name in each)), None)
    last = next((name for name in _OUTPUTS if name in calls), None)
    if names is None or last is None:
        return None
    merged = tuple(getattr(attention, name) for name in names)
    output = own_term(getattr(attention, last))
    if not all(is_product(each) for each in (*merged, output)) or not _same(calls[last].result, call.result):
        return None
    rows = torch.cat([calls[name].result[0] for name in names], dim=-1)
    dtype = rows.dtype
    query_norm, key_norm, value_norm = (
        _norm_of_heads(attention, calls, each, dtype) for each in (_QUERY_NORMS, _KEY_NORMS, ("v_norm",))
    )
    # Forms of one result differ in rounding alone, or not even so: the nearest is it, the usual one first.
    least: float = math.inf
    best: tuple[Turning, QueryScale | None, Rotation] | None = None
    factor = float(getattr(attention, "key_multiplier", 1.0))
    either = (False, True)
    for turning, scale, gated, shared, turns_first in itertools.product(
        _turnings(trace), [None, *query_scales(attention)], either, either, either
    ):
        rotation = Rotation(
            *(turning.turn(_angles(trace), rows, size), query_norm, key_norm, value_norm),
            gated=gated,
            shared=shared,
            turns_first=turns_first,
            key_factor=factor,
            growth=_growth(trace, scale),
        )
        if rotation.width(num_heads, num_kv_heads, size) != rows.shape[1]:
            continue
        if not _has_known_norms(rotation, size):
            continue
        found = rotation.apply(rows, num_heads, num_kv_heads, size)
        distance = max(_distance(a, b, b) for a, b in zip(found, (query, key, value), strict=True))
        if distance < least:
            least, best = distance, (turning, scale, rotation)
        if distance < _EQUAL:
            break
    if best is None or least > _tolerance(dtype):
        return None
    turning, scale, rotation = best
    gated = rotation.gated
    inputs = calls[last].given.reshape(len(rows), -1)
    attended = asked["out"].reshape(len(rows), -1)
    if gated:
        attended = attended * torch.sigmoid(rotation.gates(rows, num_heads, size).flatten(1))
    if inputs.shape != attended.shape or not _near(inputs, attended, attended):
        return None
    sinks, window, softcap = (asked.get(name) for name in ("sinks", "window", "softcap"))
    return AttentionParts(
        layer_index=int(asked["index"]),
        merged=merged,
        output=output,
        joined=joined(getattr(attention, last)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=size,
        query_norm=query_norm,
        key_norm=key_norm,
        turning=turning,
        scale=float(asked["scale"]),
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach().to(torch.float32),
        value_norm=value_norm,
        gated=gated,
        shared=rotation.shared,
        turns_first=rotation.turns_first,
        key_factor=factor,
        query_scale=scale,
        names=(names, last),
    )


def _describe_latents(trace: LayerTrace, call: _ModuleCall) -> LatentParts | None:
    attention: Any = call.module
    asked, latents = trace.attended, attention.kv_b_proj
    assert asked is not None
    calls = {
        each.name.rpartition(".")[2]: each for each in trace.calls if each.name.startswith(f"{call.name}.")
    }
    first, *norms = ("q_proj",) if "q_proj" in calls else ("q_a_proj", "q_a_layernorm", "q_b_proj")
    up = norms[-1] if norms else first
    names = (first, "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj", *norms)
    if not all(name in calls for name in names):
        return None
    query, down, latent_norm, last, *_ = (getattr(attention, name) for name in names)
    output, dtype = own_term(last), calls[up].result.dtype
    query_norm = find_norm(getattr(attention, norms[0]), dtype) if norms else None
    norm = find_norm(latent_norm, dtype)
    gate = attention.g_proj if "g_proj" in calls else None
    products = [query, down, output, *([getattr(attention, up)] if norms else [])]
    products += [] if gate is None else [gate]
    if not all(is_product(each) for each in products) or norm is None or (norms and query_norm is None):
        return None
    if not _same(calls["o_proj"].result, call.result) or joined(last) is not None:
        return None
    rows, queries = calls[names[1]].result[0], calls[up].result[0]
    queries = queries.unflatten(1, (-1, latents.nope + latents.rope))
    wanted = asked["query"][..., latents.latent : latents.latent + latents.rope]
    folded = latents.fold_query(queries)[..., : latents.latent]
    least: float = math.inf
    best: tuple[Turning, QueryScale | None] | None = None
    for turning, scale in itertools.product(
        _turnings(trace, is_gathered=True), [None, *query_scales(attention)]
    ):
        turn, growth = turning.turn(_angles(trace), rows, latents.rope), _growth(trace, scale)
        rotation = LatentRotation(turn, norm, latents.latent, latents.rope, growth)
        if turn.size not in (0, latents.rope):
            continue
        grown = folded if growth is None else growth.apply(folded)
        turned, key = rotation.turned(queries), rotation.key(rows, latents.key_size)
        distance = max(
            _distance(grown, asked["query"][..., : latents.latent], grown),
            _distance(turned, wanted, wanted),
            _distance(key, asked["key"], key),
        )
        if distance < least:
            least, best = distance, (turning, scale)
        if distance < _EQUAL:
            break
    if best is None or least > _tolerance(dtype):
        return None
    turning, scale = best
    inputs, attended = calls["o_proj"].given.reshape(len(rows), -1), latents.fold_output(asked["out"])
    if gate is not None:
        if gate.out_features != attended.shape[1]:
            return None
        attended = attended * torch.sigmoid(calls["g_proj"].result[0].float()).to(dtype).unsqueeze(-1)
    if inputs.shape != attended.flatten(1).shape or not _near(inputs, attended.flatten(1), inputs):
        return None
    if any(asked.get(name) is not None for name in ("sinks", "window", "softcap")):
        return None
    return LatentParts(
        layer_index=int(asked["index"]),
        query=query,
        query_norm=query_norm,
        query_up=getattr(attention, up) if norms else None,
        down=down,
        latent_norm=norm,
        latents=latents,
        output=output,
        turning=turning,
        scale=float(asked["scale"]),
        names=((first, "kv_a_proj_with_mqa", *(["g_proj"] if gate is not None else [])), up, "o_proj"),
        gate=gate,
        query_scale=scale,
        indexer=getattr(attention, "indexer", None),
    )


def _norm_of_heads(
    attention: Any, calls: dict[str, _ModuleCall], names: tuple[str, ...], dtype: torch.dtype
) -> Norm | None:
    name = next((name for name in names if name in calls), None)
    return None if name is None else find_norm(getattr(attention, name), dtype, any_layer_norm=True)


def _has_known_norms(rotation: Rotation, size: int) -> bool:
    """Return True for norms that the kernels have."""
    norms = [rotation.query_norm, rotation.key_norm, rotation.value_norm]
    over_all = [
        norm is not None and norm.weight is not None and norm.weight.shape[-1] != size for norm in norms
    ]
    present = [norm for norm in norms if norm is not None]
    if any(norm.bias is not None for norm in present) or over_all[2]:
        return False
    if over_all[0] or over_all[1]:
        has_others = rotation.gated or rotation.turns_first or any(n.centered for n in present)
        return over_all[0] and over_all[1] and not has_others
    return norms[2] is None or not norms[2].centered


def _angles(trace: LayerTrace) -> Any:
    found = trace.keywords.get("position_embeddings")
    if found is None:
        found = next((each for each in trace.arguments if isinstance(each, tuple) and len(each) == 2), None)
    return found


def _turnings(trace: LayerTrace, *, is_gathered: bool = False) -> list[Turning]:
    """Forms of the rotary embedding that the layer's angles allow, the usual ones first; `is_gathered`:
    neighbours may turn into halves."""
    angles = _angles(trace)
    kinds = [Turning(is_none=True)]
    if isinstance(angles, Tensor) and angles.is_complex():
        return [Turning(pairs=pairs, wide=True, step=2) for pairs in (Pairs.NEIGHBOURS, Pairs.HALVES)] + kinds
    if not isinstance(angles, tuple) or not all(
        isinstance(each, Tensor) and each.dim() == 3 for each in angles
    ):
        return kinds
    gathered = [(Pairs.GATHERED, 1)] if is_gathered else []
    forms = [
        Turning(pairs=pairs, wide=wide, step=step, is_half=half)
        for half in (False, True)
        for pairs, step in (*gathered, (Pairs.HALVES, 1), (Pairs.NEIGHBOURS, 2), (Pairs.NEIGHBOURS, 1))
        for wide in (False, True)
        if not (half and step == 2)
    ]
    return forms + kinds


def _near(found: Tensor, wanted: Tensor, scale: Tensor, *, most: bool = False) -> bool:
    """Return True if rows [T, ..] differ by rounding alone; `most` rows, where a router may send one another
    way."""
    if found.shape != wanted.shape:
        return False
    return _distance(found, wanted, scale, most=most) <= _tolerance(wanted.dtype)


def _distance(found: Tensor, wanted: Tensor, scale: Tensor, *, most: bool = False) -> float:
    """See `_near`; of numbers that are none, infinity."""
    size = scale.float().flatten(1).norm(dim=1).clamp_min(1e-9)
    distance = (found.float() - wanted.float()).flatten(1).norm(dim=1) / size
    worst = float(distance.median() if most else distance.max())
    return math.inf if math.isnan(worst) else worst


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCES.get(dtype, 1e-4)


def _growth(trace: LayerTrace, scale: QueryScale | None) -> QueryGrowth | None:
    return None if scale is None else scale.at(trace.positions)


@torch.no_grad()
def confirms(trace: LayerTrace, made: Any) -> bool:
    """Return True if a layer gives the recorded result for the recorded inputs."""
    assert trace.result is not None
    given, keywords = trace.given.clone(), dict(trace.keywords)
    arguments = (given, *trace.arguments[1:])
    if not trace.arguments:
        arguments, keywords["hidden_states"] = (), given
    with computing(PlainCausalStep(trace.positions), trace.positions):
        out = _first(made(*arguments, **keywords))
    assert out is not None
    change = trace.result[0] - trace.given[0]
    return _near(out[0], trace.result[0], change, most=made.gated is None or made.beside is not None)
