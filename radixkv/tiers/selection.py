# SPDX-License-Identifier: Apache-2.0
"""Selection: the choice of blocks worth writing to a tier.

    first use     remembered, not written: most prompts never come again
    second use    written: a text that came twice comes a third time
    a long text   written at once: it takes longest to compute again

A use is the end of a request whose text holds the block. The memory of a block is four bytes in a
table of fixed size, where a newer block takes the place of an older one: nothing grows, and a block that was
forgotten is written at its next second use.
"""

from __future__ import annotations

import numpy as np

from radixkv.cache.block_run import BlockRun

# Blocks that are remembered, about; a power of two. They take 4 MiB.
REMEMBERED_BLOCKS = 1 << 20
#: Tokens from which on a text is written at its first use.
LONG_TOKENS = 512

_PARTS = np.dtype([("slot", "<u4"), ("tag", "<u4"), ("rest", "<u8")])  # of an identity


class Selection:
    """Choice of blocks of a used text.

    Args:
        long_tokens: a text of this many tokens is written at its first use; 0: every text is.
    """

    def __init__(self, long_tokens: int = LONG_TOKENS) -> None:
        self._long_tokens = long_tokens
        self._tags = np.zeros(REMEMBERED_BLOCKS, np.uint32)

    def used(self, run: BlockRun) -> range:
        """Record a request's use of these blocks; return the leading ones worth writing. O(blocks).

        All blocks after a block of first use are of first use, too.
        """
        if not len(run):
            return range(0)
        parts = np.frombuffer(b"".join(run.identities), _PARTS)
        slots, tags = parts["slot"] % len(self._tags), parts["tag"] | 1  # 0: nothing is remembered
        is_new = self._tags[slots] != tags
        self._tags[slots] = tags
        if run.end >= self._long_tokens:
            return range(len(run))
        return range(int(is_new.argmax()) if is_new.any() else len(run))
