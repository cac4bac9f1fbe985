# SPDX-License-Identifier: Apache-2.0
"""TierWaits: the questions of the scheduler about tiers, answered as if there were none."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.keys import NamespaceName
from radixkv.cache.prefix_cache import Match
from radixkv.scheduling.sequence_state import SequenceState


class TierWaits:
    """Decides which requests wait for blocks from tiers; this base has no tiers, so none waits.

    `radixkv.tiers.load_waits` is the one with tiers.
    """

    @property
    def somebody_waits(self) -> bool:
        """True if a request of this step was put off, or may be able to run when transfers have ended."""
        return False

    def begin_step(self) -> None:
        """Note that requests are about to be tried."""

    def holds_up(self, request: SequenceState, match: Match) -> bool:
        """True if a request that could be admitted is to wait. O(tokens after the match) where it asks."""
        return False

    def admitted(self, request: SequenceState) -> None:
        """Note the first admission of a request, and in its report what tiers did for its prompt."""

    def has_begun(self, request: SequenceState) -> bool:
        """True if blocks were, or are being, loaded for a request since it last ran. O(1)."""
        return False

    def weigh(self, request: SequenceState, match: Match) -> int:
        """Return the tokens that a request misses, with those in a tier counted by the time of their load."""
        return request.num_tokens - match.resume

    def loads_as_tokens(self) -> list[int]:
        """Return, for each load under way, the tokens that are computed in the time it takes. O(loads)."""
        return []

    def stop_copy(self, is_rival: Callable[[NamespaceName], bool], *, at_once: bool = False) -> bool:
        """End a copy out of the pool, for its blocks; False: there is none.

        Args:
            is_rival: whether blocks of a namespace would help.
            at_once: the request runs, and does not wait at all.
        """
        return False

    def give_up_load(self, is_rival: Callable[[NamespaceName], bool]) -> bool:
        """Give up a load that has not arrived, for a running request that needs blocks; False: there is none.

        Args:
            is_rival: whether blocks of a namespace would help.
        """
        return False
