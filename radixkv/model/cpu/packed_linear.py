"""Float32 linear layers with weights packed once for `radixkv_kernels.cpu.linear.float_product`.

`torch.nn.functional.linear` calls the BLAS library torch was built with, which packs the weight in every call
and on some processors picks a slow path; it also computes a row differently when there are more rows. Whether
layers are packed depends on processor, device and dtype alone, never on a timing: the two ways differ in the
last bits, and two starts of an engine must compute in the same way.
"""

from __future__ import annotations

import torch
from torch import nn

from radixkv.model.cpu.fused_layers import fuse_layers, has_vector_kernels


class PackedLinear(nn.Module):
    """`y = x W^T + b`; [..., in] float32 -> [..., out]. The plain weight is not kept.

    A row of the result depends on its own row of the input only, bit for bit.
    """

    def __init__(self, linear: nn.Linear) -> None:
        from radixkv_kernels.cpu.linear.float_product import PackedFloat

        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.product = PackedFloat(linear.weight, linear.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = self.product.multiply(rows, torch.empty(len(rows), self.out_features))
        return out.view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


@torch.no_grad()
def pack_linear_layers(model: nn.Module) -> bool:
    """Replace the linear layers of a float32 model on a CPU by packed ones, where the kernels run.

    Whole decoder layers are replaced where `fused_layers` knows them.

    Returns:
        Whether they were replaced. Weights that nothing else uses (tied embeddings do) are freed.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not linears or not all(can_pack(linear) for linear in linears):
        return False
    fuse_layers(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    return True


def can_pack(linear: nn.Linear) -> bool:
    """Whether the layer is float32 on a CPU that the kernels were written for."""
    weight = linear.weight
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and has_vector_kernels()
