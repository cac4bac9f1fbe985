# SPDX-License-Identifier: Apache-2.0
"""Rewrite a model for the CPU: choose a replacement for each of its layers.

It depends on processor, device and dtype alone, never on a timing: the ways to compute a layer differ in the
last bits, and two starts of an engine must compute in the same way. What needs numba is imported where it is
known to be there.

Weights of 16 bits are computed in float32: the products read bfloat16 or float16 as they are, and everything
between them is float32. That is closer to the exact result than transformers, which rounds each operator's
output to the narrow type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from radixkv.errors import ConfigError
from radixkv.model.cpu_layers.quantized_linear import QuantizedLinear
from radixkv.model.cpu_layers.widening import narrow_tensors, widen_the_rest
from radixkv.model.decoder_layers import (
    DecoderParts,
    StoredProduct,
    is_plain_llama,
    pack_whole_weights,
    reads_weight,
    replace_layers,
)
from radixkv.model.parallel.over_ranks import holds_everywhere
from radixkv.model.stored_weights.scaled_weight import Fp8Weight
from radixkv_kernels.registry import numba_available

#: Most of a model's weights that may have to be widened, as a share: they take twice the memory.
_MAX_WIDENED = 0.1
_LARGEST_E4M3 = 448.0
_NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@torch.no_grad()
def pack_layers(model: nn.Module) -> bool:
    """Replace the linear layers of a model on a CPU by packed ones, where the kernels run.

    Whole decoder layers are replaced where they are known. Weights of linear layers and embeddings stay what
    they are, bfloat16 or float16 as well; the rest becomes float32, and so is all that is computed.

    Returns:
        Whether they were replaced. Weights that nothing else uses (tied embeddings do) are freed.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not has_vector_kernels():
        return False
    if any(isinstance(module, StoredProduct) for module in model.modules()):
        # These need numba.
        from radixkv.model.cpu_layers.block_layers import fuse_block_layers
        from radixkv.model.cpu_layers.packed_linear import PackedLinear

        pack_whole_weights(model)
        # Plain until now, since transformers' forward, which the trial run calls, takes its weight.
        _replace_linears(model, PackedLinear, only=("dt_proj", "term"))
        return fuse_block_layers(model) > 0
    if not linears:
        return False
    # These need numba.
    from radixkv.model.cpu_layers.fused_layers import FusedLayer
    from radixkv.model.cpu_layers.llama_layer import Scratch
    from radixkv.model.cpu_layers.packed_linear import PackedLinear
    from radixkv_kernels.cpu.linear.float_product import can_store
    from radixkv_kernels.cpu.linear.row_kernels import RowKernels

    dtype = linears[0].weight.dtype
    if not can_store(dtype) or not all(_is_on_cpu(each.weight, dtype) for each in linears):
        return False
    del linears  # else no weight would be freed before the last one is packed
    if dtype != torch.float32:
        # Rank 0 has parts that others have not.
        if not holds_everywhere(model, mostly_linear(model)):
            return False
        widen_the_rest(model)
    kernels, scratch = RowKernels(), (Scratch(), Scratch())

    def fused(parts: DecoderParts) -> nn.Module | None:
        return FusedLayer(parts, kernels, scratch) if is_plain_llama(parts, dtype) else None

    replace_layers(model, fused)
    _replace_linears(model, PackedLinear)
    return True


@torch.no_grad()
def quantize_layers(model: nn.Module) -> None:
    """Replace every linear layer of a float32 CPU model by an int8 one, and fuse decoder layers if possible.

    Embeddings stay float32, also where the output layer was tied to them.

    Raises:
        ConfigError: the model is not float32 on a CPU.
    """
    weight = next(model.parameters())
    if not _is_on_cpu(weight, torch.float32):
        raise _needs_float32("int8", weight)
    rows: Any = None
    if has_int8_products():
        # These need numba.
        from radixkv.model.cpu_layers.int8_layers import Int8Layer
        from radixkv.model.cpu_layers.llama_layer import Scratch
        from radixkv_kernels.cpu.linear.int8_rows import Int8Rows
        from radixkv_kernels.cpu.linear.row_kernels import RowKernels

        rows, kernels, scratch = Int8Rows(), RowKernels(), Scratch()

        def narrow(parts: DecoderParts) -> nn.Module | None:
            if not is_plain_llama(parts, torch.float32):
                return None
            return Int8Layer(parts, kernels, rows, scratch)

        replace_layers(model, narrow)
    _replace_linears(model, lambda linear: QuantizedLinear(linear, rows))


