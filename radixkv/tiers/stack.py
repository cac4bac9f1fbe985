# SPDX-License-Identifier: Apache-2.0
"""TierStack: the open tiers of an engine, the quickest first."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

from radixkv.tiers.tier import Tier


class OpenTier(Tier):
    """Tier that belongs to an engine, and closes with it."""

    @abstractmethod
    def flush(self, timeout: float) -> None:
        """Return when all saved blocks are kept, or after `timeout` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Finish the saves, and release files, threads and connections. May be called again."""


class TierStack:
    """Tiers in order; a block comes from the first one that loads it sooner than it is computed.

    The texts of ended requests are offered to all: blocks from a slow tier are saved in the quick ones,
    too, if they want them. That is all there is of promotion.
    """

    def __init__(self, tiers: Sequence[OpenTier]) -> None:
        self.tiers = tuple(tiers)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.tiers))

    def flush(self, timeout: float) -> None:
        """See `OpenTier`; the time is shared by all tiers."""
        end = time.monotonic() + timeout
        for tier in self.tiers:
            tier.flush(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Close all tiers."""
        for tier in self.tiers:
            tier.close()
