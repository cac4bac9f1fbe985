# SPDX-License-Identifier: Apache-2.0
"""Checkpoint: the state after a node's first few blocks, which follows the node's changes.

    node   [b0 b1 b2 b3]              states {4: checkpoint}: after b3
    split after b1
    upper  [b0 b1] ── node [b2 b3]    states {2: checkpoint} of the lower part
    trimmed, or truncated inside b3
    node   [b2]                       the checkpoint has gone: its tokens are not all here

A checkpoint hangs at a place of the tree, never at a hash, and dies with the block before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GRID = 64  # tokens between two points at which states are kept; absolute positions


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A slot with the state after the tokens of a path.

    Attributes:
        end: tokens that it sums up, a multiple of `GRID`.
        identity: of these tokens, as the tree names them; a tier's key is made of it.
        base: end of the nearest checkpoint above that was not superseded: `end` - `base` tokens are computed
            again where this one is lost.
        node: the node in whose `states` it is; None: it has left the tree.
        is_superseded: its only hit went on below, so the next one will probably find a deeper checkpoint.
        heir: the tokens with which that hit went on; None: no hit went on so far.
        num_hits: since it was added.
        priority: in the order of eviction; the lowest is evicted first.
    """

    slot: int
    end: int
    identity: bytes
    base: int
    node: Any  # a `radixkv.cache.node.Node`
    is_superseded: bool = False
    heir: bytes | None = None
    num_hits: int = 0
    priority: tuple[float, int] = (0.0, 0)

    def __repr__(self) -> str:
        mark = ", superseded" if self.is_superseded else ""
        return f"Checkpoint(slot {self.slot} after {self.end} tokens{mark})"
