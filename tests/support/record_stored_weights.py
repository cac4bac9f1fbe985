# SPDX-License-Identifier: Apache-2.0
"""Record small weights as the packages of quantised formats store them, and the numbers these make of them.

Tests hold our readers to the recordings without the packages. To record again, install what has changed into
an environment of its own beside torch and transformers, with `pip install --no-deps`, and run

    python tests/support/record_stored_weights.py [NAME ...]

A recording is a safetensors file: `layer.*` as the package stores a layer, `reference` its numbers [out, in].
`recordings.json` has each one's `quantization_config` and the package. Nothing here imports radixkv.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "data" / "stored_weights"
OUT, IN, GROUP = 32, 64, 32


@dataclass(frozen=True)
class Recording:
    """One weight.

    Attributes:
        tensors: by what follows the layer's name.
        reference: what the package makes of them, [out, in].
        settings: the `quantization_config` that goes with them.
        package: that wrote them.
        header: entries of the file's header, by what follows the layer's name.
    """

    tensors: Mapping[str, Tensor]
    reference: Tensor
    settings: Mapping[str, Any]
    package: str
    header: Mapping[str, str] = field(default_factory=dict)


def weight() -> Tensor:
    """A weight with a few large numbers, float32 [out, in]."""
    source = torch.Generator().manual_seed(0)
    made = torch.randn(OUT, IN, generator=source) / IN**0.5
    made[:, ::17] *= 4
    return made


def groups_of(numbers: Tensor, bits: int, *, has_zeros: bool) -> tuple[Tensor, Tensor]:
    """Scales in float16 and zero points of unsigned codes, [out, groups]."""
    parts = numbers.view(OUT, -1, GROUP)
    top = 2**bits - 1
    if has_zeros:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / top).half()
        return scales, (-low / scales.float()).round().clamp(0, top)
    scales = (parts.abs().amax(-1) * 2 / top).half()
    return scales, torch.full(scales.shape, 2.0 ** (bits - 1))


def linear() -> nn.Linear:
    layer = nn.Linear(IN, OUT, bias=False)
    layer.weight.data = weight()
    return layer


def awq() -> Recording:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    scales, zeros = groups_of(weight(), 4, has_zeros=True)
    layer = linear().half()
    stored = WQLinear_GEMM.from_linear(layer, 4, GROUP, False, scales.t().contiguous(), zeros.t().half())
    tensors = {name: getattr(stored, name) for name in ("qweight", "qzeros", "scales")}
    numbers = dequantize_gemm(*tensors.values(), 4, GROUP)
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return Recording(tensors, numbers.t(), settings, "autoawq")


def gptq(bits: int, *, has_zeros: bool = True, shuffled: bool = False, is_first: bool = True) -> Recording:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    order = torch.arange(IN)
    if shuffled:
        order = torch.randperm(IN, generator=torch.Generator().manual_seed(1))
    group_of = (torch.arange(IN) // GROUP)[order.argsort()].int()
    scales, zeros = groups_of(weight()[:, order], bits, has_zeros=has_zeros)
    stored = TorchLinear(
        bits=bits, group_size=GROUP, sym=not has_zeros, desc_act=shuffled, in_features=IN, out_features=OUT,
        bias=False, register_buffers=True,
    )  # fmt: skip
    stored.pack_original(linear(), scales.float(), zeros, group_of)
    stored.qzero_format(format=2)
    numbers = stored.eval().dequantize_weight().t().clone()
    if is_first:
        convert_gptq_v2_to_v1_format_module(stored, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": shuffled, "sym": not has_zeros,
        "checkpoint_format": "gptq" if is_first else "gptq_v2",
    }  # fmt: skip
    tensors = {name: getattr(stored, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return Recording(tensors, numbers, settings, "gptqmodel")


def compressed(form: str, **arguments: Any) -> Recording:
    """compressed-tensors in one of its forms; `arguments` are of its `QuantizationArgs`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    numbers = weight().bfloat16()
    state: dict[str, Tensor] = {"weight": numbers}
    whole = None
    if form == "nvfp4-pack-quantized":
        whole = generate_gparam(numbers.amin(), numbers.amax())
        state["weight_global_scale"] = whole
    size = arguments.get("group_size") or IN
    if arguments["strategy"] == "tensor":
        parts = numbers.flatten()
        low, high = parts.amin().reshape(1), parts.amax().reshape(1)
    elif arguments["strategy"] == "block":
        height, width = arguments["block_structure"]
        parts = numbers.view(OUT // height, height, IN // width, width).transpose(1, 2).flatten(2)
        low, high = parts.amin(-1), parts.amax(-1)
    else:
        parts = numbers.view(OUT, -1, size)
        low, high = parts.amin(-1), parts.amax(-1)
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    kind: Any = BaseCompressor.get_value_from_registry(form)
    stored = kind.compress(state, scheme)
    plain = kind.decompress(dict(stored), scheme)["weight"]
    described = json.loads(args.model_dump_json())
    settings = {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": described}},
    }  # fmt: skip
    if args.symmetric:
        stored.pop("weight_zero_point", None)
    return Recording(stored, plain, settings, "compressed-tensors")


def bitsandbytes(kind: str, *, nested: bool = False) -> Recording:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        weight().bfloat16(), blocksize=64, quant_type=kind, compress_statistics=nested
    )
    tensors = {"weight": codes}
    tensors |= {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Recording(tensors, functional.dequantize_4bit(codes, state), settings, "bitsandbytes")


def bitsandbytes_8() -> Recording:
    from bitsandbytes import functional

    codes, scales, _ = functional.int8_vectorwise_quant(weight().half())
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    numbers = functional.int8_vectorwise_dequant(codes, scales)
    return Recording(tensors, numbers, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes")


def torchao(name: str, **options: Any) -> Recording:
    from torchao import quantization
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    if "granularity" in options:
        options["granularity"] = quantization.PerGroup(options["granularity"])
    layer = nn.Sequential(linear().bfloat16())
    quantization.quantize_(layer, getattr(quantization, name)(**options))
    tensors, header = flatten_tensor_state_dict({"layer.weight": layer[0].weight})
    tensors, header = (
        {key.removeprefix("layer."): value for key, value in each.items()} for each in (tensors, header)
    )
    numbers = layer[0].weight.dequantize()
    return Recording(tensors, numbers, {"quant_method": "torchao", "quant_type": {}}, "torchao", header)


def mlx_floats(mode: str) -> Recording:
    import mlx.core as mx
    import numpy as np

    bits, size = (8 if mode == "mxfp8" else 4), (16 if mode == "nvfp4" else 32)
    codes, scales = mx.quantize(mx.array(weight().numpy()), group_size=size, bits=bits, mode=mode)
    plain = mx.dequantize(codes, scales, group_size=size, bits=bits, mode=mode, dtype=mx.float32)
    tensors = {"weight": torch.from_numpy(np.array(codes)), "scales": torch.from_numpy(np.array(scales))}
    settings = {"group_size": size, "bits": bits, "mode": mode}
    return Recording(tensors, torch.from_numpy(np.array(plain)), settings, "mlx")


def mlx(bits: int, size: int = GROUP) -> Recording:
    import mlx.core as mx
    import numpy as np

    numbers = mx.array(weight().numpy()).astype(mx.float32)
    codes, scales, biases = mx.quantize(numbers, group_size=size, bits=bits)
    plain = torch.from_numpy(np.array(mx.dequantize(codes, scales, biases, group_size=size, bits=bits)))
    made = {"weight": codes, "scales": scales, "biases": biases}
    tensors = {name: torch.from_numpy(np.array(each)) for name, each in made.items()}
    return Recording(tensors, plain, {"group_size": size, "bits": bits}, "mlx")


def modelopt(algorithm: str) -> Recording:
    from modelopt.torch.quantization import qtensor

    settings = {"quant_method": "modelopt", "quant_algo": algorithm}
    if algorithm == "NVFP4":
        stored, scales, whole = qtensor.NVFP4QTensor.quantize(weight().bfloat16(), 16)
        plain = stored.dequantize(
            torch.float32, scale=scales, double_scale=whole, block_sizes={-1: 16}, fast=False
        )
        tensors = {"weight": stored._quantized_data, "weight_scale": scales, "weight_scale_2": whole}
        return Recording(tensors, plain, settings, "nvidia-modelopt")
    if algorithm == "W8A16":
        from modelopt.torch.export.quant_utils import to_quantized_weight

        scales = weight().abs().amax(1) / 127
        codes = to_quantized_weight(weight(), scales, "int8_wo")
        return Recording(
            {"weight": codes, "weight_scale": scales}, codes * scales[:, None], settings, "nvidia-modelopt"
        )
    stored, scales = qtensor.FP8QTensor.quantize(weight(), axis=None)
    plain = stored.dequantize(torch.float32, scale=scales)
    tensors = {"weight": stored._quantized_data, "weight_scale": scales}
    return Recording(tensors, plain, settings, "nvidia-modelopt")


def gpt_oss() -> Recording:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, OUT, IN // 32, 16), generator=source, dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, OUT, IN // 32), generator=source, dtype=torch.uint8)
    plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    tensors = {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}
    return Recording(tensors, plain, {"quant_method": "mxfp4"}, "transformers")


_INT = {"type": "int", "symmetric": True}
_FLOAT = {"type": "float", "symmetric": True}
RECORDERS: dict[str, Callable[[], Recording]] = {
    "awq": awq,
    **{f"gptq-{bits}": partial(gptq, bits) for bits in (2, 3, 4, 8)},
    **{f"gptq-{bits}-v2": partial(gptq, bits, is_first=False) for bits in (3, 4)},
    **{f"gptq-{bits}-symmetric": partial(gptq, bits, has_zeros=False) for bits in (3, 4, 8)},
    "gptq-act-order": partial(gptq, 4, shuffled=True),
    "packed-4": partial(compressed, "pack-quantized", num_bits=4, strategy="group", group_size=32, **_INT),
    "packed-4-zeros": partial(
        compressed, "pack-quantized", num_bits=4, strategy="group", group_size=32, type="int", symmetric=False
    ),
    "packed-3-channel": partial(compressed, "pack-quantized", num_bits=3, strategy="channel", **_INT),
    "packed-8": partial(compressed, "pack-quantized", num_bits=8, strategy="group", group_size=32, **_INT),
    "compressed-int8": partial(compressed, "int-quantized", num_bits=8, strategy="channel", **_INT),
    "compressed-int8-zeros": partial(
        compressed, "int-quantized", num_bits=8, strategy="channel", type="int", symmetric=False
    ),
    "compressed-fp8": partial(compressed, "float-quantized", num_bits=8, strategy="channel", **_FLOAT),
    "compressed-fp8-tensor": partial(compressed, "float-quantized", num_bits=8, strategy="tensor", **_FLOAT),
    "compressed-fp8-blocks": partial(
        compressed, "float-quantized", num_bits=8, strategy="block", block_structure=[16, 32], **_FLOAT
    ),
    "compressed-nvfp4": partial(
        compressed, "nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16,
        scale_dtype="torch.float8_e4m3fn", **_FLOAT,
    ),
    "compressed-mxfp4": partial(
        compressed, "mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32,
        scale_dtype="torch.uint8", **_FLOAT,
    ),
    "compressed-mxfp8": partial(
        compressed, "mxfp8-quantized", num_bits=8, strategy="group", group_size=32, scale_dtype="torch.uint8",
        **_FLOAT,
    ),
    "compressed-int4": partial(
        compressed, "int-quantized", num_bits=4, strategy="group", group_size=32, **_INT
    ),
    "nf4": partial(bitsandbytes, "nf4"),
    "nf4-nested": partial(bitsandbytes, "nf4", nested=True),
    "fp4": partial(bitsandbytes, "fp4"),
    "bitsandbytes-8": bitsandbytes_8,
    "torchao-int8": partial(torchao, "Int8WeightOnlyConfig"),
    "torchao-int8-groups": partial(torchao, "Int8WeightOnlyConfig", granularity=32),
    "torchao-fp8": partial(torchao, "Float8WeightOnlyConfig"),
    "torchao-int4": partial(torchao, "IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=32),
    **{f"mlx-{bits}": partial(mlx, bits) for bits in (2, 3, 4, 5, 6, 8)},
    "mlx-4-groups-of-64": partial(mlx, 4, 64),
    **{f"mlx-{mode}": partial(mlx_floats, mode) for mode in ("mxfp4", "nvfp4", "mxfp8")},
    "modelopt-fp8": partial(modelopt, "FP8"),
    "modelopt-nvfp4": partial(modelopt, "NVFP4"),
    "modelopt-int8": partial(modelopt, "W8A16"),
    "gpt-oss": gpt_oss,
}  # fmt: skip


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    index = FOLDER / "recordings.json"
    found: dict[str, Any] = json.loads(index.read_text()) if index.exists() else {}
    for name in sys.argv[1:] or RECORDERS:
        made = RECORDERS[name]()
        tensors = {f"layer.{leaf}": tensor.detach().contiguous() for leaf, tensor in made.tensors.items()}
        header = {f"layer.{leaf}": text for leaf, text in made.header.items()}
        save_file(
            {**tensors, "reference": made.reference.detach().contiguous()},
            FOLDER / f"{name}.safetensors",
            metadata={"format": "pt"} | header,
        )
        found[name] = {
            "package": f"{made.package} {importlib.metadata.version(made.package)}",
            "settings": dict(made.settings),
        }
    index.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