@torch.no_grad()
def store_layers_as_fp8(model: nn.Module) -> None:
    """Round the linear layers of a CPU model to e4m3 with a scale for each output, and pack them as blocks.

    As a checkpoint with such weights is served. Embeddings stay float32, also where the output was tied.

    Raises:
        ConfigError: the model is not float32 on a CPU, or the products of blocks can't run here.
    """
    weight = next(model.parameters())
    if not _is_on_cpu(weight, torch.float32):
        raise _needs_float32("fp8", weight)
    if not has_int8_products():
        raise ConfigError(
            f"--quantization fp8 has no products here, since {_missing('neither VNNI nor AVX2')}: use "
            "--quantization int8, or leave it out"
        )
    # These need numba.
    from radixkv.model.cpu_layers.whole_weights import CheckpointProduct
    from radixkv_kernels.cpu.linear.block_rows import BlockRows

    rows = BlockRows()

    def narrow(linear: nn.Linear) -> nn.Module:
        scales = (linear.weight.abs().amax(1, keepdim=True) / _LARGEST_E4M3).clamp_min(1e-30)
        codes = (linear.weight / scales).to(torch.float8_e4m3fn)
        stored = Fp8Weight(codes, scales, (1, linear.in_features))
        return CheckpointProduct([stored], linear.bias, rows).packed()

    _replace_linears(model, narrow)
    pack_layers(model)


def _needs_float32(quantization: str, weight: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"--quantization {quantization} works for float32 models on a CPU; this one is {weight.dtype} on "
        f"{weight.device}: use --dtype float32 --device cpu, or leave --quantization out"
    )


def slower_than_float32(model: nn.Module, quantization: str | None) -> str | None:
    """Return a warning about products that torch computes slowly on this processor; None: there are none.

    Args:
        model: model whose layers have been replaced.
        quantization: the requested quantization: None or `int8`.
    """
    if quantization == "int8" and not has_int8_products():
        return (
            "--quantization int8 will be slower than float32: its products are left to torch, since "
            f"{_missing('neither VNNI nor AVX2')}. Leave the option out for speed"
        )
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    left = next((each for each in weights if each.device.type == "cpu" and each.dtype in _NARROW), None)
    if left is None or torch_is_fast(left.dtype):
        return None
    name = str(left.dtype).removeprefix("torch.")
    reason = _missing("no AVX2") if mostly_linear(model) else "the weights of its experts are fused"
    return (
        f"--dtype {name} will be slower than float32, several times on prompts: its products are left to "
        f"torch, since {reason}, and this processor does not compute in {name}. Use --dtype float32 if "
        "memory allows"
    )


def torch_is_fast(dtype: torch.dtype) -> bool:
    """Return True if torch's library has products of this dtype for this processor."""
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{_NARROW[dtype]}_supported", None)
    return supported is not None and bool(supported())


def _missing(instructions: str) -> str:
    if not numba_available():
        return "numba can't be used (the extra `cpu` installs it)"
    return f"this processor has {instructions}"


def has_vector_kernels() -> bool:
    """Return True if numba is installed and the processor has the multiply-adds of the float kernels."""
    try:  # numba is optional
        from radixkv_kernels.cpu.vectors import has_multiply_add
    except ImportError:
        return False
    return has_multiply_add()


def has_int8_products() -> bool:
    """Return True if numba is installed and the processor has int8 products (VNNI, AVX2)."""
    try:  # numba is optional
        from radixkv_kernels.cpu.linear.int8_product import methods
    except ImportError:
        return False
    return bool(methods())


def mostly_linear(model: nn.Module) -> bool:
    """Return True if nearly all weights belong to linear layers and embeddings, none to fused experts."""
    rest = sum(tensor.numel() for _, _, tensor in narrow_tensors(model))
    return rest <= _MAX_WIDENED * sum(parameter.numel() for parameter in model.parameters())


def _is_on_cpu(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    return weight.dtype == dtype and weight.device.type == "cpu"


def _replace_linears(
    model: nn.Module, make: Callable[[nn.Linear], nn.Module], only: tuple[str, ...] | None = None
) -> None:
    """Replace each linear layer by the result of `make`; `only`: with these names (`term`: a rank's)."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if only is not None and name not in only:
                continue
            if type(child) is nn.Linear and not reads_weight(type(parent), name):
                setattr(parent, name, make(child))
