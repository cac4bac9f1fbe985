# SPDX-License-Identifier: Apache-2.0
"""Writers of tiny checkpoints in quantised formats, and the numbers that their codes stand for.

Layouts as the formats' own packages write them, recorded with bitsandbytes 0.50, compressed-tensors 0.20 and
torchao 0.18. A writer takes a weight [out, in] and returns its stored tensors by what follows the layer's
name, and the plain numbers, computed apart from what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
_NF4 = (
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 "
    "0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1"
)
_FP4 = (
    "0 0.0052083334885537624 0.6666666865348816 1 0.3333333432674408 0.5 0.1666666716337204 0.25 "
    "0 -0.0052083334885537624 -0.6666666865348816 -1 -0.3333333432674408 -0.5 -0.1666666716337204 -0.25"
)


@dataclass(frozen=True)
class Stored:
    """One weight: `tensors` by what follows the layer's name, and the `plain` numbers, float32 [out, in]."""

    tensors: Mapping[str, Tensor]
    plain: Tensor
    header: Mapping[str, str] = field(default_factory=dict)


Writer = Callable[[Tensor], Stored]


def rounded_fp8(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes with a grid of scales, and their numbers."""
    spread = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).clamp(-448, 448).to(FP8)
    return codes, codes.float() * spread


def largest(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude in each block."""
    return torch.stack(
        [
            torch.stack([part.abs().amax() for part in row.split(block[1], 1)])
            for row in weight.split(block[0], 0)
        ]
    )


def block_fp8(
    weight: Tensor, *, kind: torch.dtype = torch.float32, block: int = 32, suffix: str = "weight_scale_inv"
) -> Stored:
    scales = largest(weight, (block, block)) / 448
    if kind.itemsize == 1:
        scales = torch.exp2(scales.log2().ceil())
    codes, plain = rounded_fp8(weight, scales.to(kind), (block, block))
    return Stored({"weight": codes, suffix: scales.to(kind)}, plain)


def exponents(weight: Tensor) -> Stored:
    return block_fp8(weight, kind=torch.float8_e8m0fnu)


def exponent_bytes(weight: Tensor) -> Stored:
    stored = exponents(weight)
    codes, scales = stored.tensors.values()
    return Stored({"weight": codes, "weight_scale_inv": scales.view(torch.uint8)}, stored.plain)


def one_fp8(weight: Tensor, *, suffix: str = "weight_scale", shape: tuple[int, ...] = ()) -> Stored:
    scale = weight.abs().amax().reshape(1, 1) / 448
    codes, plain = rounded_fp8(weight, scale, tuple(weight.shape))  # type: ignore[arg-type]
    tensors = {"weight": codes, suffix: scale.reshape(shape), "input_scale": torch.full(shape, 0.02)}
    return Stored(tensors, plain)


def channel_fp8(weight: Tensor, *, kind: torch.dtype = torch.bfloat16) -> Stored:
    scales = (weight.abs().amax(1, keepdim=True) / 448).to(kind)
    codes, plain = rounded_fp8(weight, scales, (1, weight.shape[1]))
    return Stored({"weight": codes, "weight_scale": scales}, plain)


def int8(weight: Tensor, *, group: int | None = None) -> Stored:
    size = group or weight.shape[1]
    grouped = weight.view(len(weight), -1, size)
    scales = (grouped.abs().amax(-1) / 127).to(torch.bfloat16)
    codes = (grouped / scales.float()[..., None]).round().clamp(-128, 127).to(torch.int8)
    plain = (codes.float() * scales.float()[..., None]).view_as(weight)
    return Stored({"weight": codes.view_as(weight), "weight_scale": scales}, plain)


def int8_with_zeros(weight: Tensor) -> Stored:
    scales = (weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)) / 255
    zeros = (-128 - weight.amin(1, keepdim=True) / scales).round().to(torch.int8)
    codes = (weight / scales + zeros).round().clamp(-128, 127).to(torch.int8)
    plain = (codes.float() - zeros.float()) * scales
    return Stored({"weight": codes, "weight_scale": scales, "weight_zero_point": zeros}, plain)


def packed_int8(weight: Tensor) -> Stored:
    stored = int8(weight, group=32)
    codes, scales = stored.tensors.values()
    words = (codes.int() + 128).to(torch.uint8).view(torch.int32)
    shape = torch.tensor(weight.shape)
    return Stored({"weight_packed": words, "weight_scale": scales, "weight_shape": shape}, stored.plain)


