"""Float32 linear layers with weights packed once for `radixkv_kernels.cpu.linear.float_product`.

`torch.nn.functional.linear` calls the BLAS library torch was built with, which packs the weight in every call
and on some processors picks a slow path; it also computes a row differently when there are more rows. Which
way is faster depends on the processor, so `pack_linear_layers` times both on the model's own shapes and
changes nothing where packing does not pay.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

# Rows of the products that are timed: a few decodes, and a prompt chunk.
_TIMED_ROWS = (4, 128)
_REPEATS = 7


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
def pack_linear_layers(model: nn.Module, *, always: bool = False) -> bool:
    """Replace the float32 linear layers of a CPU model by packed ones, if that is faster here.

    Whole decoder layers are replaced where `fused_layers` knows them.

    Args:
        always: do it without timing, so that two starts never compute in different ways.

    Returns:
        Whether they were replaced. Weights that nothing else uses (tied embeddings do) are freed.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not linears or not _can_pack(linears):
        return False
    largest_inner = max(
        (linear for linear in linears if linear.out_features < 16384), key=_size, default=linears[0]
    )
    if not always and not _is_faster(largest_inner):
        return False
    from radixkv.model.cpu.fused_layers import fuse_layers

    fuse_layers(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    return True


def _size(linear: nn.Linear) -> int:
    return linear.in_features * linear.out_features


def _can_pack(linears: list[nn.Linear]) -> bool:
    if any(linear.weight.dtype != torch.float32 or linear.weight.device.type != "cpu" for linear in linears):
        return False
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def _is_faster(linear: nn.Linear) -> bool:
    """Whether the packed layer is at least 5 % faster over the timed rows.

    Both take turns and the best time of each counts: other programs may be computing, too.
    """
    packed = PackedLinear(linear)
    ours = theirs = 0.0
    for rows in _TIMED_ROWS:
        inputs = torch.randn(rows, linear.in_features)
        times: tuple[list[float], list[float]] = ([], [])
        sides: tuple[Callable[[], torch.Tensor], ...] = (
            lambda x=inputs: packed(x),  # type: ignore[misc]
            lambda x=inputs: F.linear(x, linear.weight, linear.bias),  # type: ignore[misc]
        )
        for _ in range(_REPEATS):
            for side, run in enumerate(sides):
                started = time.perf_counter()
                run()
                times[side].append(time.perf_counter() - started)
        ours += min(times[0]) / rows
        theirs += min(times[1]) / rows
    return ours < 0.95 * theirs
