# SPDX-License-Identifier: Apache-2.0
"""Acceptance: the rate of right guesses among a request's latest ones."""

from __future__ import annotations

from bisect import bisect_right

#: Matches of this length and longer are counted apart from shorter ones: they are right more often.
KINDS = (0, 3, 8)
_PRIOR_WEIGHT = 2.0
_MEMORY = 0.7  # weight of earlier counts at each draft
_REST = 0.97  # the same whenever no guess pays: so in the end one is made again


class Acceptance:
    """The rate of right guesses, for matches of each of `KINDS`.

    Args:
        is_greedy: the request takes the likeliest tokens, so that it repeats itself more exactly.
    """

    __slots__ = ("_priors", "_right", "_tried")

    def __init__(self, is_greedy: bool) -> None:
        self._priors = (0.3, 0.6, 0.9) if is_greedy else (0.2, 0.35, 0.6)
        self._right, self._tried = [0.0] * len(KINDS), [0.0] * len(KINDS)

    def rate(self, match: int) -> float:
        """Return the probability that the next guess is right, after a match of this length."""
        kind = bisect_right(KINDS, match) - 1
        right = self._right[kind] + _PRIOR_WEIGHT * self._priors[kind]
        return right / (self._tried[kind] + _PRIOR_WEIGHT)

    def worthwhile(self, match: int, break_even: float, most: int) -> int:
        """Return the largest number of guesses that are all right with more than this probability. O(result).

        It is at most `most`, and at most the length of the match.
        """
        rate, most = self.rate(match), min(most, match)
        count, chance = 0, rate
        while count < most and chance > break_even:
            count += 1
            chance *= rate
        if not count:
            kind = bisect_right(KINDS, match) - 1
            self._right[kind] *= _REST
            self._tried[kind] *= _REST
        return count

    def observe(self, match: int, num_guesses: int, num_right: int) -> None:
        """Record that the first `num_right` guesses after such a match were right."""
        kind = bisect_right(KINDS, match) - 1
        self._right[kind] = self._right[kind] * _MEMORY + num_right
        self._tried[kind] = self._tried[kind] * _MEMORY + num_right + (num_right < num_guesses)
