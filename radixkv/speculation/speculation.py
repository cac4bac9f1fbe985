# SPDX-License-Identifier: Apache-2.0
"""Speculation: drafts for the requests of an engine, tokens forced by grammars first, and statistics.

The scheduler's `DraftProposer`, with facts that only the engine knows of a request: the tokens it may still
get, its end tokens, and the tokens its grammar allows.
"""

from __future__ import annotations

from collections import abc
from itertools import takewhile

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.counts import EngineStats, SpeculationCounts
from radixkv.engine.hooks import StepHook
from radixkv.scheduling.batch import Entry
from radixkv.scheduling.sequence import Sequence
from radixkv.speculation.drafter import Drafter
from radixkv.speculation.step_costs import StepCosts


class Speculation(StepHook):
    """Forced tokens, then guesses.

    Args:
        max_tokens: most tokens of a draft.
        costs: what rows cost, for how many guesses pay.
    """

    def __init__(self, max_tokens: int, costs: StepCosts) -> None:
        self.drafter = self
        self.counts = SpeculationCounts()
        self._guesses = Drafter(costs, max_tokens, self._continuation)
        self._max_tokens = max_tokens
        self._cache: PrefixCache
        self._resets_seen = 0  # a reset forgets what was written before, too

    def attach(self, cache: PrefixCache) -> None:
        self._cache = cache

    def _continuation(self, request: Sequence, most: int) -> list[int]:
        return self._cache.tree.following(request.tokens(), request.namespace, most)

    def begin(self, num_rows: int, num_samples: int) -> None:
        """See `Drafter.begin`."""
        resets = self._cache.num_resets
        if resets != self._resets_seen:
            self._resets_seen = resets
            self._guesses.forget_outputs()
        self._guesses.begin(num_rows, num_samples)

    def granted(self, num_tokens: int) -> None:
        """See `Drafter.granted`."""
        self._guesses.granted(num_tokens)

    def draft(self, request: Sequence, most: int) -> abc.Sequence[int]:
        """Return tokens that the request's grammar forces, else guesses that the grammar allows.

        A token that ends the output is left out: choosing it without a guess is as fast.
        """
        sample = request
        state = sample.sampling_state
        most = min(most, self._max_tokens, sample.grows_until - sample.num_output_tokens - 1)
        if most <= 0:
            return ()
        tokens: abc.Sequence[int] = state.forced_tokens()[:most]
        if not tokens:
            tokens = self._guesses.draft(request, most)
            if tokens:
                tokens = tokens[: state.num_allowed(tokens)]
        if tokens:
            ends, stops = sample.end_token_ids, sample.params.stop_token_ids
            tokens = list(takewhile(lambda token: token not in ends and token not in stops, tokens))
        return tokens

    def would_guess(self, entries: abc.Sequence[Entry]) -> bool:
        self.begin(len(entries), len(entries))
        return any(len(self.draft(entry.request, self._max_tokens)) > 1 for entry in entries)

    def checked(self, request: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        self.counts.observe(num_draft_tokens, num_accepted)
        self._guesses.observe(request, num_draft_tokens, num_accepted)

    def ended(self, sequence: Sequence, *, discarded: bool) -> None:
        self._guesses.ended(sequence)

    def add_counts(self, stats: EngineStats) -> None:
        stats.speculation = self.counts.snapshot()