def nf4(
    weight: Tensor, *, nested: bool = False, block: int = 64, kind: str = "nf4", numbers: str = _NF4
) -> Stored:
    table = torch.tensor([float(each) for each in numbers.split()])
    flat = weight.flatten().view(-1, block)
    scales = flat.abs().amax(1)
    state: dict[str, Any] = {
        "quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape),
    }  # fmt: skip
    tensors = {"weight.absmax": scales}
    if nested:
        offset = float(scales.mean())
        codebook = torch.linspace(-1, 1, 256)
        own = (scales - offset).abs().amax().reshape(1)
        indices = ((scales - offset)[:, None] / own - codebook).abs().argmin(1)
        scales = codebook[indices] * own + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors = {
            "weight.absmax": indices.to(torch.uint8),
            "weight.nested_absmax": own,
            "weight.nested_quant_map": codebook,
        }
    codes = (flat[..., None] / scales[:, None, None] - table).abs().argmin(-1)
    plain = (table[codes] * scales[:, None]).view_as(weight)
    pairs = codes.flatten().view(-1, 2).to(torch.uint8)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1])[:, None],
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": text,
    }
    return Stored(tensors, plain)


def fp4(weight: Tensor) -> Stored:
    return nf4(weight, kind="fp4", numbers=_FP4)


def bitsandbytes_int8(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1)
    codes = (weight / scales[:, None] * 127).round().to(torch.int8)
    form = torch.tensor(0, dtype=torch.uint8)
    plain = codes.float() * (scales / 127)[:, None]
    return Stored({"weight": codes, "SCB": scales, "weight_format": form}, plain)


