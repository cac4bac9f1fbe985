# SPDX-License-Identifier: Apache-2.0
"""Device buffers of plans and partials."""

from __future__ import annotations

import numpy as np
import torch

from radixkv_kernels.interface import BackendConfig
from radixkv_kernels.triton.plan import HEADER, TritonPlan, partial_slots, split_items
from radixkv_kernels.work_plan import ITEM_WIDTH, WorkSettings


class PlanBuffers:
    """Device memory for the plans of one window: fixed addresses, so that CUDA graphs may hold them."""

    def __init__(self, config: BackendConfig, settings: WorkSettings) -> None:
        spec = config.spec
        segments = -(-config.max_model_len // settings.segment)
        blocks = segments * settings.segment // settings.block_size
        pairs = config.max_num_seqs * segments
        tiles = config.max_num_tokens // settings.long_tile + config.max_num_seqs
        size = (
            HEADER
            + ITEM_WIDTH * (2 * pairs + tiles * segments + split_items(settings))
            + config.max_num_tokens * 5
            + partial_slots(config, settings)
            + pairs * settings.short_tile
            + config.max_num_seqs * blocks
        )
        pinned = spec.device.type == "cuda"
        self.blob = torch.zeros(size, dtype=torch.int32, device=spec.device)
        self.staging = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.host = self.staging.numpy()
        self.copied = torch.cuda.Event() if pinned else None
        self.plan: TritonPlan | None = None

    def load(self, plan: TritonPlan, packed: np.ndarray) -> None:
        """Copy a plan to the device, unless it is there."""
        if self.plan is plan:
            return
        if len(packed) > len(self.host):
            raise ValueError(f"the plan needs {len(packed)} words, more than the {len(self.host)} allotted")
        if self.copied is not None:
            # The last copy may still be reading the staging memory.
            self.copied.synchronize()
        self.host[: len(packed)] = packed
        self.blob[: len(packed)].copy_(self.staging[: len(packed)], non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        self.plan = plan


class Partials:
    """Device memory for one layer's partials: float32 [slots, heads, value size], and two numbers each."""

    def __init__(self, config: BackendConfig, settings: WorkSettings) -> None:
        self.slots = partial_slots(config, settings)
        rows = self.slots * config.num_query_heads
        device, size = config.spec.device, config.spec.value_size
        self.out = torch.empty(rows * size, dtype=torch.float32, device=device)
        self.stat = torch.empty(rows * 2, dtype=torch.float32, device=device)
