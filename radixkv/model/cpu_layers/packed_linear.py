# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights packed once for `radixkv_kernels.cpu.linear.float_product`.

`torch.nn.functional.linear` calls the BLAS library torch was built with, which packs the weight in every call
and on some processors picks a slow path; it also computes a row differently when there are more rows.
"""

from __future__ import annotations

import torch
from torch import nn

from radixkv.model.decoder_layers import StoredProduct
from radixkv_kernels.cpu.linear.float_product import PackedFloat


class PackedLinear(StoredProduct):
    """`y = x W^T + b`; [..., in] float32 -> [..., out] float32. The plain weight is not kept.

    The weight may be bfloat16 or float16: it stays so, and is widened when it is multiplied.

    A row of the result depends on its own row of the input only, bit for bit.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.product = PackedFloat(linear.weight, linear.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = self.product.multiply(rows, torch.empty(len(rows), self.out_features))
        return out.view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
