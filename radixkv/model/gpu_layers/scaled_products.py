# SPDX-License-Identifier: Apache-2.0
"""Choice of torch's scaled products for FP8 weights on a GPU: their inputs are rounded to 8 bits, too.

Norms and gates before such a product round their results at once. A form and size is used where one trial on
the GPU at hand gives the reference's numbers; all others keep the product that reads codes and multiplies
inputs as they are, and so does deterministic mode, since a library's order of sums depends on the number of
rows.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from radixkv.model.gpu_layers.products import TiledProduct
from radixkv_kernels.triton.fp8_rows import GROUP, round_rows
from radixkv_kernels.triton.scaled_product import ScaledProduct, scaled_product

logger = logging.getLogger("radixkv")

#: GPUs that have the products of scales for each row, and of blocks.
_BY_ROW, _BY_BLOCK = (8, 9), (9, 0)
#: Rows of a trial: no multiple of what they are padded to.
_TRIED_ROWS = 5
#: Largest deviation in a trial, of the largest result: rounding to bfloat16 and another order of sums.
_TOLERANCE = 0.02


@torch.no_grad()
def use_scaled_products(model: Any, *, on_cpu: bool = False) -> int:
    """Let FP8 products that torch has on this GPU round their inputs; once is enough.

    Args:
        on_cpu: on a CPU, too, where the reference computes them.

    Returns:
        How many do.
    """
    tried: dict[tuple[int, ...], bool] = {}
    count = 0
    for product in model.modules():
        if not isinstance(product, TiledProduct) or len(product.weights) > 1:
            continue
        if product.scaled is None and product.dtype in (torch.bfloat16, torch.float32):
            scaled = scaled_product(product.weights[0])
            if scaled is None or not (on_cpu or product.dtype == torch.bfloat16):
                continue
            key = (*scaled.codes.shape, scaled.group)
            if key not in tried:
                tried[key] = _is_right(scaled, product.dtype, on_cpu)
            if tried[key]:
                product.scaled = scaled
        count += product.scaled is not None
    wrong = [f"{key[0]} x {key[1]}" for key, is_right in tried.items() if not is_right]
    if wrong and not on_cpu and torch.cuda.is_available():
        logger.info("FP8 products of these sizes multiply inputs of 16 bits: %s", ", ".join(wrong))
    return count


def _is_right(scaled: ScaledProduct, dtype: torch.dtype, on_cpu: bool) -> bool:
    """True where the device has the product, and it gives the reference's numbers."""
    device = scaled.codes.device
    if device.type == "cpu":
        return on_cpu
    if torch.version.hip is not None:
        return False
    capability = torch.cuda.get_device_capability(device)
    if capability < _BY_ROW or (scaled.group == GROUP < scaled.codes.shape[1] and capability != _BY_BLOCK):
        return False
    generator = torch.Generator(device=device).manual_seed(0)
    rows = torch.randn(_TRIED_ROWS, scaled.codes.shape[1], generator=generator, device=device).to(dtype)
    rounded = round_rows(rows, scaled.group)
    wanted = scaled.reference(rounded).float()
    try:
        got = scaled.multiply(rounded).float()
    except (RuntimeError, NotImplementedError):  # this torch or library has none of this form
        return False
    return bool((got - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())
