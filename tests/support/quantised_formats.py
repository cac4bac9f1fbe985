# SPDX-License-Identifier: Apache-2.0
"""Formats of quantised checkpoints: how a weight is written, and the configuration that says so."""

from __future__ import annotations

from functools import partial
from typing import Any

import quantised_checkpoints as written
import torch

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
}
BITS_4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BITS_8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
TORCHAO = {"quant_method": "torchao", "quant_type": {}}
MLX = {"group_size": 32, "bits": 4}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def packed(bits: int, size: int | None = 32, **more: Any) -> dict[str, Any]:
    strategy = "channel" if size is None else "group"
    settings = written.groups("int", strategy, num_bits=bits, group_size=size, **more)
    return {**settings, "format": "pack-quantized"}


def floats(form: str, size: int) -> dict[str, Any]:
    settings = written.groups("float", "group", num_bits=4, group_size=size)
    return {**settings, "format": form}


def auto_round(kind: str, bits: int, size: int = 32) -> dict[str, Any]:
    settings = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}
    return {**settings, "data_type": kind, "bits": bits, "group_size": size, "sym": True}


#: Format -> how a weight is written, and `quantization_config`.
FORMATS: dict[str, tuple[written.Writer, dict[str, Any]]] = {
    "fp8-blocks": (written.block_fp8, FP8),
    "fp8-blocks-bfloat16": (partial(written.block_fp8, kind=torch.bfloat16), FP8),
    "fp8-uneven-blocks": (partial(written.block_fp8, block=48), {**FP8, "weight_block_size": [48, 48]}),
    "fp8-exponents": (written.exponents, FP8),
    "fp8-bytes": (written.exponent_bytes, FP8),
    "fp8-tensor": (partial(written.one_fp8, suffix="weight_scale_inv"), {"quant_method": "fp8"}),
    "modelopt": (written.one_fp8, MODELOPT),
    "modelopt-int8": (written.int8, {**MODELOPT, "quant_algo": "W8A16"}),
    "modelopt-awq": (written.smoothed_int4, {**MODELOPT, "quant_algo": "W4A16_AWQ", "group_size": 32}),
    "modelopt-smoothed": (written.smoothed_int8, {**MODELOPT, "quant_algo": "W8A8_SQ_PER_CHANNEL"}),
    "modelopt-mxfp4": (
        partial(written.mxfp4, name="weight"),
        {**MODELOPT, "quant_algo": "MXFP4"},
    ),
    "modelopt-mxfp8": (written.mxfp8, {**MODELOPT, "quant_algo": "MXFP8"}),
    "fbgemm": (partial(written.channel_fp8, kind=torch.float32), {"quant_method": "fbgemm_fp8"}),
    "quark": (written.one_fp8, QUARK),
    "compressed-static": (partial(written.one_fp8, shape=(1,)), written.groups("float", "tensor")),
    "compressed-dynamic": (written.channel_fp8, written.groups("float", "channel")),
    "compressed-blocks": (
        partial(written.block_fp8, suffix="weight_scale"),
        written.groups("float", "block", block_structure=[32, 32]),
    ),
    "modelopt-blocks": (
        partial(written.block_fp8, suffix="weight_scale", block=128),
        {**MODELOPT, "quant_algo": "FP8_PB_WO"},
    ),
    "compressed-int8": (written.int8, written.groups("int", "channel")),
    "compressed-int8-groups": (
        partial(written.int8, group=32),
        written.groups("int", "group", group_size=32),
    ),
    "compressed-int8-zeros": (written.int8_with_zeros, written.groups("int", "channel", symmetric=False)),
    "compressed-packed": (
        written.packed_int8,
        {**written.groups("int", "group", group_size=32), "format": "pack-quantized"},
    ),
    "nf4": (partial(written.nf4, block=32), BITS_4),
    "nf4-nested": (partial(written.nf4, nested=True, block=32), BITS_4),
    "bitsandbytes-8": (written.bitsandbytes_int8, BITS_8),
    "torchao-fp8": (partial(written.torchao, kind="Float8Tensor"), TORCHAO),
    "torchao-int8": (partial(written.torchao, kind="Int8Tensor"), TORCHAO),
    "torchao-int4": (partial(written.torchao, kind="Int4Tensor"), TORCHAO),
    "torchao-intx": (partial(written.torchao, kind="IntxUnpackedToInt8Tensor"), TORCHAO),
    "awq": (written.awq, AWQ),
    "gptq": (written.gptq, GPTQ),
    "gptq-symmetric": (partial(written.gptq, has_zeros=False), {**GPTQ, "sym": True}),
    "gptq-act-order": (partial(written.gptq, shuffled=True), {**GPTQ, "desc_act": True}),
    "gptq-2": (partial(written.gptq, bits=2), {**GPTQ, "bits": 2}),
    "gptq-3": (partial(written.gptq, bits=3), {**GPTQ, "bits": 3}),
    "gptq-8": (partial(written.gptq, bits=8), {**GPTQ, "bits": 8}),
    "gptq-v2": (partial(written.gptq, is_first=False), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "auto-round": (
        written.gptq,
        {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    ),
    "auto-round-awq": (
        written.awq,
        {**AWQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
    ),
    "gptq-dynamic": (
        written.gptq,
        {
            **GPTQ,
            "bits": 2,
            "group_size": 64,
            "dynamic": {"-:.*lm_head": {}, "+:.*proj": {"bits": 4, "group_size": 32}},
        },
    ),
    "auto-round-layers": (
        written.gptq,
        {
            **GPTQ,
            "quant_method": "auto-round",
            "bits": 8,
            "extra_config": {".*proj": {"bits": 4}, "b": {"bits": 16}},
        },
    ),
    "auto-round-mxfp4": (written.mxfp4, auto_round("mx_fp", 4)),
    "auto-round-mxfp8": (written.mxfp8, auto_round("mx_fp", 8)),
    "auto-round-nvfp4": (
        partial(written.nvfp4, is_compressed=True),
        auto_round("nv_fp", 4, 16),
    ),
    "auto-round-fp8": (
        written.block_fp8,
        {
            **auto_round("fp", 8),
            "group_size": [32, 32],
            "packing_format": "auto_round:fp8",
            "weight_block_size": [32, 32],
        },
    ),
    "packed-4": (written.pack_quantized, packed(4)),
    "packed-4-channels": (partial(written.pack_quantized, size=None), packed(4, None)),
    "packed-4-zeros": (partial(written.pack_quantized, has_zeros=True), packed(4, symmetric=False)),
    "packed-4-act-order": (partial(written.pack_quantized, shuffled=True), packed(4, actorder="group")),
    "packed-3": (partial(written.pack_quantized, bits=3), packed(3)),
    "packed-8-zeros": (partial(written.pack_quantized, bits=8, has_zeros=True), packed(8, symmetric=False)),
    "nvfp4": (written.nvfp4, {**MODELOPT, "quant_algo": "NVFP4"}),
    "nvfp4-compressed": (partial(written.nvfp4, is_compressed=True), floats("nvfp4-pack-quantized", 16)),
    "mxfp4-compressed": (written.mxfp4, floats("mxfp4-pack-quantized", 32)),
    "mlx-4": (written.mlx, MLX),
    "mlx-8": (partial(written.mlx, bits=8), {**MLX, "bits": 8}),
    "mlx-3": (partial(written.mlx, bits=3), {**MLX, "bits": 3}),
    "mlx-6": (partial(written.mlx, bits=6), {**MLX, "bits": 6, "mode": "affine"}),
}