def torchao(weight: Tensor, *, kind: str, size: int = 32) -> Stored:
    data = {"block_size": [1, weight.shape[1]], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
    if kind == "Float8Tensor":
        stored = channel_fp8(weight, kind=torch.float32)
        names = ["qdata", "scale"]
        parts = dict(zip(names, stored.tensors.values(), strict=True))
    else:
        stored = int8(weight) if kind == "Int8Tensor" else int8_with_zeros(weight)
        names = ["qdata", "scale", "zero_point"]
        values = list(stored.tensors.values())
        zeros = torch.zeros(len(weight), 1, dtype=torch.int8)
        parts = dict(zip(names, [*values, zeros][:3], strict=True))
    if kind == "Int4Tensor":
        low, high = (pick(weight.view(len(weight), -1, size), -1) for pick in (torch.amin, torch.amax))
        scales = ((high - low) / 15).to(torch.bfloat16).float()
        zeros = (low + 8 * scales).to(torch.bfloat16).float()
        spread, middle = (each.repeat_interleave(size, 1) for each in (scales, zeros))
        codes = ((weight - middle) / spread).round().clamp(-8, 7).to(torch.int8)
        stored = Stored({}, (codes.float() + 8) * spread + (middle - 8 * spread))
        pairs = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
        values = [pairs, *(each.t().to(torch.bfloat16).contiguous() for each in (scales, zeros))]
        parts = dict(zip(names, values, strict=True))
        data["block_size"] = [1, size]
    header = json.dumps({"_type": kind, "_data": data, "_tensor_data_names": names})
    tensors = {f"_weight_{name}": tensor for name, tensor in parts.items()}
    return Stored(tensors, stored.plain, {"weight": header})


def mlx(weight: Tensor, *, bits: int = 4, group: int = 32) -> Stored:
    grouped = weight.view(len(weight), -1, group)
    biases = grouped.amin(-1).to(torch.bfloat16)
    scales = ((grouped.amax(-1) - grouped.amin(-1)) / (2**bits - 1)).to(torch.bfloat16)
    codes = (grouped - biases.float()[..., None]) / scales.float()[..., None]
    codes = codes.round().clamp(0, 2**bits - 1)
    plain = (codes * scales.float()[..., None] + biases.float()[..., None]).view_as(weight)
    stream = (codes.view_as(weight).int()[..., None] >> torch.arange(bits)) & 1
    octets = stream.reshape(len(weight), -1, 8) << torch.arange(8)
    words = octets.sum(-1).to(torch.uint8).view(torch.uint32)
    return Stored({"weight": words, "scales": scales, "biases": biases}, plain)


def grouped(weight: Tensor, bits: int, size: int, *, has_zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes [out, in], and float16 scales and zero points [out, groups]."""
    parts = weight.view(len(weight), -1, size)
    top = 2**bits - 1
    if has_zeros:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / top).half()
        zeros = (-low / scales.float()).round().clamp(0, top)
    else:
        scales = (parts.abs().amax(-1) * 2 / top).half()
        zeros = torch.full(scales.shape, float(2 ** (bits - 1)))
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.view_as(weight).long(), scales, zeros.long()


def packed_bits(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as streams of bits in int32 words, the lowest bit first."""
    stream = ((codes[..., None] >> torch.arange(bits)) & 1).reshape(len(codes), -1, 32)
    words = (stream << torch.arange(32)).sum(-1)
    return words.to(torch.uint32).view(torch.int32)


def numbers_of(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    return (codes - zeros[:, group_of]).float() * scales.float()[:, group_of]


def awq(weight: Tensor, *, size: int = 32) -> Stored:
    codes, scales, zeros = grouped(weight, 4, size, has_zeros=True)
    plain = numbers_of(codes, scales, zeros, torch.arange(weight.shape[1]) // size)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def words(matrix: Tensor) -> Tensor:
        own = matrix.t().reshape(matrix.shape[1], -1, 8)[..., order].flatten(1)
        return packed_bits(own, 4)

    tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.t()}
    return Stored(tensors, plain)


def gptq(
    weight: Tensor, *, bits: int = 4, size: int = 32, has_zeros: bool = True, shuffled: bool = False,
    is_first: bool = True,
) -> Stored:  # fmt: skip
    width = weight.shape[1]
    group_of = torch.arange(width) // size
    order = torch.arange(width)
    if shuffled:
        order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
        group_of = group_of[order.argsort()]
    codes, scales, zeros = grouped(weight[:, order], bits, size, has_zeros=has_zeros)
    codes = codes[:, order.argsort()]
    plain = numbers_of(codes, scales, zeros, group_of)
    stored_zeros = zeros - 1 if is_first else zeros
    if is_first and bits in (2, 4, 8):  # words less a word of ones, with its borrow
        ones = int("".join(["0" * (bits - 1) + "1"] * (32 // bits)), 2)
        words = packed_bits(zeros.t(), bits).long() - ones
        packed_zeros = (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    else:
        packed_zeros = packed_bits(stored_zeros.t() & (2**bits - 1), bits)
    tensors = {
        "qweight": packed_bits(codes, bits).t(),
        "qzeros": packed_zeros,
        "scales": scales.t(),
        "g_idx": group_of.int(),
    }
    return Stored(tensors, plain)


def pack_quantized(
    weight: Tensor, *, bits: int = 4, size: int | None = 32, has_zeros: bool = False, shuffled: bool = False
) -> Stored:
    stored = gptq(
        weight,
        bits=bits,
        size=size or weight.shape[1],
        has_zeros=has_zeros,
        shuffled=shuffled,
        is_first=False,
    )
    parts = stored.tensors
    tensors = {
        "weight_packed": parts["qweight"].t(),
        "weight_scale": parts["scales"].t(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        tensors["weight_zero_point"] = parts["qzeros"].t()
    if shuffled:
        tensors["weight_g_idx"] = parts["g_idx"]
    return Stored(tensors, stored.plain)


def fp4_codes(weight: Tensor, scales: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Pairs of codes in bytes, and their numbers."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    spread = scales.repeat_interleave(size, 1)
    near = ((weight / spread).abs()[..., None] - table).abs().argmin(-1)
    codes = near + 8 * (weight < 0)
    plain = table[near] * torch.where(weight < 0, -1.0, 1.0) * spread
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), plain


def nvfp4(weight: Tensor, *, is_compressed: bool = False) -> Stored:
    largest = weight.view(len(weight), -1, 16).abs().amax(-1)
    whole = (largest.amax() / (6 * 448)).reshape(1)
    if is_compressed:
        whole = 1 / whole
        scales = (largest / 6 * whole).to(FP8)
        own = scales.float() / whole
    else:
        scales = (largest / 6 / whole).to(FP8)
        own = scales.float() * whole
    codes, plain = fp4_codes(weight, own, 16)
    if is_compressed:
        return Stored({"weight_packed": codes, "weight_scale": scales, "weight_global_scale": whole}, plain)
    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": whole.reshape(())}
    return Stored({**tensors, "input_scale": torch.tensor(0.02)}, plain)


def mxfp4(weight: Tensor, *, name: str = "weight_packed") -> Stored:
    exponents = (weight.view(len(weight), -1, 32).abs().amax(-1) / 6).log2().ceil()
    codes, plain = fp4_codes(weight, torch.exp2(exponents), 32)
    return Stored({name: codes, "weight_scale": (exponents + 127).to(torch.uint8)}, plain)


def mxfp8(weight: Tensor) -> Stored:
    exponents = (weight.view(len(weight), -1, 32).abs().amax(-1) / 448).log2().ceil()
    codes, plain = rounded_fp8(weight, torch.exp2(exponents), (1, 32))
    return Stored({"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, plain)


def smoothing(weight: Tensor) -> Tensor:
    """A scale for each input."""
    noise = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    return (noise / 4).exp().to(torch.bfloat16)


def smoothed_int8(weight: Tensor) -> Stored:
    scales = smoothing(weight)
    stored = int8(weight / scales.float())
    codes, own = stored.tensors.values()
    tensors = {"weight": codes, "weight_scale": own[:, 0].float(), "input_scale": torch.tensor(0.02)}
    return Stored({**tensors, "pre_quant_scale": scales}, stored.plain * scales.float())


def smoothed_int4(weight: Tensor) -> Stored:
    scales = smoothing(weight)
    parts = (weight / scales.float()).view(len(weight), -1, 32)
    own = parts.abs().amax(-1) / 7
    codes = (parts / own[..., None]).round().clamp(-8, 7)
    plain = (codes * own[..., None]).view_as(weight) * scales.float()
    codes = codes.view_as(weight).to(torch.int8) & 15
    pairs = (codes[::2] | codes[1::2] << 4).view(torch.uint8)
    return Stored({"weight": pairs, "weight_scale": own, "pre_quant_scale": scales}, plain)


def groups(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group of all linear layers."""
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **more}
    form = "float-quantized" if kind == "float" else "int-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def is_product(name: str, tensor: Tensor) -> bool:
    """Return True for weights of products in layers, experts included, and False for routers."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    plain = ("norm", "gate", "router", "conv", "conv1d", "embed", "b_proj", "weights_proj")
    return "layers." in name and tensor.ndim in (2, 3) and leaf not in plain and min(tensor.shape[-2:]) >= 16


def quantise(
    folder: Path,
    write: Writer,
    settings: Mapping[str, Any] | None,
    *,
    plain: Path,
    bare: str = "_proj.weight",
) -> int:
    """Store a folder's products as a writer does, and a copy with the plain numbers in another folder.

    Args:
        bare: part of the names of those weights; empty: all that `is_product`.

    Returns:
        How many there are.
    """
    stored: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    header = {"format": "pt"}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not (bare in name and is_product(name, tensor)):
            stored[name] = numbers[name] = tensor
            continue
        stem = name.removesuffix("weight")
        made = [write(each.float()) for each in (tensor if tensor.ndim == 3 else [tensor])]
        header |= {f"{stem}{rest}": text for rest, text in made[0].header.items()}
        for rest in made[0].tensors:
            parts = [each.tensors[rest] for each in made]
            own = name + rest.removeprefix("weight") if tensor.ndim == 3 else f"{stem}{rest}"
            stored[own] = (torch.stack(parts) if tensor.ndim == 3 else parts[0]).contiguous()
        plains = [each.plain for each in made]
        numbers[name] = (torch.stack(plains) if tensor.ndim == 3 else plains[0]).contiguous()
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata=header)
    if settings is not None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    return len(stored) - len(numbers)


def quantise_gpt_oss(folder: Path, *, plain: Path) -> None:
    """Store the experts of gpt-oss as MXFP4, and a copy with the plain numbers in another folder."""
    stored: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = numbers[name] = tensor
            continue
        made = [mxfp4(each.t().float()) for each in tensor]
        blocks = torch.stack([each.tensors["weight_packed"] for each in made])
        stored[f"{name}_blocks"] = blocks.view(*blocks.shape[:2], -1, 16)
        stored[f"{name}_scales"] = torch.stack([each.tensors["weight_scale"] for each in made])
        numbers[name] = torch.stack([each.plain.t() for each in made]).contiguous()
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
