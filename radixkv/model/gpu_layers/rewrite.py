# SPDX-License-Identifier: Apache-2.0
"""Rewrite a model for a GPU: decoder layers and norms that the kernels know; the rest stays as it is."""

from __future__ import annotations

import torch
from torch import nn

from radixkv.model.decoder_layers import describe_norm, is_norm, replace_layers
from radixkv.model.gpu_layers.fused_layers import FusedGpuLayer, FusedNorm, can_fuse


@torch.no_grad()
def fuse_layers(model: nn.Module) -> int:
    """Replace decoder layers, one after the other, so that no more than one has its weights twice.

    Layers replaced earlier stay.

    Returns:
        How many were replaced.
    """
    count = replace_layers(model, lambda parts: FusedGpuLayer(parts) if can_fuse(parts) else None)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_norm(child):
                setattr(parent, name, FusedNorm(describe_norm(child)))
    return count
