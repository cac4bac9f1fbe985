# SPDX-License-Identifier: Apache-2.0
"""LearnedBlocks: the probable blocks of a replica without events, learned from requests and usage."""

from __future__ import annotations

from collections import OrderedDict

from radixkv.cluster.routing.prompt_blocks import PromptBlocks
from radixkv.cluster.routing.replica import Replica

#: Number of latest blocks that a replica of unknown size is believed to hold.
MAX_BLOCKS = 1 << 16  # a replica is believed to hold no more


class LearnedBlocks:
    """A guess at one replica's blocks: the latest that were used there."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._keys: OrderedDict[int, None] = OrderedDict()  # the latest used last; of a prompt its beginning

    def reported(self, prompt: PromptBlocks, expected_tokens: int, share: float) -> None:
        """Learn how much of a prompt was there, from its answer's usage.

        Args:
            expected_tokens: of it that were believed to be there.
        """
        if share * prompt.num_tokens < expected_tokens / 2:
            # Many believed blocks were gone: so are probably others that were used before this prompt.
            self._replica.removed([self._keys.popitem(last=False)[0] for _ in range(len(self._keys) // 4)])
            self.computed(prompt)

    def computed(self, prompt: PromptBlocks) -> None:
        """A prompt was computed there. O(its blocks)."""
        keys = prompt.own_keys(self._replica.block_size)
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        self._replica.stored(keys)
        evicted = [self._keys.popitem(last=False)[0] for _ in range(len(self._keys) - MAX_BLOCKS)]
        self._replica.removed(evicted)

    def forget(self) -> None:
        """The replica may have been restarted."""
        self._keys.clear()
        self._replica.cleared()
