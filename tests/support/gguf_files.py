# SPDX-License-Identifier: Apache-2.0
"""Random blocks of GGUF formats, and tiny GGUF models whose weights mix them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tiny_models import add_llama_tensors, finish_gguf, llama_gguf_writer

from radixkv_kernels.cpu.linear.block_formats import FORMATS

Array = np.ndarray[Any, Any]


def random_blocks(number: int, rows: int, width: int, seed: int) -> Array:
    """uint8 [rows, bytes]: any quants, with scales that give weights of about 1 / sqrt(width)."""
    form, random = FORMATS[number], np.random.default_rng(seed)
    units = width // form.inputs
    blocks = random.integers(0, 256, (rows, units, form.file_bytes), dtype=np.uint8)
    steps = 2 ** (form.bits - 2) * (32 if form.is_super else 1)
    unit = width**-0.5 / steps

    def halves(low: float, high: float) -> Array:
        drawn = random.uniform(low * unit, high * unit, (rows, units)).astype(np.float16)
        return drawn.view(np.uint8).reshape(rows, units, 2)

    if form.name == "Q6_K":
        blocks[:, :, 208:] = halves(0.5, 1.5)
        return blocks.reshape(rows, -1)
    if form.name == "MXFP4":
        blocks[:, :, 0] = random.integers(125, 129, (rows, units)) + round(math.log2(unit))
        return blocks.reshape(rows, -1)
    blocks[:, :, :2] = halves(0.5, 1.5)
    if form.has_least:
        # Weights around zero.
        most = 2 ** (form.bits - 1)
        blocks[:, :, 2:4] = (
            halves(0.8 * most, 1.2 * most) if form.is_super else halves(-1.2 * most, -0.8 * most)
        )
    return blocks.reshape(rows, -1)


def write_llama_gguf(
    path: Path, kinds: Mapping[str, str], *, hidden: int = 256, layers: int = 2, tied: bool = True,
    split: int = 0, factors: Array | None = None, experts: int = 0,
) -> Path:  # fmt: skip
    """A random Llama with a byte-level tokenizer.

    Args:
        kinds: name of a tensor without its layer (`attn_q`, `token_embd`) -> format; `rest` for all others.
        split: the most tensors of a part; 0 for one file.
        factors: of rotary frequencies.
        experts: of each layer, two of which a token takes (a Mixtral); 0 for none.
    """
    inner = 2 * hidden
    writer, vocab = llama_gguf_writer(
        path, hidden=hidden, inner=inner, layers=layers, context=256, split=split
    )
    write = add = tensor_writer(writer, kinds)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)

        def add(name: str, *shape: int) -> None:
            expert = name.endswith(("ffn_gate", "ffn_up", "ffn_down"))
            write(f"{name}_exps", experts, *shape) if expert else write(name, *shape)
            if name.endswith("ffn_norm"):
                write(name.replace("ffn_norm", "ffn_gate_inp"), experts, hidden)

    add_llama_tensors(add, vocab=vocab, hidden=hidden, inner=inner, layers=layers, tied=tied)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    finish_gguf(writer)
    return path


def tensor_writer(writer: Any, kinds: Mapping[str, str]) -> Callable[..., None]:
    """A function that adds a random tensor by its name without suffix; vectors are norms' weights."""
    random = np.random.default_rng(0)

    def add(name: str, *shape: int, suffix: str = ".weight") -> None:
        data = random.standard_normal(shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)
        if len(shape) == 1 or suffix == ".bias":
            writer.add_tensor(name + suffix, (1 if "norm" in name else 0) + data)
            return
        kind = gguf.GGMLQuantizationType[kinds.get(name.rpartition(".")[2], kinds["rest"])]
        seed = int(random.integers(2**32))
        if kind in FORMATS:
            stored = random_blocks(int(kind), math.prod(shape[:-1]), shape[-1], seed)
            stored = stored.reshape(*shape[:-1], -1)
        else:
            stored = gguf.quantize(data, kind)
        writer.add_tensor(name + suffix, stored, raw_dtype=kind)

    return add


