# SPDX-License-Identifier: Apache-2.0
"""Questions that a scheduler asks of an engine's extensions, where the engine has these."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import Protocol

from radixkv.cache.keys import NamespaceName
from radixkv.cache.prefix_cache import Match
from radixkv.scheduling.in_flight_prefixes import Producer
from radixkv.scheduling.sequence import Sequence


class DraftProposer(Protocol):
    """Guesses of tokens, which a step computes after a request's last one.

    known | draft ........ |        rows of one entry: each draft token's logits say what follows it
      t   | g1   g2   g3   |        chosen after t: g1, after g1: g2, after g2: x
                                    -> the request gets g1 g2 x; the K/V of g3 is overwritten later
    """

    def begin(self, num_rows: int, num_samples: int) -> None:
        """Prepare for the drafts of a step of `num_rows` rows with `num_samples` sampled ones."""

    def draft(self, request: Sequence, most: int) -> abc.Sequence[int]:
        """Return at most `most` tokens that the request may get next; none where no guess pays."""

    def granted(self, num_tokens: int) -> None:
        """Record that `num_tokens` tokens of the latest draft are rows of the step now."""


#: Lets a request wait for a load that makes its tokens up to a number: `InFlightPrefixes.wait_for`.
WaitFor = Callable[[Sequence, Producer, int], None]


class TierLoads(Protocol):
    """Loads of blocks from tiers, for which requests wait instead of computing the tokens."""

    @property
    def somebody_waits(self) -> bool:
        """True if a request of this step waits for a tier, or may be able to run when a transfer ends."""

    def begin_step(self) -> None:
        """Prepare for a step: requests are about to be tried."""

    def holds_up(self, request: Sequence, match: Match, wait_for: WaitFor) -> bool:
        """Return True if a request that could be admitted is to wait. O(tokens after the match).

        Args:
            wait_for: called if it waits for a load.
        """

    def admitted(self, request: Sequence) -> None:
        """Record an admission; at a request's first, tell in its report what tiers did for its prompt."""

    def forget(self, request: Sequence) -> None:
        """Drop all notes of a request that has ended."""

    def has_begun(self, request: Sequence) -> bool:
        """Return True if blocks were, or are being, loaded for a request since it last ran. O(1)."""

    def weigh(self, request: Sequence, match: Match) -> int:
        """Return the tokens that a request misses, with those in a tier counted by the time of their load."""

    def loads_as_tokens(self) -> list[int]:
        """Return, for each load under way, the tokens that are computed in the time it takes. O(loads)."""

    def stop_copy(self, is_rival: Callable[[NamespaceName], bool], *, at_once: bool = False) -> bool:
        """End a copy out of the pool, for its blocks; False: there is none.

        Args:
            is_rival: whether blocks of a namespace would help.
            at_once: the request runs, and does not wait at all.
        """

    def give_up_load(self, is_rival: Callable[[NamespaceName], bool]) -> bool:
        """Give up a load that has not arrived, for a running request that needs blocks; False: there is none.

        Args:
            is_rival: whether blocks of a namespace would help.
        """


class ImageWaits(Protocol):
    """Encodings of images, for which requests wait before they begin."""

    @property
    def somebody_waits(self) -> bool:
        """True if a request of the latest step waits."""

    def holds_up(self, request: Sequence, num_known: int) -> bool:
        """Return True if a request that could be admitted is to wait.

        Args:
            num_known: leading tokens that are not computed again.
        """

    def forget(self, request: Sequence) -> None:
        """Drop all notes of a request that runs, or has ended."""
