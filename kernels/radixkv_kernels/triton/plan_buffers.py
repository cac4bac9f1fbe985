"""Where plans and partials live on the device."""

from __future__ import annotations

import numpy as np
import torch

from radixkv_kernels.interface import BackendConfig
from radixkv_kernels.triton.plan import HEADER, TritonPlan
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
            + ITEM_WIDTH * (2 * pairs + tiles * segments)
            + config.max_num_tokens * 4
            + pairs * settings.short_tile
            + config.max_num_seqs * blocks
        )
        pinned = spec.device.type == "cuda"
        self.blob = torch.zeros(size, dtype=torch.int32, device=spec.device)
        self.staging = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.host = self.staging.numpy()
        self.copied = torch.cuda.Event() if pinned else None
        self.plan: TritonPlan | None = None
        #: Times that `reserve` moved the partials: launches recorded before must not be replayed.
        self.generation = 0
        self.partial_out = torch.empty(0, dtype=torch.float32, device=spec.device)
        self.partial_stat = torch.empty(0, dtype=torch.float32, device=spec.device)

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

    def reserve(self, slots: int, num_heads: int, head_size: int) -> None:
        """Room for partials; grows by doubling. A captured graph must have seen the largest."""
        rows = slots * num_heads
        if self.partial_stat.numel() < rows * 2:
            rows = max(rows, self.partial_stat.numel())
            self.generation += 1
            device = self.blob.device
            self.partial_out = torch.empty(rows * head_size, dtype=torch.float32, device=device)
            self.partial_stat = torch.empty(rows * 2, dtype=torch.float32, device=device)
