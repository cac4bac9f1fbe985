"""TierStack: the tiers that were opened for an engine, the quickest first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from radixkv.tiers.selection import Selection
from radixkv.tiers.tier import Tier


class OpenTier(Tier, Protocol):
    """A tier that belongs to one engine, and ends with it.

    Attributes:
        name: what people call it.
        selection: what it is offered of the texts that requests leave.
    """

    name: str
    selection: Selection

    def flush(self, timeout: float) -> None:
        """Return when what was saved is kept, or so many seconds have passed."""

    def close(self) -> None:
        """Finish what was saved, and let go of files, threads and connections. May be called again."""


class TierStack:
    """Each block is asked of the first tier that has it and brings it sooner than it is computed.

    What ends is offered to all: what came back from a slow tier is saved in the quick ones, too, where they
    want it. That is all there is of promotion.
    """

    def __init__(self, tiers: Sequence[OpenTier]) -> None:
        self.tiers = tuple(tiers)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.tiers))

    def flush(self, timeout: float) -> None:
        """See `OpenTier`; the time is for all of them together."""
        end = time.monotonic() + timeout
        for tier in self.tiers:
            tier.flush(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """End all of them."""
        for tier in self.tiers:
            tier.close()
