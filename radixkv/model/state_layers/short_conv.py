# SPDX-License-Identifier: Apache-2.0
"""LFM2's gated short convolutions."""

from __future__ import annotations

from torch import Tensor

from radixkv.model.state_layers.mixer import Mixer


class ShortConv(Mixer):
    """in product -> B, C, x; C * conv(B * x) -> out product."""

    def rows(self, x: Tensor) -> Tensor:
        before, after, x = self.module.in_proj(x).chunk(3, dim=-1)
        y = after * self.convolve(self.module.conv, before * x, None)
        out: Tensor = self.module.out_proj(y)
        return out