#: Architectures -> metadata beside the common ones, as (method of the writer, value).
ARCHITECTURES: dict[str, tuple[tuple[str, Any], ...]] = {
    "llama": (),
    "qwen2": (),
    "qwen3": (("add_key_length", 64), ("add_value_length", 64)),
    "gemma2": (("add_key_length", 64), ("add_value_length", 64), ("add_sliding_window", 8)),
    "gemma3": (("add_key_length", 64), ("add_value_length", 64), ("add_sliding_window", 8)),
    "phi3": (("add_rope_dimension_count", 64),),
    "starcoder2": (),
}
_EXPERTS = (("add_expert_count", 6), ("add_expert_used_count", 2), ("add_expert_feed_forward_length", 256))
#: The same of architectures with experts; `llama` is Mixtral then.
EXPERT_ARCHITECTURES: dict[str, tuple[tuple[str, Any], ...]] = {
    "llama": _EXPERTS[:2],
    "qwen2moe": (*_EXPERTS, ("add_expert_shared_feed_forward_length", 512)),
    "qwen3moe": (*_EXPERTS, ("add_key_length", 64), ("add_value_length", 64)),
    "gpt-oss": (
        *_EXPERTS, ("add_key_length", 64), ("add_value_length", 64), ("add_sliding_window", 8),
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN), ("add_rope_scaling_factor", 32.0),
        ("add_rope_scaling_orig_ctx_len", 128),
    ),
}  # fmt: skip


def family_config(path: Path) -> Any:
    """The transformers configuration of a GGUF file."""
    from transformers import AutoConfig

    from radixkv.model.loading.gguf_configs import own_config, set_expert_sizes

    config = own_config(path) or AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    set_expert_sizes(path, config)
    return config


def names_of(model: Any, architecture: str) -> tuple[dict[str, str], Any]:
    """Tensors of a file -> parameters of a model, but for experts; and transformers' processor of values."""
    from transformers import modeling_gguf_pytorch_utils as reading

    kind = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)
    processor = kind(config=model.config.to_dict())
    return reading.get_gguf_hf_weights_map(model, processor, model_type=architecture), processor


def write_family_gguf(
    path: Path, architecture: str, kinds: Mapping[str, str], extra: tuple[tuple[str, Any], ...] | None = None
) -> Path:
    """A random model of an architecture without a tokenizer, its tensors named by the gguf package.

    Args:
        extra: metadata beside the common ones, as in `ARCHITECTURES`, where it is by default.
    """
    from transformers import AutoModelForCausalLM

    from radixkv.model.loading.gguf_experts import expected_shapes, expert_modules

    def metadata() -> Any:
        writer = gguf.GGUFWriter(str(path), architecture)
        writer.add_context_length(256)
        writer.add_embedding_length(256)
        writer.add_block_count(2)
        writer.add_feed_forward_length(512)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_layer_norm_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_vocab_size(320)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        for method, value in ARCHITECTURES[architecture] if extra is None else extra:
            getattr(writer, method)(value)
        return writer

    finish_gguf(metadata())
    config = family_config(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names, _ = names_of(model, architecture)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    writer = metadata()
    add = tensor_writer(writer, kinds)
    for name, parameter in sorted(names.items()):
        if parameter in shapes and not name.rpartition(".")[0].endswith("_exps"):
            shape = shapes[parameter]
            if name.endswith("_gate_inp_shexp.weight"):
                shape = shape[1:]
            stem, _, suffix = name.rpartition(".")
            add(stem, *shape, suffix=f".{suffix}")
    for _, layer, module in expert_modules(model):
        for name, shape in expected_shapes(module, {}).items():
            stem, _, suffix = name.partition(".")
            add(f"blk.{layer}.ffn_{stem}_exps", *shape, suffix=f".{suffix}")
    finish_gguf(writer)
    return path


def expert_state(path: Path, model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """The parameters of a model with experts, dequantised from its file."""
    from radixkv.model.loading.gguf_experts import expert_modules, expert_tensors

    def plain(tensor: Any) -> Array:
        return np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    reader = gguf.GGUFReader(str(path))
    names, processor = names_of(model, architecture)
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        if tensor.name in names and "_exps" not in tensor.name:
            weights = processor.process(weights=plain(tensor), name=tensor.name).weights
            state[names[tensor.name]] = torch.from_numpy(np.array(weights))
    tensors = expert_tensors(reader)
    for name, layer, module in expert_modules(model):
        for leaf, suffix in (("weight", ""), ("bias", "_bias")):
            if f"down.{leaf}" not in tensors[layer]:
                continue
            gate, up, down = (
                torch.from_numpy(plain(tensors[layer][f"{each}.{leaf}"])) for each in ("gate", "up", "down")
            )
            both = (
                torch.cat([gate, up], 1)
                if module.is_concatenated
                else torch.stack([gate, up], 2).flatten(1, 2)
            )
            if module.is_transposed and leaf == "weight":
                both, down = both.transpose(1, 2), down.transpose(1, 2)
            state[f"{name}.gate_up_proj{suffix}"], state[f"{name}.down_proj{suffix}"] = both, down
    return state
