"""Speculation: drafts for the requests of one engine, what grammars force first, and how they went.

What the scheduler asks for drafts (its `DraftProposer`), with what only the engine knows of a request: how
many tokens it may still get, which tokens end it, what its grammar allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.request_group import Sample, sample_of
from radixkv.scheduling.batch import Entry
from radixkv.scheduling.sequence_state import SequenceState
from radixkv.speculation.counts import SpeculationCounts
from radixkv.speculation.drafter import Drafter
from radixkv.speculation.step_costs import StepCosts


class Speculation:
    """Forced tokens, then guesses.

    Args:
        max_tokens: most tokens of a draft.
        costs: what rows cost, for how many guesses pay.
        cache: the engine's cache at the time, where what others wrote is looked up.
    """

    def __init__(self, max_tokens: int, costs: StepCosts, cache: Callable[[], PrefixCache]) -> None:
        def continuation(request: SequenceState, most: int) -> list[int]:
            return cache().tree.following(request.tokens.view(), request.namespace, most)

        self._drafter = Drafter(costs, max_tokens, continuation)
        self._max_tokens = max_tokens
        self._cache = cache
        self._resets_seen = 0  # a reset forgets what was written before, too
        self.counts = SpeculationCounts()

    def begin(self, num_rows: int, num_samples: int) -> None:
        """See `Drafter.begin`."""
        resets = self._cache().num_resets
        if resets != self._resets_seen:
            self._resets_seen = resets
            self._drafter.forget_outputs()
        self._drafter.begin(num_rows, num_samples)

    def granted(self, num_tokens: int) -> None:
        """See `Drafter.granted`."""
        self._drafter.granted(num_tokens)

    def draft(self, request: SequenceState, most: int) -> Sequence[int]:
        """What the request's grammar forces; else guesses, as far as the grammar allows them.

        A token that ends the output is none of them: it is chosen without a guess as quickly.
        """
        sample = sample_of(request)
        output, state = sample.output, sample.sampling_state
        most = min(most, self._max_tokens, output.max_output_tokens - output.num_tokens - 1)
        if most <= 0:
            return ()
        tokens: Sequence[int] = state.forced_tokens()[:most]
        if not tokens:
            tokens = self._drafter.draft(request, most)
            if tokens:
                tokens = tokens[: state.num_allowed(tokens)]
        if tokens:
            ends, stops = output.end_token_ids, sample.params.stop_token_ids
            tokens = list(takewhile(lambda token: token not in ends and token not in stops, tokens))
        return tokens

    def would_guess(self, entries: Sequence[Entry]) -> bool:
        """Whether one of these requests, of which a step runs, may get a draft in the step after it."""
        self.begin(len(entries), len(entries))
        return any(len(self.draft(entry.request, self._max_tokens)) > 1 for entry in entries)

    def checked(self, request: Sample, num_draft_tokens: int, num_accepted: int) -> None:
        """Of a draft of the request so many tokens were right."""
        self.counts.observe(num_draft_tokens, num_accepted)
        self._drafter.observe(request, num_draft_tokens, num_accepted)

    def ended(self, request: SequenceState) -> None:
        """The request has ended."""
        self._drafter.ended(request)
